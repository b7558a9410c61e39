"""`RecurrentCache`: the cell table, the planner and the buffers put together. Orchestration only, no algorithm."""

from __future__ import annotations

import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .cells import CellTable
from .checkpoint import Checkpoint, CheckpointPolicy, CheckpointStore, DefaultPolicy, Stats
from .errors import ClosedError, InvalidArgument, StateError, Unsupported
from .history import token_array
from .slots import CLASSIC, PLACEMENTS, SlotPlan, commit, discard, plan_slots
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
from .ubatch import CELL_NONE, SEQ_ANY, Int32Array, UBatch

if TYPE_CHECKING:
    from .buffers import StateBuffers
    from .ggml_lib import GgmlLib


class PlanObserver(Protocol):
    """What wants to know of each new plan, as the C tables do."""

    def publish(self, plan: SlotPlan | None) -> None:
        """Called after each slot, and with None when there is no slot any more."""

    def changed(self) -> None:
        """Called after any other change of the table."""


class _RowBytes:
    """A `Writer` for whoever takes bytes only."""

    def __init__(self, writer: Writer, buffers: StateBuffers) -> None:
        self.write = writer.write
        self._buffers = buffers

    def write_rows(self, which: Which, il: int, first: int, n_rows: int) -> None:
        for cell_id in range(first, first + n_rows):
            self.write(self._buffers.get_row(which, il, cell_id))


Replay = Callable[[int, int, Int32Array], bool]
"""``replay(seq_id, pos0, tokens)`` has the tokens, int32 [n], read into a sequence from `pos0` on; false: it failed.

Called by `RecurrentCache.seq_rm` while the sequence ends at ``pos0 - 1``; the reading comes back to `find_slot`.
"""


