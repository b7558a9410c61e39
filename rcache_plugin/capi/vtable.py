"""Makes a `RecurrentCache` callable through the C interface (``struct rcache_vtable``), and the factory.

An exception never crosses into C. It is parked on the table's Python object, the call returns its status, and the
Python code that entered C raises the original (`HostVTable.raise_pending`, which `TableClient` calls). Where nobody on
the Python side waits for it, it is logged with its traceback; its text is had from ``last_error`` in any case.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from .._rcache import ffi, lib
from ..cache import RecurrentCache
from ..cells.slots import CLASSIC, COMPACT, SlotPlan
from ..cells.spec import CacheSpec, Which
from ..cells.ubatch import POS_NONE, SEQ_ANY, Int32Array, UBatch
from ..errors import AllocationError, InvalidArgument, RcacheError, StateError, Status, counted, status_of
from ..states.image import columns_of
from ..states.streams import Bytes

log = logging.getLogger(__name__)

ABI_VERSION: int = lib.RCACHE_ABI_VERSION
_OK, _NO_SLOT = int(Status.OK), int(Status.NO_SLOT)
_PLACEMENT = {lib.RCACHE_PLACEMENT_CLASSIC: CLASSIC, lib.RCACHE_PLACEMENT_COMPACT: COMPACT}
_MAX_TOKENS = 1 << 24  # of one ubatch; keeps a damaged struct from asking for gigabytes
_EXIT_WAIT_MS = 2000
_BYTES = {name: ffi.sizeof(f"struct {name}") for name in ("rcache_ubatch", "rcache_slot", "rcache_info", "rcache_io")}

_keys = itertools.count(1)
_tables: dict[int, weakref.ref[HostVTable]] = {}  # looked up in each call; `_let_go` takes out what is collected
_creators: dict[int, Callable[[CacheRequest], RecurrentCache]] = {}
_owned_by_host: dict[int, HostVTable] = {}  # made by the factory: held until the host destroys them
_waiting = threading.local()


class AwaitErrors:
    """While inside, this thread raises what its calls into C park, so that it need not be logged as well."""

    __slots__ = ()

    def __enter__(self) -> None:
        _waiting.depth = getattr(_waiting, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _waiting.depth -= 1


class HostVTable:
    """The C table of a cache. `address` goes to the host.

    `s_copy` and `s_mask` (``f(i) -> int`` and ``f(i) -> float``, i in [0, n)) answer these two calls in Python; without
    them C reads the plan of the last slot. The table does not keep the cache open, nor does the host: once this object
    or the cache is closed or collected, every call answers ``RCACHE_STATUS_CLOSED``. The table's memory outlives this
    object until the host calls ``destroy``. Raises `AllocationError`.
    """

    def __init__(
        self,
        cache: RecurrentCache,
        s_copy: Callable[[int], int] | None = None,
        s_mask: Callable[[int], float] | None = None,
    ) -> None:
        _install()
        self.cache = cache
        self.key = next(_keys)
        self.pending: BaseException | None = None
        # what C refers to by number; written and read whole, since calls may come from several threads
        self.prepared: tuple[int, list[UBatch]] = (0, [])
        self.published: tuple[int, SlotPlan | None] = (0, None)
        # the C entries reach these through `key` and this object, so nothing else has to stay alive for C
        self._s_copy, self._s_mask = s_copy, s_mask
        self._handle = lib.rcache_handle_new(self.key)
        if self._handle == ffi.NULL:
            raise AllocationError("no memory for a table of the C interface")
        self._release = weakref.finalize(self, _let_go, self._handle, self.key)
        self._release.atexit = False  # a host may be in the middle of a step when Python ends: the plan stays readable
        lib.rcache_handle_use_python(self._handle, s_copy is not None, s_mask is not None)
        table = lib.rcache_handle_table(self._handle)
        self.address = int(ffi.cast("uintptr_t", table))
        self.user = int(ffi.cast("uintptr_t", table.user))
        _tables[self.key] = weakref.ref(self)
        cache.observers.add(self)
        self.publish(cache.plan)

    def close(self) -> None:
        """Every later call through the table answers ``RCACHE_STATUS_CLOSED``. Idempotent; the cache stays open."""
        self._release()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._release.alive

    def __enter__(self) -> HostVTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def raise_pending(self) -> None:
        """Raises the exception that the last failed call parked, if any, as it was."""
        error, self.pending = self.pending, None
        if error is not None:
            raise error

    def park(self, error: BaseException) -> Status:
        """Keeps `error` for `raise_pending` and ``last_error``; returns the status that stands for it."""
        if getattr(_waiting, "depth", 0):
            self.pending = error
        else:
            expected = isinstance(error, (InvalidArgument, StateError))  # the caller's doing: a traceback adds nothing
            level = logging.WARNING if expected else logging.ERROR
            log.log(level, "a call through the C interface failed: %s", error, exc_info=None if expected else error)
        text = f"{type(error).__name__}: {error}".replace("\0", "")
        lib.rcache_handle_set_error(self._handle, text.encode("utf-8", "replace"))
        return status_of(error)

    def publish(self, plan: SlotPlan | None) -> None:
        """Hands the plan of the cache's last slot to the C readers of s_copy and s_mask. Raises `AllocationError`."""
        if self.closed:
            return
        last = self.published[1]
        if plan is None:
            status = lib.rcache_handle_publish(self._handle, 0, ffi.NULL, ffi.NULL)
        elif last is not None and plan.s_copy is last.s_copy and plan.src is last.src:
            status = _OK  # C has these rows
            lib.rcache_handle_touch(self._handle)
        else:
            status = lib.rcache_handle_publish(
                self._handle, plan.n, ffi.from_buffer("int32_t[]", plan.s_copy), ffi.from_buffer("int32_t[]", plan.src)
            )
        if status != _OK:
            self.published = 0, None
            raise AllocationError("no memory to publish a plan")
        self.published = lib.rcache_handle_changes(self._handle), plan

    def changed(self) -> None:
        """Voids the positions that C has cached."""
        if not self.closed:
            lib.rcache_handle_touch(self._handle)

    def answer_s_copy(self, i: int) -> int:
        """The registered answer to s_copy, or the cache's."""
        return int(self._s_copy(i) if self._s_copy is not None else self.cache.s_copy(i))

    def answer_s_mask(self, i: int) -> float:
        """The registered answer to s_mask, or the cache's."""
        return float(self._s_mask(i) if self._s_mask is not None else self.cache.s_mask(i))


