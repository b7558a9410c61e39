"""The memory of a cache: r and s tensors of each layer, in one ggml buffer for each buffer type.

Each tensor is [n_embd, n_cells]: a row is one cell's state in one layer, and rows follow each other without gaps.

Who holds what::

    StateBuffers --- _Memory --- a context and a buffer for each buffer type
         |              |
      RowView        arrays that a RowView gave out

`StateBuffers.close` lets go of `_Memory`, which frees the buffers when nothing else holds it: a call in another thread
or an array keeps it until it is done. So memory is never read after it was freed.
"""

from __future__ import annotations

import ctypes
import logging
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from .._rcache import ffi as _c
from .._rcache import lib as _lib
from ..cells.spec import WHICH, CacheSpec, StateType, Which
from ..errors import AllocationError, BackendError, ClosedError, InvalidArgument
from .ggml import GgmlLib

logger = logging.getLogger(__name__)

MAX_CELLS = 2**31 - 1
"""Cell ids are int32."""

_MAX_BYTES = 1 << 62
_RPC_MAX_ROW = 1 << 32  # the RPC protocol has row strides of 32 bits
_ZEROS = memoryview(bytes(1 << 20))
_NAMES: dict[Which, str] = {"r": "cache_r_l{}", "s": "cache_s_l{}", "p": "cache_ple_r_l{}"}  # as in llama.cpp
# What numpy has no type for (bf16, quantised) is shown as bytes.
_DTYPES: dict[str, npt.DTypeLike] = {"f32": np.float32, "f16": np.float16, "f64": np.float64}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a cache's tensors and buffers."""

    r_bytes: int
    """All r tensors."""
    s_bytes: int
    """All s tensors."""
    total_bytes: int
    """All buffers, padding included."""
    by_device: dict[str, int]
    """Buffers by device; a buffer type that is not its device's default one stands under its own name."""
    p_bytes: int = 0
    """All p tensors."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor and what is needed to address its rows."""

    cdata: Any
    state_type: StateType
    n_embd: int
    row_bytes: int
    data: int | None  # address, of host memory only
    chars: Any  # the same as char *
    endpoint: str | None  # of the RPC server that holds it


