"""Proves that files of our own are whole or not at all, and refused with the reason and nothing changed."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import struct
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import children
import numpy as np
import pytest
from state_tools import (
    CIO,
    SPEC,
    SPEC_P,
    c_status,
    contents,
    fill,
    ggml,
    little_memory,
    tensors,
    used_cache,
    written,
)

from rcache_plugin import CacheSpec, HostVTable, RecurrentCache, UBatch
from rcache_plugin.errors import InvalidArgument, SeqIdError, StateError, Status, Unsupported
from rcache_plugin.states.file import MAGIC
from rcache_plugin.states.streams import FLAG_ON_DEVICE


def left_overs(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".rcache-tmp")]


def state_of(cache: RecurrentCache, seq_id: int) -> bytes:
    return written(cache, seq_id)


def reseal(data: bytes) -> bytes:
    """`data` with the right checksum."""
    return data[:-32] + hashlib.sha256(data[:-32]).digest()


def with_header(data: bytes, change: Callable[[dict], object]) -> bytes:
    """`data` with another header, and the right checksum."""
    (n_bytes,) = struct.unpack("<I", data[8:12])
    fields = json.loads(data[12 : 12 + n_bytes])
    change(fields)
    text = json.dumps(fields).encode()
    return reseal(data[:8] + struct.pack("<I", len(text)) + text + data[12 + n_bytes :])


# --- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, SPEC_P], ids=["plain", "p"])
def test_all_sequences_and_one_are_saved_and_loaded(tmp_path: Path, spec: CacheSpec) -> None:
    with used_cache(spec) as cache, used_cache(spec, seed=1) as other:
        tokens = {0: [1, 2, 3], 3: list(range(10))}
        cache.save(tmp_path / "all", tokens=tokens)
        cache.save(tmp_path / "one", 3, tokens=[5, 6])
        assert other.load(tmp_path / "all") == tokens
        assert written(other) == written(cache) and other.table.used == 2
        assert other.load(tmp_path / "one", 2) == {2: [5, 6]}
        assert other.seq_pos_max(2) == 9 and state_of(other, 2) == state_of(cache, 1)
        other.table.check()
        other.save(tmp_path / "again", 2, tokens=[5, 6])
        other.save(tmp_path / "one again", 3, tokens=[5, 6])
        assert (tmp_path / "one again").read_bytes() == (tmp_path / "one").read_bytes(), "equal states, equal files"
        assert left_overs(tmp_path) == []


def test_an_empty_cache_is_loaded_as_one(tmp_path: Path) -> None:
    with RecurrentCache(SPEC, 3) as empty, used_cache() as other:
        empty.save(tmp_path / "all")
        empty.save(tmp_path / "one", 1)
        assert other.load(tmp_path / "one", 0) == {} and other.seq_pos_max(0) == -1 and other.seq_pos_max(1) == 9
        other.load(tmp_path / "all")
        assert other.table.used == 0


def test_the_layout_is_as_documented(tmp_path: Path) -> None:
    with used_cache() as cache:
        cache.save(tmp_path / "x", 0, [4])
        data = (tmp_path / "x").read_bytes()
        assert data[:8] == b"RCACHE\0\1" == MAGIC + b"\1"
        (n_bytes,) = struct.unpack("<I", data[8:12])
        text = data[12 : 12 + n_bytes]
        assert json.loads(text)["tokens"] == {"0": [4]} and json.loads(text)["seq_id"] == 0
        assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")).encode() == text
        assert data[12 + n_bytes : -32] == state_of(cache, 0)
        assert data[-32:] == hashlib.sha256(data[:-32]).digest()


def test_names_links_and_modes_of_files(tmp_path: Path) -> None:
    with used_cache() as cache:
        (tmp_path / "link").symlink_to(tmp_path / "real")
        cache.save(str(tmp_path / "link"))
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real").stat().st_size > 100
        (tmp_path / "real").chmod(0o600)
        cache.save(os.fsencode(tmp_path / "real"))
        assert (tmp_path / "real").stat().st_mode & 0o777 == 0o600
        name = "ä" * 120
        cache.save(tmp_path / name)
        cache.load(tmp_path / name)
        with pytest.raises(FileNotFoundError):
            cache.save(tmp_path / "no folder" / "x")
        with pytest.raises(IsADirectoryError):
            cache.save(tmp_path)
        with pytest.raises(FileNotFoundError):
            cache.load(tmp_path / "nothing")
        assert left_overs(tmp_path) == left_overs(tmp_path.parent) == []


# --- room ------------------------------------------------------------------------------------------------------------


def test_larger_and_smaller_caches(tmp_path: Path) -> None:
    with used_cache() as cache:
        cache.save(tmp_path / "all")
        cache.save(tmp_path / "one", 3)
        for n_cells, n_seq_max in ((2, 4), (3, 4), (16, 16), (300, 4)):
            with fill(RecurrentCache(SPEC, n_cells, n_seq_max=n_seq_max)) as other:
                other.load(tmp_path / "all")
                assert written(other) == written(cache)
                other.table.check()
        with fill(RecurrentCache(SPEC, 1)) as other:
            other.load(tmp_path / "one", 0)
            assert state_of(other, 0) == state_of(cache, 1)
            before = contents(other)
            with pytest.raises(StateError, match=r"expected at most \d+ bytes, found"):
                other.load(tmp_path / "all")
            for seq_id in (-1, 0):  # more cells than there are, and than a sequence has
                with pytest.raises(StateError, match="the state has 2 cells, expected at most 1"):
                    other.state_read(written(cache), seq_id)
            assert contents(other) == before
        with fill(RecurrentCache(SPEC, 4, n_seq_max=3)) as other:
            before = contents(other)
            with pytest.raises(StateError, match=r"ids of cell 1: 3 is not from 0 to 2 \(n_seq_max\)"):
                other.load(tmp_path / "all")
            with pytest.raises(SeqIdError, match="seq_id is 3"):
                other.load(tmp_path / "one", 3)
            assert contents(other) == before


def test_a_sequence_needs_a_cell(tmp_path: Path) -> None:
    """It takes its own if there is no other; one whose cell is shared has none of its own."""
    with used_cache(n_cells=3, n_seq_max=4) as cache:
        cache.save(tmp_path / "one", 0)
        assert cache.find_slot(UBatch.single(2, 0)) is not None and cache.table.used == 3
        before = contents(cache)
        with pytest.raises(StateError, match="no free cell for sequence 1: 3 cells, all in use"):
            cache.load(tmp_path / "one", 1)
        assert contents(cache) == before
        cache.load(tmp_path / "one", 2)
        assert state_of(cache, 2) == state_of(cache, 0) and cache.table.used == 3


# --- refusals --------------------------------------------------------------------------------------------------------


def test_another_model_is_refused_by_the_fields_that_differ(tmp_path: Path) -> None:
    others = {
        "type_r: expected 'f32', found 'f16'": CacheSpec.make([6, 0, 3], [10, 0, 5], "f32", "f32"),
        "n_embd_s of layer 2: expected 6, found 5": CacheSpec.make([6, 0, 3], [10, 0, 6], "f16", "f32"),
        "n_embd_p of layer 0: expected 2, found 0; type_r": CacheSpec.make([6, 0, 3], [10, 0, 5], n_embd_p=[2, 0, 0]),
        "n_embd_p: expected 2 layers, found 3; n_embd_r: expected 2 layers, found 3; n_embd_s: expected 2 layers, "
        "found 3; n_layer: expected 2, found 3": CacheSpec.make([6, 3], [10, 5], "f16", "f32"),
    }
    with used_cache() as cache:
        cache.save(tmp_path / "x")
    for words, spec in others.items():
        with used_cache(spec) as other:
            before = contents(other)
            with pytest.raises(StateError, match="another model") as caught:
                other.load(tmp_path / "x")
            assert words in str(caught.value) and contents(other) == before


def test_a_file_of_all_is_not_one_of_a_sequence(tmp_path: Path) -> None:
    with used_cache() as cache:
        cache.save(tmp_path / "all")
        cache.save(tmp_path / "one", 3)
        before = contents(cache)
        with pytest.raises(InvalidArgument, match="holds a whole cache: load it without"):
            cache.load(tmp_path / "all", 3)
        with pytest.raises(InvalidArgument, match="holds sequence 3 alone: load it with the seq_id"):
            cache.load(tmp_path / "one")
        assert contents(cache) == before


def test_tokens_that_cannot_be(tmp_path: Path) -> None:
    with used_cache() as cache:
        for seq_id, tokens, words in (
            (-1, [1, 2], "by sequence"),
            (-1, {2: [1]}, "sequence 2, which is not saved or has no state"),
            (0, {1: [1]}, "sequence 1, which is not saved"),
            (0, [-1], "not all are from 0"),
            (0, [1 << 31], "not all are from 0"),
        ):
            with pytest.raises(InvalidArgument, match=words):
                cache.save(tmp_path / "x", seq_id, tokens)
        with pytest.raises(SeqIdError):
            cache.save(tmp_path / "x", 4)
        assert list(tmp_path.iterdir()) == []
    with RecurrentCache(SPEC, 2, allocate=False) as bare, pytest.raises(Unsupported):
        bare.save(tmp_path / "x")


def test_every_cut_and_every_changed_byte_is_refused(tmp_path: Path) -> None:
    with used_cache() as cache:
        before = contents(cache)
        for seq_id in (-1, 3):
            cache.save(tmp_path / "good", seq_id)
            data = (tmp_path / "good").read_bytes()
            bad = [data[:n] for n in range(len(data))] + [data + b"\0"]
            bad += [data[:i] + bytes([data[i] ^ (1 << i % 8)]) + data[i + 1 :] for i in range(len(data))]
            for one in bad:
                (tmp_path / "bad").write_bytes(one)
                with pytest.raises(StateError):
                    cache.load(tmp_path / "bad", seq_id)
            assert contents(cache) == before


def test_what_a_header_may_not_say(tmp_path: Path) -> None:
    """With the right checksum: nothing is believed because of it, and nothing large is allocated."""
    with used_cache() as cache:
        cache.save(tmp_path / "good", 3, [5])
        data = (tmp_path / "good").read_bytes()
        cases: list[tuple[str, bytes]] = [
            ("version: expected 1, found 2", reseal(data[:7] + b"\2" + data[8:])),
            ("header length: 4294967295", reseal(data[:8] + b"\xff" * 4 + data[12:])),
            ("header: it can't be read", reseal(data[:12] + b"[" * 100_000 + data[12:])[: 12 + 100_000 + 600]),
            ("payload of 1099511627776 bytes", with_header(data, lambda h: h.update(payload_bytes=1 << 40))),
            ("payload_bytes is -1", with_header(data, lambda h: h.update(payload_bytes=-1))),
            ("payload_bytes is True", with_header(data, lambda h: h.update(payload_bytes=True))),
            ("seq_id is 2147483648", with_header(data, lambda h: h.update(seq_id=1 << 31))),
            ("seq_id is '3'", with_header(data, lambda h: h.update(seq_id="3"))),
            ("KeyError: 'spec'", with_header(data, lambda h: h.pop("spec"))),
            ("fingerprint is 0", with_header(data, lambda h: h.update(fingerprint="0"))),
            ("tokens are given for 'x'", with_header(data, lambda h: h.update(tokens={"x": [1]}))),
            ("other sequences than 3", with_header(data, lambda h: h.update(tokens={"2": [1]}))),
            ("a token is 1.5", with_header(data, lambda h: h.update(tokens={"3": [1.5]}))),
            ("header: it can't be read", with_header(data, lambda h: h.update(tokens=7))),
        ]
        before = contents(cache)
        with little_memory(1 << 26):
            for words, bad in cases:
                (tmp_path / "bad").write_bytes(bad)
                with pytest.raises(StateError) as caught:
                    cache.load(tmp_path / "bad", 3)
                assert words in str(caught.value), caught.value
        assert contents(cache) == before
        (tmp_path / "newer").write_bytes(with_header(data, lambda h: h.update(something={"new": 1})))
        assert cache.load(tmp_path / "newer", 3) == {3: [5]}, "keys that are not known are ignored"


def test_a_payload_larger_than_the_cache_is_not_read(tmp_path: Path) -> None:
    with used_cache(n_cells=300) as cache:
        cache.find_slot(UBatch([(i,) for i in range(4, 200)], [0] * 196))
        cache.save(tmp_path / "all")
    with used_cache() as other:
        before = contents(other)
        with pytest.raises(StateError, match=r"payload: expected at most \d+ bytes, found \d+"):
            other.load(tmp_path / "all")
        assert contents(other) == before


# --- saves that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with used_cache() as cache:
        cache.save(tmp_path / "x")
        old = (tmp_path / "x").read_bytes()
        fill(cache, 5)
        monkeypatch.setattr(f"rcache_plugin.states.atomic.os.{function}", broken)
        with pytest.raises(OSError, match="no space"):
            cache.save(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == old and left_overs(tmp_path) == []


def test_a_full_disk_in_the_middle(tmp_path: Path) -> None:
    """A limit on the size of files stands for it: the write of the rows fails."""
    import resource
    import signal

    spec = CacheSpec.make([1 << 18], [1 << 18])
    with used_cache(spec) as cache:
        cache.save(tmp_path / "x", 0)
        old = (tmp_path / "x").read_bytes()
        fill(cache, 5)
        before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            with pytest.raises(OSError):
                cache.save(tmp_path / "x", 0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "x").read_bytes() == old and left_overs(tmp_path) == []


def test_a_device_that_fails_while_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with used_cache() as cache:
        cache.save(tmp_path / "x")
        old = (tmp_path / "x").read_bytes()

        def gone(*_: object) -> memoryview:
            raise RuntimeError("gone")

        monkeypatch.setattr(cache.buffers, "borrow_rows", gone)
        with pytest.raises(RuntimeError, match="gone"):
            cache.save(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == old and left_overs(tmp_path) == []


def test_left_overs_of_killed_saves_are_removed_when_nobody_writes_them(tmp_path: Path) -> None:
    import fcntl

    old = time.time() - 3600
    names = {"killed": old, "being written": old, "just begun": time.time()}
    for name, at in names.items():
        path = tmp_path / f".x.{name}.rcache-tmp"
        path.touch()
        os.utime(path, (at, at))
    other = tmp_path / ".y.killed.rcache-tmp"
    other.touch()
    os.utime(other, (old, old))
    with open(tmp_path / ".x.being written.rcache-tmp") as writer, used_cache() as cache:
        fcntl.flock(writer, fcntl.LOCK_EX)
        cache.save(tmp_path / "x")
    assert sorted(left_overs(tmp_path)) == [
        ".x.being written.rcache-tmp", ".x.just begun.rcache-tmp", ".y.killed.rcache-tmp"
    ]


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from state_tools import SPEC, fill, used_cache
    from rcache_plugin.states import atomic, file, image, streams

    folder = Path(sys.argv[1])
    FILES = {module.__file__ for module in (atomic, file, image, streams)}

    def attempt(step):
        '''In a fork: saves the new state, and is killed when it comes to line number `step`; else ends with 3.'''
        pid = os.fork()
        if pid == 0:
            count = 0
            def trace(frame, event, arg):
                nonlocal count
                if frame.f_code.co_filename not in FILES:
                    return None
                if event == "line":
                    count += 1
                    if count == step:
                        os.kill(os.getpid(), signal.SIGKILL)
                return trace
            sys.settrace(trace)
            cache.save(folder / "x", tokens={0: [2]})
            sys.settrace(None)
            os._exit(3)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)

    cache = used_cache()
    cache.save(folder / "x", tokens={0: [1]})
    old = (folder / "x").read_bytes()
    fill(cache, 9)
    reader = used_cache()
    cache.save(folder / "new", tokens={0: [2]})
    new = (folder / "new").read_bytes()
    seen, step = {"old": 0, "new": 0}, 0
    while True:
        step += 1
        (folder / "x").write_bytes(old)
        code = attempt(step)
        data = (folder / "x").read_bytes()
        assert data in (old, new), step
        assert reader.load(folder / "x") == {0: [1 if data == old else 2]}
        if code == 3:
            assert data == new
            break
        assert code == -signal.SIGKILL, code
        for path in folder.glob(".x.*"):
            path.unlink()  # or the next attempts would have more and more lines
        seen["old" if data == old else "new"] += 1
    print(seen["old"], seen["new"])
"""