def table_of(user: int) -> HostVTable | None:
    """This process's `HostVTable` behind a ``user`` pointer of a table; None for a foreign or closed one."""
    tables = (ref() for ref in list(_tables.values()))
    return next((table for table in tables if table is not None and table.user == user), None)


def take_pending(cache: RecurrentCache) -> BaseException | None:
    """The exception that a call through one of the cache's tables has parked within `AwaitErrors`, once; None: none."""
    for table in list(cache.observers):
        if isinstance(table, HostVTable) and table.pending is not None:
            error, table.pending = table.pending, None
            return error
    return None


def _let_go(handle: Any, key: int) -> None:
    """Python's end of a table; it must not hold the `HostVTable`, whose finalizer it is."""
    _tables.pop(key, None)
    _owned_by_host.pop(key, None)
    lib.rcache_handle_close(handle)


class CacheRequest(NamedTuple):
    """What a host asked a factory for, ``struct rcache_spec``."""

    spec: CacheSpec
    n_cells: int
    n_seq_max: int | None
    placement: str
    bufts: list[int | None] | None
    """Addresses of ggml buffer types, [n_layer]; None is the CPU's."""
    ggml_library: str | None
    n_rs_seq: int
    checkpoint_cells: int
    hybrid: bool

    def make(self) -> RecurrentCache:
        """The cache as asked for."""
        from ..memory.ggml import GgmlLib

        return RecurrentCache(
            self.spec, self.n_cells, n_seq_max=self.n_seq_max, placement=self.placement, bufts=self.bufts,
            ggml=GgmlLib.find(self.ggml_library), n_rs_seq=self.n_rs_seq,
            checkpoint_cells=self.checkpoint_cells, hybrid=self.hybrid,
        )


