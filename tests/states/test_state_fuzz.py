"""Proves that damaged states, whatever the bytes, are taken as a right state or refused with nothing changed.

``make test-fuzz-state`` runs many more of them (RCACHE_STATE_EXAMPLES). Memory is limited meanwhile, so that a count
that is believed too early ends in a MemoryError, which is not a refusal.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import random
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st
from state_tools import CIO, SPEC, SPEC_P, c_status, contents, fill, little_memory, used_cache, written

from rcache_plugin import HostVTable, RecurrentCache
from rcache_plugin.errors import InvalidArgument, StateError, Status
from rcache_plugin.states.inspect import inspect

EXAMPLES = int(os.environ.get("RCACHE_STATE_EXAMPLES", "2000"))
COUNTS: Counter[str] = Counter()
"""What was tried, for the last lines of the test run."""

NUMBERS = (0, 1, 2, 3, 4, 5, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 1 << 24, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)


@pytest.fixture(scope="module", autouse=True)
def _limit() -> Iterator[None]:
    logging.disable(logging.WARNING)  # each refusal through C is told
    with little_memory():
        yield
    logging.disable(logging.NOTSET)


def blobs() -> list[tuple[bytes, int]]:
    """(state, the sequence to restore it to)."""
    found = []
    for spec in (SPEC, SPEC_P):
        with used_cache(spec) as cache:
            found += [(written(cache), -1), (written(cache, 3), 3), (written(cache, 2), 2), (written(cache, 0), 2)]
        with RecurrentCache(spec, 4) as empty:
            found.append((written(empty), -1))
    return found


BLOBS = blobs()
PER_SEED = 20
"""Damaged states drawn from one of hypothesis's numbers: its own drawing takes longer than a restore."""

Changes = list[tuple[str, int, int]]


def draw(rng: random.Random) -> Changes:
    """One to four changes: (what, where, how)."""
    found = []
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        what = rng.choice(("flip", "number", "number", "head", "head", "cut", "remove", "repeat", "splice"))
        where = rng.randrange(40 if what == "head" else 1 << 16)
        how = {"flip": rng.randrange(8), "splice": rng.randrange(len(BLOBS))}.get(what, rng.randrange(1, 40))
        found.append((what, where, rng.choice(NUMBERS) if what in ("number", "head") else how))
    return found


def changed(data: bytes, how: Changes) -> bytes:
    for what, where, value in how:
        at = where % (len(data) + 1)
        if what == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << value)]) + data[at + 1 :]
        elif what in ("number", "head"):
            at -= at % 4
            data = data[:at] + struct.pack("<I", value) + data[at + 4 :]
        elif what == "cut":
            data = data[:at]
        elif what == "remove":
            data = data[:at] + data[at + value :]
        elif what == "repeat":
            data = data[: at + value] + data[at:]
        elif what == "splice":
            data = data[:at] + BLOBS[value][0][at:]
    return data


class Target:
    """Caches that are put back to what they were after each state that was taken."""

    def __init__(self) -> None:
        self.caches = [used_cache(SPEC), used_cache(SPEC_P)]
        self.before = [contents(cache) for cache in self.caches]
        self.used = [contents(cache, rows_of_free_cells=False) for cache in self.caches]
        self.connect()

    def connect(self) -> None:
        self.tables = [HostVTable(cache) for cache in self.caches]
        self.streams = [
            [CIO(cache, tensors=mode > 0, wait=mode > 1) for mode in range(3)] for cache in self.caches
        ]

    def read_in_c(self, i: int, state: bytes, seq_id: int, mode: int) -> int:
        """`mode`: 0 reads bytes only, 1 rows to tensors at once, 2 rows that wait."""
        return c_status(self.tables[i], "state_read", self.streams[i][mode].reset(state), seq_id)

    def was_refused(self, i: int, *, rows_of_free_cells: bool = True) -> None:
        before = self.before[i] if rows_of_free_cells else self.used[i]
        assert contents(self.caches[i], rows_of_free_cells) == before
        if not rows_of_free_cells:
            fill(self.caches[i])

    def was_taken(self, i: int, seq_id: int, state: bytes | None) -> None:
        self.caches[i].table.check()
        if state is not None:
            again = written(self.caches[i], seq_id)
            assert again == state or (seq_id == -1 and len(again) == len(state))  # ids in order, cells too
        self.caches[i].close()
        self.caches[i] = used_cache((SPEC, SPEC_P)[i])
        assert contents(self.caches[i]) == self.before[i]
        self.connect()


