"""The storage of a cache: its ggml contexts and buffers and the tensors in them, read, written and copied.

Rows in host memory are reached by their address, others through their backend. Callers check cells and sizes.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from .._rcache import ffi as _c
from .._rcache import lib as _lib
from ..cells.spec import WHICH, CacheSpec, StateType, Which
from ..errors import AllocationError, BackendError, counted
from .ggml import GgmlLib
from .layout import Sizes, describe, human, padded_size, sizes_of

logger = logging.getLogger(__name__)

_ZEROS = memoryview(bytes(1 << 20))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor and what is needed to address its rows."""

    cdata: Any
    state_type: StateType
    n_embd: int
    row_bytes: int
    data: int | None  # address, of host memory only
    chars: Any  # the same as char *
    endpoint: str | None  # of the RPC server that holds it


class Storage:
    """Contexts and buffers, and the tensors in them. Freed with its last reference, or at once by `free`.

    Calls on a device that is lost raise `BackendError`.
    """

    def __init__(self, lib: GgmlLib) -> None:
        self._lib = lib
        self._stack = ExitStack()
        self._buffers: list[tuple[str, Any, str | None]] = []  # (name of device, buffer, endpoint)
        self.by_layer: dict[Which, dict[int, Tensor]] = {which: {} for which in WHICH}
        self.tensors: tuple[Tensor, ...] = ()  # in an order that depends on the spec only
        self.on_host = True
        self._rows_for_c: tuple[Any, Any, int] | None = None  # address and row bytes of each tensor, their number

    def __del__(self) -> None:
        self.free()

    def free(self) -> None:
        """Frees the buffers and contexts, the last first. May be called again."""
        for tensors in self.by_layer.values():
            tensors.clear()
        self.tensors = ()
        self._rows_for_c = None
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
        """Adds a buffer of type `buft` with the tensors of `layers`; their content is undefined. See `describe`.

        Raises `AllocationError` saying how many bytes were asked of which device.
        """
        lib = self._lib
        name, endpoint = lib.buft_name(buft), lib.endpoint_of_buft(buft)
        ctx, tensors = describe(lib, spec, n_cells, buft, layers, empty)
        self._stack.callback(lib.free_context, ctx)
        asked = padded_size(lib, buft, [cdata for _, _, cdata in tensors])
        total = lib.memory_total(buft)
        # Linux promises more memory than it has and ends the process that uses it, so ggml alone would not notice.
        buffer = None if 0 < total < asked else lib.alloc_tensors(ctx, buft)
        if buffer is None:
            raise AllocationError(
                f"{asked} bytes ({human(asked)}) could not be allocated on {name}"
                + (f", which has {total} bytes ({human(total)}) in all" if total else "")
                + f"; asked for {counted(n_cells, 'cell')} of {counted(len(layers), 'layer')}"
            )
        self._stack.callback(self._free_buffer, lib, buffer, endpoint)
        self._buffers.append((name, buffer, endpoint))
        for which, il, cdata in tensors:
            data = lib.data_address(cdata) if lib.is_host(buft) else None
            self.by_layer[which][il] = Tensor(
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
        """Bytes of the tensors and buffers."""
        by_device: dict[str, int] = {}
        for name, buffer, _ in self._buffers:
            by_device[name] = by_device.get(name, 0) + self._lib.buffer_size(buffer)
        return sizes_of(spec, n_cells, by_device)

    def clear(self) -> None:
        """Sets every row of every tensor to zero."""
        for _, buffer, endpoint in self._buffers:
            self._lib.require_reachable(endpoint)
            self._lib.clear_buffer(buffer)

    def zero(self, tensor: Tensor, offset: int, n_bytes: int) -> None:
        """Sets bytes of a tensor to zero."""
        if tensor.data is not None:
            ctypes.memset(tensor.data + offset, 0, n_bytes)
            return
        # ggml has a memset of its own, but it aborts where a backend (RPC's, say) has none, and nothing tells before.
        # Pieces: a backend may copy what it is given, and RPC's hashes what is longer than 10 MiB.
        for start in range(offset, offset + n_bytes, len(_ZEROS)):
            self.write(tensor, start, _ZEROS[: offset + n_bytes - start])

    def move(self, moves: list[int]) -> None:
        """Copies or exchanges rows in host memory: (src, dst, swap) after (src, dst, swap)."""
        if self._rows_for_c is None:
            rows = [(tensor.data, tensor.row_bytes) for tensor in self.tensors if tensor.row_bytes]
            self._rows_for_c = (
                _c.new("char *[]", [_c.cast("char *", data) for data, _ in rows]),
                _c.new("uint64_t[]", [n_bytes for _, n_bytes in rows]),
                len(rows),
            )
        _lib.rcache_move_rows(*self._rows_for_c, _c.new("int32_t[]", moves), len(moves) // 3)

    def read(self, tensor: Tensor, offset: int, n_bytes: int) -> bytes:
        """Bytes of a tensor, copied."""
        ffi = self._lib.ffi
        if tensor.data is not None:
            return bytes(ffi.buffer(tensor.chars + offset, n_bytes))
        self._lib.require_reachable(tensor.endpoint)
        data = ffi.new("char[]", n_bytes)
        self._lib.tensor_get(tensor.cdata, data, offset, n_bytes)
        return bytes(ffi.buffer(data))

    def read_to(self, tensor: Tensor, offset: int, n_bytes: int, out: memoryview) -> None:
        """Copies bytes of a tensor to the beginning of `out`."""
        ffi = self._lib.ffi
        if tensor.data is not None:
            ffi.memmove(out, tensor.chars + offset, n_bytes)
            return
        self._lib.require_reachable(tensor.endpoint)
        self._lib.tensor_get(tensor.cdata, ffi.from_buffer(out, require_writable=True), offset, n_bytes)

    def write(self, tensor: Tensor, offset: int, data: memoryview) -> None:
        """Writes `data` at a byte offset of a tensor."""
        ffi = self._lib.ffi
        if tensor.data is not None:
            ffi.memmove(tensor.chars + offset, data, data.nbytes)
            return
        self._lib.require_reachable(tensor.endpoint)
        self._lib.tensor_set(tensor.cdata, ffi.from_buffer(data), offset, data.nbytes)

    def copy(self, dst: Tensor, dst_cell: int, source: Storage, src: Tensor, src_cell: int, n: int) -> None:
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
