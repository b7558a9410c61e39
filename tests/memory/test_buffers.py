"""Proves layout, rows, lifetime and failures of state tensors in host memory. Other devices are in test_rpc."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buffer_kit import SpyLib, content, fill
from ggml_kit import child

from rcache_plugin.cells.spec import CacheSpec
from rcache_plugin.errors import AllocationError, BackendError, ClosedError, InvalidArgument
from rcache_plugin.memory.buffers import StateBuffers, dry_run
from rcache_plugin.memory.ggml import GgmlLib
from rcache_plugin.memory.layout import Sizes

SPEC = CacheSpec.make([6, 0, 4, 0], [5, 3, 0, 0])
"""r and s, s only, r only, nothing."""


@pytest.fixture
def buffers(lib: SpyLib) -> Iterator[StateBuffers]:
    with StateBuffers(lib, SPEC, 8) as made:
        yield made


# layout


@pytest.mark.parametrize("type_r, type_s", [("f32", "f32"), ("f16", "f32"), ("bf16", "f64"), ("q8_0", "q4_0")])
def test_tensors_are_named_and_shaped_as_hosts_expect(lib: SpyLib, type_r: str, type_s: str) -> None:
    import ggml

    spec = CacheSpec.make([64, 0, 32], [96, 32, 0], type_r, type_s)
    with StateBuffers(lib, spec, 3) as buffers:
        for which, addresses, n_embd, state_type in (
            ("r", buffers.r_l, spec.n_embd_r, spec.type_r),
            ("s", buffers.s_l, spec.n_embd_s, spec.type_s),
        ):
            assert [address is not None for address in addresses] == [n > 0 for n in n_embd]
            for il, address in enumerate(addresses):
                if address is not None:
                    tensor = ctypes.cast(address, ctypes.POINTER(ggml.ggml_tensor)).contents
                    assert tensor.name == f"cache_{which}_l{il}".encode()
                    assert tuple(tensor.ne) == (n_embd[il], 3, 1, 1)
                    assert tensor.type == state_type.type_id
                    assert tensor.nb[1] == state_type.row_bytes(n_embd[il])
                    assert tensor.data and tensor.buffer


def test_all_rows_are_zero_at_first(lib: SpyLib) -> None:
    spec = CacheSpec.make([1 << 16], [1 << 18])
    for salt in (1, 2):  # the second is likely to get the memory that the first has left
        with StateBuffers(lib, spec, 4) as buffers:
            assert not any(any(row) for row in content(buffers).values())
            fill(buffers, salt)


def test_sizes(lib: SpyLib, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rcache_plugin.memory.buffers"), StateBuffers(lib, SPEC, 8) as buffers:
        assert buffers.size_r_bytes == 8 * 4 * (6 + 4)
        assert buffers.size_s_bytes == 8 * 4 * (5 + 3)
        assert buffers.total_size >= buffers.size_r_bytes + buffers.size_s_bytes
        assert buffers.memory_breakdown() == {"CPU": buffers.total_size}
    assert any(record.message.startswith("CPU: ") for record in caplog.records)
    assert any("state of 8 cells, 3 layers" in record.message for record in caplog.records)


def test_log_has_the_figures(lib: SpyLib, caplog: pytest.LogCaptureFixture) -> None:
    spec = CacheSpec.make([1 << 18, 1 << 18], [1 << 20, 0], "f32", "f16")
    with caplog.at_level(logging.INFO, "rcache_plugin.memory.buffers"), StateBuffers(lib, spec, 2):
        pass
    assert [record.message for record in caplog.records] == [
        "CPU: 8.00 MiB",
        "state of 2 cells, 2 layers: 8.00 MiB (r f32 in 4.00 MiB, s f16 in 4.00 MiB)",
    ]


@pytest.mark.parametrize("n_cells", [1, 3, 64])
@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "bf16"), ("q8_0", "q5_1")])
def test_dry_run_tells_what_will_be_taken(lib: SpyLib, n_cells: int, types: tuple[str, str]) -> None:
    spec = CacheSpec.make([32, 0, 96, 160], [0, 32, 64, 32], *types)
    sizes = dry_run(lib, spec, n_cells)
    assert not any("buffer" in entry for entry in lib.log) and not lib.leaked()
    with StateBuffers(lib, spec, n_cells) as buffers:
        real = Sizes(buffers.size_r_bytes, buffers.size_s_bytes, buffers.total_size, buffers.memory_breakdown())
    assert sizes == real
    assert sizes.r_bytes == n_cells * spec.r_cell_bytes and sizes.s_bytes == n_cells * spec.s_cell_bytes


def test_dry_run_of_what_nobody_has(lib: SpyLib) -> None:
    assert dry_run(lib, CacheSpec.make([1 << 40], [0]), 8).total_bytes == 1 << 45


def test_buffer_types_that_a_host_gives(lib: SpyLib) -> None:
    address = lib.address(lib.cpu_buft())
    with StateBuffers(lib, SPEC, 2, bufts=[address, None, 0, address]) as buffers:
        assert list(buffers.memory_breakdown()) == ["CPU"]
        assert buffers.total_size == dry_run(lib, SPEC, 2, bufts=[address] * 4).total_bytes
        rows = fill(buffers)
        assert content(buffers) == rows


def test_devices_by_name(lib: SpyLib) -> None:
    for devices in (None, "CPU", "cpu", ["CPU", None, "cpu", None]):
        with StateBuffers(lib, SPEC, 2, devices=devices) as buffers:
            assert list(buffers.memory_breakdown()) == ["CPU"]


# rows


def test_rows_are_read_as_written(buffers: StateBuffers) -> None:
    rows = fill(buffers)
    assert content(buffers) == rows


def test_rows_are_written_from_anything_that_has_bytes(buffers: StateBuffers) -> None:
    values = np.arange(6, dtype=np.float32)
    for data in (values, values.tobytes(), bytearray(values.tobytes()), memoryview(values), values.reshape(2, 3)):
        buffers.set_row("r", 0, 3, bytes(24))
        buffers.set_row("r", 0, 3, data)
        assert np.frombuffer(buffers.get_row("r", 0, 3), np.float32).tolist() == values.tolist()


@pytest.mark.parametrize("data", [b"", bytes(23), bytes(25), np.zeros(12, np.float32)[::2], "text", 24, None])
def test_what_is_not_a_row_changes_nothing(buffers: StateBuffers, data: object) -> None:
    rows = fill(buffers)
    with pytest.raises(InvalidArgument, match="row"):
        buffers.set_row("r", 0, 3, data)
    assert content(buffers) == rows


@pytest.mark.parametrize(
    "row", [("r", 0, 8), ("r", 0, -1), ("r", 0, 1.0), ("r", 1, 0), ("s", 2, 0), ("r", 4, 0), ("s", -1, 0), ("k", 0, 0)]
)
def test_missing_rows_are_refused(buffers: StateBuffers, row: Any) -> None:
    for call in (buffers.get_row, buffers.view_row, lambda *row: buffers.set_row(*row, data=bytes(24))):
        with pytest.raises(InvalidArgument):
            call(*row)


def test_clear(buffers: StateBuffers) -> None:
    fill(buffers)
    buffers.clear()
    assert not any(any(row) for row in content(buffers).values())


@pytest.mark.parametrize("cells", [[], [0], [7], [2, 3, 4], [5, 1, 5, 6], range(8)])
def test_clear_rows_spares_the_others(buffers: StateBuffers, cells: list[int]) -> None:
    rows = fill(buffers)
    buffers.clear_rows(iter(cells))
    assert content(buffers) == {row: bytes(len(data)) if row[2] in cells else data for row, data in rows.items()}


def test_clear_of_rows_larger_than_the_block_of_zeros(lib: SpyLib) -> None:
    with StateBuffers(lib, CacheSpec.make([3 << 18], [0]), 3) as buffers:
        rows = fill(buffers)
        buffers.clear_rows([1])
        assert content(buffers) == rows | {("r", 0, 1): bytes(3 << 20)}


@pytest.mark.parametrize("cell", [8, -1, 2**40, 1.5, "1"])
def test_a_missing_cell_changes_nothing(buffers: StateBuffers, cell: Any) -> None:
    rows = fill(buffers)
    calls: list[Callable[[], None]] = [
        lambda: buffers.clear_rows([0, cell]),
        lambda: buffers.copy_row(0, cell),
        lambda: buffers.copy_row(cell, 0),
        lambda: buffers.move_rows([(0, 1, True), (cell, 2, True)]),
        lambda: buffers.move_rows([(0, 1, True), (2, cell, False)]),
        lambda: buffers.copy_rows_from(buffers, [(0, 1), (cell, 2)]),
        lambda: buffers.copy_rows_from(buffers, [(0, 1), (2, cell)]),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument):
            call()
    assert content(buffers) == rows


def test_numpy_integers_are_cells(buffers: StateBuffers) -> None:
    rows = fill(buffers)
    buffers.copy_row(np.int32(1), np.int64(2))  # type: ignore[arg-type]
    assert buffers.get_row("s", 1, 2) == rows["s", 1, 1]


def test_copy_row(buffers: StateBuffers) -> None:
    rows = fill(buffers)
    buffers.copy_row(2, 5)
    buffers.copy_row(3, 3)
    assert content(buffers) == {(w, il, c): rows[w, il, 2 if c == 5 else c] for w, il, c in rows}


@pytest.mark.parametrize("width", [5, 1024, 1025, 3001])
def test_move_rows_in_the_order_given(lib: SpyLib, width: int) -> None:
    """Rows longer and shorter than the piece that is exchanged at a time."""
    with StateBuffers(lib, CacheSpec.make([width, 0, 3], [7, width, 0], "f32", "f16"), 5) as buffers:
        assert buffers.on_host
        rows = fill(buffers)
        buffers.move_rows([(0, 4, True), (4, 1, False), (2, 3, True), (2, 0, True)])
        now = {0: 3, 1: 0, 2: 4, 3: 2, 4: 0}
        assert content(buffers) == {(w, il, c): rows[w, il, now[c]] for w, il, c in rows}
        with pytest.raises(InvalidArgument, match="itself"):
            buffers.move_rows([(0, 1, True), (2, 2, False)])
        assert content(buffers) == {(w, il, c): rows[w, il, now[c]] for w, il, c in rows}
        buffers.move_rows([])


@pytest.mark.parametrize("pairs", [[], [(0, 0)], [(0, 4), (1, 5), (2, 6)], [(7, 0), (6, 1)], [(3, 3), (3, 4), (4, 11)]])
def test_copy_rows_from_another(lib: SpyLib, buffers: StateBuffers, pairs: list[tuple[int, int]]) -> None:
    theirs = fill(buffers, 1)
    with StateBuffers(lib, SPEC, 12) as wider:
        ours = fill(wider, 2)
        wider.copy_rows_from(buffers, iter(pairs))
        source = {dst: src for src, dst in pairs}
        assert content(wider) == {
            (w, il, c): theirs[w, il, source[c]] if c in source else data for (w, il, c), data in ours.items()
        }
    assert content(buffers) == theirs


def test_copy_rows_checks_each_cell_where_it_belongs(lib: SpyLib, buffers: StateBuffers) -> None:
    with StateBuffers(lib, SPEC, 12) as wider:
        rows = fill(wider)
        wider.copy_rows_from(buffers, [(0, 11)])
        buffers.copy_rows_from(wider, [(10, 0)])
        assert buffers.get_row("r", 0, 0) == rows["r", 0, 10]
        for target, source, pair in ((wider, buffers, (8, 0)), (buffers, wider, (0, 8))):
            with pytest.raises(InvalidArgument, match="cell 8 is not one of 0 to 7"):
                target.copy_rows_from(source, [pair])


def test_copy_rows_within_one_buffer_go_in_order(buffers: StateBuffers) -> None:
    rows = fill(buffers)
    buffers.copy_rows_from(buffers, [(0, 1), (1, 2), (5, 5), (2, 3)])
    source = {1: 0, 2: 0, 3: 0}
    assert content(buffers) == {(w, il, c): rows[w, il, source.get(c, c)] for w, il, c in rows}


def test_copy_rows_needs_the_same_spec(lib: SpyLib, buffers: StateBuffers) -> None:
    with StateBuffers(lib, CacheSpec.make([6, 0, 4, 0], [5, 3, 0, 0], "f16"), 8) as other:
        with pytest.raises(InvalidArgument, match="same spec"):
            buffers.copy_rows_from(other, [(0, 0)])
    with pytest.raises(ClosedError):
        buffers.copy_rows_from(other, [(0, 0)])


def test_copy_rows_between_two_copies_of_ggml(buffers: StateBuffers, tmp_path: Path) -> None:
    out = child(
        """
        import shutil, sys
        from rcache_plugin.memory.buffers import StateBuffers
        from rcache_plugin.memory.ggml import GgmlLib
        from rcache_plugin.cells.spec import CacheSpec
        first = GgmlLib.find()
        second = GgmlLib.find(shutil.copytree(first.path.parent, sys.argv[1]))
        spec = CacheSpec.make([4], [2])
        with StateBuffers(first, spec, 2) as a, StateBuffers(second, spec, 2) as b:
            a.set_row("r", 0, 1, bytes(range(16)))
            b.copy_rows_from(a, [(1, 0)])
            print(first.same_copy(second), b.get_row("r", 0, 0) == bytes(range(16)))
        """,
        tmp_path / "second",
    )
    assert out == "False True"


# lifetime


def test_close_frees_in_reverse_order_and_once(lib: SpyLib) -> None:
    buffers = StateBuffers(lib, SPEC, 2)
    acquired = [entry for entry in lib.log if entry[1:] in lib.leaked()]
    lib.log.clear()
    buffers.close()
    buffers.close()
    assert buffers.closed
    assert [entry[1:] for entry in lib.log] == [entry[1:] for entry in reversed(acquired)] and len(acquired) == 2


def test_use_after_close(lib: SpyLib) -> None:
    with StateBuffers(lib, SPEC, 2) as buffers:
        assert not buffers.closed
    uses: list[Callable[[], object]] = [
        lambda: buffers.r_l,
        lambda: buffers.s_l,
        lambda: buffers.total_size,
        lambda: buffers.size_r_bytes,
        lambda: buffers.size_s_bytes,
        buffers.memory_breakdown,
        buffers.clear,
        lambda: buffers.clear_rows([0]),
        lambda: buffers.copy_row(0, 1),
        lambda: buffers.copy_rows_from(buffers, [(0, 1)]),
        lambda: buffers.get_row("r", 0, 0),
        lambda: buffers.set_row("r", 0, 0, bytes(24)),
        lambda: buffers.view_row("r", 0, 0),
    ]
    for use in uses:
        with pytest.raises(ClosedError):
            use()


def test_forgotten_buffers_are_freed(lib: SpyLib) -> None:
    buffers = StateBuffers(lib, SPEC, 2)
    gone = weakref.ref(buffers)
    del buffers
    gc.collect()
    assert gone() is None and not lib.leaked()


def test_close_after_a_failed_init(lib: SpyLib) -> None:
    buffers = StateBuffers.__new__(StateBuffers)
    with pytest.raises(InvalidArgument):
        buffers.__init__(lib, SPEC, 0)  # type: ignore[misc]
    buffers.close()
    assert buffers.closed


def test_close_while_another_thread_works(lib: SpyLib) -> None:
    spec = CacheSpec.make([1 << 20], [0])
    buffers = StateBuffers(lib, spec, 4)
    ends: list[BaseException] = []
    started = threading.Event()

    def work() -> None:
        try:
            while True:
                buffers.copy_row(0, 1)
                buffers.clear_rows([2])
                buffers.get_row("r", 0, 1)
                started.set()
        except BaseException as error:
            ends.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    started.wait(10)
    buffers.close()
    for thread in threads:
        thread.join(10)
    assert [type(error) for error in ends] == [ClosedError, ClosedError]
    ends.clear()  # their tracebacks hold frames that hold the memory
    gc.collect()
    assert not lib.leaked()


# failure


def test_more_than_the_device_has(lib: SpyLib) -> None:
    with pytest.raises(AllocationError, match=r"35184372088832 bytes .* on CPU, which has \d+ bytes") as caught:
        StateBuffers(lib, CacheSpec.make([1 << 40], [0]), 8)
    assert isinstance(caught.value, MemoryError) and "8 cells" in str(caught.value)
    assert not lib.leaked()


def test_more_than_the_device_has_is_not_tried(lib: SpyLib, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux would promise it."""
    monkeypatch.setattr(lib, "memory_total", lambda buft: 1000)
    with StateBuffers(lib, CacheSpec.make([1], [0]), 10):
        pass
    lib.log.clear()
    with pytest.raises(AllocationError, match=r"1024 bytes .* which has 1000 bytes"):
        StateBuffers(lib, CacheSpec.make([1], [0]), 256)
    assert not any("buffer" in entry for entry in lib.log) and not lib.leaked()


