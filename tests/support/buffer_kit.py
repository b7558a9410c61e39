"""A ggml that notes what is acquired and released, and the rows of buffers as a dictionary."""

from __future__ import annotations

from typing import Any

import numpy as np

from rcache_plugin.cells.spec import CacheSpec
from rcache_plugin.memory.buffers import StateBuffers
from rcache_plugin.memory.ggml import GgmlLib


class SpyLib(GgmlLib):
    """Notes what is acquired and released; refuses buffers on request."""

    log: list[str]
    refuse = False

    def new_context(self, n_tensors: int) -> Any:
        ctx = super().new_context(n_tensors)
        self.log.append(f"+context {self.address(ctx)}")
        return ctx

    def free_context(self, ctx: Any) -> None:
        self.log.append(f"-context {self.address(ctx)}")
        super().free_context(ctx)

    def alloc_tensors(self, ctx: Any, buft: Any) -> Any:
        buffer = None if self.refuse else super().alloc_tensors(ctx, buft)
        if buffer is not None:
            self.log.append(f"+buffer {self.address(buffer)}")
        return buffer

    def free_buffer(self, buffer: Any) -> None:
        self.log.append(f"-buffer {self.address(buffer)}")
        super().free_buffer(buffer)

    def leaked(self) -> set[str]:
        open_now: set[str] = set()
        for entry in self.log:
            if entry[0] == "+":
                open_now.add(entry[1:])
            else:
                open_now.remove(entry[1:])  # a second release is an error too
        return open_now


def fill(buffers: StateBuffers, salt: int = 0) -> dict[tuple[str, int, int], bytes]:
    """Writes another content into each row; returns what was written."""
    rng = np.random.default_rng(salt)
    rows = {}
    for which, il, n_bytes in rows_of(buffers.spec):
        for cell in range(buffers.n_cells):
            rows[which, il, cell] = data = rng.bytes(n_bytes)
            buffers.set_row(which, il, cell, data)  # type: ignore[arg-type]
    return rows


def rows_of(spec: CacheSpec) -> list[tuple[str, int, int]]:
    r = [("r", il, spec.r_row_bytes(il)) for il in spec.layers]
    s = [("s", il, spec.s_row_bytes(il)) for il in spec.layers]
    return [row for row in r + s if row[2]]


def content(buffers: StateBuffers) -> dict[tuple[str, int, int], bytes]:
    return {
        (which, il, cell): buffers.get_row(which, il, cell)  # type: ignore[arg-type]
        for which, il, _ in rows_of(buffers.spec)
        for cell in range(buffers.n_cells)
    }