def new_factory(create: Callable[[CacheRequest], RecurrentCache]) -> int:
    """Address of a new ``struct rcache_factory`` whose caches `create` makes; it lives as long as the process.

    What `create` raises becomes a status and the text of the factory's ``last_error``. Raises `AllocationError`.
    """
    _install()
    key = next(_keys)
    factory = lib.rcache_factory_new(key)
    if factory == ffi.NULL:
        raise AllocationError("no memory for a factory of the C interface")
    _creators[key] = create
    return int(ffi.cast("uintptr_t", factory))


@cache
def factory_address() -> int:
    """Address of the ``struct rcache_factory``, with which a host written in C makes caches of its own."""
    return new_factory(CacheRequest.make)


def _ubatch(c: Any) -> UBatch:
    """A `UBatch` from ``const struct rcache_ubatch *``. Raises `InvalidArgument` for a struct that cannot be."""
    if c == ffi.NULL:
        raise InvalidArgument("the ubatch is NULL")
    if c.struct_size < _BYTES["rcache_ubatch"]:
        raise InvalidArgument(
            f"rcache_ubatch.struct_size is {c.struct_size}, at least {_BYTES['rcache_ubatch']} is needed"
        )
    n_seqs, n_tokens = c.n_seqs, c.n_seqs * c.n_seq_tokens
    if not 0 < n_tokens <= _MAX_TOKENS:
        raise InvalidArgument(f"a ubatch of {counted(n_seqs, 'sequence')} with {counted(c.n_seq_tokens, 'token')} each")
    if ffi.NULL in (c.n_seq_id, c.seq_id, c.pos):
        raise InvalidArgument("n_seq_id, seq_id or pos of the ubatch is NULL")
    pos = np.frombuffer(ffi.buffer(c.pos, 4 * n_tokens), dtype=np.int32)
    token = None if c.token == ffi.NULL else np.frombuffer(ffi.buffer(c.token, 4 * n_tokens), dtype=np.int32)
    ids = ffi.new("int32_t[]", n_seqs)
    single = lib.rcache_ubatch_ids(c, ids)
    if single == 1:
        return UBatch.of_ids(ffi.unpack(ids, n_seqs), pos, token)
    counts = ffi.unpack(c.n_seq_id, n_seqs)
    if single < 0 or max(counts) > _MAX_TOKENS:
        raise InvalidArgument(f"a sequence set of the ubatch is NULL or its number of ids cannot be: {counts}")
    return UBatch([ffi.unpack(c.seq_id[s], count) for s, count in enumerate(counts)], pos, token)


def _out(struct: Any, kind: str) -> Any:
    """An output struct, checked. Raises `InvalidArgument`."""
    if not struct or struct.struct_size < _BYTES[kind]:
        raise InvalidArgument(f"{kind} is NULL or its struct_size is not set")
    return struct


def _prepare(table: HostVTable, c: Any, n_ubatches: int, number: int) -> int:
    if n_ubatches and c == ffi.NULL:
        raise InvalidArgument("the ubatches are NULL")
    ubatches = [_ubatch(c + i) for i in range(n_ubatches)]
    table.prepared = number, ubatches
    return _OK if table.cache.prepare(ubatches) else _NO_SLOT


def _find_slot(table: HostVTable, c: Any, slot: Any, prepared: int, continues_at: int, n_batches: int) -> int:
    _out(slot, "rcache_slot")
    ubatch = None
    if prepared:
        first, ubatches = table.prepared
        if 0 <= prepared - first < len(ubatches):
            ubatch = ubatches[prepared - first]
    elif continues_at:
        published_at, last = table.published
        if published_at == continues_at and last is not None:
            ubatch = _next_ubatch(last.ubatch, c)
    plan = table.cache.find_slot(_ubatch(c) if ubatch is None else ubatch, n_batches)
    if plan is None:
        return _NO_SLOT
    slot.head, slot.n, slot.rs_z = plan.head, plan.n, plan.rs_z
    return _OK