def test_more_than_ggml_can_get(
    lib: SpyLib, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lib, "memory_total", lambda buft: 0)  # a device that does not tell
    with pytest.raises(AllocationError, match=f"{1 << 61} bytes .* on CPU; asked"):
        StateBuffers(lib, CacheSpec.make([1 << 40], [0]), 1 << 19)
    assert "failed to allocate" in capfd.readouterr().err  # it was ggml that refused
    assert not lib.leaked()


def test_more_than_can_be_addressed(lib: SpyLib) -> None:
    with pytest.raises(InvalidArgument, match="more than can be addressed"):
        StateBuffers(lib, CacheSpec.make([1 << 40], [1 << 40]), 1 << 30)
    with pytest.raises(InvalidArgument, match="more than can be addressed"):
        dry_run(lib, CacheSpec.make([1 << 62], [0]), 2)
    assert not lib.leaked()


def test_refused_buffer_leaks_nothing(lib: SpyLib) -> None:
    lib.refuse = True
    with pytest.raises(AllocationError):
        StateBuffers(lib, SPEC, 2)
    assert lib.log and not lib.leaked()


@pytest.mark.parametrize("n_cells", [0, -1, 2**31, 1.5, "8", None])
def test_numbers_of_cells_that_cannot_be(lib: SpyLib, n_cells: Any) -> None:
    for make in (StateBuffers, dry_run):
        with pytest.raises(InvalidArgument, match="n_cells"):
            make(lib, SPEC, n_cells)
    assert not lib.log