class StateBuffers:
    """The r and s tensors of a cache, on one device or several. All rows are zero at first.

    `devices` is the name of a device for all layers, or one name (or None for the CPU) for each layer, [n_layer];
    `bufts` gives addresses of ``ggml_backend_buffer_type_t`` instead, [n_layer], 0 or None for the CPU. Without
    either, all is on the CPU. With `empty_tensors` a layer that keeps only one of r and s has a tensor of width 0 for
    the other, as llama.cpp's graphs expect it.

    The caller closes it after the last graph that uses the tensors has been computed; until then the addresses in
    `r_l` and `s_l` are valid.

    Raises `InvalidArgument` for counts, names or lists that cannot be, `AllocationError` saying how many bytes were
    asked of which device, `BackendError` when a device cannot be reached or sizes a type otherwise than the spec. On
    failure nothing is kept.
    """

    _memory: _Memory | None = None  # so that close() works after a failed __init__

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
        self.n_cells = _checked_n_cells(n_cells)
        placement = _placement(lib, spec, devices, bufts)
        memory = _Memory(lib)
        try:
            for buft, layers in placement.items():
                with lib.connected(buft):
                    memory.allocate(spec, self.n_cells, buft, layers, empty_tensors)
            memory.clear()
        except BaseException:
            memory.free()
            raise
        self._memory = memory
        self._addresses = {which: _addresses(lib, memory.by_layer[which], spec.n_layer) for which in WHICH}
        _log(memory.sizes(spec, self.n_cells), spec, self.n_cells)

    # -- what there is ------------------------------------------------------------------------------------------------

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
        self._alive()
        return self._addresses[which]

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
        return self._alive().sizes(self.spec, self.n_cells)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Sets every row of every layer to zero. Raises `ClosedError`, `BackendError` when a device is gone."""
        self._alive().clear()

    def clear_rows(self, cells: Iterable[int]) -> None:
        """Sets the rows of `cells` to zero in every layer. Raises `InvalidArgument` for a cell that there is not (then
        nothing has changed), `ClosedError`, `BackendError` when a device is gone."""
        memory = self._alive()
        wanted = sorted({self._checked_cell(cell) for cell in cells})
        runs = list(_runs((cell, cell) for cell in wanted))
        for tensor in memory.tensors:
            for cell, _, n in runs:
                memory.zero(tensor, cell * tensor.row_bytes, n * tensor.row_bytes)

    def copy_row(self, src_cell: int, dst_cell: int) -> None:
        """Copies the state of one cell to another, in every layer, each on its own device. Raises `InvalidArgument` for
        a cell that there is not, `ClosedError`, `BackendError` when a device is gone."""
        memory = self._alive()
        src_cell, dst_cell = self._checked_cell(src_cell), self._checked_cell(dst_cell)
        if src_cell != dst_cell:  # backends assume that the two do not overlap
            for tensor in memory.tensors:
                memory.copy(tensor, dst_cell, memory, tensor, src_cell, 1)

    @property
    def on_host(self) -> bool:
        """Whether all rows lie in host memory. Raises `ClosedError`."""
        return self._alive().on_host

    def move_rows(self, moves: Sequence[tuple[int, int, bool]]) -> None:
        """Copies row `a` to row `b` for each (a, b, swap), in their order and in every layer; with `swap` row `b` goes
        to `a` in turn. Rows in host memory only: `InvalidArgument` otherwise, for a cell that there is not, and for a
        row moved to itself (then nothing has changed). Raises `ClosedError`."""
        memory = self._alive()
        flat: list[int] = []
        for src, dst, swap in moves:
            flat += self._checked_cell(src), self._checked_cell(dst), swap
            if src == dst:
                raise InvalidArgument(f"row {src} can't be moved to itself")
        if not memory.on_host:
            raise InvalidArgument("only rows in host memory can be moved; copy these with copy_row")
        memory.move(flat)

    def copy_rows_from(self, other: StateBuffers, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies states from cells of `other` to cells of this one: `pairs` of (source cell, destination cell), in
        their order. A layer may lie on different devices in the two, or in two copies of ggml.

        Raises `InvalidArgument` when the specs differ or a cell is not there (then nothing has changed), `ClosedError`
        when either is closed, `BackendError` when a device is gone.
        """
        memory, source = self._alive(), other._alive()
        if other.spec != self.spec:
            raise InvalidArgument("rows can be copied only between buffers of the same spec")
        checked = [(other._checked_cell(src), self._checked_cell(dst)) for src, dst in pairs]
        # Within one buffer a later pair may read what an earlier one wrote, so each is copied by itself.
        runs = [(src, dst, 1) for src, dst in checked if src != dst] if source is memory else list(_runs(checked))
        for src_tensor, dst_tensor in zip(source.tensors, memory.tensors, strict=True):
            for src, dst, n in runs:
                memory.copy(dst_tensor, dst, source, src_tensor, src, n)

    def get_row(self, which: Which, il: int, cell: int) -> bytes:
        """The bytes of one cell's r, s or p in layer `il`, [row_bytes]. Raises `InvalidArgument` for a cell or a
        layer's state that there is not, `ClosedError`, `BackendError` when the device is gone."""
        return self.get_rows(which, il, cell, 1)

    def get_rows(self, which: Which, il: int, first: int, n_rows: int) -> bytes:
        """As `get_row`, of the cells ``first .. first + n_rows - 1``, [n_rows * row_bytes]."""
        memory, tensor, offset = self._row(which, il, first, n_rows)
        return memory.read(tensor, offset, n_rows * tensor.row_bytes)

    def borrow_rows(self, which: Which, il: int, first: int, n_rows: int) -> memoryview:
        """As `get_rows`, read-only and in place if the rows are in host memory: then it shows what is there now, and
        changes with the next graph or write. It keeps the memory of all the buffers from being freed."""
        memory, tensor, offset = self._row(which, il, first, n_rows)
        n_bytes = n_rows * tensor.row_bytes
        if tensor.data is None:
            return memoryview(memory.read(tensor, offset, n_bytes))
        return np.asarray(_HostBlock(memory, tensor.data + offset, n_bytes)).data

    def copy_rows_to(self, which: Which, il: int, first: int, n_rows: int, out: memoryview) -> int:
        """Copies what `get_rows` returns to the beginning of `out`, bytes that can be written; returns how many there
        were. Raises as `get_rows`, and `InvalidArgument` when `out` is too short."""
        memory, tensor, offset = self._row(which, il, first, n_rows)
        n_bytes = n_rows * tensor.row_bytes
        if out.nbytes < n_bytes:
            raise InvalidArgument(f"{n_rows} rows {which} of layer {il} have {n_bytes} bytes, not {out.nbytes}")
        memory.read_to(tensor, offset, n_bytes, out)
        return n_bytes

    def set_row(self, which: Which, il: int, cell: int, data: Any) -> None:
        """Writes one cell's r, s or p in layer `il`; `data` is any contiguous buffer of row_bytes bytes. Raises
        `InvalidArgument` for a cell or a layer's state that there is not or another number of bytes (then nothing has
        changed), `ClosedError`, `BackendError` when the device is gone."""
        self.set_rows(which, il, cell, 1, data)

    def set_rows(self, which: Which, il: int, first: int, n_rows: int, data: Any) -> None:
        """As `set_row`, for the cells ``first .. first + n_rows - 1``, from [n_rows * row_bytes] bytes."""
        memory, tensor, offset = self._row(which, il, first, n_rows)
        view = data
        if type(data) is not memoryview or data.format != "B" or not data.c_contiguous:
            try:
                view = memoryview(data).cast("B")
            except TypeError as error:
                raise InvalidArgument(f"a row must be written from a contiguous buffer of bytes: {error}") from error
        if view.nbytes != n_rows * tensor.row_bytes:
            rows = "row" if n_rows == 1 else f"{n_rows} rows"
            raise InvalidArgument(
                f"{rows} {which} of layer {il} has {n_rows * tensor.row_bytes} bytes, not {view.nbytes}"
            )
        memory.write(tensor, offset, view)

    def view_row(self, which: Which, il: int, cell: int) -> RowView:
        """A read-only view of one row where it lies. Raises `InvalidArgument` for a row that there is not or that is
        not in host memory, `ClosedError`."""
        view = RowView(self, which, il, cell)
        view.array()
        return view

    # -- lifetime -----------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or `__init__` failed."""
        return self._memory is None

    def close(self) -> None:
        """Frees all buffers and contexts, in reverse order; the addresses in `r_l` and `s_l` and all views end here.

        May be called again. Memory that a call in another thread is using, or that an array from `RowView.array`
        shows, is freed when that is done with it.
        """
        self._memory = None

    def __enter__(self) -> StateBuffers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _alive(self) -> _Memory:
        memory = self._memory
        if memory is None:
            raise ClosedError("these buffers are closed")
        return memory

    def _checked_cell(self, cell: int) -> int:
        cell = _index(cell, "a cell")
        if not 0 <= cell < self.n_cells:
            raise InvalidArgument(f"cell {cell} is not one of 0 to {self.n_cells - 1}")
        return cell

    def _row(self, which: Which, il: int, cell: int, n_rows: int = 1) -> tuple[_Memory, _Tensor, int]:
        memory = self._alive()
        if which not in WHICH:
            raise InvalidArgument(f"which is {which!r}, not one of {', '.join(WHICH)}")
        tensor = memory.by_layer[which].get(_index(il, "a layer"))
        if tensor is None:
            raise InvalidArgument(f"layer {il} (of {self.spec.n_layer}) keeps no {which}")
        if n_rows != 1 and (n_rows < 1 or self._checked_cell(cell) + n_rows > self.n_cells):
            raise InvalidArgument(f"{n_rows} cells from {cell} on are not all of 0 to {self.n_cells - 1}")
        return memory, tensor, self._checked_cell(cell) * tensor.row_bytes


