"""Proves the C interface: layout, a scenario driven from C, errors parked and re-raised, threads, user-made answers."""

from __future__ import annotations

import ctypes
import gc
import logging
import random
import re
from pathlib import Path

import pytest
from native_build import INCLUDE, compile_shared, load_scenario
from tables import same_columns

from rcache_plugin import CacheSpec, HostVTable, RecurrentCache, TableClient, UBatch, factory_address
from rcache_plugin._rcache import ffi, lib
from rcache_plugin.capi import vtable
from rcache_plugin.errors import (
    AbiMismatch,
    ClosedError,
    CorruptTable,
    InvalidArgument,
    RcacheError,
    SeqIdError,
    Status,
    Unsupported,
    check,
    status_of,
)

SPEC = CacheSpec.make([8, 0, 4], [16, 0, 12])


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load_scenario(compile_shared("abi_scenario.c", tmp_path_factory.mktemp("native")))


@pytest.fixture
def cache() -> RecurrentCache:
    return RecurrentCache(SPEC, 8, allocate=False)


@pytest.fixture
def table(cache: RecurrentCache) -> HostVTable:
    return HostVTable(cache)


@pytest.fixture
def client(table: HostVTable) -> TableClient:
    return TableClient(table.address)


@pytest.mark.parametrize("use_mask", [0, 1], ids=["rs_z", "s_mask"])
@pytest.mark.parametrize("placement", [0, 1], ids=["classic", "compact"])
def test_scenario_in_c(scenario: ctypes.CDLL, placement: int, use_mask: int, capfd: pytest.CaptureFixture[str]) -> None:
    line = scenario.abi_run_factory(factory_address(), placement, use_mask, None)
    assert line == 0, capfd.readouterr().err