def test_a_save_killed_at_any_line_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
    n_old, n_new = map(int, children.run(command).stdout.split())
    assert n_old > 100 and n_new > 3


KILLED_ANY_TIME = """
    import os, signal, sys, time
    from pathlib import Path
    from state_tools import used_cache
    from rcache_plugin import CacheSpec

    folder = Path(sys.argv[1])
    spec = CacheSpec.make([1 << 16] * 8, [1 << 16] * 8)
    cache, reader = used_cache(spec), used_cache(spec)
    cache.save(folder / "x", 0, [0])
    interrupted, seen = 0, set()
    for i in range(40):
        pid = os.fork()
        if pid == 0:
            for token in range(1000):
                cache.save(folder / "x", 0, [1000 * i + token + 1])
        time.sleep(0.002 * i + 0.01)
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        unfinished = list(folder.glob(".x.*"))
        interrupted += len(unfinished)
        for path in unfinished:
            path.unlink()
        seen.update(reader.load(folder / "x", 2)[2])
    print(interrupted, len(seen))
"""


def test_a_save_killed_at_any_time_leaves_a_good_file(tmp_path: Path) -> None:
    """40 kills at times that the child does not choose, of saves of 4 MB."""
    command = [sys.executable, "-c", textwrap.dedent(KILLED_ANY_TIME), str(tmp_path)]
    interrupted, n_seen = map(int, children.run(command).stdout.split())
    assert interrupted > 10, "hardly any of the kills met a save"
    assert n_seen > 1, "no save was complete before its kill"


