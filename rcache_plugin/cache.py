"""`RecurrentCache`: the cell table, the planner and the buffers put together. Orchestration only, no algorithm."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .cells.slots import CLASSIC, PLACEMENTS, SlotPlan, commit, discard, plan_next, plan_slots
from .cells.spec import CacheSpec, Which
from .cells.table import CellTable
from .cells.ubatch import CELL_NONE, SEQ_ANY, Int32Array, UBatch
from .checkpoints.history import token_array
from .checkpoints.rollback import Replay, Rewind
from .checkpoints.store import Checkpoint, CheckpointPolicy, CheckpointStore, DefaultPolicy, Stats
from .errors import ClosedError, InvalidArgument, Unsupported
from .states.file import (
    Header,
    Saving,
    Tokens,
    check_spec,
    checked_tokens,
    read_header,
    read_payload,
    spec_fields,
)
from .states.image import (
    Column,
    StateImage,
    most_bytes,
    read_cells,
    read_columns,
    read_image,
    read_rows,
    state_bytes,
    write_state,
)
from .states.restore import find_room, set_rows, take_rows
from .states.streams import FLAG_ON_DEVICE, MemoryReader, reader_from, writer_to

if TYPE_CHECKING:
    from .memory.buffers import StateBuffers
    from .memory.ggml import GgmlLib


class PlanObserver(Protocol):
    """What wants to know of each new plan, as the C tables do."""

    def publish(self, plan: SlotPlan | None) -> None:
        """Called after each slot, and with None when there is no slot any more."""

    def changed(self) -> None:
        """Called after any other change of the table, and of what its next steps need: until then a step of the same
        sequences as the last one counts as one that fits."""


class Observers:
    """Those who want to know, while they live. A `weakref.WeakSet` costs too much where each step goes through it."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[PlanObserver]] = []

    def add(self, observer: PlanObserver) -> None:
        """From now on `observer` is told."""
        self._refs.append(weakref.ref(observer, self._refs.remove))

    def __iter__(self) -> Iterator[PlanObserver]:
        for ref in self._refs[:]:
            observer = ref()
            if observer is not None:
                yield observer


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
        kept = None
        if checkpoint_cells:
            kept = CheckpointStore(
                checkpoint_cells, self.table.n_seq_max, DefaultPolicy() if policy is None else policy, own_lineage
            )
        self.observers = Observers()
        self._back = Rewind(kept, self.observers, max_replay)
        self._batch = 0
        self.buffers: StateBuffers | None = None
        self._where: dict[str, Any] = {"devices": devices, "bufts": bufts, "empty_tensors": empty_tensors}
        self._lock = threading.RLock()
        self._prepared: deque[tuple[UBatch, SlotPlan]] = deque()
        self._plan: SlotPlan | None = None
        if allocate:
            from .memory.buffers import StateBuffers
            from .memory.ggml import GgmlLib

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
            self._back.check(ubatches)
            plans = self._find_plans(ubatches)
            if plans is None:
                return False
            self._batch += 1
            self._prepared.extend(zip(ubatches, plans, strict=True))
            return True

    def _find_plans(self, ubatches: Sequence[UBatch]) -> tuple[SlotPlan, ...] | None:
        """The plans of `ubatches`. A checkpoint gives way when there is no room otherwise."""
        while True:
            plans = plan_slots(self.table, ubatches, self.placement, self._can_move)
            if plans is not None or not self._back.make_room(self.table):
                return plans

    def find_slot(self, ubatch: UBatch, batch: int = 0) -> SlotPlan | None:
        """Finds a slot and commits it; None, with nothing changed, when there is no room.

        `batch` numbers the batch that the ubatch is a part of, if the host knows better than `prepare`; 0: it doesn't.

        A ubatch that `prepare` has planned on this very state is not planned again. Row `rs_z` is cleared when a
        sequence starts from it. With compact placement and all rows in host memory, rows of sequences that have no part
        in the step may be moved here, see `SlotPlan.moves`; they belong to the cache, so no graph may be at work on
        them. Raises `SeqIdError` for an id that cannot be.
        """
        with self._lock:
            self._open()
            self._back.check((ubatch,))
            if batch:
                self._batch = batch
            elif not self._prepared:
                self._batch += 1  # a host that does not prepare has batches of one ubatch
            self._back.before_step(self.table, ubatch, self._batch)
            plan = self._take_prepared(ubatch)
            if plan is None and self._plan is not None:
                plan = plan_next(self.table, self._plan, ubatch)
            if plan is None:
                plans = self._find_plans((ubatch,))
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
                    self._drop_cells([cell_id for move in plan.moves for cell_id in move[:2]])
                raise
            self._back.after_step(self.table, ubatch, self._batch, bool(plan.gaps))
            try:
                self._publish(plan)
            except BaseException:  # a host that can't read the plan can't compute on the slot
                self._discard(plan)
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
        if self._prepared:
            planned, plan = self._prepared.popleft()
            if planned is ubatch or planned.same_as(ubatch):
                if plan.epoch == self.table.epoch:
                    return plan if planned is ubatch else plan._replace(ubatch=ubatch)  # the tokens may differ
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
        self._lose(lambda: discard(self.table, plan))

    def _drop_cells(self, cell_ids: Sequence[int]) -> None:
        self._lose(lambda: self.table.drop_cells(cell_ids))

    def _lose(self, drop: Callable[[], None]) -> None:
        self._back.lose(self.table, drop)
        self._prepared.clear()
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
            done = self._back.remove(self._open(), seq_id, p0, p1)
            self._changed()
            return done

    def seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int = -1, p1: int = -1) -> None:
        """As `CellTable.seq_cp`. The copy may go back to the checkpoints of its source."""
        with self._lock:
            table = self._open()
            table.seq_cp(seq_id_src, seq_id_dst, p0, p1)
            self._back.copied(table, seq_id_src, seq_id_dst)
            self._changed()

    def seq_keep(self, seq_id: int) -> None:
        """As `CellTable.seq_keep`. Checkpoints stay; with `own_lineage` those of the sequence."""
        with self._lock:
            table = self._open()
            table.seq_keep(seq_id)
            self._back.only(table, seq_id)
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
            if table.seq_pos_max(seq_id) != before:
                self._back.shifted(table, seq_id)
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
            if data:
                table.clear()
                self._back.cleared(table)
            else:
                self._back.drop_sequences(table)
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
                from .memory.buffers import StateBuffers

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
            if self._back.kept is not None:
                self._back.kept.histories.resize(target.n_seq_max)
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
        return self._back.kept is not None and self._make_checkpoint(seq_id, held=False) is not None

    def _make_checkpoint(self, seq_id: int, held: bool) -> Checkpoint | None:
        with self._lock:
            table = self._open()
            table.check_seq_id(seq_id)
            made = self._with_checkpoints().make(table, seq_id, held=held)
            self._changed()  # the next step needs a cell more
            return made

    def _with_checkpoints(self) -> CheckpointStore:
        self._open()
        if self._back.kept is None:
            raise Unsupported("this cache was made without checkpoint_cells")
        return self._back.kept

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
            self._back.switch(self.table, kept, seq_id, checkpoint)
            self._changed()

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
                self._back.switch(self.table, kept, seq_id, best)
                self._changed()
                return best.n_tokens
            return own if history.whole and own == len(history.tokens) else 0

    def known_prefix(self, tokens: Sequence[int] | Int32Array) -> int:
        """Tokens at the start of `tokens`, int32 [n], that the tokens of some checkpoint start with too.

        Where they part is a place to come back to. 0 with `own_lineage`.
        """
        with self._lock:
            return self._with_checkpoints().shared(token_array(tokens))

    @property
    def replay(self) -> Replay | None:
        """What the host has registered for reading tokens again; see `rollback.Replay`."""
        return self._back.replay

    @replay.setter
    def replay(self, replay: Replay | None) -> None:
        self._back.replay = replay

    @property
    def max_replay(self) -> int | None:
        """The most tokens that `seq_rm` has read again; None: no limit."""
        return self._back.max_replay

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
            if self._back.kept is not None:
                self._back.kept.set_tokens(seq_id, token_array(tokens))

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
        return self._back.kept is not None and self._back.kept.own_lineage

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes that the cells for checkpoints take."""
        return self.checkpoint_cells * (1 + self.table.n_rs_seq) * self.spec.cell_bytes

    # states

    def state_size(self, seq_id: int = SEQ_ANY) -> int:
        """Bytes of the state of one sequence, or of the whole cache. Raises `SeqIdError`."""
        with self._lock:
            return state_bytes(self._open(), self.spec, seq_id)

    def state_write(self, writer: Any, seq_id: int = SEQ_ANY, flags: int = 0) -> None:
        """Writes the state of one sequence, or of the whole cache, in llama.cpp's format (see `states.image`).

        `writer` has ``write(bytes)``, as a binary file has, or is memory of at least `state_size` bytes; one that also
        has ``write_rows`` is given the rows' places instead of their bytes. `flags` are llama.cpp's; none of them
        changes what a recurrent state writes. Raises `SeqIdError`, `Unsupported` without buffers, and
        `InvalidArgument` for memory that is too small.
        """
        with self._lock:
            table, buffers = self._open(), self._with_buffers()
            write_state(writer_to(writer, buffers, self.state_size(seq_id)), table, self.spec, seq_id)

    def state_read(self, reader: Any, seq_id: int = SEQ_ANY, flags: int = 0) -> None:
        """Restores one sequence, or the whole cache, from what `state_write` or llama.cpp wrote.

        `reader` has ``read(n_bytes)``, as a binary file has, or is memory that holds the state and nothing else. A
        sequence goes to an empty cell or to one that is its own alone; the whole cache to cells 0, 1, ...

        All is read and checked before anything changes: when it raises `StateError`, the cache is what it was. Only
        rows of cells that hold no state may have changed, where `reader` takes rows from its stream to their places
        itself and at once (see `DeviceReader`). With `FLAG_ON_DEVICE` it does so after the rest has been checked;
        should that fail, what was to be restored is lost.
        """
        with self._lock:
            table, buffers = self._open(), self._with_buffers()
            source, on_device = reader_from(reader), bool(flags & FLAG_ON_DEVICE)
            if on_device and not hasattr(source, "read_rows"):
                raise Unsupported("states on a device need a reader of rows")
            cells = read_cells(source, table, seq_id)
            cell_ids, after = find_room(
                table, self.placement, cells, seq_id, lambda: self._back.make_room(self.table)
            )
            waits = bool(getattr(source, "rows_wait", False))

            def taken(cell_id: int) -> bool:
                return bool(table.cell(cell_id).seq_ids)

            fill: Callable[[], None]
            if on_device:
                columns: list[Column] = []
                read_columns(source, self.spec, columns.append)
                fill = partial(take_rows, source, columns, cell_ids)
            elif getattr(source, "streams_rows", False) and (waits or not any(map(taken, cell_ids))):
                fill = partial(read_columns, source, self.spec, lambda column: take_rows(source, (column,), cell_ids))
            else:
                fill = partial(set_rows, read_rows(source, self.spec, cells), buffers, cell_ids)
            if isinstance(source, MemoryReader):
                source.check_end()
            try:
                fill()
            except BaseException:
                lost = [] if waits else list(filter(taken, cell_ids))  # written over in part
                if lost:
                    self._drop_cells(lost)
                raise
            self.table = after
            self._back.replaced(after, seq_id)
            self._publish(None)

    def save(
        self,
        path: str | os.PathLike[str],
        seq_id: int = SEQ_ANY,
        tokens: Tokens | Sequence[int] | None = None,
        *,
        checkpoints: bool = True,
    ) -> None:
        """Saves the state of one sequence, or of the whole cache, in a file of our own (see `states.file`).

        `tokens` are kept with it: those of the sequence, or by sequence, ``{seq_id: [token, ...]}``; by default those
        that the cache knows. With `checkpoints` the states that these sequences may go back to are saved too (not with
        `own_lineage`). The file replaces an older one when it is complete and on the disk; a save that fails or is
        killed leaves the old one. Raises `SeqIdError`, `InvalidArgument` for tokens that cannot be, `Unsupported`
        without buffers, `OSError`.
        """
        with self._lock:
            table, buffers, kept = self._open(), self._with_buffers(), self._back.kept
            size = self.state_size(seq_id)
            saved = [seq for seq, pos in enumerate(table.positions()) if pos >= 0 and seq_id in (SEQ_ANY, seq)]
            if tokens is None and kept is not None:
                tokens = {seq: kept.histories[seq].tokens for seq in saved if kept.histories[seq].whole}
            pinned = kept.to_save(table, saved) if kept is not None and checkpoints else []
            states = table.of_pins([each.pin for each in pinned])
            header = Header(
                spec_fields(self.spec), seq_id, size, checked_tokens(tokens, seq_id, saved),
                checkpoints=tuple(tuple(each.tokens or ()) for each in pinned),
                checkpoint_bytes=state_bytes(states, self.spec, 0) if pinned else 0,
            )
            with Saving(path, header) as file:
                writer = writer_to(file, buffers, size + header.following_bytes)
                write_state(writer, table, self.spec, seq_id)
                for i in range(len(pinned)):
                    write_state(writer, states, self.spec, i)

    def load(self, path: str | os.PathLike[str], seq_id: int = SEQ_ANY) -> dict[int, list[int]]:
        """Restores what `save` wrote; returns the tokens that were saved with it, by sequence.

        A file of one sequence goes to `seq_id`, any one; a file of a whole cache is loaded without it, and may be of a
        larger or smaller cache if the states in it fit. Checkpoints in it are taken as long as there are free cells for
        such. Raises `StateError`, with nothing changed, for a file that is not whole, not intact, of another model
        (naming the fields), or does not fit; and `InvalidArgument`, `OSError`.
        """
        with self._lock, open(path, "rb", buffering=0) as file:
            table, kept = self._open(), self._back.kept
            header = read_header(file)
            check_spec(header, self.spec)
            if (header.seq_id == SEQ_ANY) != (seq_id == SEQ_ANY):
                holds = "a whole cache" if header.seq_id == SEQ_ANY else f"sequence {header.seq_id} alone"
                how = "without a seq_id" if header.seq_id == SEQ_ANY else "with the seq_id that is to have it"
                raise InvalidArgument(f"the file holds {holds}: load it {how}")
            one = CellTable(1, 1)
            payload, states = read_payload(
                file, header, most_bytes(table, self.spec, seq_id),
                0 if kept is None or kept.own_lineage else kept.n_cells, most_bytes(one, self.spec, 0),
            )
            images = [read_image(state, one, self.spec, 0) for state in states]
            self.state_read(payload, seq_id)
            whole = header.seq_id == SEQ_ANY
            tokens = {saved if whole else seq_id: list(ids) for saved, ids in header.tokens.items()}
            self._adopt(tokens, header, images)
            return tokens

    def _adopt(self, tokens: Mapping[int, Sequence[int]], header: Header, images: Sequence[StateImage]) -> None:
        """What a file tells beside the states: what they have read, and the checkpoints."""
        kept, buffers = self._back.kept, self._with_buffers()
        if kept is None:
            return
        for seq_id, ids in tokens.items():
            if len(ids) == self.table.seq_pos_max(seq_id) + 1:
                kept.set_tokens(seq_id, token_array(ids))
        for ids, image in zip(header.checkpoints, images, strict=False):
            if len(image.cells) == 1 and image.cells[0].pos == len(ids) - 1:
                if not kept.adopt(self.table, token_array(ids), lambda cell_id: set_rows(image, buffers, [cell_id])):  # noqa: B023 - called here
                    return

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
