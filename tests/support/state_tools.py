"""Caches to save and load, all that is in one, and a C stream over bytes."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rcache_plugin import CacheSpec, GgmlLib, HostVTable, RecurrentCache, UBatch
from rcache_plugin._rcache import ffi, lib
from rcache_plugin.errors import Status

SPEC = CacheSpec.make([6, 0, 3], [10, 0, 5], "f16", "f32")
SPEC_P = CacheSpec.make([4, 4, 0], [6, 6, 0], n_embd_p=[0, 2, 0])


@functools.cache
def ggml() -> GgmlLib:
    """Looked for once: that takes longer than most tests here."""
    return GgmlLib.find()


def fill(cache: RecurrentCache, seed: int = 0) -> RecurrentCache:
    """Draws every row of every cell, those of cells that hold nothing too."""
    assert cache.buffers is not None
    rng = np.random.default_rng(seed)
    for which, il in tensors(cache):
        n_bytes = cache.spec.row_bytes(which, il) * cache.buffers.n_cells
        cache.buffers.set_rows(which, il, 0, cache.buffers.n_cells, rng.integers(0, 256, n_bytes, np.uint8))
    return cache


def used_cache(spec: CacheSpec = SPEC, n_cells: int = 4, seed: int = 0, n_seq_max: int | None = None) -> RecurrentCache:
    """Sequence 0 in cell 0, 1 and 3 share cell 1, 2 was there and is gone; rows are drawn."""
    cache = RecurrentCache(spec, n_cells, n_seq_max=n_seq_max, ggml=ggml())
    assert cache.find_slot(UBatch([(0,), (1, 3), (2,)], [7, 9, 5])) is not None
    cache.seq_rm(2)
    return fill(cache, seed)


def tensors(cache: RecurrentCache) -> list[tuple[Any, int]]:
    return [(w, il) for w in ("r", "s", "p") for il in cache.spec.layers if cache.spec.row_bytes(w, il)]


def contents(cache: RecurrentCache, rows_of_free_cells: bool = True) -> tuple[Any, ...]:
    """Cells, positions, head, the last slot and all rows; equal contents compare equal."""
    assert cache.buffers is not None
    columns = cache.table.columns()
    rows: Any = tuple(cache.buffers.get_rows(which, il, 0, cache.table.size) for which, il in tensors(cache))
    if not rows_of_free_cells:
        used = [cell for cell in range(cache.table.size) if columns.seq_ids[cell]]
        sizes = [cache.spec.row_bytes(which, il) for which, il in tensors(cache)]
        rows = tuple(data[c * n : (c + 1) * n] for data, n in zip(rows, sizes, strict=True) for c in used)
    numbers = tuple(column.tobytes() for column in columns[:3])
    table = cache.table
    return numbers, columns.seq_ids, (table.head, table.n, table.rs_z, table.used), cache.plan is None, rows


def written(cache: RecurrentCache, seq_id: int = -1) -> bytes:
    file = io.BytesIO()
    cache.state_write(file, seq_id)
    return file.getvalue()


class CIO:
    """``struct rcache_io`` over bytes; with `tensors`, rows go from and to the tensors themselves, at once or, with
    `wait`, when `flush` is called."""

    def __init__(
        self, cache: RecurrentCache, data: bytes = b"", *, tensors: bool, wait: bool = False, fail_after: int = 1 << 60
    ) -> None:
        self.reset(data, fail_after)
        assert cache.buffers is not None
        self._where = {
            cache.buffers.tensors(which)[il]: (which, il)
            for which in ("r", "s", "p")
            for il in cache.spec.layers
            if cache.buffers.tensors(which)[il]
        }
        self._cache = cache
        plain = "int32_t(void *, {}void *, uint64_t)"
        self._keep = [
            ffi.callback(plain.format("const "), self._write),
            ffi.callback(plain.format(""), self._read),
            ffi.callback("int32_t(void *, void *, uint64_t, uint64_t)", self._write_tensor),
            ffi.callback("int32_t(void *, void *, uint64_t, uint64_t)", self._read_tensor),
        ]
        self.struct = ffi.new("struct rcache_io *", {"struct_size": ffi.sizeof("struct rcache_io")})
        self.struct.write, self.struct.read = self._keep[:2]
        if tensors:
            self.struct.write_tensor, self.struct.read_tensor = self._keep[2:]
        self.struct.flags = lib.RCACHE_IO_ROWS_WAIT if wait else 0

    def reset(self, data: bytes, fail_after: int = 1 << 60) -> CIO:
        """Begins anew, with other bytes."""
        self.data, self.at, self.out, self.left = data, 0, bytearray(), fail_after
        self._waiting: list[tuple[Any, ...]] = []
        return self

    def flush(self) -> None:
        """Puts the rows that wait into their places."""
        for rows in self._waiting:
            self._cache.buffers.set_rows(*rows)  # type: ignore[union-attr]
        self._waiting.clear()

    def _step(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def _write(self, _user: Any, source: Any, n_bytes: int) -> int:
        self.out += ffi.buffer(source, n_bytes)
        return Status.OK if self._step() else Status.IO

    def _take(self, n_bytes: int) -> bytes | None:
        taken = self.data[self.at : self.at + n_bytes]
        self.at += n_bytes
        return taken if self._step() and len(taken) == n_bytes else None

    def _read(self, _user: Any, target: Any, n_bytes: int) -> int:
        taken = self._take(n_bytes)
        if taken is None:
            return Status.IO
        ffi.memmove(target, taken, n_bytes)
        return Status.OK

    def _rows(self, tensor: Any, offset: int, n_bytes: int) -> tuple[Any, int, int, int]:
        which, il = self._where[int(ffi.cast("uintptr_t", tensor))]
        row_bytes = self._cache.spec.row_bytes(which, il)
        assert offset % row_bytes == n_bytes % row_bytes == 0
        return which, il, offset // row_bytes, n_bytes // row_bytes

    def _write_tensor(self, _user: Any, tensor: Any, offset: int, n_bytes: int) -> int:
        self.out += self._cache.buffers.get_rows(*self._rows(tensor, offset, n_bytes))  # type: ignore[union-attr]
        return Status.OK if self._step() else Status.IO

    def _read_tensor(self, _user: Any, tensor: Any, offset: int, n_bytes: int) -> int:
        taken = self._take(n_bytes)
        if taken is None:
            return Status.IO
        self._waiting.append((*self._rows(tensor, offset, n_bytes), taken))
        if not self.struct.flags:
            self.flush()
        return Status.OK


def c_status(table: HostVTable, operation: str, stream: CIO, seq_id: int, flags: int = 0) -> int:
    """What ``state_write`` or ``state_read`` of the C table answers."""
    vtable = ffi.cast("const struct rcache_vtable *", table.address)
    status = int(getattr(vtable, operation)(vtable.user, stream.struct, seq_id, flags))
    if status == Status.OK:
        stream.flush()
    return status


@contextmanager
def little_memory(n_bytes: int = 1 << 28) -> Iterator[None]:
    """This process may take no more than `n_bytes` more than it has; what is above is a MemoryError."""
    import resource
    from pathlib import Path

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