def _next_ubatch(last: UBatch, c: Any) -> UBatch:
    """What C has found to have the sets of `last`, and positions that can be."""
    n_seqs, n_seq_tokens, at = last.n_seqs, c.n_seq_tokens, c.pos
    n_tokens = n_seqs * n_seq_tokens
    pos = ffi.buffer(at, 4 * n_tokens)[:]
    token = ffi.buffer(c.token, 4 * n_tokens)[:] if c.token else None
    if n_seqs == 1:
        pos_last = [at[n_tokens - 1]]
    else:
        pos_last = ffi.unpack(at, n_tokens)[n_seq_tokens - 1 :: n_seq_tokens]
    return last.next(pos, token, n_seq_tokens, pos_last)


def _seq_rm(table: HostVTable, seq_id: int, p0: int, p1: int) -> Status:
    return Status.OK if table.cache.seq_rm(seq_id, p0, p1) else Status.REFUSED


def _mark(table: HostVTable, seq_id: int) -> Status:
    return Status.OK if table.cache.checkpoints.mark(seq_id) else Status.REFUSED


def _set_replay(table: HostVTable, replay: Any, data: Any) -> None:
    def replay_in_host(seq_id: int, pos0: int, tokens: Int32Array) -> bool:
        ok = replay(data, seq_id, pos0, ffi.from_buffer("int32_t[]", tokens), len(tokens)) == Status.OK
        return bool(ok)

    table.cache.checkpoints.replay = None if replay == ffi.NULL else replay_in_host


def _seq_pos(table: HostVTable, seq_id: int, pos: Any) -> None:
    if pos == ffi.NULL:
        raise InvalidArgument("there is no place for the position")
    pos[0] = POS_NONE  # also what a host sees that does not look at the status
    pos[0] = table.cache.seq_pos_max(seq_id)


def _positions(table: HostVTable, pos: Any, n: int) -> int:
    positions = table.cache.positions()
    if len(positions) <= n:
        pos[0 : len(positions)] = positions
    return len(positions)


def _info(table: HostVTable, info: Any) -> None:
    cache = table.cache
    _out(info, "rcache_info")
    cells, buffers = cache.table, cache.buffers
    info.size, info.used, info.n_seq_max, info.n_layer = cells.size, cells.used, cells.n_seq_max, cache.spec.n_layer
    info.head, info.n, info.rs_z = cells.head, cells.n, cells.rs_z
    if buffers is not None:
        info.r_bytes, info.s_bytes, info.total_bytes = buffers.size_r_bytes, buffers.size_s_bytes, buffers.total_size
    else:
        info.r_bytes = info.s_bytes = info.total_bytes = 0


def _tensor(table: HostVTable, il: int, tensor: Any, which: Which) -> None:
    if tensor == ffi.NULL:
        raise InvalidArgument("there is no place for the tensor")
    tensor[0] = ffi.NULL
    address = table.cache.with_buffers().tensor(which, il)
    if address is not None:
        tensor[0] = ffi.cast("void *", address)


