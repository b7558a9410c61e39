"""`RecurrentCache`: joins cells, checkpoints, memory and states, and decides nothing itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ._access import Access
from .cells.observers import Observers
from .cells.planner import Planner
from .cells.slots import CLASSIC, PLACEMENTS, SlotPlan, commit, discard
from .cells.spec import CacheSpec
from .cells.table import CellTable
from .cells.ubatch import CELL_NONE, SEQ_ANY, UBatch
from .checkpoints.api import Checkpoints
from .checkpoints.policy import CheckpointPolicy, DefaultPolicy, cells_within
from .checkpoints.rollback import Rollback
from .checkpoints.store import CheckpointStore, Stats
from .errors import InvalidArgument, Unsupported, counted
from .states.file import Tokens
from .states.transfer import StateTransfer

if TYPE_CHECKING:
    from .memory.buffers import StateBuffers
    from .memory.ggml import GgmlLib

_T = TypeVar("_T")


class RecurrentCache:
    """One fixed-size state a sequence, in ggml buffers, for the sequences ``0 .. n_seq_max - 1``.

    `spec`: what a cell holds. `n_cells`: room for that many states. `n_seq_max`: default `n_cells`. `placement`:
    ``"classic"`` places as llama.cpp does, ``"compact"`` avoids copying bystanders; what the sequences compute is the
    same. `ggml`: the library to allocate with (default: `GgmlLib.find`). `devices`: name of the device of each layer,
    [n_layer], or one for all, None is the CPU; or `bufts`, addresses of ggml buffer types, [n_layer]. With
    ``allocate=False`` there are no buffers: the table only, for hosts that keep the rows themselves. `n_rs_seq`: the
    host's graphs keep the states of that many earlier tokens, see `CellTable`. `empty_tensors`: as `StateBuffers`.

    `checkpoint_cells`: room for that many checkpoints besides, or `checkpoint_bytes`, as many cells as these hold.
    `policy` says which the cache makes by itself. With `hybrid` a sequence rolls back to its own past only: for hosts
    that keep an attention half beside this cache. `max_replay`: the most tokens that `seq_rm` has replayed; None is no
    limit.

    Calls may come from several threads, one at a time runs. Raises `InvalidArgument`, `GgmlNotFound`,
    `AllocationError`. After `close` every call raises `ClosedError`.
    """

    spec: CacheSpec
    table: CellTable
    """Which sequence is in which cell, at which position; always the same object. Changed by the cache only."""
    buffers: StateBuffers | None
    """The tensors, their sizes and rows; None without. Another object after `resize`."""
    checkpoints: Checkpoints
    """Checkpoints: made, found, gone to; tokens that the sequences have read."""
    observers: Observers

    _access = Access("cache", closed=True)  # until __init__ has succeeded

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
        hybrid: bool = False,
        max_replay: int | None = None,
    ) -> None:
        if placement not in PLACEMENTS:
            raise InvalidArgument(f"placement {placement!r} is not one of {', '.join(PLACEMENTS)}")
        if checkpoint_bytes is not None:
            checkpoint_cells = cells_within(checkpoint_bytes, spec.cell_bytes * (1 + n_rs_seq))
        if n_cells < 1 or checkpoint_cells < 0:
            raise InvalidArgument(f"a cache of {counted(n_cells, 'cell')}, and {checkpoint_cells} for checkpoints")
        self.spec = spec
        self.placement = placement
        self.table = CellTable(n_cells + checkpoint_cells, n_cells if n_seq_max is None else n_seq_max, n_rs_seq)
        store = None
        if checkpoint_cells:
            store = CheckpointStore(self.table, checkpoint_cells, DefaultPolicy() if policy is None else policy, hybrid)
        access = Access("cache")
        self.observers = Observers()
        self._rollback = Rollback(self.table, store, self.observers, max_replay)
        self._planner = Planner(self.table, placement, self._rollback.evict)
        self._states = StateTransfer(self.table, spec, placement, self._rollback)
        self.checkpoints = Checkpoints(self._rollback, spec, access, self.observers.changed)
        self.buffers = None
        if allocate:
            from .memory.buffers import StateBuffers
            from .memory.ggml import GgmlLib

            ggml = ggml if ggml is not None else GgmlLib.find()
            self.buffers = StateBuffers(
                ggml, spec, self.table.n_rows, devices=devices, bufts=bufts, empty_tensors=empty_tensors
            )
        self._access = access

    # lifetime

    def close(self) -> None:
        """Frees the buffers. Idempotent. Tensor addresses and views are void from here on."""
        if self._access.close():
            self._end_plan()
            if self.buffers is not None:
                self.buffers.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._access.closed

    def __enter__(self) -> RecurrentCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    # steps

    @property
    def plan(self) -> SlotPlan | None:
        """The plan of the last slot; None before the first, and after `clear`, `resize` and `discard_slot`."""
        return self._planner.last

    def prepare(self, ubatches: Sequence[UBatch]) -> bool:
        """Whether the ubatches fit, one after the other. Nothing changes; the plans are kept for `find_slot`.

        Raises `SeqIdError` for an id that cannot be, `StateError` for a sequence that has lost its state.
        """
        access = self._access
        with access.lock:
            if access.closed:
                access.check()
            self._rollback.check(ubatches)
            return self._planner.prepare(ubatches, self._can_move)

    def find_slot(self, ubatch: UBatch, batch: int = 0) -> SlotPlan | None:
        """Finds a slot and commits it; None, with nothing changed, when there is no room.

        `batch` numbers the batch that the ubatch is a part of, if the host knows better than `prepare`; 0: it doesn't.

        A ubatch that `prepare` has planned on this very state is not planned again. Row `rs_z` is cleared when a
        sequence starts from it. With compact placement and all rows in host memory, rows of sequences that have no part
        in the step may be moved here, see `SlotPlan.moves`; they belong to the cache, so no graph may be at work on
        them. Raises as `prepare`.
        """
        access = self._access
        with access.lock:
            if access.closed:
                access.check()
            batch = self._planner.enter_batch(batch)
            self._rollback.before_step(ubatch, batch)  # check, and checkpoints that are due
            plan = self._planner.plan(ubatch, self._can_move)  # evicts checkpoints if it needs room
            if plan is None:
                return None
            self._commit(plan)  # moves rows first
            self._rollback.after_step(ubatch, batch, bool(plan.gaps))
            self._publish(plan)
            return plan

    def _can_move(self) -> bool:
        """Whether rows can be moved between graphs for little: in host memory, where a copy is done when it returns."""
        return self.buffers is not None and self.buffers.on_host

    def _commit(self, plan: SlotPlan) -> None:
        """Makes the rows ready that the slot reads, and commits it."""
        try:
            if self.buffers is not None and (plan.moves or (plan.rs_z != CELL_NONE and plan.starts)):
                self.buffers.make_ready(plan.moves, (plan.rs_z,) if plan.starts else ())
            commit(self.table, plan)
        except BaseException:
            if plan.moves and self.table.epoch == plan.epoch:  # interrupted: which row holds which state is not known
                moved = [cell_id for move in plan.moves for cell_id in move[:2]]
                self._drop_states(lambda: self.table.drop_cells(moved))
            raise

    def _publish(self, plan: SlotPlan) -> None:
        self._planner.last = plan
        try:
            self.observers.publish(plan)  # inside the lock: C must not read an older plan than the table's
        except BaseException:  # a host that can't read the plan can't compute on the slot
            self._drop_states(lambda: discard(self.table, plan))
            raise

    def s_copy(self, i: int) -> int:
        """The row that row ``head + i`` of the last slot reads from. Raises `InvalidArgument`: no slot, i outside."""
        return int(self._planned(i).s_copy[i])

    def s_mask(self, i: int) -> float:
        """1.0: row ``head + i`` of the last slot keeps what it reads; 0.0: it starts from zero. Raises as `s_copy`."""
        return float(self._planned(i).src[i] >= 0)

    def _planned(self, i: int) -> SlotPlan:
        with self._access:
            plan = self._planner.last
        n = 0 if plan is None else plan.n
        if plan is None or not 0 <= i < n:
            raise InvalidArgument(f"row {i} is outside the last slot of {counted(n, 'row')}")
        return plan

    def discard_slot(self) -> None:
        """The computation on the last slot failed: the sequences whose rows may be half written lose their states.

        A sequence that has lost its state is empty, but can't continue at a position above 0 before it was removed, or
        rolled back to tokens of before the failed step (`seq_rm`, which restores and replays what the cache knows).
        Raises `StalePlan` when the table has changed since, and `InvalidArgument` when there is no slot.
        """
        with self._access:
            plan = self._planner.last
            if plan is None:
                raise InvalidArgument("there is no slot to discard")
            self._drop_states(lambda: discard(self.table, plan))

    def _drop_states(self, drop: Callable[[], None]) -> None:
        self._rollback.drop_states(drop)
        self._end_plan()

    def _end_plan(self) -> None:
        self._planner.last = None
        self._planner.forget_prepared()
        self.observers.publish(None)

    # sequences

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Removes the positions ``[p0, p1)`` of a sequence; of all sequences with `SEQ_ANY`. As `CellTable`'s, but:

        The end of a sequence, ``[p0, -1)``, can be removed whenever its tokens are known: the sequence is rolled back
        to the nearest checkpoint that has read no more than `p0` tokens, and the host replays what is missing up to
        `p0` (see `Checkpoints.replay`; at most `max_replay` tokens). False, and nothing has changed, when that is not
        possible. When a replay fails in the middle the state is again what it was; with `hybrid`, or with every cell
        for checkpoints held, it is lost, see `discard_slot`.

        Checkpoints stay when a sequence is removed. With `hybrid` those behind `p0` end.
        """
        with self._access:
            done = self._rollback.seq_rm(seq_id, p0, p1)
            self.observers.changed()
            return done

    def seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int = -1, p1: int = -1) -> None:
        """As `CellTable.seq_cp`. The fork may roll back to the checkpoints of its source."""
        with self._access:
            self.table.seq_cp(seq_id_src, seq_id_dst, p0, p1)
            self._rollback.copied(seq_id_src, seq_id_dst)
            self.observers.changed()

    def seq_keep(self, seq_id: int) -> None:
        """As `CellTable.seq_keep`. Checkpoints stay; with `hybrid` those of the sequence."""
        with self._access:
            self.table.seq_keep(seq_id)
            self._rollback.only(seq_id)
            self.observers.changed()

    def seq_add(self, seq_id: int, p0: int, p1: int, shift: int) -> None:
        """As `CellTable.seq_add`. What the shifted states have read counts as unknown from then on."""
        self._shift(seq_id, lambda: self.table.seq_add(seq_id, p0, p1, shift))

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """As `CellTable.seq_div`. What the shifted states have read counts as unknown from then on."""
        self._shift(seq_id, lambda: self.table.seq_div(seq_id, p0, p1, d))

    def _shift(self, seq_id: int, shift: Callable[[], None]) -> None:
        with self._access:
            before = self.table.seq_pos_max(seq_id)
            shift()
            if self.table.seq_pos_max(seq_id) != before:
                self._rollback.shifted(seq_id)
            self.observers.changed()

    def seq_pos_min(self, seq_id: int) -> int:
        """As `CellTable.seq_pos_min`."""
        with self._access:
            return self.table.seq_pos_min(seq_id)

    def seq_pos_max(self, seq_id: int) -> int:
        """As `CellTable.seq_pos_max`."""
        with self._access:
            return self.table.seq_pos_max(seq_id)

    def positions(self) -> list[int]:
        """`seq_pos_max` of every sequence, [n_seq_max]."""
        with self._access:
            return self.table.positions()

    def clear(self, data: bool = True) -> None:
        """Forgets every sequence. With `data` every row becomes zero and every checkpoint ends: no byte is left."""
        with self._access:
            if data:
                self.table.clear()
                self._rollback.cleared()
            else:
                self._rollback.drop_sequences()
            self._end_plan()
            if data and self.buffers is not None:
                self.buffers.clear()

    def resize(self, n_cells: int, n_seq_max: int | None = None) -> None:
        """Changes the number of cells for sequences; states and checkpoints are kept, their rows copied to new buffers.

        Tensor addresses change, so a host builds its graphs anew. Raises as `CellTable.resize`, and `AllocationError`;
        then nothing has changed. Both sets of buffers exist while the rows are copied.
        """
        with self._access:
            target = self.table.copy()
            moves = dict(target.resize(n_cells + self.checkpoints.n_cells, n_seq_max))
            if self.buffers is not None:
                rows = [(self.table.row_of(c), moves.get(c, c)) for c in self.table.used_cells()]
                self.buffers = self.buffers.replaced(target.n_rows, rows)
            self.table.become(target)
            self._rollback.resized()
            self._end_plan()

    # states

    def stats(self) -> Stats:
        """Counts of tokens and checkpoints up to now. Raises `Unsupported` without cells for checkpoints."""
        return self.checkpoints.stats()

    def state_size(self, seq_id: int = SEQ_ANY) -> int:
        """Bytes of the state of one sequence, or of the whole cache. Raises `SeqIdError`."""
        with self._access:
            return self._states.size(seq_id)

    def state_write(self, writer: Any, seq_id: int = SEQ_ANY, flags: int = 0) -> None:
        """Writes the state of one sequence, or of the whole cache, in llama.cpp's format (see `states.image`).

        `writer` has ``write(bytes)``, as a binary file has, or is memory of at least `state_size` bytes; one that also
        has ``write_rows`` is given the rows' places instead of their bytes. `flags` are llama.cpp's; none of them
        changes what a recurrent state writes. Raises `SeqIdError`, `Unsupported` without buffers, and
        `InvalidArgument` for memory that is too small.
        """
        with self._access:
            self._states.write(self.with_buffers(), writer, seq_id)

    def state_read(self, reader: Any, seq_id: int = SEQ_ANY, flags: int = 0) -> None:
        """Restores one sequence, or the whole cache, from what `state_write` or llama.cpp wrote.

        `reader` has ``read(n_bytes)``, as a binary file has, or is memory that holds the state and nothing else. A
        sequence goes to an empty cell or to one that is its own alone; the whole cache to cells 0, 1, ...

        All is read and checked before anything changes: when it raises `StateError`, the cache is what it was. Only
        rows of cells that hold no state may have changed, where `reader` takes rows from its stream to their places
        itself and at once (see `DeviceReader`). With `FLAG_ON_DEVICE` it does so after the rest has been checked;
        should that fail, what was to be restored is lost.
        """
        with self._access:
            self._restore(lambda: self._states.read(self.with_buffers(), reader, seq_id, flags))

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
        that the cache knows. With `checkpoints` those that these sequences may roll back to are saved too (not with
        `hybrid`). The file replaces an older one when it is complete and on the disk; a save that fails or is killed
        leaves the old one. Raises `SeqIdError`, `InvalidArgument` for tokens that cannot be, `Unsupported` without
        buffers, `OSError`.
        """
        with self._access:
            self._states.save(self.with_buffers(), path, seq_id, tokens, checkpoints)

    def load(self, path: str | os.PathLike[str], seq_id: int = SEQ_ANY) -> dict[int, list[int]]:
        """Restores what `save` wrote; returns the tokens that were saved with it, by sequence.

        A file of one sequence goes to `seq_id`, any one; a file of a whole cache is loaded without it, and may be of a
        larger or smaller cache if the states in it fit. Checkpoints in it are taken as long as there are free cells for
        such. Raises `StateError`, with nothing changed, for a file that is not whole, not intact, of another model
        (naming the fields), or does not fit; and `InvalidArgument`, `OSError`.
        """
        with self._access:
            return self._restore(lambda: self._states.load(self.with_buffers(), path, seq_id))

    def _restore(self, restore: Callable[[], _T]) -> _T:
        """The plan ends when the table has changed, also where `restore` raises."""
        epoch = self.table.epoch
        try:
            return restore()
        finally:
            if self.table.epoch != epoch:
                self._end_plan()

    def with_buffers(self) -> StateBuffers:
        """`buffers`. Raises `Unsupported` for a cache without."""
        if self.buffers is None:
            raise Unsupported("this cache was made without buffers")
        return self.buffers
