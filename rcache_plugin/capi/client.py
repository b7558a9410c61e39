"""Calls any cache through its C table, as a host written in C would; statuses become exceptions and refusals values."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._rcache import ffi, lib
from ..cells.ubatch import Float32Array, Int32Array, UBatch
from ..errors import AbiMismatch, ClosedError, InvalidArgument, Status, check, counted
from .vtable import AwaitErrors, table_of

_AWAIT = AwaitErrors()


class Slot(NamedTuple):
    """``struct rcache_slot``."""

    head: int
    n: int
    rs_z: int


class Info(NamedTuple):
    """``struct rcache_info``."""

    size: int
    used: int
    n_seq_max: int
    n_layer: int
    head: int
    n: int
    rs_z: int
    r_bytes: int
    s_bytes: int
    total_bytes: int


class TableClient:
    """The operations of the ``struct rcache_vtable`` at `address`.

    Raises `AbiMismatch` for a table of another version or shorter than this version's, and `InvalidArgument` for a
    NULL address. Every call raises what the cache raised, if the cache is of this process, else the exception that
    stands for the status, with the cache's own text.
    """

    def __init__(self, address: int) -> None:
        if not address:
            raise InvalidArgument("the address of the table is NULL")
        table = ffi.cast("const struct rcache_vtable *", address)
        if table.abi_version != lib.RCACHE_ABI_VERSION or table.struct_size < ffi.sizeof("struct rcache_vtable"):
            raise AbiMismatch(
                f"the table has version {table.abi_version} of the interface in {counted(table.struct_size, 'byte')}, "
                f"this is version {lib.RCACHE_ABI_VERSION} with {ffi.sizeof('struct rcache_vtable')} bytes"
            )
        self.address = address
        self._table = table
        self._user = table.user
        owner = table_of(int(ffi.cast("uintptr_t", table.user)))
        # weak: a host in C does not keep the cache alive either
        self._owner = (lambda: None) if owner is None else weakref.ref(owner)
        self._slot = ffi.new("struct rcache_slot *", {"struct_size": ffi.sizeof("struct rcache_slot")})
        self._destroyed = False

    def _open(self) -> Any:
        if self._destroyed:
            raise ClosedError("the table was destroyed")
        return self._table

    def _call(self, name: str, *args: Any) -> Status:
        operation = getattr(self._open(), name)
        with _AWAIT:
            status = operation(self._user, *args)
        if status < 0:
            self._raise_original()
            gone = status == Status.CLOSED  # its last error is of before
            why = "the cache is closed or was collected" if gone else self.last_error()
            check(status, f"{name}: {why or Status(status).name}")
        return Status(status)

    def last_error(self) -> str:
        """The text of the cache's last error; empty if there was none."""
        n_bytes = self._open().last_error(self._user, ffi.NULL, 0)
        text = ffi.new("char[]", n_bytes + 1)
        self._table.last_error(self._user, text, n_bytes + 1)
        return str(ffi.string(text).decode("utf-8", "replace"))

    def destroy(self) -> None:
        """Tells the cache that this host will not call again. Idempotent; later calls raise `ClosedError`."""
        if not self._destroyed:
            self._destroyed = True
            self._table.destroy(self._user)

    # steps

    def prepare(self, ubatches: Sequence[UBatch]) -> bool:
        """Whether the ubatches fit, one after the other; nothing changes."""
        keep: list[Any] = []
        array = ffi.new("struct rcache_ubatch[]", len(ubatches))
        for i, ubatch in enumerate(ubatches):
            _fill(array[i], ubatch, keep)
        return self._call("prepare", array, len(ubatches)) == Status.OK

    def find_slot(self, ubatch: UBatch) -> Slot | None:
        """Finds, commits and publishes a slot; None when there is no room."""
        keep: list[Any] = []
        struct = ffi.new("struct rcache_ubatch *")
        _fill(struct, ubatch, keep)
        if self._call("find_slot", struct, self._slot) != Status.OK:
            return None
        return Slot(self._slot.head, self._slot.n, self._slot.rs_z)

    def s_copy(self, n: int) -> Int32Array:
        """The rows that the `n` rows of the last slot read from, int32 [n]. Raises `InvalidArgument`: no such slot."""
        s_copy, user = self._open().s_copy, self._user
        with _AWAIT:
            rows = np.array([s_copy(user, i) for i in range(n)], dtype=np.int32)
        if n and rows.min() < 0:
            self._raise_row("s_copy", int(rows.argmin()))
        return rows

    def s_mask(self, n: int) -> Float32Array:
        """1.0 for rows of the last slot that keep what they read, 0.0 for those that start from zero, float32 [n].

        Raises `InvalidArgument`: no such slot.
        """
        s_mask, user = self._open().s_mask, self._user
        with _AWAIT:
            mask = np.array([s_mask(user, i) for i in range(n)], dtype=np.float32)
        if np.isnan(mask).any():
            self._raise_row("s_mask", int(np.isnan(mask).argmax()))
        return mask

    def _raise_original(self) -> None:
        owner = self._owner()
        if owner is not None:
            owner.raise_pending()

    def _raise_row(self, name: str, i: int) -> None:
        self._raise_original()
        self.info()  # raises ClosedError when that is the reason
        raise InvalidArgument(f"{name}({i}): there is no such row in the last slot")

    def discard_slot(self) -> None:
        """The computation on the last slot failed."""
        self._call("discard_slot")

    # sequences

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """As `CellTable.seq_rm`."""
        return self._call("seq_rm", seq_id, p0, p1) == Status.OK

    def seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int = -1, p1: int = -1) -> None:
        """As `CellTable.seq_cp`."""
        self._call("seq_cp", seq_id_src, seq_id_dst, p0, p1)

    def seq_keep(self, seq_id: int) -> None:
        """As `CellTable.seq_keep`."""
        self._call("seq_keep", seq_id)

    def seq_add(self, seq_id: int, p0: int, p1: int, shift: int) -> None:
        """As `CellTable.seq_add`."""
        self._call("seq_add", seq_id, p0, p1, shift)

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """As `CellTable.seq_div`."""
        self._call("seq_div", seq_id, p0, p1, d)

    def seq_pos_min(self, seq_id: int) -> int:
        """As `CellTable.seq_pos_min`."""
        return self._pos("seq_pos_min", seq_id)

    def seq_pos_max(self, seq_id: int) -> int:
        """As `CellTable.seq_pos_max`."""
        return self._pos("seq_pos_max", seq_id)

    def _pos(self, name: str, seq_id: int) -> int:
        pos = ffi.new("int32_t *")
        self._call(name, seq_id, pos)
        return int(pos[0])

    def clear(self, data: bool = True) -> None:
        """Forgets every sequence; with `data` every row becomes zero too."""
        self._call("clear", int(data))

    @property
    def can_shift(self) -> bool:
        """Whether positions may be shifted."""
        return self._call("get_can_shift") == 1

    # memory

    def info(self) -> Info:
        """Counts and sizes as they stand."""
        info = ffi.new("struct rcache_info *", {"struct_size": ffi.sizeof("struct rcache_info")})
        self._call("info", info)
        return Info(*(int(getattr(info, name)) for name in Info._fields))

    def r_tensor(self, il: int) -> int | None:
        """Address of the ``ggml_tensor`` r of a layer, [n_embd_r, size]; None: the layer keeps no state."""
        return self._tensor("r_tensor", il)

    def s_tensor(self, il: int) -> int | None:
        """As `r_tensor`, of s."""
        return self._tensor("s_tensor", il)

    def p_tensor(self, il: int) -> int | None:
        """As `r_tensor`, of p."""
        return self._tensor("p_tensor", il)

    def _tensor(self, name: str, il: int) -> int | None:
        out = ffi.new("void **")
        self._call(name, il, out)
        return int(ffi.cast("uintptr_t", out[0])) or None


def _fill(struct: Any, ubatch: UBatch, keep: list[Any]) -> None:
    """Points the fields of ``struct rcache_ubatch`` at the ubatch's arrays; `keep` holds what C would not."""
    ids = [ffi.new("int32_t[]", seq_ids) for seq_ids in ubatch.seq_ids]
    n_seq_id = ffi.new("int32_t[]", [len(seq_ids) for seq_ids in ubatch.seq_ids])
    seq_id = ffi.new("int32_t *[]", ids)
    pos = ffi.from_buffer("int32_t[]", ubatch.pos)
    token = ffi.NULL if ubatch.token is None else ffi.from_buffer("int32_t[]", ubatch.token)
    keep += (ids, n_seq_id, seq_id, pos, token)
    struct.struct_size = ffi.sizeof("struct rcache_ubatch")
    struct.n_seqs = ubatch.n_seqs
    struct.n_seq_tokens = ubatch.n_seq_tokens
    struct.n_seq_id, struct.seq_id, struct.pos, struct.token = n_seq_id, seq_id, pos, token