class _CStream:
    """``struct rcache_io`` as a reader and writer of states. Raises `StateError` when the host's side fails."""

    def __init__(self, table: HostVTable, io: Any, needed: str) -> None:
        if io == ffi.NULL or io.struct_size < _BYTES["rcache_io"] or getattr(io, needed) == ffi.NULL:
            raise InvalidArgument(f"rcache_io is NULL, its struct_size is not set, or it has no {needed}")
        self._io = io
        self._cache = table.cache
        self._row_bytes = {(column.which, column.il): column.row_bytes for column in columns_of(table.cache.spec)}
        self.streams_rows: bool = io.read_tensor != ffi.NULL
        self.rows_wait = bool(io.flags & lib.RCACHE_IO_ROWS_WAIT)

    def _check(self, status: int, what: str) -> None:
        if status != Status.OK:
            raise StateError(f"the host's {what} failed with status {status}")

    def read(self, n_bytes: int) -> memoryview:
        data = np.empty(n_bytes, dtype=np.uint8).data  # is written over, so it need not be zeroed before
        status = self._io.read(self._io.user, ffi.from_buffer(data), n_bytes)
        if status != Status.OK:
            self._check(status, f"read of {counted(n_bytes, 'byte')}")
        return data

    def write(self, data: Bytes) -> None:
        status = self._io.write(self._io.user, ffi.from_buffer(data), len(data))
        if status != Status.OK:
            self._check(status, f"write of {counted(len(data), 'byte')}")

    def write_rows(self, which: Which, il: int, first: int, n_rows: int) -> None:
        buffers = self._cache.buffers
        if self._io.write_tensor == ffi.NULL and buffers is not None:
            self.write(buffers.borrow_rows(which, il, first, n_rows))
            return
        status = self._io.write_tensor(*self._rows(which, il, first, n_rows))
        if status != Status.OK:
            self._check(status, f"write of {counted(n_rows, 'row')} of layer {il}, {which}")

    def read_rows(self, which: Which, il: int, first: int, n_rows: int) -> None:
        if self._io.read_tensor == ffi.NULL:
            raise InvalidArgument("rcache_io has no read_tensor")
        status = self._io.read_tensor(*self._rows(which, il, first, n_rows))
        if status != Status.OK:
            self._check(status, f"read of {counted(n_rows, 'row')} of layer {il}, {which}")

    def _rows(self, which: Which, il: int, first: int, n_rows: int) -> tuple[Any, ...]:
        row_bytes = self._row_bytes[which, il]
        tensor = ffi.cast("void *", self._cache.with_buffers().tensor(which, il))
        return self._io.user, tensor, first * row_bytes, n_rows * row_bytes


def _state_write(table: HostVTable, io: Any, seq_id: int, flags: int) -> None:
    table.cache.state_write(_CStream(table, io, "write"), seq_id if seq_id >= 0 else SEQ_ANY, flags)


def _state_read(table: HostVTable, io: Any, seq_id: int, flags: int) -> None:
    table.cache.state_read(_CStream(table, io, "read"), seq_id if seq_id >= 0 else SEQ_ANY, flags)


# by the name in the C interface; None as an answer stands for RCACHE_STATUS_OK
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "prepare": _prepare,
    "find_slot": _find_slot,
    "discard_slot": lambda table: table.cache.discard_slot(),
    "seq_rm": _seq_rm,
    "seq_cp": lambda table, *args: table.cache.seq_cp(*args),
    "seq_keep": lambda table, *args: table.cache.seq_keep(*args),
    "seq_add": lambda table, *args: table.cache.seq_add(*args),
    "seq_div": lambda table, *args: table.cache.seq_div(*args),
    "set_replay": _set_replay,
    "mark": _mark,
    "seq_pos": _seq_pos,
    "positions": _positions,
    "clear": lambda table, data: table.cache.clear(bool(data)),
    "get_can_shift": lambda table: int(table.cache.table.can_shift),
    "info": _info,
    "r_tensor": partial(_tensor, which="r"),
    "s_tensor": partial(_tensor, which="s"),
    "p_tensor": partial(_tensor, which="p"),
    "state_write": _state_write,
    "state_read": _state_read,
}


def _entry(operation: Callable[..., Any]) -> Callable[..., int]:
    def call(key: int, *args: Any) -> int:
        ref = _tables.get(key)
        table = None if ref is None else ref()
        if table is None or table.cache.closed:
            return Status.CLOSED
        try:
            result = operation(table, *args)
        except BaseException as error:  # whatever it is, it must not cross into C
            return table.park(error)
        return Status.OK if result is None else result

    return call


