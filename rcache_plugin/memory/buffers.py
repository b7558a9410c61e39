"""`StateBuffers`: the r and s tensors of a cache, and its rows, by cell.

Each tensor is [n_embd, n_cells]: a row is one cell's state in one layer, and rows follow each other without gaps.

Who holds what::

    StateBuffers --- Storage --- a context and a buffer for each buffer type
         |              |
      RowView        arrays that a RowView gave out

`StateBuffers.close` drops the `Storage`. It frees the buffers when nothing else holds it: a call in another thread or
an array keeps it until it is done. So memory is never read after it was freed.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from ..cells.spec import WHICH, CacheSpec, Which
from ..errors import ClosedError, InvalidArgument, counted
from .ggml import GgmlLib
from .layout import Sizes, describe, human, padded_size, placement_of, sizes_of
from .storage import Storage, Tensor
from .views import HostBlock, RowView

logger = logging.getLogger(__name__)

MAX_CELLS = 2**31 - 1
"""Cell ids are int32."""


class StateBuffers:
    """The r and s tensors of a cache, on one device or several. All rows are zero at first.

    `devices` is the name of a device for all layers, or one name (or None for the CPU) for each layer, [n_layer];
    `bufts` gives addresses of ``ggml_backend_buffer_type_t`` instead, [n_layer], 0 or None for the CPU. Without
    either, all is on the CPU. With `empty_tensors` a layer that keeps only one of r and s has a tensor of width 0 for
    the other, as llama.cpp's graphs expect it.

    The caller closes it after the last graph that uses the tensors has been computed; until then the addresses in
    `r_l` and `s_l` are valid.

    Raises `InvalidArgument` for impossible counts, names or lists, `AllocationError` saying how many bytes were
    asked of which device, `BackendError` when a device cannot be reached or sizes a type otherwise than the spec. On
    failure nothing is kept.
    """

    _storage: Storage | None = None  # so that close() works after a failed __init__

    def __init__(
        self,
        lib: GgmlLib,
        spec: CacheSpec,
        n_cells: int,
        *,
        devices: str | Sequence[str | None] | None = None,
        bufts: Sequence[int | None] | None = None,
        empty_tensors: bool = False,
    ) -> None:
        self.lib = lib
        self.spec = spec
        self._placement: dict[str, Any] = {"devices": devices, "bufts": bufts, "empty_tensors": empty_tensors}
        self.n_cells = _checked_n_cells(n_cells)
        placement = placement_of(lib, spec, devices, bufts)
        storage = Storage(lib)
        try:
            for buft, layers in placement.items():
                with lib.connected(buft):
                    storage.allocate(spec, self.n_cells, buft, layers, empty_tensors)
            storage.clear()
        except BaseException:
            storage.free()
            raise
        self._storage = storage
        self._addresses = {which: _addresses(lib, storage.by_layer[which], spec.n_layer) for which in WHICH}
        _log(storage.sizes(spec, self.n_cells), spec, self.n_cells)

    # tensors and sizes

    @property
    def r_l(self) -> tuple[int | None, ...]:
        """Addresses of the ``ggml_tensor`` ``cache_r_l<il>``, [n_layer]; None where a layer keeps no r. Raises
        `ClosedError`."""
        return self.tensors("r")

    @property
    def s_l(self) -> tuple[int | None, ...]:
        """Addresses of the ``ggml_tensor`` ``cache_s_l<il>``, [n_layer]; None where a layer keeps no s. Raises
        `ClosedError`."""
        return self.tensors("s")

    def tensors(self, which: Which) -> tuple[int | None, ...]:
        """Addresses of the ``ggml_tensor`` r, s or p of each layer, [n_layer]; None where there is none. Raises
        `ClosedError`."""
        self._open_storage()
        return self._addresses[which]

    def tensor(self, which: Which, il: int) -> int | None:
        """Address of layer `il`'s tensor, as `tensors` has it. Raises `InvalidArgument` for a layer that is not."""
        if not 0 <= il < self.spec.n_layer:
            raise InvalidArgument(f"layer {il} is outside the model's {counted(self.spec.n_layer, 'layer')}")
        return self.tensors(which)[il]

    @property
    def total_size(self) -> int:
        """Bytes of all buffers, padding included. Raises `ClosedError`."""
        return self._sizes().total_bytes

    @property
    def size_r_bytes(self) -> int:
        """Bytes of all r tensors. Raises `ClosedError`."""
        return self._sizes().r_bytes

    @property
    def size_s_bytes(self) -> int:
        """Bytes of all s tensors. Raises `ClosedError`."""
        return self._sizes().s_bytes

    def memory_breakdown(self) -> dict[str, int]:
        """Bytes of the buffers by device, padding included; a buffer type that is not its device's default one stands
        under its own name. Raises `ClosedError`."""
        return self._sizes().by_device

    def _sizes(self) -> Sizes:
        return self._open_storage().sizes(self.spec, self.n_cells)

    # rows

    def clear(self) -> None:
        """Sets every row of every layer to zero. Raises `ClosedError`, `BackendError` when a device is gone."""
        self._open_storage().clear()

    def clear_rows(self, cells: Iterable[int]) -> None:
        """Sets the rows of `cells` to zero in every layer. Raises `InvalidArgument` for a cell out of range (then
        nothing has changed), `ClosedError`, `BackendError` when a device is gone."""
        storage = self._open_storage()
        wanted = sorted({self._checked_cell(cell) for cell in cells})
        runs = list(_runs((cell, cell) for cell in wanted))
        for tensor in storage.tensors:
            for cell, _, n in runs:
                storage.zero(tensor, cell * tensor.row_bytes, n * tensor.row_bytes)

    def copy_row(self, src_cell: int, dst_cell: int) -> None:
        """Copies the state of one cell to another, in every layer, each on its own device. Raises `InvalidArgument` for
        a cell out of range, `ClosedError`, `BackendError` when a device is gone."""
        storage = self._open_storage()
        src_cell, dst_cell = self._checked_cell(src_cell), self._checked_cell(dst_cell)
        if src_cell != dst_cell:  # backends assume that the two do not overlap
            for tensor in storage.tensors:
                storage.copy(tensor, dst_cell, storage, tensor, src_cell, 1)

    @property
    def on_host(self) -> bool:
        """Whether all rows lie in host memory. Raises `ClosedError`."""
        return self._open_storage().on_host

    def move_rows(self, moves: Sequence[tuple[int, int, bool]]) -> None:
        """Copies row `a` to row `b` for each (a, b, swap), in their order and in every layer; with `swap` row `b` goes
        to `a` in turn. Rows in host memory only: `InvalidArgument` otherwise, for a cell out of range, and for a row
        moved to itself (then nothing has changed). Raises `ClosedError`."""
        storage = self._open_storage()
        flat: list[int] = []
        for src, dst, swap in moves:
            flat += self._checked_cell(src), self._checked_cell(dst), swap
            if src == dst:
                raise InvalidArgument(f"row {src} can't be moved to itself")
        if not storage.on_host:
            raise InvalidArgument("only rows in host memory can be moved; copy these with copy_row")
        storage.move(flat)

    def make_ready(self, moves: Sequence[tuple[int, int, bool]], cleared: Sequence[int]) -> None:
        """What a step needs before its graph runs: `moves` as `move_rows`, then `clear_rows`, which may be of a row
        that was moved from. Raises as these two."""
        if moves:
            self.move_rows(moves)
        if cleared:
            self.clear_rows(cleared)  # whatever the row held, NaN included

    def copy_rows_from(self, other: StateBuffers, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies states from cells of `other` to cells of this one: `pairs` of (source cell, destination cell), in
        their order. A layer may lie on different devices in the two, or in two copies of ggml.

        Raises `InvalidArgument` when the specs differ or a cell is out of range (then nothing has changed),
        `ClosedError` when either is closed, `BackendError` when a device is gone.
        """
        storage, source = self._open_storage(), other._open_storage()
        if other.spec != self.spec:
            raise InvalidArgument("rows can be copied only between buffers of the same spec")
        checked = [(other._checked_cell(src), self._checked_cell(dst)) for src, dst in pairs]
        # Within one buffer a later pair may read what an earlier one wrote, so each is copied by itself.
        runs = [(src, dst, 1) for src, dst in checked if src != dst] if source is storage else list(_runs(checked))
        for src_tensor, dst_tensor in zip(source.tensors, storage.tensors, strict=True):
            for src, dst, n in runs:
                storage.copy(dst_tensor, dst, source, src_tensor, src, n)

    def replaced(self, n_cells: int, pairs: Iterable[tuple[int, int]]) -> StateBuffers:
        """Buffers of `n_cells` cells on the same devices, with `pairs` copied as `copy_rows_from` does it; these here
        are closed then. Raises as the class and `copy_rows_from`, with nothing changed."""
        other = StateBuffers(self.lib, self.spec, n_cells, **self._placement)
        try:
            other.copy_rows_from(self, pairs)
        except BaseException:
            other.close()
            raise
        self.close()
        return other

    def get_row(self, which: Which, il: int, cell: int) -> bytes:
        """The bytes of one cell's r, s or p in layer `il`, [row_bytes]. Raises `InvalidArgument` for a cell or a
        layer's state that does not exist, `ClosedError`, `BackendError` when the device is gone."""
        return self.get_rows(which, il, cell, 1)

    def get_rows(self, which: Which, il: int, first: int, n_rows: int) -> bytes:
        """As `get_row`, of the cells ``first .. first + n_rows - 1``, [n_rows * row_bytes]."""
        storage, tensor, offset = self._row(which, il, first, n_rows)
        return storage.read(tensor, offset, n_rows * tensor.row_bytes)

    def borrow_rows(self, which: Which, il: int, first: int, n_rows: int) -> memoryview:
        """As `get_rows`, read-only and in place if the rows are in host memory: then its content
        changes with the next graph or write. It keeps the memory of all the buffers from being freed."""
        storage, tensor, offset = self._row(which, il, first, n_rows)
        n_bytes = n_rows * tensor.row_bytes
        if tensor.data is None:
            return memoryview(storage.read(tensor, offset, n_bytes))
        return np.asarray(HostBlock(storage, tensor.data + offset, n_bytes)).data

    def copy_rows_to(self, which: Which, il: int, first: int, n_rows: int, out: memoryview) -> int:
        """Copies what `get_rows` returns to the beginning of `out`, bytes that can be written; returns how many there
        were. Raises as `get_rows`, and `InvalidArgument` when `out` is too short."""
        storage, tensor, offset = self._row(which, il, first, n_rows)
        n_bytes = n_rows * tensor.row_bytes
        if out.nbytes < n_bytes:
            raise InvalidArgument(f"{_rows_of(which, il, n_rows)} {counted(n_bytes, 'byte')}, not {out.nbytes}")
        storage.read_to(tensor, offset, n_bytes, out)
        return n_bytes

    def set_row(self, which: Which, il: int, cell: int, data: Any) -> None:
        """Writes one cell's r, s or p in layer `il`; `data` is any contiguous buffer of row_bytes bytes. Raises
        `InvalidArgument` for a cell or a layer's state that does not exist and for another number of bytes (then
        nothing has changed), `ClosedError`, `BackendError` when the device is gone."""
        self.set_rows(which, il, cell, 1, data)

    def set_rows(self, which: Which, il: int, first: int, n_rows: int, data: Any) -> None:
        """As `set_row`, for the cells ``first .. first + n_rows - 1``, from [n_rows * row_bytes] bytes."""
        storage, tensor, offset = self._row(which, il, first, n_rows)
        view = data
        if type(data) is not memoryview or data.format != "B" or not data.c_contiguous:
            try:
                view = memoryview(data).cast("B")
            except TypeError as error:
                raise InvalidArgument(f"a row must be written from a contiguous buffer of bytes: {error}") from error
        if view.nbytes != n_rows * tensor.row_bytes:
            n_bytes = n_rows * tensor.row_bytes
            raise InvalidArgument(f"{_rows_of(which, il, n_rows)} {counted(n_bytes, 'byte')}, not {view.nbytes}")
        storage.write(tensor, offset, view)

    def view_row(self, which: Which, il: int, cell: int) -> RowView:
        """A read-only view of one row where it lies. Raises `InvalidArgument` for a row that does not exist or is not
        in host memory, `ClosedError`."""
        view = RowView(partial(self._row, which, il, cell))
        view.array()
        return view

    # lifetime

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or `__init__` failed."""
        return self._storage is None

    def close(self) -> None:
        """Frees all buffers and contexts, in reverse order; the addresses in `r_l` and `s_l` and all views end here.

        May be called again. Memory that a call in another thread is using, or that an array from `RowView.array`
        shows, is freed when that is done with it.
        """
        self._storage = None

    def __enter__(self) -> StateBuffers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open_storage(self) -> Storage:
        storage = self._storage
        if storage is None:
            raise ClosedError("these buffers are closed")
        return storage

    def _checked_cell(self, cell: int) -> int:
        cell = _index(cell, "a cell")
        if not 0 <= cell < self.n_cells:
            raise InvalidArgument(f"cell {cell} is not one of 0 to {self.n_cells - 1}")
        return cell

    def _row(self, which: Which, il: int, cell: int, n_rows: int = 1) -> tuple[Storage, Tensor, int]:
        storage = self._open_storage()
        if which not in WHICH:
            raise InvalidArgument(f"which is {which!r}, not one of {', '.join(WHICH)}")
        tensor = storage.by_layer[which].get(_index(il, "a layer"))
        if tensor is None:
            raise InvalidArgument(f"layer {il} (of {self.spec.n_layer}) keeps no {which}")
        if n_rows != 1 and (n_rows < 1 or self._checked_cell(cell) + n_rows > self.n_cells):
            raise InvalidArgument(f"{counted(n_rows, 'cell')} from {cell} on: not all are of 0 to {self.n_cells - 1}")
        return storage, tensor, self._checked_cell(cell) * tensor.row_bytes


def dry_run(
    lib: GgmlLib,
    spec: CacheSpec,
    n_cells: int,
    *,
    devices: str | Sequence[str | None] | None = None,
    bufts: Sequence[int | None] | None = None,
) -> Sizes:
    """What `StateBuffers` with the same arguments would take, without allocating it. Raises as it does, except for
    `AllocationError`."""
    n_cells = _checked_n_cells(n_cells)
    by_device: dict[str, int] = {}
    for buft, layers in placement_of(lib, spec, devices, bufts).items():
        name = lib.buft_name(buft)
        ctx, tensors = describe(lib, spec, n_cells, buft, layers)
        try:
            with lib.connected(buft):
                by_device[name] = by_device.get(name, 0) + padded_size(lib, buft, [cdata for _, _, cdata in tensors])
        finally:
            lib.free_context(ctx)
    return sizes_of(spec, n_cells, by_device)


def _addresses(lib: GgmlLib, tensors: dict[int, Tensor], n_layer: int) -> tuple[int | None, ...]:
    return tuple(lib.address(tensors[il].cdata) if il in tensors else None for il in range(n_layer))


def _rows_of(which: Which, il: int, n_rows: int) -> str:
    return f"{counted(n_rows, f'{which} row')} of layer {il} {'has' if n_rows == 1 else 'have'}"


def _runs(pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Joins (a, b), (a + 1, b + 1), ... to (a, b, n), so that each is one copy."""
    run: tuple[int, int, int] | None = None
    for a, b in pairs:
        if run is not None and (a, b) == (run[0] + run[2], run[1] + run[2]):
            run = (run[0], run[1], run[2] + 1)
            continue
        if run is not None:
            yield run
        run = (a, b, 1)
    if run is not None:
        yield run


def _checked_n_cells(n_cells: int) -> int:
    n_cells = _index(n_cells, "n_cells")
    if not 1 <= n_cells <= MAX_CELLS:
        raise InvalidArgument(f"n_cells is {n_cells}, not one of 1 to {MAX_CELLS}")
    return n_cells


def _index(value: int, what: str) -> int:
    if type(value) is int:
        return value
    try:
        return operator.index(value)
    except TypeError as error:
        raise InvalidArgument(f"{what} must be a whole number, not {value!r}") from error


def _log(sizes: Sizes, spec: CacheSpec, n_cells: int) -> None:
    for name, n_bytes in sizes.by_device.items():
        logger.info("%s: %s", name, human(n_bytes))
    logger.info(
        "state of %s, %s: %s (r %s in %s, s %s in %s)",
        counted(n_cells, "cell"),
        counted(len(spec.layers), "layer"),
        human(sizes.total_bytes),
        spec.type_r.name,
        human(sizes.r_bytes),
        spec.type_s.name,
        human(sizes.s_bytes),
    )