@pytest.mark.parametrize("flags", [0, lib.RCACHE_SPEC_HYBRID], ids=["pure", "hybrid"])
def test_rollback_from_c(scenario: ctypes.CDLL, flags: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert scenario.abi_run_checkpoints(factory_address(), flags) == 0, capfd.readouterr().err


def test_factory_lets_go_of_what_it_made(scenario: ctypes.CDLL) -> None:
    scenario.abi_run_factory(factory_address(), 0, 0, None)
    gc.collect()
    assert not vtable._owned_by_host


def test_layout_is_the_headers() -> None:
    """The numbers that the header asserts at compile time are those cffi works with."""
    text = (INCLUDE / "rcache_plugin.h").read_text(encoding="utf-8")
    sizes = dict(re.findall(r"sizeof\(struct (rcache_\w+)\) == (\d+)", text))
    assert set(sizes) == {"rcache_spec", "rcache_ubatch", "rcache_slot", "rcache_info", "rcache_io", "rcache_vtable"}
    for name, size in sizes.items():
        assert ffi.sizeof(f"struct {name}") == int(size)
    for name, field, offset in re.findall(r"offsetof\(struct (rcache_\w+), (\w+)\) == (\d+)", text):
        assert ffi.offsetof(f"struct {name}", field) == int(offset)


def test_statuses_are_the_headers() -> None:
    assert {f"RCACHE_STATUS_{s.name}": s.value for s in Status} == {
        name: value for value, name in ffi.typeof("enum rcache_status").elements.items()
    }


@pytest.mark.parametrize("field, value", [("abi_version", 1), ("abi_version", 3), ("struct_size", 192)])
def test_client_refuses_another_version(table: HostVTable, field: str, value: int) -> None:
    copy = ffi.new("struct rcache_vtable *", ffi.cast("struct rcache_vtable *", table.address)[0])
    setattr(copy, field, value)
    with pytest.raises(AbiMismatch, match="version"):
        TableClient(int(ffi.cast("uintptr_t", copy)))
    with pytest.raises(InvalidArgument, match="NULL"):
        TableClient(0)


def test_the_original_exception_is_raised(
    client: TableClient, cache: RecurrentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SeqIdError) as caught:
        client.find_slot(UBatch.single(99, 0))
    assert caught.value.seq_id == 99 and caught.value.n_seq_max == 8

    class Mine(Exception):
        pass

    def broken(*args: object) -> None:
        raise Mine("on purpose")

    monkeypatch.setattr(cache, "find_slot", broken)
    with pytest.raises(Mine, match="on purpose") as mine:
        client.find_slot(UBatch.single(0, 0))
    assert any(entry.name == "broken" for entry in mine.traceback)
    assert client.last_error() == "Mine: on purpose"

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "find_slot", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.find_slot(UBatch.single(0, 0))


def test_nobody_waits_so_it_is_logged(
    table: HostVTable, cache: RecurrentCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(cache, "seq_keep", broken)
    c_table = ffi.cast("struct rcache_vtable *", table.address)
    with caplog.at_level(logging.ERROR):
        assert c_table.seq_keep(c_table.user, 0) == Status.EXCEPTION
    assert "a bug of ours" in caplog.text and "Traceback" in caplog.text and "in broken" in caplog.text
    table.raise_pending()  # nothing is parked for a Python side that does not exist


def test_each_operation_answers_as_the_cache(client: TableClient, cache: RecurrentCache) -> None:
    ubatch = UBatch([(0,), (1, 2)], [0, 1, 0, 1])
    assert client.prepare([ubatch, UBatch.single(0, 2)])
    slot = client.find_slot(ubatch)
    assert slot == (0, 2, 0)
    assert client.s_copy(2).tolist() == [0, 0] and client.s_mask(2).tolist() == [0.0, 0.0]
    assert client.find_slot(UBatch.single(0, 2)) == (0, 1, -1)
    assert client.s_copy(1).tolist() == [0] and client.s_mask(1).tolist() == [1.0]
    client.seq_cp(0, 5)
    assert cache.table.cell(0).seq_ids == (0, 5)
    client.seq_add(0, 0, -1, 10)
    client.seq_div(0, 0, -1, 4)
    assert client.seq_pos_max(5) == 3 == client.seq_pos_min(0)
    assert client.seq_rm(0, 1, 2) is False
    assert client.seq_rm(0) is True
    assert client.seq_pos_max(0) == -1
    client.seq_keep(5)
    info = client.info()
    assert (info.size, info.used, info.n_seq_max, info.n_layer) == (8, 1, 8, 3)
    assert client.can_shift is True
    client.clear()
    assert client.info().used == 0
    for call in (lambda: client.s_copy(1), lambda: client.s_mask(1)):
        with pytest.raises(InvalidArgument, match="no such row"):
            call()
    with pytest.raises(Unsupported):
        client.r_tensor(0)


def test_no_room_is_a_refusal_and_nothing_changes() -> None:
    cache = RecurrentCache(SPEC, 2, n_seq_max=4, allocate=False)
    with HostVTable(cache) as table:
        client = TableClient(table.address)
        client.find_slot(UBatch([(0,), (1,)], [0, 0]))
        before = cache.table.columns(), cache.table.epoch
        assert client.find_slot(UBatch.single(2, 0)) is None
        assert client.prepare([UBatch.single(0, 1), UBatch.single(2, 0)]) is False
        after = cache.table.columns(), cache.table.epoch
        assert after[1] == before[1]
        assert same_columns(after[0], before[0])
        assert client.s_copy(2).tolist() == [0, 0], "the last slot's plan is still the one to read"


@pytest.mark.parametrize(
    "found, ids, last",
    [
        (UBatch.single(0, 2), (0,), 2),  # as prepared
        (UBatch.single(1, 2), (1,), 2),  # another sequence
        (UBatch.single(0, 3), (0,), 3),  # another position
        (UBatch.single(0, 1, 2), (0,), 2),  # another number of tokens
        (UBatch.single(0, 2, 2), (0,), 3),  # the same first token, and one more
        (UBatch([(0, 1)], [2]), (0, 1), 2),  # another set
        (UBatch([(0,), (1,)], [2, 2]), (0,), 2),  # more sequences
    ],
)
def test_only_what_was_prepared_is_taken_for_it(found: UBatch, ids: tuple[int, ...], last: int) -> None:
    cache = RecurrentCache(SPEC, 8, allocate=False, n_rs_seq=2)
    table = HostVTable(cache)
    client = TableClient(table.address)
    client.find_slot(UBatch([(0,), (1,)], [0, 1, 0, 1]))
    assert client.prepare([UBatch.single(0, 2)])
    slot = client.find_slot(found)
    assert slot is not None and slot.n == found.n_seqs
    cell = cache.table.cell(slot.head)
    assert (cell.seq_ids, cell.pos) == (ids, last)
    assert cache.table.snapshots(slot.head).kept == found.n_seq_tokens - 1


class Watched:
    """A cache behind a C table, and what reaches it of the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_cells: int = 8, **options: int) -> None:
        self.cache = RecurrentCache(SPEC, n_cells, allocate=False, placement="compact", **options)
        self.table = HostVTable(self.cache)
        self.client = TableClient(self.table.address)
        self.prepared: list[int] = []  # ubatches of each call
        self.read = 0  # ubatches read from C's structs
        prepare, read = self.cache.prepare, vtable._ubatch

        def prepare_and_note(ubatches: list[UBatch]) -> bool:
            self.prepared.append(len(ubatches))
            return prepare(ubatches)

        def read_and_note(c: object) -> UBatch:
            self.read += 1
            return read(c)

        monkeypatch.setattr(self.cache, "prepare", prepare_and_note)
        monkeypatch.setattr(vtable, "_ubatch", read_and_note)


def test_what_was_prepared_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Watched(monkeypatch)
    steps = [UBatch([(0, 3), (1,)], [0, 0], [5, 6]), UBatch.single(2, 0, 3), UBatch([(1,)], [1], [7])]
    assert w.client.prepare(steps) and w.read == 3
    for step in steps:
        assert w.client.find_slot(step) is not None
    assert (w.read, w.prepared) == (3, [3])
    single = UBatch.single
    bare, tokens = single(2, 3), single(1, 2, 1, [8])
    for plain, other in ((bare, single(2, 3, 1, [8])), (tokens, single(1, 2)), (single(5, 0), single(6, 0))):
        assert w.client.prepare([plain])
        w.read = 0
        assert w.client.find_slot(other) is not None and w.read == 1
        assert w.cache.plan is not None and w.cache.plan.ubatch.same_as(other)
        assert (w.cache.plan.ubatch.token is None) == (other.token is None)


def test_steps_of_the_same_sequences_are_prepared_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Watched(monkeypatch)
    w.client.find_slot(UBatch([(4,), (2, 0)], [0, 0]))
    w.read = 0
    for pos in range(1, 5):
        step = UBatch([(4,), (2, 0)], [pos, pos], [10 + pos, 20 + pos])
        assert w.client.prepare([step, UBatch([(4,), (2, 0)], [pos + 1, pos + 2, pos + 1, pos + 2])])
        assert w.client.find_slot(step) == (0, 2, -1)
        assert w.cache.plan is not None
        found = w.cache.plan.ubatch
        assert (found.pos.tolist(), found.token.tolist()) == ([pos, pos], [10 + pos, 20 + pos])  # type: ignore[union-attr]
        assert not found.pos.flags.writeable
    assert (w.read, w.prepared) == (0, [])
    assert w.client.find_slot(UBatch([(4,), (2, 0)], [5, 6, 5, 6])) == (0, 2, -1)
    assert w.client.seq_pos_max(0) == w.cache.seq_pos_max(0) == 6 and w.read == 0
    for wrong in (UBatch([(2, 0), (4,)], [7, 7]), UBatch([(4,), (2,)], [7, 7]), UBatch([(4,)], [7])):
        assert w.client.prepare([wrong])
    assert w.prepared == [1, 1, 1]


@pytest.mark.parametrize(
    "how", ["cp", "rm", "keep", "add", "div", "clear", "resize", "discard", "python", "other table"]
)
def test_after_any_change_python_is_asked(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = Watched(monkeypatch, 3, n_seq_max=8)
    w.client.find_slot(UBatch([(0,), (1,)], [0, 0]))
    if how == "cp":
        w.client.seq_cp(0, 5)
        w.client.seq_cp(1, 6)
    elif how == "rm":
        w.client.seq_rm(0)
    elif how == "keep":
        w.client.seq_keep(0)
    elif how == "add":
        w.client.seq_add(0, -1, -1, 4)
    elif how == "div":
        w.client.seq_div(0, -1, -1, 2)
    elif how == "clear":
        w.client.clear()
    elif how == "resize":
        w.cache.resize(2, 8)
    elif how == "discard":
        w.client.discard_slot()
    elif how == "python":
        w.cache.find_slot(UBatch([(1,), (0,)], [1, 1]))
    else:
        other = HostVTable(w.cache)
        TableClient(other.address).find_slot(UBatch([(1,), (0,)], [1, 1]))
    first = 0 if how == "discard" else 1  # sequences that have lost their states start anew
    step = UBatch([(0,), (1,)], [first, first])
    assert w.client.prepare([step]) is (how != "cp"), "two shared states, and one cell left"
    assert w.prepared == [1]
    assert (w.client.find_slot(step) is None) == (how == "cp")
    w.cache.table.check()


def test_an_impossible_step_of_the_same_sequences_is_an_error() -> None:
    cache = RecurrentCache(SPEC, 2, allocate=False)
    table = HostVTable(cache)
    client = TableClient(table.address)
    client.find_slot(UBatch([(0,), (1,)], [0, 0]))
    step = UBatch([(0,), (1,)], [1, 1])
    bad = step.next(b"\1\0\0\0\xff\xff\xff\xff", None, 1, [1, -1])
    for call in (lambda: client.prepare([step, bad]), lambda: client.find_slot(bad)):
        with pytest.raises(InvalidArgument, match="-1"):
            call()
    cache.close()
    for call in (lambda: client.prepare([step]), lambda: client.find_slot(step)):
        with pytest.raises(ClosedError):
            call()


@pytest.mark.parametrize("n_rs_seq", [0, 2])
@pytest.mark.parametrize("seed", range(6))
def test_shortcuts_of_the_c_side_change_no_result(seed: int, n_rs_seq: int) -> None:
    """A cache behind the C table and one that is called directly, given the same random calls."""
    rng = random.Random(seed)
    caches = [
        RecurrentCache(SPEC, 5, n_seq_max=7, allocate=False, placement="compact", n_rs_seq=n_rs_seq) for _ in range(2)
    ]
    plain = caches[1]
    table = HostVTable(caches[0])
    client = TableClient(table.address)
    step = UBatch.single(0, 0)
    for _ in range(300):
        if rng.random() < 0.15:
            seq_id, p0 = rng.randrange(7), rng.choice([-1, max(plain.seq_pos_max(0) - 1, -1)])
            changes = ("seq_cp", seq_id, rng.randrange(7)), ("seq_rm", seq_id, p0), ("seq_add", seq_id, -1, -1, 1)
            name, *args = rng.choice(changes)
            assert getattr(client, name)(*args) == getattr(plain, name)(*args)
        if rng.random() < 0.4:
            ids = rng.sample(range(7), rng.randint(1, 3))
            sets = [tuple(ids)] if rng.random() < 0.2 else [(i,) for i in ids]
        else:
            sets = [tuple(ids) for ids in step.seq_ids]
        steps, at = [], [plain.seq_pos_max(ids[0]) for ids in sets]
        for _ in range(rng.randint(1, 2)):
            n = rng.randint(1, 3)
            pos = [p + 1 + j + (rng.random() < 0.05) for p in at for j in range(n)]
            steps.append(UBatch(sets, pos, [rng.randrange(99) for _ in pos] if rng.random() < 0.8 else None))
            at = [p + n for p in at]
        if rng.random() < 0.7:
            assert client.prepare(steps) == plain.prepare(steps)
        for step in steps:
            if rng.random() < 0.1:
                step = UBatch(step.seq_ids, step.pos, [7] * step.n_tokens)
            slot, plan = client.find_slot(step), plain.find_slot(step)
            assert slot == (None if plan is None else (plan.head, plan.n, plan.rs_z))
            if plan is not None:
                assert client.s_copy(plan.n).tolist() == plan.s_copy.tolist()
                ours = caches[0].plan
                assert ours is not None and ours.gaps == plan.gaps
                for name in ("seq_ids", "n_seq_tokens", "pos_last"):
                    assert getattr(ours.ubatch, name) == getattr(step, name)
                for name in ("pos", "token"):
                    one, other = getattr(ours.ubatch, name), getattr(step, name)
                    assert one is other is None or one.tolist() == other.tolist()
            assert [client.seq_pos_max(s) for s in range(7)] == plain.positions()
        for cache in caches:
            cache.table.check()
        assert same_columns(caches[0].table.columns(), plain.table.columns())
        assert [caches[0].table.snapshots(c) for c in range(5)] == [plain.table.snapshots(c) for c in range(5)]


def test_a_cache_of_the_users_answers_in_python(cache: RecurrentCache) -> None:
    asked: list[int] = []

    def s_copy(i: int) -> int:
        asked.append(i)
        return cache.s_copy(i)

    def s_mask(i: int) -> float:
        if i == 1:
            raise ValueError("not this one")
        return cache.s_mask(i)

    table = HostVTable(cache, s_copy=s_copy, s_mask=s_mask)
    client = TableClient(table.address)
    client.find_slot(UBatch([(3,), (4,)], [0, 0]))
    assert client.s_copy(2).tolist() == [0, 0] and asked == [0, 1]
    assert client.s_mask(1).tolist() == [0.0]
    with pytest.raises(ValueError, match="not this one"):
        client.s_mask(2)


def test_plan_follows_the_cache_whoever_changes_it(client: TableClient, cache: RecurrentCache) -> None:
    plan = cache.find_slot(UBatch([(1,), (0,)], [0, 0]))
    assert plan is not None and client.s_copy(2).tolist() == plan.s_copy.tolist()
    cache.resize(16)
    with pytest.raises(InvalidArgument):
        client.s_copy(1)


def test_threads_that_python_has_never_seen(scenario: ctypes.CDLL) -> None:
    cache = RecurrentCache(SPEC, 8, allocate=False)
    table = HostVTable(cache)
    assert scenario.abi_run_threads(table.address, 8, 200) == 0
    cache.table.check()
    assert [cache.seq_pos_max(seq_id) for seq_id in range(8)] == [199] * 8


@pytest.mark.parametrize("how", ["table closed", "cache closed", "collected"])
def test_closed_from_under_the_host(scenario: ctypes.CDLL, how: str) -> None:
    cache = RecurrentCache(SPEC, 8, allocate=False)
    table = HostVTable(cache)
    address = table.address
    client = TableClient(address)
    client.find_slot(UBatch.single(0, 0))
    if how == "table closed":
        table.close()
        table.close()
    elif how == "cache closed":
        cache.close()
    else:
        del cache, table
        gc.collect()
    assert scenario.abi_run_closed(address) == 0
    with pytest.raises(ClosedError):
        client.find_slot(UBatch.single(0, 1))
    with pytest.raises(ClosedError):
        client.s_copy(1)
    client.destroy()
    client.destroy()
    with pytest.raises(ClosedError, match="destroyed"):
        client.info()


def test_closed_table_leaves_the_cache_open(cache: RecurrentCache, table: HostVTable) -> None:
    table.close()
    assert cache.find_slot(UBatch.single(0, 0)) is not None


def test_status_round_trip() -> None:
    for error in (InvalidArgument("x"), ClosedError("x"), AbiMismatch("x"), CorruptTable("x"), Unsupported("x")):
        with pytest.raises(type(error)):
            check(status_of(error), "x")
    assert status_of(MemoryError()) == Status.ALLOC and status_of(KeyError()) == Status.EXCEPTION
    with pytest.raises(RcacheError, match="what"):
        check(Status.EXCEPTION, "what")
    assert check(Status.NO_SLOT, "") is Status.NO_SLOT


def test_header_compiles_as_cplusplus(tmp_path: Path) -> None:
    import shutil
    import subprocess

    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None, "no C++ compiler"
    source = tmp_path / "user.cpp"
    source.write_text('#include "rcache_plugin.h"\nint main() { return RCACHE_ABI_VERSION == 2 ? 0 : 1; }\n')
    subprocess.run([compiler, "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", str(source), "-o", str(tmp_path / "user")],
                   check=True)
    subprocess.run([str(tmp_path / "user")], check=True)


def test_memory_of_a_table_is_the_hosts_until_destroy() -> None:
    """Many tables made, used and destroyed: nothing piles up."""
    import resource

    def rounds(n: int) -> None:
        for _ in range(n):
            cache = RecurrentCache(SPEC, 64, allocate=False)
            client = TableClient(HostVTable(cache).address)
            with pytest.raises(ClosedError):  # the HostVTable was collected at once
                client.info()
            client.destroy()

    rounds(200)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rounds(3000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096, "KiB"


def test_version_constant() -> None:
    assert lib.RCACHE_ABI_VERSION == 2