class RowView:
    """One row of a `StateBuffers` in host memory, where it lies: nothing is copied.

    Give it to numpy (``np.asarray(view)``) or call `array`. What it shows changes with the next graph that is computed,
    and with each write to the cell. It is valid until its `StateBuffers` is closed; then it raises `ClosedError`. An
    array obtained before keeps the memory of all the buffers from being freed, so drop arrays with the cache.
    """

    __slots__ = ("_buffers", "_where")

    def __init__(self, buffers: StateBuffers, which: Which, il: int, cell: int) -> None:
        self._buffers = buffers
        self._where = (which, il, cell)

    def array(self) -> npt.NDArray[Any]:
        """The row as a read-only array: [n_embd] of float32, float16 or float64, or [row_bytes] of uint8 for a type
        that numpy does not have. Raises `ClosedError`."""
        memory, tensor, offset = self._buffers._row(*self._where)
        if tensor.data is None:
            raise InvalidArgument("only rows in host memory can be viewed; read this one with get_row")
        dtype = _DTYPES.get(tensor.state_type.name)
        block = _HostBlock(memory, tensor.data + offset, tensor.row_bytes)
        array = np.asarray(block)
        return array if dtype is None else array.view(dtype)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        array = self.array()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError(f"a row of {array.dtype} cannot be shown as {np.dtype(dtype)} without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __len__(self) -> int:
        return len(self.array())

    def __getitem__(self, key: Any) -> Any:
        return self.array()[key]


class _HostBlock:
    """Bytes of host memory in numpy's array interface. An array made from it holds it, and so holds the memory."""

    __slots__ = ("__array_interface__", "_memory")

    def __init__(self, memory: _Memory, address: int, n_bytes: int) -> None:
        self._memory = memory
        self.__array_interface__ = {"version": 3, "shape": (n_bytes,), "typestr": "|u1", "data": (address, True)}


class _Memory:
    """Contexts and buffers, and the tensors in them. Freed with its last reference, or at once by `free`."""

    def __init__(self, lib: GgmlLib) -> None:
        self._lib = lib
        self._stack = ExitStack()
        self._buffers: list[tuple[str, Any, str | None]] = []  # (name of device, buffer, endpoint)
        self.by_layer: dict[Which, dict[int, _Tensor]] = {which: {} for which in WHICH}
        self.tensors: tuple[_Tensor, ...] = ()  # in an order that depends on the spec only
        self.on_host = True
        self._places: tuple[Any, Any, int] | None = None  # of all rows, for C

    def __del__(self) -> None:
        self.free()

    def free(self) -> None:
        for tensors in self.by_layer.values():
            tensors.clear()
        self.tensors = ()
        self._places = None
        self._buffers.clear()
        self._stack.close()

    @staticmethod
    def _free_buffer(lib: GgmlLib, buffer: Any, endpoint: str | None) -> None:
        try:
            lib.require_reachable(endpoint)
        except BackendError as error:
            logger.warning("a buffer could not be freed: %s", error)  # the call would end the process
        else:
            lib.free_buffer(buffer)

    def allocate(self, spec: CacheSpec, n_cells: int, buft: Any, layers: Sequence[int], empty: bool) -> None:
        lib = self._lib
        name, endpoint = lib.buft_name(buft), lib.endpoint_of_buft(buft)
        ctx, tensors = _describe(lib, spec, n_cells, buft, layers, empty)
        self._stack.callback(lib.free_context, ctx)
        asked = _padded_size(lib, buft, [cdata for _, _, cdata in tensors])
        total = lib.memory_total(buft)
        # Linux promises more memory than there is and ends the process that uses it, so ggml alone would not notice.
        buffer = None if 0 < total < asked else lib.alloc_tensors(ctx, buft)
        if buffer is None:
            raise AllocationError(
                f"{asked} bytes ({_human(asked)}) could not be had on {name}"
                + (f", which has {total} bytes ({_human(total)}) in all" if total else "")
                + f"; asked for {n_cells} cells of {len(layers)} layers"
            )
        self._stack.callback(self._free_buffer, lib, buffer, endpoint)
        self._buffers.append((name, buffer, endpoint))
        for which, il, cdata in tensors:
            data = lib.data_address(cdata) if lib.is_host(buft) else None
            self.by_layer[which][il] = _Tensor(
                cdata=cdata,
                state_type=spec.type_of(which),
                n_embd=spec.n_embd(which, il),
                row_bytes=spec.row_bytes(which, il),
                data=data,
                chars=None if data is None else lib.ffi.cast("char *", data),
                endpoint=endpoint,
            )
        self.tensors = tuple(of_which[il] for of_which in self.by_layer.values() for il in sorted(of_which))
        self.on_host = all(tensor.data is not None for tensor in self.tensors)

    def sizes(self, spec: CacheSpec, n_cells: int) -> Sizes:
        by_device: dict[str, int] = {}
        for name, buffer, _ in self._buffers:
            by_device[name] = by_device.get(name, 0) + self._lib.buffer_size(buffer)
        return _sizes(spec, n_cells, by_device)

    def clear(self) -> None:
        for _, buffer, endpoint in self._buffers:
            self._lib.require_reachable(endpoint)
            self._lib.clear_buffer(buffer)

    def zero(self, tensor: _Tensor, offset: int, n_bytes: int) -> None:
        if tensor.data is not None:
            ctypes.memset(tensor.data + offset, 0, n_bytes)
            return
        # ggml has a memset of its own, but it aborts where a backend (RPC's, say) has none, and nothing tells before.
        # Pieces: a backend may copy what it is given, and RPC's hashes what is longer than 10 MiB.
        for start in range(offset, offset + n_bytes, len(_ZEROS)):
            self.write(tensor, start, _ZEROS[: offset + n_bytes - start])

    def move(self, moves: list[int]) -> None:
        """(src, dst, swap) after (src, dst, swap), for rows in host memory."""
        if self._places is None:
            places = [(tensor.data, tensor.row_bytes) for tensor in self.tensors if tensor.row_bytes]
            self._places = (
                _c.new("char *[]", [_c.cast("char *", data) for data, _ in places]),
                _c.new("uint64_t[]", [n_bytes for _, n_bytes in places]),
                len(places),
            )
        _lib.rcache_move_rows(*self._places, _c.new("int32_t[]", moves), len(moves) // 3)

    def read(self, tensor: _Tensor, offset: int, n_bytes: int) -> bytes:
        ffi = self._lib.ffi
        if tensor.data is not None:
            return bytes(ffi.buffer(tensor.chars + offset, n_bytes))
        self._lib.require_reachable(tensor.endpoint)
        data = ffi.new("char[]", n_bytes)
        self._lib.tensor_get(tensor.cdata, data, offset, n_bytes)
        return bytes(ffi.buffer(data))

    def read_to(self, tensor: _Tensor, offset: int, n_bytes: int, out: memoryview) -> None:
        ffi = self._lib.ffi
        if tensor.data is not None:
            ffi.memmove(out, tensor.chars + offset, n_bytes)
            return
        self._lib.require_reachable(tensor.endpoint)
        self._lib.tensor_get(tensor.cdata, ffi.from_buffer(out, require_writable=True), offset, n_bytes)

    def write(self, tensor: _Tensor, offset: int, data: memoryview) -> None:
        ffi = self._lib.ffi
        if tensor.data is not None:
            ffi.memmove(tensor.chars + offset, data, data.nbytes)
            return
        self._lib.require_reachable(tensor.endpoint)
        self._lib.tensor_set(tensor.cdata, ffi.from_buffer(data), offset, data.nbytes)

    def copy(self, dst: _Tensor, dst_cell: int, source: _Memory, src: _Tensor, src_cell: int, n: int) -> None:
        """Copies `n` rows of `src`, which belongs to `source`, to rows of `dst` that do not overlap with them."""
        ffi = self._lib.ffi
        dst_offset, src_offset, n_bytes = dst_cell * dst.row_bytes, src_cell * src.row_bytes, n * src.row_bytes
        if src.data is not None and dst.data is not None:
            ctypes.memmove(dst.data + dst_offset, src.data + src_offset, n_bytes)
            return
        self._lib.require_reachable(src.endpoint)
        self._lib.require_reachable(dst.endpoint)
        if src.data is not None:
            self._lib.tensor_set(dst.cdata, ffi.cast("char *", src.data + src_offset), dst_offset, n_bytes)
        elif dst.data is not None:
            source._lib.tensor_get(src.cdata, ffi.cast("char *", dst.data + dst_offset), src_offset, n_bytes)
        elif self._lib.same_copy(source._lib):
            self._lib.copy_elements(src.cdata, src_offset, dst.cdata, dst_offset, n * src.n_embd)
        else:
            self.write(dst, dst_offset, memoryview(source.read(src, src_offset, n_bytes)))


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
    for buft, layers in _placement(lib, spec, devices, bufts).items():
        name = lib.buft_name(buft)
        ctx, tensors = _describe(lib, spec, n_cells, buft, layers)
        try:
            with lib.connected(buft):
                by_device[name] = by_device.get(name, 0) + _padded_size(lib, buft, [cdata for _, _, cdata in tensors])
        finally:
            lib.free_context(ctx)
    return _sizes(spec, n_cells, by_device)


def _sizes(spec: CacheSpec, n_cells: int, by_device: dict[str, int]) -> Sizes:
    of_cell = (spec.r_cell_bytes, spec.s_cell_bytes, spec.p_cell_bytes)
    r_bytes, s_bytes, p_bytes = (n_bytes * n_cells for n_bytes in of_cell)
    return Sizes(r_bytes, s_bytes, sum(by_device.values()), by_device, p_bytes)


def _placement(
    lib: GgmlLib, spec: CacheSpec, devices: str | Sequence[str | None] | None, bufts: Sequence[int | None] | None
) -> dict[Any, list[int]]:
    """The layers of each buffer type."""
    if devices is not None and bufts is not None:
        raise InvalidArgument("give devices or bufts, not both")
    by_layer: list[str | int | None]
    if bufts is not None:
        by_layer = [buft or None for buft in bufts]
    elif isinstance(devices, str):
        by_layer = [devices] * spec.n_layer
    else:
        by_layer = [None] * spec.n_layer if devices is None else list(devices)
    if len(by_layer) != spec.n_layer:
        raise InvalidArgument(f"{len(by_layer)} devices or buffer types were given for {spec.n_layer} layers")
    layers_of: dict[str | int | None, list[int]] = {}
    for il in spec.layers:
        layers_of.setdefault(by_layer[il], []).append(il)
    placement: dict[Any, list[int]] = {}
    for where, layers in layers_of.items():
        buft = lib.buft_at(where) if isinstance(where, int) else lib.buft_of(where)
        placement.setdefault(buft, []).extend(layers)
    return placement


def _describe(
    lib: GgmlLib, spec: CacheSpec, n_cells: int, buft: Any, layers: Sequence[int], empty: bool = False
) -> tuple[Any, list[tuple[Which, int, Any]]]:
    """A context with the tensors of `layers`, without data: (context, [(which, il, tensor)])."""
    total = spec.cell_bytes * n_cells
    if total > _MAX_BYTES:
        raise InvalidArgument(f"{n_cells} cells of {spec.cell_bytes} bytes are more than can be addressed")
    wanted: list[tuple[Which, int, StateType, int, int]] = [
        (which, il, spec.type_of(which), spec.n_embd(which, il), spec.row_bytes(which, il))
        for il in layers
        for which in WHICH
    ]
    wanted = [entry for entry in wanted if entry[3] or (empty and entry[0] != "p")]
    on_rpc = lib.endpoint_of_buft(buft) is not None
    for which, il, state_type, n_embd, row_bytes in wanted:
        if on_rpc and row_bytes >= _RPC_MAX_ROW:
            raise InvalidArgument(f"a row {which} of layer {il} has {row_bytes} bytes, more than RPC can carry")
        if lib.row_size(state_type.type_id, n_embd) != row_bytes:
            raise BackendError(f"{lib!r} sizes type {state_type.name} otherwise than this package")
    ctx = lib.new_context(len(wanted))
    try:
        return ctx, [
            (which, il, lib.new_tensor_2d(ctx, state_type.type_id, n_embd, n_cells, _NAMES[which].format(il)))
            for which, il, state_type, n_embd, _ in wanted
        ]
    except BaseException:
        lib.free_context(ctx)
        raise


def _padded_size(lib: GgmlLib, buft: Any, tensors: Iterable[Any]) -> int:
    alignment = lib.alignment(buft)
    return sum(-(-lib.alloc_size(buft, tensor) // alignment) * alignment for tensor in tensors)


def _addresses(lib: GgmlLib, tensors: dict[int, _Tensor], n_layer: int) -> tuple[int | None, ...]:
    return tuple(lib.address(tensors[il].cdata) if il in tensors else None for il in range(n_layer))


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
        logger.info("%s: %s", name, _human(n_bytes))
    logger.info(
        "state of %d cells, %d layers: %s (r %s in %s, s %s in %s)",
        n_cells,
        len(spec.layers),
        _human(sizes.total_bytes),
        spec.type_r.name,
        _human(sizes.r_bytes),
        spec.type_s.name,
        _human(sizes.s_bytes),
    )


def _human(n_bytes: int) -> str:
    size = float(n_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{n_bytes} bytes" if unit == "bytes" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