class RecurrentCache:
    """One fixed-size state a sequence, in ggml buffers, for the sequences ``0 .. n_seq_max - 1``.

    `spec`: what a cell holds. `n_cells`: room for that many states. `n_seq_max`: default `n_cells`. `placement`:
    ``"classic"`` places as llama.cpp does, ``"compact"`` avoids copying bystanders; what the sequences compute is the
    same. `ggml`: the library to allocate with (default: `GgmlLib.find`). `devices`: name of the device of each layer,
    [n_layer], or one for all, None is the CPU; or `bufts`, addresses of ggml buffer types, [n_layer]. With
    ``allocate=False`` there are no buffers: the table only, for hosts that keep the rows themselves.

    `checkpoint_cells`: room for that many checkpoints besides, or `checkpoint_bytes` (as many cells as these hold); see
    `checkpoint`, `seq_rm` and the module `checkpoint`. `policy` says which the cache makes by itself. With
    `own_lineage` a sequence goes back to its own past only: for hosts that keep something else a sequence beside this
    cache. `max_replay`: the most tokens that `seq_rm` has read again; None is no limit.

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
        checkpoint_cells: int = 0,
        checkpoint_bytes: int | None = None,
        policy: CheckpointPolicy | None = None,
        own_lineage: bool = False,
        max_replay: int | None = None,
    ) -> None:
        if placement not in PLACEMENTS:
            raise InvalidArgument(f"placement {placement!r} is not one of {', '.join(PLACEMENTS)}")
        if checkpoint_bytes is not None:
            checkpoint_cells = checkpoint_bytes // spec.cell_bytes
        if n_cells < 1 or checkpoint_cells < 0:
            raise InvalidArgument(f"a cache of {n_cells} cells, and {checkpoint_cells} for checkpoints")
        self.spec = spec
        self.placement = placement
        self.checkpoint_cells = checkpoint_cells
        self.table = CellTable(n_cells + checkpoint_cells, n_cells if n_seq_max is None else n_seq_max, n_rs_seq)
        self.replay: Replay | None = None
        """What the host has registered for reading tokens again; see `Replay`."""
        self.max_replay = max_replay
        self._kept: CheckpointStore | None = None
        if checkpoint_cells:
            self._kept = CheckpointStore(
                checkpoint_cells, self.table.n_seq_max, DefaultPolicy() if policy is None else policy, own_lineage
            )
        self._lost: set[int] = set()  # sequences whose last step failed, and which have not been removed since
        self._batch = 0
        self._replaying = False
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
            self.buffers = StateBuffers(self._ggml, spec, self.table.size * (1 + n_rs_seq), **self._where)
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
            self._open()
            if self._lost:
                self._check_lost(ubatches)
            plans = self._find_plans(ubatches)
            if plans is None:
                return False
            self._batch += 1
            self._prepared.extend(zip(ubatches, plans, strict=True))
            return True

    def _find_plans(self, ubatches: Sequence[UBatch]) -> tuple[SlotPlan, ...] | None:
        """The plans of `ubatches`. A checkpoint gives way when there is no room otherwise."""
        while True:
            plans = plan_slots(self.table, ubatches, self.placement)
            if plans is not None or self._kept is None or not self._kept.evict(self.table):
                return plans

    def find_slot(self, ubatch: UBatch) -> SlotPlan | None:
        """Finds a slot and commits it; None, with nothing changed, when there is no room.

        A ubatch that `prepare` has planned on this very state is not planned again. Row `rs_z` is cleared when a
        sequence starts from it. Raises `SeqIdError` for an id that cannot be.
        """
        with self._lock:
            self._open()
            if self._lost:
                self._check_lost((ubatch,))
            kept = self._kept
            if kept is not None:
                if not self._prepared:
                    self._batch += 1  # a host that does not prepare has batches of one ubatch
                kept.before_step(self.table, ubatch, self._batch)
            plan = self._take_prepared(ubatch)
            if plan is None:
                plans = self._find_plans((ubatch,))
                if plans is None:
                    return None
                (plan,) = plans
            if plan.rs_z != CELL_NONE and self.buffers is not None and plan.s_copy is not plan.src:
                self.buffers.clear_rows((plan.rs_z,))  # whatever the row held, NaN included
            commit(self.table, plan)
            if kept is not None:
                kept.after_step(ubatch, self._batch, self._replaying)
            if self._lost:
                self._lost.difference_update(*ubatch.seq_ids)
            try:
                self._publish(plan)
            except BaseException:  # a host that can't read the plan can't compute on the slot
                self._discard(plan)
                raise
            return plan

    def _check_lost(self, ubatches: Sequence[UBatch]) -> None:
        seen: set[int] = set()
        for ubatch in ubatches:
            for s, ids in enumerate(ubatch.seq_ids):
                if ids[0] in self._lost and ids[0] not in seen and ubatch.pos[s * ubatch.n_seq_tokens] > 0:
                    raise StateError(
                        f"sequence {ids[0]} lost its state when a step failed, it can't go on at position "
                        f"{ubatch.pos[s * ubatch.n_seq_tokens]}: remove it, or go back with seq_rm"
                    )
                seen.update(ids)

    def _publish(self, plan: SlotPlan | None) -> None:
        self._plan = plan
        for observer in self.observers:
            observer.publish(plan)

    @property
    def next_prepared(self) -> UBatch | None:
        """The ubatch that `prepare` has planned next, if its plan still holds."""
        prepared = self._prepared
        return prepared[0][0] if prepared and prepared[0][1].epoch == self.table.epoch else None

    def _changed(self) -> None:
        for observer in self.observers:
            observer.changed()

    def _take_prepared(self, ubatch: UBatch) -> SlotPlan | None:
        if self._prepared:
            planned, plan = self._prepared.popleft()
            if planned is ubatch or planned.same_as(ubatch):
                if plan.epoch == self.table.epoch:
                    return plan
            else:
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
        """The computation on the last slot failed: the sequences whose rows may be half written lose their states.

        A sequence that has lost its state is empty, but can't go on at a position above 0 before it was removed, or has
        gone back to tokens of before the failed step (`seq_rm`, which restores and replays what the cache knows).
        Raises `StalePlan` when the table has changed since, and `InvalidArgument` when there is no slot.
        """
        with self._lock:
            self._open()
            if self._plan is None:
                raise InvalidArgument("there is no slot to discard")
            self._discard(self._plan)

    def _discard(self, plan: SlotPlan) -> None:
        before = self.table.positions()
        discard(self.table, plan)
        self._lost.update(
            seq_id for seq_id, (was, now) in enumerate(zip(before, self.table.positions(), strict=True)) if was > now
        )
        self._prepared.clear()
        if self._kept is not None:
            self._kept.drop_lost(self.table)
        self._publish(None)

    # sequences

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Removes the positions ``[p0, p1)`` of a sequence; of all sequences with `SEQ_ANY`. As `CellTable`'s, but:

        The end of a sequence, ``[p0, -1)``, can be removed whenever its tokens are known and there is a way back: the
        sequence goes to the nearest checkpoint that has read no more than `p0` tokens, and what is missing up to `p0`
        is read again (see `Replay`; needs a replay, and at most `max_replay` tokens). False, and nothing has changed,
        when there is none. When a replay fails in the middle the state is again what it was; with `own_lineage`, or
        with every cell for checkpoints held, it is lost, see `discard_slot`.

        Checkpoints stay when a sequence is removed. With `own_lineage` those behind `p0` go.
        """
        with self._lock:
            done = self._seq_rm(self._open(), seq_id, p0, p1)
            self._changed()
            return done

    def _seq_rm(self, table: CellTable, seq_id: int, p0: int, p1: int) -> bool:
        kept = self._kept
        one = 0 <= seq_id < table.n_seq_max
        # how long a sequence was that has lost its state is nobody's knowledge, so only -1 is its end
        to_end = one and (p1 < 0 or (seq_id not in self._lost and p1 > table.seq_pos_max(seq_id)))
        if one and p0 <= 0 and p1 < 0:
            self._lost.discard(seq_id)
        if kept is None:
            return table.seq_rm(seq_id, p0, p1)
        if not one:
            if seq_id < 0 and p0 <= 0 and p1 < 0:
                return self._drop_sequences(kept)
            return table.seq_rm(seq_id, p0, p1)
        before = table.seq_pos_max(seq_id)
        if p0 <= 0 and to_end:
            kept.leaves(table, seq_id)
        if seq_id not in self._lost and table.seq_rm(seq_id, p0, p1):
            after = table.seq_pos_max(seq_id)
            if after < 0 and (before >= 0 or p0 <= 0):  # it may be empty because it had lost its state
                kept.emptied(table, seq_id)
            elif after != before:
                kept.cut(table, seq_id, after + 1)
            return True
        return p0 > 0 and to_end and self._go_back(kept, seq_id, p0)

    def _drop_sequences(self, kept: CheckpointStore) -> bool:
        for seq_id, pos in enumerate(self.table.positions()):
            if pos >= 0:
                kept.leaves(self.table, seq_id)
        self.table.drop_sequences()
        for seq_id in range(self.table.n_seq_max):
            kept.emptied(self.table, seq_id)
        self._lost.clear()
        return True

    def _go_back(self, kept: CheckpointStore, seq_id: int, n_tokens: int) -> bool:
        """Lets the state of a sequence be that after its first `n_tokens` tokens, if there is a way."""
        table, history = self.table, kept.histories[seq_id]
        base = kept.nearest(seq_id, n_tokens)
        start = 0 if base is None else base.n_tokens
        missing = n_tokens - start
        if (
            n_tokens > len(history.tokens)
            or (missing and self.replay is None)
            or (self.max_replay is not None and missing > self.max_replay)
        ):
            kept.stats.refused += 1
            return False
        tokens = history.tokens[:n_tokens]
        if seq_id not in self._lost:
            kept.leaves(table, seq_id, to=base)
        hold = self._hold(kept, seq_id, base)
        was, whole = history.tokens, history.whole
        done = False
        try:
            self._go_to(kept, seq_id, base)
            done = not missing or self._read_again(seq_id, start, tokens)
        finally:
            self._arrive(kept, seq_id, done, hold)
            if done:
                history.branch = bool(missing)
            else:
                history.start()
                history.tokens, history.whole = was, whole and hold is not None
            # what a hybrid's other half had behind `start` may be gone, and with it the use of later checkpoints
            kept.part(table, seq_id, n_tokens if done else start)
        return done

    def _arrive(self, kept: CheckpointStore, seq_id: int, done: bool, hold: int | None) -> None:
        """A sequence is where it was to go back to; else it returns to `hold`, or has lost its state."""
        table = self.table
        if not done and hold is not None:
            table.go_to_pin(seq_id, hold)
        elif not done:
            table.seq_rm(seq_id, -1, -1)
        (self._lost.discard if done or hold is not None else self._lost.add)(seq_id)
        if hold is not None:
            table.unpin(hold)

    def _hold(self, kept: CheckpointStore, seq_id: int, base: Checkpoint | None) -> int | None:
        """A pin on the state that a sequence is about to leave, so that it can be had back; None if it can't."""
        table = self.table
        if kept.own_lineage or table.tail(seq_id) == CELL_NONE:
            return None
        held = {table.pin_cell(each.pin) for each in kept}
        if table.tail(seq_id) not in held and len(held) >= kept.n_cells:
            if not kept.evict(table, not_held=True, spare=base):
                return None
        return table.pin(seq_id)

    def _go_to(self, kept: CheckpointStore, seq_id: int, one: Checkpoint | None) -> None:
        """The state of a sequence is that of a checkpoint from here on; without one, it is empty."""
        if one is None:
            self.table.seq_rm(seq_id, -1, -1)
            kept.histories[seq_id].start()
        else:
            self.table.go_to_pin(seq_id, one.pin)
            kept.used(one, seq_id)
        self._lost.discard(seq_id)
        self._changed()

    def _read_again(self, seq_id: int, start: int, tokens: array[int]) -> bool:
        replay = self.replay
        if replay is None or self._replaying:
            return False
        self._replaying = True
        try:
            done = replay(seq_id, start, np.array(tokens[start:], np.int32))
        finally:
            self._replaying = False
        return done and self.table.seq_pos_max(seq_id) == len(tokens) - 1

    def seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int = -1, p1: int = -1) -> None:
        """As `CellTable.seq_cp`. The copy may go back to the checkpoints of its source."""
        with self._lock:
            table = self._open()
            table.seq_cp(seq_id_src, seq_id_dst, p0, p1)
            if self._lost:
                (self._lost.add if seq_id_src in self._lost else self._lost.discard)(seq_id_dst)
            if self._kept is not None:
                self._kept.copied(table, seq_id_src, seq_id_dst)
            self._changed()

    def seq_keep(self, seq_id: int) -> None:
        """As `CellTable.seq_keep`. Checkpoints stay; with `own_lineage` those of the sequence."""
        with self._lock:
            table = self._open()
            table.seq_keep(seq_id)
            self._lost &= {seq_id}
            if self._kept is not None:
                for other in range(table.n_seq_max):
                    if other != seq_id:
                        self._kept.emptied(table, other)
            self._changed()

    def seq_add(self, seq_id: int, p0: int, p1: int, shift: int) -> None:
        """As `CellTable.seq_add`. What the shifted states have read counts as unknown from then on."""
        self._shift(seq_id, lambda table: table.seq_add(seq_id, p0, p1, shift))

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """As `CellTable.seq_div`. What the shifted states have read counts as unknown from then on."""
        self._shift(seq_id, lambda table: table.seq_div(seq_id, p0, p1, d))

    def _shift(self, seq_id: int, shift: Callable[[CellTable], None]) -> None:
        with self._lock:
            table = self._open()
            before = table.seq_pos_max(seq_id)
            shift(table)
            if self._kept is not None and table.seq_pos_max(seq_id) != before:
                self._kept.moved(table, seq_id)
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
        """Forgets every sequence. With `data` every row becomes zero and every checkpoint goes too: no byte is left."""
        with self._lock:
            table = self._open()
            if self._kept is None or data:
                table.clear()
            if self._kept is not None:
                if data:
                    self._kept.end_all(table, "the cache was cleared")
                self._drop_sequences(self._kept)
            self._lost.clear()
            self._publish(None)
            if data and self.buffers is not None:
                self.buffers.clear()

    def resize(self, n_cells: int, n_seq_max: int | None = None) -> None:
        """Changes the number of cells for sequences; states and checkpoints are kept, their rows copied to new buffers.

        Tensor addresses change, so a host builds its graphs anew. Raises as `CellTable.resize`, and `AllocationError`;
        then nothing has changed. Both sets of buffers exist while the rows are copied.
        """
        with self._lock:
            target = self._open().copy()
            n_cells += self.checkpoint_cells
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
            if self._kept is not None:
                self._kept.histories.resize(target.n_seq_max)
            self._prepared.clear()
            self._publish(None)

    # checkpoints

    def checkpoint(self, seq_id: int) -> Checkpoint | None:
        """Keeps the state of a sequence as it is now, without copying it; the receipt is for `restore` and `release`.

        What the cache keeps by itself gives way to it. None when the sequence is empty, or all cells for checkpoints
        are taken by such. Raises `SeqIdError`, and `Unsupported` for a cache without cells for checkpoints.
        """
        return self._make_checkpoint(seq_id, held=True)

    def mark(self, seq_id: int) -> bool:
        """Tells that this is a place to come back to, such as the border between two messages of a chat.

        Whether there is a checkpoint of it now. Does nothing without cells for checkpoints. Raises `SeqIdError`.
        """
        return self._kept is not None and self._make_checkpoint(seq_id, held=False) is not None

    def _make_checkpoint(self, seq_id: int, held: bool) -> Checkpoint | None:
        with self._lock:
            table = self._open()
            table.check_seq_id(seq_id)
            return self._with_checkpoints().make(table, seq_id, held=held)

    def _with_checkpoints(self) -> CheckpointStore:
        self._open()
        if self._kept is None:
            raise Unsupported("this cache was made without checkpoint_cells")
        return self._kept

    def checkpoints(self, seq_id: int | None = None) -> list[Checkpoint]:
        """The checkpoints that a sequence may go back to, the shortest first; without `seq_id` all there are."""
        with self._lock:
            kept = self._with_checkpoints()
            if seq_id is None:
                return sorted(kept, key=lambda each: each.n_tokens)
            return kept.of(self.table.check_seq_id(seq_id))

    def nearest(
        self, tokens: Sequence[int] | Int32Array | None = None, *, seq_id: int | None = None, pos: int | None = None
    ) -> Checkpoint | None:
        """The checkpoint that has read the most of `tokens` and nothing else; or, by `seq_id`, the last on the way of a
        sequence to position `pos` (default: to where it is). None if there is none, or `tokens` with `own_lineage`.

        Raises `InvalidArgument` unless exactly one of `tokens` and `seq_id` is given.
        """
        with self._lock:
            kept = self._with_checkpoints()
            if (tokens is None) == (seq_id is None):
                raise InvalidArgument("nearest takes tokens or a seq_id")
            if tokens is not None:
                return kept.longest(token_array(tokens))
            position = self.table.seq_pos_max(-1 if seq_id is None else seq_id) if pos is None else pos
            return kept.nearest(self.table.check_seq_id(-1 if seq_id is None else seq_id), position + 1)

    def release(self, checkpoint: Checkpoint) -> None:
        """Lets a checkpoint go. Raises `StaleCheckpoint` when it has gone already."""
        with self._lock:
            self._with_checkpoints().release(self.table, checkpoint)

    def restore(self, checkpoint: Checkpoint, seq_id: int) -> None:
        """Lets the state of a sequence be that of the checkpoint; what it had is dropped. No row is copied.

        Raises `StaleCheckpoint`, `SeqIdError`, and `Unsupported` with `own_lineage`: there the host has to go back with
        both halves (`seq_rm`).
        """
        with self._lock:
            kept = self._with_checkpoints()
            self.table.check_seq_id(seq_id)
            kept.check(checkpoint)
            if kept.own_lineage:
                raise Unsupported("the host keeps more of a sequence than its state: go back with its seq_rm")
            self._switch(kept, seq_id, checkpoint)

    def resume(self, seq_id: int, tokens: Sequence[int] | Int32Array) -> int:
        """Lets a sequence have read as much of `tokens`, int32 [n], as any known state has, and nothing else.

        Returns how many that are; they need not be read again. The sequence keeps its own state when that is as good,
        and is not changed when nothing is better than what its own tokens share with `tokens`: then `seq_rm` is the way
        back, and the result is 0 unless the sequence has read nothing else. With `own_lineage` never changed.
        """
        with self._lock:
            kept = self._with_checkpoints()
            wanted = token_array(tokens)
            history = kept.histories[self.table.check_seq_id(seq_id)]
            own = history.shared(wanted) if self.table.tail(seq_id) != CELL_NONE else 0
            best = kept.longest(wanted)
            if not kept.own_lineage and best is not None and best.n_tokens > own:
                self._switch(kept, seq_id, best)
                return best.n_tokens
            return own if history.whole and own == len(history.tokens) else 0

    def known_prefix(self, tokens: Sequence[int] | Int32Array) -> int:
        """Tokens at the start of `tokens`, int32 [n], that the tokens of some checkpoint start with too.

        Where they part is a place to come back to. 0 with `own_lineage`.
        """
        with self._lock:
            return self._with_checkpoints().shared(token_array(tokens))

    def _switch(self, kept: CheckpointStore, seq_id: int, one: Checkpoint) -> None:
        kept.leaves(self.table, seq_id, to=one)
        self._go_to(kept, seq_id, one)

    def tokens(self, seq_id: int) -> Int32Array:
        """The tokens that a sequence is known to have read, from position 0 on, int32 [n <= position + 1]; a copy.

        Raises `SeqIdError`, and `Unsupported` for a cache without cells for checkpoints.
        """
        with self._lock:
            kept = self._with_checkpoints()
            return np.array(kept.histories[self.table.check_seq_id(seq_id)].tokens, np.int32)

    def set_tokens(self, seq_id: int, tokens: Sequence[int] | Int32Array) -> None:
        """Tells what the state of a sequence has read, int32 [n], when it came from elsewhere (`state_read`).

        Raises `InvalidArgument` unless there is one for each position, `SeqIdError`. Nothing happens without cells for
        checkpoints.
        """
        with self._lock:
            table = self._open()
            n_tokens = table.seq_pos_max(seq_id) + 1
            if len(tokens) != n_tokens:
                raise InvalidArgument(f"{len(tokens)} tokens for a sequence of {n_tokens} positions")
            if self._kept is not None:
                self._kept.histories[seq_id].set(token_array(tokens))

    def stats(self) -> Stats:
        """Counts of tokens and checkpoints up to now. Raises `Unsupported` without cells for checkpoints."""
        with self._lock:
            kept = self._with_checkpoints()
            return replace(kept.stats, checkpoints=len(kept), bytes=self.checkpoint_bytes)

    def count_prompt(self, n_asked: int, n_reused: int) -> None:
        """The host has read a prompt of `n_asked` tokens, of which `n_reused` did not have to be read: for `stats`."""
        stats = self._with_checkpoints().stats
        stats.tokens_asked += n_asked
        stats.tokens_reused += n_reused

    @property
    def own_lineage(self) -> bool:
        """Whether sequences go back to their own past only."""
        return self._kept is not None and self._kept.own_lineage

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes that the cells for checkpoints take."""
        return self.checkpoint_cells * (1 + self.table.n_rs_seq) * self.spec.cell_bytes

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
                self._replaced(seq_id)
                self._changed()

    def _restore_all(self, image: StateImage, buffers: StateBuffers) -> None:
        room = self.table.room_for_states()
        while len(room) < len(image.cells) and self._kept is not None and self._kept.evict(self.table):
            room = self.table.room_for_states()
        # rows are written over live ones: if a device fails in the middle, no state can be trusted
        try:
            for i in range(len(image.cells)):
                self._set_rows(image, buffers, i, room[i])
        except BaseException:
            self.table.drop_sequences()
            self._replaced()
            self._publish(None)
            raise
        self.table.restore(image.cells)
        self._replaced()
        self._publish(None)

    def _replaced(self, seq_id: int = SEQ_ANY) -> None:
        """The state of a sequence, or of all, has come from elsewhere."""
        for each in range(self.table.n_seq_max) if seq_id == SEQ_ANY else (seq_id,):
            self._lost.discard(each)
            if self._kept is not None:
                empty = self.table.tail(each) == CELL_NONE
                (self._kept.emptied if empty else self._kept.forget)(self.table, each)

    def _restore_one(
        self, cell: CellImage, image: StateImage | None, reader: Reader | DeviceReader, buffers: StateBuffers
    ) -> None:
        (seq_id,) = cell.seq_ids
        step = UBatch.single(seq_id, cell.pos)
        after = self.table.copy()
        after.seq_rm(seq_id, -1, -1)
        plans = plan_slots(after, (step,), self.placement)
        while plans is None and self._kept is not None and self._kept.evict(self.table):
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
                self._replaced(seq_id)
                self._changed()
            raise
        commit(after, plan)
        self.table = after
        self._replaced(seq_id)
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