# --- readers and writers ---------------------------------------------------------------------------------------------


def test_states_go_to_memory_and_come_from_it() -> None:
    with used_cache() as cache, used_cache(seed=1) as other:
        for seq_id, to in ((-1, -1), (3, 2)):
            state = written(cache, seq_id)
            assert cache.state_size(seq_id) == len(state)
            memory = np.zeros(len(state) + 5, np.uint8)
            cache.state_write(memory, seq_id)
            assert memory[:-5].tobytes() == state and not memory[-5:].any()
            for data in (state, bytearray(state), memory[:-5], memoryview(state), io.BytesIO(state)):
                fill(other, 3)
                other.state_read(data, to)
                assert written(other, to) == state
            before = contents(other)
            with pytest.raises(StateError, match=rf"the state ends after {len(state)} bytes, found {len(state) + 5}"):
                other.state_read(memory, to)
            for too_small in (bytearray(len(state) - 1), bytearray()):
                with pytest.raises(InvalidArgument, match=f"the state takes {len(state)} bytes, the memory has"):
                    cache.state_write(too_small, seq_id)
                assert not any(too_small)
            with pytest.raises(InvalidArgument, match="cannot be written"):
                cache.state_write(bytes(len(state)), seq_id)
            with pytest.raises(InvalidArgument, match="binary file or contiguous memory"):
                other.state_read(object(), to)
            assert contents(other) == before