@pytest.mark.parametrize(
    "arguments",
    [
        {"devices": "CUDA7"},
        {"devices": ["CPU"]},
        {"devices": ["CPU", "CPU", "nowhere", None]},
        {"bufts": [None]},
        {"devices": "CPU", "bufts": [None] * 4},
    ],
)
def test_devices_that_cannot_be(lib: SpyLib, arguments: Any) -> None:
    for make in (StateBuffers, dry_run):
        with pytest.raises(InvalidArgument):
            make(lib, SPEC, 2, **arguments)
    assert not lib.leaked()


def test_a_ggml_that_sizes_a_type_otherwise(lib: SpyLib, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lib, "row_size", lambda type_id, n: 4 * n + 4)
    with pytest.raises(BackendError, match="sizes type f32 otherwise"):
        StateBuffers(lib, SPEC, 2)
    assert not lib.leaked()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc/self/statm, which is Linux's")
def test_memory_does_not_grow() -> None:
    out = child("""
        from pathlib import Path
        import numpy as np
        from rcache_plugin.memory.buffers import StateBuffers, dry_run
        from rcache_plugin.errors import AllocationError
        from rcache_plugin.memory.ggml import GgmlLib
        from rcache_plugin.cells.spec import CacheSpec

        lib = GgmlLib.find()
        spec = CacheSpec.make([1 << 17] * 4, [1 << 17] * 4)

        def resident_bytes():
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

        def once():
            with StateBuffers(lib, spec, 1) as buffers:  # 4 MiB
                np.asarray(buffers.view_row("r", 0, 0))
            dry_run(lib, spec, 1 << 20)
            try:
                StateBuffers(lib, spec, 1 << 22)  # 16 TiB
            except AllocationError:
                return
            raise SystemExit("no error")

        for _ in range(20):
            once()
        before = resident_bytes()
        for _ in range(200):
            once()
        print(resident_bytes() - before)
    """)
    assert int(out) < 1 << 20  # a forgotten buffer a round would be 800 MiB, a forgotten context 1 MiB


def test_tensors_of_width_0_where_a_host_wants_them() -> None:
    spec = CacheSpec.make([0, 6, 0], [4, 0, 0])
    with StateBuffers(GgmlLib.find(), spec, 3, empty_tensors=True) as buffers:
        assert [address is not None for address in buffers.r_l] == [True, True, False]
        assert [address is not None for address in buffers.s_l] == [True, True, False]
        assert buffers.tensors("p") == (None, None, None)
        assert (buffers.size_r_bytes, buffers.size_s_bytes) == (3 * 6 * 4, 3 * 4 * 4)
        buffers.clear()
        buffers.clear_rows([0, 2])
        buffers.copy_row(0, 1)
        assert buffers.get_row("r", 0, 1) == b""
        buffers.set_row("s", 0, 2, bytes(16))
        with StateBuffers(GgmlLib.find(), spec, 5, empty_tensors=True) as other:
            other.copy_rows_from(buffers, [(0, 4)])