TARGET = Target()
FUZZ = settings(max_examples=EXAMPLES // PER_SEED, deadline=None, database=None, phases=(Phase.generate,))
seeds = st.integers(0, 2**32 - 1)


@given(seed=seeds)
@FUZZ
def test_changed_states(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(PER_SEED):
        (state, seq_id), i, as_file = rng.choice(BLOBS), rng.randrange(2), rng.random() < 0.5
        how = draw(rng)
        note(f"{how} of {state!r}, for {seq_id} in cache {i}")
        state = changed(state, how)
        COUNTS["states in Python"] += 1
        try:
            TARGET.caches[i].state_read(io.BytesIO(state) if as_file else state, seq_id)
        except StateError:
            COUNTS["refused"] += 1
            TARGET.was_refused(i)
        else:
            TARGET.was_taken(i, seq_id, None if as_file else state)


@given(seed=seeds)
@FUZZ
def test_changed_states_through_c(seed: int) -> None:
    """With rows that go straight to tensors, those of cells that hold nothing may have changed."""
    rng = random.Random(seed)
    for _ in range(PER_SEED):
        (state, seq_id), i, mode = rng.choice(BLOBS), rng.randrange(2), rng.randrange(3)
        how = draw(rng)
        note(f"{how} of {state!r}, for {seq_id} in cache {i}, mode {mode}")
        status = TARGET.read_in_c(i, changed(state, how), seq_id, mode)
        COUNTS["states through C"] += 1
        if status == Status.IO:
            COUNTS["refused"] += 1
            TARGET.was_refused(i, rows_of_free_cells=mode != 1)
        else:
            assert status == Status.OK
            TARGET.was_taken(i, seq_id, None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for i, spec in enumerate((SPEC, SPEC_P)):
        with used_cache(spec) as cache:
            cache.save(folder / f"{i} all", tokens={0: [1, 2], 3: [4]})
            cache.save(folder / f"{i} one", 3, tokens=[1])
    return folder


@given(seed=seeds)
@settings(FUZZ, max_examples=max(EXAMPLES // 4, 500) // PER_SEED)
def test_changed_files(saved: Path, seed: int) -> None:
    """Some with the right checksum all the same."""
    rng = random.Random(seed)
    path = saved / "changed"
    for _ in range(PER_SEED):
        i, one, seal = rng.randrange(2), rng.random() < 0.5, rng.random() < 0.5
        good, how, seq_id = (saved / f"{i} {'one' if one else 'all'}").read_bytes(), draw(rng), 3 if one else -1
        note(f"{how} of file {i} of {'one' if one else 'all'}, sealed: {seal}")
        data = changed(good, how)
        if seal:
            data = data[:-32] + hashlib.sha256(data[:-32]).digest()
        path.write_bytes(data)
        COUNTS["files"] += 1
        try:
            TARGET.caches[i].load(path, seq_id)
        except (StateError, InvalidArgument):
            COUNTS["refused"] += 1
            TARGET.was_refused(i)
        else:
            TARGET.was_taken(i, seq_id, None)
        try:
            report = inspect(path)
        except InvalidArgument:
            assert data[:7] != b"RCACHE\0"
        else:
            assert seal or data == good or not report.intact


@pytest.mark.parametrize("blob", BLOBS, ids=range(len(BLOBS)))
def test_every_cut(blob: tuple[bytes, int]) -> None:
    state, seq_id = blob
    for i in range(2):
        for length in range(len(state)):
            COUNTS["cuts"] += 1
            with pytest.raises(StateError):
                TARGET.caches[i].state_read(state[:length], seq_id)
            assert TARGET.read_in_c(i, state[:length], seq_id, mode=2 * (length % 2)) == Status.IO
        TARGET.was_refused(i)


def test_the_undamaged_ones_are_taken() -> None:
    for n, (state, seq_id) in enumerate(BLOBS):
        with fill(used_cache((SPEC, SPEC_P)[n // 5]), 3) as cache:
            cache.state_read(state, seq_id)
            assert written(cache, seq_id) == state