class Trickle(io.RawIOBase):
    """A raw file that takes and gives a few bytes at a time, as pipes do."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)

    def write(self, data: object) -> int:  # type: ignore[override]
        taken = bytes(data)[:7]  # type: ignore[call-overload]
        self.data += taken
        return len(taken)

    def read(self, n_bytes: int = -1) -> bytes:
        given = bytes(self.data[: min(n_bytes, 5)])
        del self.data[: len(given)]
        return given


class Full(io.RawIOBase):
    def write(self, data: object) -> int:  # type: ignore[override]
        return 0


def test_raw_files_that_take_and_give_less_than_asked() -> None:
    with used_cache() as cache:
        file = Trickle()
        cache.state_write(file)
        assert bytes(file.data) == written(cache)
        state = written(cache)
        fill(cache, 1)
        cache.state_read(Trickle(state))
        assert written(cache) == state
        with pytest.raises(StateError, match="took none"):
            cache.state_write(Full())
        with pytest.raises(StateError, match="the state ends after"):
            cache.state_read(Trickle(state[:-1]))


def test_a_writer_that_keeps_what_it_is_given() -> None:
    class Keeper:
        def __init__(self) -> None:
            self.parts: list[bytes] = []

        def write(self, data: bytes) -> None:
            self.parts.append(data)

    with used_cache() as cache:
        keeper, state = Keeper(), written(cache)
        cache.state_write(keeper)
        fill(cache, 4)
        assert b"".join(keeper.parts) == state


def test_a_reader_that_gives_too_much() -> None:
    class Generous(io.BytesIO):
        def read(self, n_bytes: int | None = -1) -> bytes:
            return super().read((n_bytes or 0) + 1)

    with used_cache() as cache:
        before = contents(cache)
        with pytest.raises(StateError, match="the reader gave 5 bytes for 4"):
            cache.state_read(Generous(written(cache)))
        assert contents(cache) == before


def test_a_device_that_fails_in_the_middle_of_a_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is half written over is dropped, what is not stays."""
    with used_cache() as cache:
        assert cache.buffers is not None
        whole, one = written(cache), written(cache, 0)
        cache.find_slot(UBatch.single(2, 3))
        before, real, left = [written(cache, s) for s in range(4)], cache.buffers.set_rows, [2]

        def failing(*arguments: object) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("gone")
            real(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(cache.buffers, "set_rows", failing)
        with pytest.raises(RuntimeError, match="gone"):
            cache.state_read(one, 3)  # 1 keeps the cell, so 3 goes to a free one
        assert [written(cache, s) for s in range(4)] == before
        left[0] = 2
        with pytest.raises(RuntimeError, match="gone"):
            cache.state_read(whole)
        assert [cache.seq_pos_max(s) for s in range(4)] == [-1, -1, 3, -1], "2 lies in a cell that is not restored"
        cache.table.check()


# --- the same through C ----------------------------------------------------------------------------------------------


MODES = {"bytes": {"tensors": False}, "tensors": {"tensors": True}, "waiting": {"tensors": True, "wait": True}}


@pytest.mark.parametrize("mode", MODES)
def test_states_through_the_c_interface(mode: str) -> None:
    with used_cache(SPEC_P) as cache, used_cache(SPEC_P, seed=1) as other, HostVTable(cache) as table:
        with HostVTable(other) as other_table:
            for seq_id, to in ((-1, -1), (3, 2), (0, 0)):
                out = CIO(cache, **MODES[mode])
                assert c_status(table, "state_write", out, seq_id) == Status.OK
                assert bytes(out.out) == written(cache, seq_id)
                fill(other, 3)
                read = CIO(other, bytes(out.out), **MODES[mode])
                assert c_status(other_table, "state_read", read, to) == Status.OK
                assert written(other, to) == written(cache, seq_id) and read.at == len(out.out)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seq_id", [-1, 0, 2])
def test_streams_in_c_that_fail_anywhere(mode: str, seq_id: int) -> None:
    """0 has a cell of its own, 2 is empty: it goes to a free cell."""
    with used_cache(n_cells=4) as cache, HostVTable(cache) as table:
        state, n = written(cache, -1 if seq_id < 0 else 1), 0
        fill(cache, 2)
        exact = mode != "tensors"
        before = contents(cache, rows_of_free_cells=exact)
        while True:
            status = c_status(table, "state_read", CIO(cache, state, fail_after=n, **MODES[mode]), seq_id)
            if status == Status.OK:
                break
            assert status == Status.IO and contents(cache, rows_of_free_cells=exact) == before, n
            n += 1
        assert n > 10 and written(cache, seq_id) == state
        for m in range(n):
            status = c_status(table, "state_write", CIO(cache, fail_after=m, **MODES[mode]), seq_id)
            assert status in (Status.OK, Status.IO)


def test_rows_on_a_device_are_asked_for_when_all_else_is_right() -> None:
    class Device:
        """Headers only in the stream, rows by themselves."""

        def __init__(self, data: bytes, fail: int = 1 << 30) -> None:
            self.stream, self.asked, self.fail = io.BytesIO(data), 0, fail

        def read(self, n_bytes: int) -> bytes:
            return self.stream.read(n_bytes)

        def read_rows(self, which: str, il: int, first: int, n_rows: int) -> None:
            self.asked += n_rows
            if self.asked > self.fail:
                raise RuntimeError("gone")

    class Headers(io.BytesIO):
        def write_rows(self, *_: object) -> None:
            pass

    with used_cache() as cache:
        out = Headers()
        cache.state_write(out, flags=FLAG_ON_DEVICE)
        headers = out.getvalue()
        before = contents(cache)
        for length in range(len(headers)):
            reader = Device(headers[:length])
            with pytest.raises(StateError):
                cache.state_read(reader, flags=FLAG_ON_DEVICE)
            assert reader.asked == 0
        assert contents(cache) == before
        reader = Device(headers)
        cache.state_read(reader, flags=FLAG_ON_DEVICE)
        assert reader.asked == 2 * 4 and cache.seq_pos_max(1) == 9
        with pytest.raises(RuntimeError, match="gone"):
            cache.state_read(Device(headers, fail=3), flags=FLAG_ON_DEVICE)
        assert cache.table.used == 0
        with pytest.raises(Unsupported, match="reader of rows"):
            cache.state_read(io.BytesIO(headers), flags=FLAG_ON_DEVICE)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def conversation(n_cells: int = 2, checkpoint_cells: int = 4, **options: object) -> RecurrentCache:
    """Sequence 0 has read the tokens 0 .. 11 in three parts, each end a checkpoint; sequence 1 the tokens 50, 51."""
    cache = RecurrentCache(SPEC, n_cells, checkpoint_cells=checkpoint_cells, ggml=ggml(), **options)  # type: ignore[arg-type]
    fill(cache)
    for first in (0, 4, 8):
        cache.find_slot(UBatch.single(0, first, 4, range(first, first + 4)))
        cache.checkpoints.mark(0)
    cache.find_slot(UBatch.single(1, 0, 2, [50, 51]))
    return fill(cache, 1)


def rows_of(cache: RecurrentCache, n_tokens: int) -> bytes:
    """The state of the checkpoint of that many tokens."""
    (one,) = [each for each in cache.checkpoints.all() if each.n_tokens == n_tokens]
    file = io.BytesIO()
    assert cache.buffers is not None
    for which, il in tensors(cache):
        file.write(cache.buffers.get_rows(which, il, cache.table.pin_cell(one.pin), 1))
    return file.getvalue()


def test_checkpoints_and_tokens_travel_with_a_file(tmp_path: Path) -> None:
    with conversation() as cache, RecurrentCache(SPEC, 3, checkpoint_cells=8, ggml=ggml()) as other:
        cache.save(tmp_path / "all")
        cache.save(tmp_path / "one", 1)
        assert other.load(tmp_path / "all") == {0: list(range(12)), 1: [50, 51]}
        other.table.check()
        assert [each.n_tokens for each in other.checkpoints.of(0)] == [4, 8, 12]
        assert other.checkpoints.tokens(0).tolist() == list(range(12)) and other.checkpoints.of(1) == []
        for n_tokens in (4, 8, 12):
            assert rows_of(other, n_tokens) == rows_of(cache, n_tokens)
        assert written(other) == written(cache)
        assert other.seq_rm(0, 8, -1) and other.seq_pos_max(0) == 7
        assert other.checkpoints.tokens(0).tolist() == list(range(8))
        other.load(tmp_path / "one", 2)
        assert other.checkpoints.tokens(2).tolist() == [50, 51] and len(other.checkpoints.all()) == 3
        other.save(tmp_path / "without", checkpoints=False)
        assert len((tmp_path / "without").read_bytes()) < len((tmp_path / "all").read_bytes())


@pytest.mark.parametrize("room", [0, 1, 2])
def test_as_many_checkpoints_are_taken_as_fit(tmp_path: Path, room: int) -> None:
    with conversation() as cache, RecurrentCache(SPEC, 2, checkpoint_cells=room, ggml=ggml()) as other:
        cache.save(tmp_path / "all")
        other.load(tmp_path / "all")
        other.table.check()
        if room:
            assert len(other.checkpoints.all()) == room and other.stats().checkpoints_evicted == 0
            assert 4 in [each.n_tokens for each in other.checkpoints.all()], "the first is the most useful"
        assert written(other) == written(cache)


def test_a_lineage_takes_no_checkpoints_along(tmp_path: Path) -> None:
    with conversation(hybrid=True) as cache, conversation() as other:
        cache.save(tmp_path / "all")
        assert b'"checkpoints"' not in (tmp_path / "all").read_bytes()[:4096]
        other.save(tmp_path / "other")
        cache.load(tmp_path / "other")
        assert cache.checkpoints.all() == [] and cache.checkpoints.tokens(0).tolist() == list(range(12))


def test_damaged_checkpoints_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    with conversation() as cache:
        cache.save(tmp_path / "all")
        data = (tmp_path / "all").read_bytes()
        before = contents(cache)
        size = cache.state_size(0)
        bad = data[: -32 - size] + b"\xff" * 4 + data[-32 - size + 4 :]
        cases = [
            ("sha256", bad),
            ("cell count", reseal(bad)),
            ("length", with_header(data, lambda h: h["checkpoints"].append([1, 2]))),
            ("length", with_header(data, lambda h: h.pop("checkpoints"))),
            ("checkpoint_bytes", with_header(data, lambda h: h.update(checkpoint_bytes=0))),
            ("a token is", with_header(data, lambda h: h["checkpoints"].__setitem__(0, [-1]))),
            ("header", with_header(data, lambda h: h.update(checkpoints=7))),
            ("length", data[:-40]),
        ]
        for what, damaged in cases:
            (tmp_path / "bad").write_bytes(damaged)
            with pytest.raises(StateError, match=what):
                cache.load(tmp_path / "bad")
            assert contents(cache) == before and len(cache.checkpoints.all()) == 3


def test_inspect_shows_checkpoints(tmp_path: Path) -> None:
    from rcache_plugin.states.inspect import inspect

    with conversation() as cache:
        cache.save(tmp_path / "all")
    report = inspect(tmp_path / "all")
    assert report.intact and sorted(report.checkpoints) == [4, 8, 12] and report.problems == []
    assert sorted(report.as_dict()["checkpoints"]) == [4, 8, 12]
