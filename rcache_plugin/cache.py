"""`RecurrentCache`: the cell table, the planner and the buffers put together. Orchestration only, no algorithm."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from .cells import CellTable
from .errors import ClosedError, InvalidArgument, StateError, Unsupported
from .slots import CLASSIC, PLACEMENTS, SlotPlan, commit, discard, plan_next, plan_slots
from .spec import CacheSpec, Which
from .state_io import (
    FLAG_ON_DEVICE,
    CellImage,
    Column,
    DeviceReader,
    Reader,
    StateImage,
    Writer,
    columns_of,
    read_cells,
    read_columns,
    read_state,
    write_state,
)
from .ubatch import CELL_NONE, SEQ_ANY, UBatch

if TYPE_CHECKING:
    from .buffers import StateBuffers
    from .ggml_lib import GgmlLib


class PlanObserver(Protocol):
    """What wants to know of each new plan, as the C tables do."""

    def publish(self, plan: SlotPlan | None) -> None:
        """Called after each slot, and with None when there is no slot any more."""

    def changed(self) -> None:
        """Called after any other change of the table, and of what its next steps need: until then a step of the same
        sequences as the last one counts as one that fits."""


class _RowBytes:
    """A `Writer` for whoever takes bytes only."""

    def __init__(self, writer: Writer, buffers: StateBuffers) -> None:
        self.write = writer.write
        self._buffers = buffers

    def write_rows(self, which: Which, il: int, first: int, n_rows: int) -> None:
        for cell_id in range(first, first + n_rows):
            self.write(self._buffers.get_row(which, il, cell_id))


class RecurrentCache:
    """One fixed-size state a sequence, in ggml buffers, for the sequences ``0 .. n_seq_max - 1``.

    `spec`: what a cell holds. `n_cells`: room for that many states. `n_seq_max`: default `n_cells`. `placement`:
    ``"classic"`` places as llama.cpp does, ``"compact"`` avoids copying bystanders; what the sequences compute is the
    same. `ggml`: the library to allocate with (default: `GgmlLib.find`). `devices`: name of the device of each layer,
    [n_layer], or one for all, None is the CPU; or `bufts`, addresses of ggml buffer types, [n_layer]. With
    ``allocate=False`` there are no buffers: the table only, for hosts that keep the rows themselves.

    Calls may come from several threads, one at a time goes on. Raises `InvalidArgument`, `GgmlNotFound`,
    `AllocationError`. After `close` every call raises `ClosedError`.
    """

    _closed = True  # until __init__ has succeeded

    def __init__(
        self,
        spec: CacheSpec,
        n_cells: int,
        *,
        n_seq_max: int | None = None,
        placement: str = CLASSIC,
        ggml: GgmlLib | None = None,
        devices: str | Sequence[str | None] | None = None,
        bufts: Sequence[int | None] | None = None,
        allocate: bool = True,
        n_rs_seq: int = 0,
        empty_tensors: bool = False,
    ) -> None:
        if placement not in PLACEMENTS:
            raise InvalidArgument(f"placement {placement!r} is not one of {', '.join(PLACEMENTS)}")
        self.spec = spec
        self.placement = placement
        self.table = CellTable(n_cells, n_seq_max, n_rs_seq)
        self.buffers: StateBuffers | None = None
        self._where: dict[str, Any] = {"devices": devices, "bufts": bufts, "empty_tensors": empty_tensors}
        self._lock = threading.RLock()
        self._prepared: deque[tuple[UBatch, SlotPlan]] = deque()
        self._plan: SlotPlan | None = None
        self.observers: weakref.WeakSet[PlanObserver] = weakref.WeakSet()
        if allocate:
            from .buffers import StateBuffers
            from .ggml_lib import GgmlLib

            self._ggml = ggml if ggml is not None else GgmlLib.find()
            self.buffers = StateBuffers(self._ggml, spec, n_cells * (1 + n_rs_seq), **self._where)
        self._closed = False

    # life

    def close(self) -> None:
        """Frees the buffers. Idempotent. Tensor addresses and views are void from here on."""
        if self._closed:
            return
        with self._lock:
            self._closed = True
            self._prepared.clear()
            self._publish(None)
            if self.buffers is not None:
                self.buffers.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def __enter__(self) -> RecurrentCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _open(self) -> CellTable:
        if self._closed:
            raise ClosedError("the cache is closed")
        return self.table

    # what is where

    @property
    def size(self) -> int:
        """Cells; also the rows of each tensor."""
        return self._open().size

    @property
    def used(self) -> int:
        """Cells with at least one sequence."""
        return self._open().used

    @property
    def n_seq_max(self) -> int:
        """Sequence ids run from 0 to this, exclusive."""
        return self._open().n_seq_max

    @property
    def head(self) -> int:
        """First cell of the last slot, or where the next search starts."""
        return self._open().head

    @property
    def n(self) -> int:
        """Cells of the last slot."""
        return self._open().n

    @property
    def rs_z(self) -> int:
        """Zero row of the last slot; -1 if none."""
        return self._open().rs_z

    @property
    def plan(self) -> SlotPlan | None:
        """The plan of the last slot; None before the first, and after `clear`, `resize` and `discard_slot`."""
        return self._plan

    # steps

    def prepare(self, ubatches: Sequence[UBatch]) -> bool:
        """Whether the ubatches fit, one after the other. Nothing changes; the plans are kept for `find_slot`.

        Raises `SeqIdError` for an id that cannot be.
        """
        with self._lock:
            self._prepared.clear()
            plans = plan_slots(self._open(), ubatches, self.placement, self._can_move)
            if plans is None:
                return False
            self._prepared.extend(zip(ubatches, plans, strict=True))
            return True

    def find_slot(self, ubatch: UBatch) -> SlotPlan | None:
        """Finds a slot and commits it; None, with nothing changed, when there is no room.

        A ubatch that `prepare` has planned on this very state is not planned again. Row `rs_z` is cleared when a
        sequence starts from it. With compact placement and all rows in host memory, rows of sequences that have no part
        in the step may be moved here, see `SlotPlan.moves`; they belong to the cache, so no graph may be at work on
        them. Raises `SeqIdError` for an id that cannot be.
        """
        with self._lock:
            plan = self._take_prepared(ubatch)
            if plan is None and self._plan is not None:
                plan = plan_next(self.table, self._plan, ubatch)
            if plan is None:
                plans = plan_slots(self._open(), (ubatch,), self.placement, self._can_move)
                if plans is None:
                    return None
                (plan,) = plans
            try:
                if plan.moves:
                    self._with_buffers().move_rows(plan.moves)  # before the clearing, which may be of a row moved from
                if plan.rs_z != CELL_NONE and self.buffers is not None and plan.s_copy is not plan.src:
                    self.buffers.clear_rows((plan.rs_z,))  # whatever the row held, NaN included
                commit(self.table, plan)
            except BaseException:
                if plan.moves and self.table.epoch == plan.epoch:  # interrupted: who is in which row is not known
                    self.table.drop_cells(cell_id for move in plan.moves for cell_id in move[:2])
                    self._publish(None)
                raise
            try:
                self._publish(plan)
            except BaseException:  # a host that can't read the plan can't compute on the slot
                discard(self.table, plan)
                self._publish(None)
                raise
            return plan

    @property
    def _can_move(self) -> bool:
        """Whether rows can be moved between graphs for little: in host memory, where a copy is done when it returns."""
        return self.buffers is not None and self.buffers.on_host

    def _publish(self, plan: SlotPlan | None) -> None:
        self._plan = plan
        for observer in self.observers:
            observer.publish(plan)

    def _changed(self) -> None:
        for observer in self.observers:
            observer.changed()

    def _take_prepared(self, ubatch: UBatch) -> SlotPlan | None:
        table = self._open()
        if self._prepared:
            planned, plan = self._prepared.popleft()
            if plan.epoch == table.epoch and planned.same_as(ubatch):
                return plan if planned is ubatch else plan._replace(ubatch=ubatch)  # the tokens may differ
            self._prepared.clear()
        return None

    def s_copy(self, i: int) -> int:
        """The row that row ``head + i`` of the last slot reads from. Raises `InvalidArgument`: no slot, i outside."""
        return int(self._planned(i).s_copy[i])

    def s_mask(self, i: int) -> float:
        """1.0: row ``head + i`` of the last slot keeps what it reads; 0.0: it starts from zero. Raises as `s_copy`."""
        return float(self._planned(i).src[i] >= 0)

    def _planned(self, i: int) -> SlotPlan:
        self._open()
        plan = self._plan
        if plan is None or not 0 <= i < plan.n:
            raise InvalidArgument(f"row {i} is outside the last slot of {0 if plan is None else plan.n} rows")
        return plan

    def discard_slot(self) -> None:
        """The computation on the last slot failed: removes the sequences whose rows may be half written.

        Raises `StalePlan` when the table has changed since, and `InvalidArgument` when there is no slot.
        """
        with self._lock:
            table = self._open()
            if self._plan is None:
                raise InvalidArgument("there is no slot to discard")
            discard(table, self._plan)
            self._publish(None)

    # sequences

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """As `CellTable.seq_rm`."""
        with self._lock:
            done = self._open().seq_rm(seq_id, p0, p1)
            self._changed()
            return done

    def seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int = -1, p1: int = -1) -> None:
        """As `CellTable.seq_cp`."""
        with self._lock:
            self._open().seq_cp(seq_id_src, seq_id_dst, p0, p1)
            self._changed()

    def seq_keep(self, seq_id: int) -> None:
        """As `CellTable.seq_keep`."""
        with self._lock:
            self._open().seq_keep(seq_id)
            self._changed()

    def seq_add(self, seq_id: int, p0: int, p1: int, shift: int) -> None:
        """As `CellTable.seq_add`."""
        with self._lock:
            self._open().seq_add(seq_id, p0, p1, shift)
            self._changed()

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """As `CellTable.seq_div`."""
        with self._lock:
            self._open().seq_div(seq_id, p0, p1, d)
            self._changed()

    def seq_pos_min(self, seq_id: int) -> int:
        """As `CellTable.seq_pos_min`."""
        return self._open().seq_pos_min(seq_id)

    def seq_pos_max(self, seq_id: int) -> int:
        """As `CellTable.seq_pos_max`."""
        return self._open().seq_pos_max(seq_id)

    def positions(self) -> list[int]:
        """`seq_pos_max` of every sequence, [n_seq_max]."""
        with self._lock:
            return self._open().positions()

    @property
    def can_shift(self) -> bool:
        """Whether positions may be shifted."""
        return self._open().can_shift

    def clear(self, data: bool = True) -> None:
        """Forgets every sequence; with `data` every row becomes zero too."""
        with self._lock:
            self._open().clear()
            self._publish(None)
            if data and self.buffers is not None:
                self.buffers.clear()

    def resize(self, n_cells: int, n_seq_max: int | None = None) -> None:
        """Changes the number of cells; every state is kept, its row copied into new buffers.

        Tensor addresses change, so a host builds its graphs anew. Raises as `CellTable.resize`, and `AllocationError`;
        then nothing has changed. Both sets of buffers exist while the rows are copied.
        """
        with self._lock:
            target = self._open().copy()
            moves = dict(target.resize(n_cells, n_seq_max))
            if self.buffers is not None:
                from .buffers import StateBuffers

                n_rows = n_cells * (1 + self.table.n_rs_seq)
                larger = StateBuffers(self._ggml, self.spec, n_rows, **self._where)
                old, row_of = self.table.used_cells(), self.table.row_of
                try:
                    larger.copy_rows_from(self.buffers, ((row_of(c), moves.get(c, c)) for c in old))
                except BaseException:
                    larger.close()
                    raise
                self.buffers.close()
                self.buffers = larger
            self.table = target
            self._prepared.clear()
            self._publish(None)

    # states

    def state_write(self, writer: Writer, seq_id: int = SEQ_ANY, flags: int = 0) -> None:
        """Writes the state of one sequence, or of the whole cache, in llama.cpp's format (see `state_io`).

        `writer` has ``write(bytes)``, as a binary file has; one that also has ``write_rows`` is given the rows' places
        instead of their bytes. `flags` are llama.cpp's; none of them changes what a recurrent state writes. Raises
        `SeqIdError`, and `Unsupported` without buffers.
        """
        with self._lock:
            table, buffers = self._open(), self._with_buffers()
            if not hasattr(writer, "write_rows"):
                writer = _RowBytes(writer, buffers)
            write_state(writer, table, self.spec, seq_id)

    def state_read(self, reader: Reader | DeviceReader, seq_id: int = SEQ_ANY, flags: int = 0) -> None:
        """Restores one sequence, or the whole cache, from what `state_write` or llama.cpp wrote.

        Everything is read and checked first: when it raises `StateError`, the cache is what it was. A sequence goes to
        an empty cell, or, if there is none, to its own. With `FLAG_ON_DEVICE`, for one sequence only, `reader` puts the
        rows in place itself; if it fails in the middle and the cell was the sequence's own, the sequence is lost.
        """
        with self._lock:
            table, buffers = self._open(), self._with_buffers()
            if flags & FLAG_ON_DEVICE:
                if seq_id == SEQ_ANY or not hasattr(reader, "read_rows"):
                    raise Unsupported("states on a device are of one sequence, and need a reader of rows")
                cells, image = read_cells(reader, table, seq_id), None
            else:
                image = read_state(reader, table, self.spec, seq_id)
                cells = image.cells
            if seq_id == SEQ_ANY and image is not None:
                self._restore_all(image, buffers)
            elif cells:
                self._restore_one(cells[0], image, reader, buffers)
            else:
                if image is None:
                    read_columns(reader, self.spec, lambda column: None)
                table.seq_rm(seq_id, -1, -1)
                self._changed()

    def _restore_all(self, image: StateImage, buffers: StateBuffers) -> None:
        # rows are written over live ones: if a device fails in the middle, no state can be trusted
        try:
            for i in range(len(image.cells)):
                self._set_rows(image, buffers, i, i)
        except BaseException:
            self.table.clear()
            self._publish(None)
            raise
        self.table.restore(image.cells)
        self._publish(None)

    def _restore_one(
        self, cell: CellImage, image: StateImage | None, reader: Reader | DeviceReader, buffers: StateBuffers
    ) -> None:
        (seq_id,) = cell.seq_ids
        step = UBatch.single(seq_id, cell.pos)
        after = self.table.copy()
        after.seq_rm(seq_id, -1, -1)
        plans = plan_slots(after, (step,), self.placement)
        if plans is None:
            raise StateError(f"all {after.size} cells are taken, there is no room for sequence {seq_id}")
        (plan,) = plans
        own = plan.head == self.table.tail(seq_id)
        try:
            if image is not None:
                self._set_rows(image, buffers, 0, plan.head)
            else:
                read_columns(reader, self.spec, partial(self._read_row, reader, plan.head))
        except BaseException:
            if own:  # its old state is written over in part
                self.table.seq_rm(seq_id, -1, -1)
                self._changed()
            raise
        commit(after, plan)
        self.table = after
        self._publish(None)

    def _read_row(self, reader: Any, cell_id: int, column: Column) -> None:
        if column.row_bytes:
            reader.read_rows(column.which, column.il, cell_id, 1)

    def _set_rows(self, image: StateImage, buffers: StateBuffers, i: int, cell_id: int) -> None:
        for column in columns_of(self.spec):
            if column.row_bytes:
                buffers.set_row(column.which, column.il, cell_id, image.row(column, i))

    def _with_buffers(self) -> StateBuffers:
        if self.buffers is None:
            raise Unsupported("this cache was made without buffers")
        return self.buffers

    # memory

    def r_tensor(self, il: int) -> int | None:
        """Address of layer `il`'s ``ggml_tensor`` r, [n_embd_r, size]; None: no state there. Raises `InvalidArgument`
        for a layer that is not."""
        return self._tensor(il, "r")

    def s_tensor(self, il: int) -> int | None:
        """As `r_tensor`, of s."""
        return self._tensor(il, "s")

    def p_tensor(self, il: int) -> int | None:
        """As `r_tensor`, of p."""
        return self._tensor(il, "p")

    def _tensor(self, il: int, which: Which) -> int | None:
        self._open()
        if not 0 <= il < self.spec.n_layer:
            raise InvalidArgument(f"layer {il} is outside the model's {self.spec.n_layer} layers")
        return self._with_buffers().tensors(which)[il]

    @property
    def size_r_bytes(self) -> int:
        """Bytes of all r tensors; 0 without buffers."""
        self._open()
        return 0 if self.buffers is None else self.buffers.size_r_bytes

    @property
    def size_s_bytes(self) -> int:
        """Bytes of all s tensors; 0 without buffers."""
        self._open()
        return 0 if self.buffers is None else self.buffers.size_s_bytes

    @property
    def total_size(self) -> int:
        """Bytes of all buffers, padding included; 0 without buffers."""
        self._open()
        return 0 if self.buffers is None else self.buffers.total_size

    def memory_breakdown(self) -> dict[str, int]:
        """Bytes by device."""
        self._open()
        return {} if self.buffers is None else self.buffers.memory_breakdown()