def _row_entry(answer: Callable[[HostVTable, int], Any], missing: Any) -> Callable[[int, int], Any]:
    def call(key: int, i: int) -> Any:
        ref = _tables.get(key)
        table = None if ref is None else ref()
        if table is None:
            return missing
        try:
            return answer(table, i)
        except BaseException as error:  # as above
            table.park(error)
            return missing

    return call


def _destroy_entry(key: int) -> None:
    table = _owned_by_host.pop(key, None)
    if table is not None:  # the factory made it for this host: nobody else has the cache
        try:
            cache = table.cache
            table.close()
            cache.close()
        except BaseException as error:
            log.error("closing a cache for its host failed", exc_info=error)


def _create_entry(key: int, spec: Any, out: Any) -> int:
    try:
        table = HostVTable(_creators[key](_request(spec)))
    except BaseException as error:
        lib.rcache_factory_set_error(f"{type(error).__name__}: {error}".replace("\0", "").encode("utf-8", "replace"))
        if not isinstance(error, RcacheError):
            log.error("making a cache for a host failed", exc_info=error)
        return status_of(error)
    _owned_by_host[table.key] = table
    out[0] = ffi.cast("const struct rcache_vtable *", table.address)
    return Status.OK


def _request(c: Any) -> CacheRequest:
    n_layer = c.n_layer
    if not 0 < n_layer <= _MAX_TOKENS or ffi.NULL in (c.n_embd_r, c.n_embd_s):
        at = f"n_embd_r at {c.n_embd_r}, n_embd_s at {c.n_embd_s}"
        raise InvalidArgument(f"a spec of {counted(n_layer, 'layer')}, {at}")
    if c.placement not in _PLACEMENT:
        raise InvalidArgument(f"placement {c.placement} is not one of enum rcache_placement")
    n_embd_p = [] if c.n_embd_p == ffi.NULL else ffi.unpack(c.n_embd_p, n_layer)
    bufts = None
    if c.buft != ffi.NULL:
        bufts = [int(ffi.cast("uintptr_t", buft)) or None for buft in ffi.unpack(c.buft, n_layer)]
    return CacheRequest(
        CacheSpec.make(ffi.unpack(c.n_embd_r, n_layer), ffi.unpack(c.n_embd_s, n_layer), c.type_r, c.type_s, n_embd_p),
        c.n_cells,
        c.n_seq_max or None,
        _PLACEMENT[c.placement],
        bufts,
        None if c.ggml_library == ffi.NULL else ffi.string(c.ggml_library).decode("utf-8", "surrogateescape"),
        c.n_rs_seq,
        c.checkpoint_cells,
        bool(c.flags & lib.RCACHE_SPEC_HYBRID),
    )


_installed = False


def _install() -> None:
    """Connects the C entries with this module, once, and has them refuse calls when Python ends."""
    global _installed
    if _installed:
        return
    closed = int(Status.CLOSED)
    for name, operation in _OPERATIONS.items():
        ffi.def_extern(name=f"rcache_py_{name}", error=closed)(_entry(operation))
    ffi.def_extern(name="rcache_py_s_copy", error=-1)(_row_entry(HostVTable.answer_s_copy, -1))
    ffi.def_extern(name="rcache_py_s_mask", error=float("nan"))(_row_entry(HostVTable.answer_s_mask, float("nan")))
    ffi.def_extern(name="rcache_py_destroy")(_destroy_entry)
    ffi.def_extern(name="rcache_py_create", error=closed)(_create_entry)
    lib.rcache_python_alive(1, 0)
    atexit.register(_refuse_calls)
    _installed = True


def _refuse_calls() -> None:
    # a host that holds a cache of its own may be computing on it: its memory must outlive Python
    for table in _owned_by_host.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(table.cache))
    left = lib.rcache_python_alive(0, _EXIT_WAIT_MS)
    if left:
        log.warning("%s through the C interface had not returned when Python ended", counted(left, "call"))
