"""Finding a slot: planning is pure, committing is the only change. Needs neither ggml nor cffi.

A slot is a contiguous range of cells, ``[head, head + n)``. The host's graph gathers one row for each of them, computes
the first `n_seqs` and writes all of them back::

    row       head      head+1   ...  head+n_seqs-1 | head+n_seqs  ...  head+n-1
    holds     set 0     set 1         last set      | bystanders, moved or not
    read from s_copy[0] s_copy[1]     ...           | ...          s_copy[n-1]

so a state changes its cell by being read from the old row and written to the new one; nothing else is copied.

A caller that can copy rows itself before the graph runs may be asked to (`SlotPlan.moves`): when sequences are
scattered among others that have no part in a step, it is cheaper to clear a window of n_seqs cells first, by exchanging
the few bystanders in it for sequences of the step, than to have the graph copy every bystander between them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import InvalidArgument, SeqIdError, StalePlan
from .table import NO_SNAPSHOTS, CellDelta, CellTable, Owners, Snapshots, iter_bits
from .ubatch import CELL_NONE, POS_NONE, Float32Array, Int32Array, UBatch

log = logging.getLogger(__name__)

CLASSIC = "classic"
"""llama.cpp's placement, cell for cell."""
COMPACT = "compact"
"""Prefers a run of free or own cells, so that n equals n_seqs and no bystander is copied."""
PLACEMENTS = (CLASSIC, COMPACT)

_INT32 = np.dtype(np.int32)


class Move(NamedTuple):
    """A row to be copied to another before the graph runs, in every layer."""

    src: int
    dst: int
    swap: bool
    """Whether the row of `dst` goes to `src` in turn; else `dst` held no state."""


class SlotPlan(NamedTuple):
    """Where one ubatch works and what its rows are read from. A value: it changes nothing until it is committed.

    The arrays are read-only and stay valid for as long as the plan itself.
    """

    epoch: int
    """State of the table that the plan was made on."""
    epoch_after: int
    """State of the table that committing it leads to."""
    head: int
    n: int
    n_seqs: int
    rs_z: int
    """Row that has to read as zeros because new sequences copy from it, and that nobody else needs; -1 if none."""
    src: Int32Array
    """int32 [n]: the row that each row of the slot is read from; -1: it starts from zero."""
    s_copy: Int32Array
    """int32 [n]: as `src`, but what starts from zero reads row `rs_z`."""
    gaps: tuple[tuple[int, int, int], ...]
    """(seq_id, position before, position after) of sequences whose positions are not consecutive."""
    delta: CellDelta
    ubatch: UBatch
    """What the plan is for."""
    moves: tuple[Move, ...] = ()
    """Rows to be moved in this order before row `rs_z` is cleared and the plan is committed; all else here holds after
    that. Empty unless the planner was allowed moves."""

    @property
    def starts(self) -> bool:
        """Whether a sequence starts from row `rs_z`, which has to be cleared for it; false without such a row."""
        return self.s_copy is not self.src

    @property
    def s_mask(self) -> Float32Array:
        """float32 [n]: 1.0 keeps the row that was read, 0.0 starts from zero."""
        mask = (self.src >= 0).astype(np.float32)
        mask.setflags(write=False)
        return mask


def plan_slots(
    table: CellTable, ubatches: Sequence[UBatch], placement: str = CLASSIC, moves: bool = False
) -> tuple[SlotPlan, ...] | None:
    """A plan for each ubatch, each made on the table as the plans before it leave it.

    `moves`: the caller carries out `SlotPlan.moves`, so compact placement may ask for them where that copies fewer rows
    than the graph would. It never does on a table with snapshots (n_rs_seq): there a state is more than its row.

    The table is as before when this returns or raises, and in between only with several ubatches: no other thread may
    look at it meanwhile. None when one of them does not fit. Costs grow with the sequences and the slots, not with the
    table. Raises `SeqIdError` for an id outside ``[0, n_seq_max)`` and
    `InvalidArgument` for an unknown placement.
    """
    if placement not in PLACEMENTS:
        raise InvalidArgument(f"placement {placement!r} is not one of {', '.join(PLACEMENTS)}")
    for ubatch in ubatches:
        largest = max(max(ids) for ids in ubatch.seq_ids) if ubatch.shared else max(ubatch.primary)
        if largest >= table.n_seq_max:
            raise SeqIdError(largest, table.n_seq_max)
    plans: list[SlotPlan] = []
    undo: list[tuple[CellDelta, int]] = []
    try:
        for ubatch in ubatches:
            if plans:
                undo.append((table.apply(plans[-1].delta, plans[-1].epoch_after), plans[-1].epoch))
            plan = _plan(table, ubatch, placement, moves and not table.n_rs_seq)
            if plan is None:
                return None
            plans.append(plan)
    finally:
        for delta, epoch in reversed(undo):
            table.apply(delta, epoch)
    return tuple(plans)


def plan_next(table: CellTable, last: SlotPlan, ubatch: UBatch) -> SlotPlan | None:
    """The plan for a ubatch that continues the sets of the last slot: what `plan_slots` plans, at less cost.

    None when that is unknown: the sets are not those of `last.ubatch` (the very object, see `UBatch.next`), or the
    table has changed since `last` was committed.
    """
    if ubatch.seq_ids is not last.ubatch.seq_ids or last.epoch_after != table.epoch:
        return None
    # after a slot each set has a cell to itself, side by side and in the ubatch's order
    head, n, step = last.head, ubatch.n_seqs, ubatch.n_seq_tokens
    before = last.ubatch.pos_last
    gaps: tuple[tuple[int, int, int], ...] = ()
    if [pos + step for pos in before] != ubatch.pos_last:
        gaps = tuple(
            (seq_id, pos, after)
            for seq_id, pos, after in zip(ubatch.primary, before, ubatch.pos_last, strict=True)
            if after != pos + step
        )
    if last.rs_z == CELL_NONE and last.delta.owners is None and last.n == n:
        rows, cells = last.src, last.delta.src
    else:
        cells = list(range(head, head + n))
        rows = _frozen_rows(cells)
    delta = CellDelta(head, n, CELL_NONE, head, ubatch.pos_last, cells, None, (), (), _kept_by(table, ubatch, head))
    return SlotPlan(table.epoch, table.new_epoch(), head, n, n, CELL_NONE, rows, rows, gaps, delta, ubatch)


def commit(table: CellTable, plan: SlotPlan) -> None:
    """Makes the plan real; gaps between positions are logged as warnings. Raises `StalePlan` if the table has changed.

    From here on each row of the slot counts as written: its source is itself, so a copy happens once.
    """
    if plan.epoch != table.epoch:
        raise StalePlan(f"the plan was made at epoch {plan.epoch} of the table, which is now at {table.epoch}")
    table.apply(plan.delta, plan.epoch_after)
    for seq_id, before, after in plan.gaps:
        log.warning("sequence %d goes from position %d to %d: not consecutive", seq_id, before, after)


def discard(table: CellTable, plan: SlotPlan) -> None:
    """Drops the states of a committed slot whose computation failed: they may be half written.

    Removed are the ubatch's sequences and every bystander that was to be moved; one that stayed in its row is not.
    Raises `StalePlan` if the table has changed since the commit.
    """
    if plan.epoch_after != table.epoch:
        raise StalePlan(f"the slot was committed at epoch {plan.epoch_after}, the table is now at {table.epoch}")
    rows = np.arange(plan.head, plan.head + plan.n)
    lost = plan.src != rows
    lost[: plan.n_seqs] = True
    table.drop_cells(rows[lost].tolist())


def _plan(table: CellTable, ubatch: UBatch, placement: str, moves: bool) -> SlotPlan | None:
    plan = _plan_among_own(table, ubatch)
    if plan is not None:
        return plan
    draft = _Draft(table, ubatch)
    draft.free_joining()
    if placement == COMPACT:
        own = draft.own_cells()
        usable = own | draft.empty
        first = _lowest_run(usable, ubatch.n_seqs)
        if first == CELL_NONE and moves and usable.bit_count() >= ubatch.n_seqs:
            # Never dearer than classic placement, which reads and writes back each of the k cells that its slot has
            # besides n_seqs usable ones: of the first n_seqs cells of that slot at most k are bystanders
            first = _cheapest_window(table.size, own, draft.empty, ubatch.n_seqs)
            draft.clear_window(first, own)
        if first != CELL_NONE:
            draft.place_at(first)
            return draft.plan(zero_row_always=False)
    return draft.plan(zero_row_always=True) if draft.place_classic() else None


def _frozen_rows(rows: Sequence[int]) -> Int32Array:
    array = np.array(rows, _INT32)
    array.flags.writeable = False
    return array


def _plan_among_own(table: CellTable, ubatch: UBatch) -> SlotPlan | None:
    """The steady state: every set has a cell of its own and these cells lie side by side, in whatever order."""
    pos, _, owners, tail = table.raw()
    n = ubatch.n_seqs
    cells = [tail[seq_id] for seq_id in ubatch.primary]
    if [owners[cell_id] for cell_id in cells] != ubatch.owners:
        return None
    head = cells[0]
    if table.n_rs_seq and any(table.row_of(cell_id) != cell_id for cell_id in cells):
        return None
    in_order = True
    if n > 1:
        head = min(cells)
        window = list(range(head, head + n))
        in_order = cells == window
        if not in_order and sorted(cells) != window:
            return None
    step = ubatch.n_seq_tokens
    gaps: tuple[tuple[int, int, int], ...] = ()
    if [pos[cell_id] + step for cell_id in cells] != ubatch.pos_last:
        gaps = tuple(
            (seq_id, pos[cell_id], last)
            for seq_id, cell_id, last in zip(ubatch.primary, cells, ubatch.pos_last, strict=True)
            if last != pos[cell_id] + step
        )
    rows = _frozen_rows(cells)
    if in_order:
        delta = CellDelta(head, n, CELL_NONE, head, ubatch.pos_last, cells, None, (), (), _kept_by(table, ubatch, head))
    else:
        tails = [(seq_id, cell_id) for ids, cell_id in zip(ubatch.seq_ids, window, strict=True) for seq_id in ids]
        delta = CellDelta(head, n, CELL_NONE, head, ubatch.pos_last, window, ubatch.owners, (), tails,
                          _kept_by(table, ubatch, head))
    return SlotPlan(table.epoch, table.new_epoch(), head, n, n, CELL_NONE, rows, rows, gaps, delta, ubatch)


def _kept_by(table: CellTable, ubatch: UBatch, head: int) -> list[tuple[int, Snapshots]]:
    """The snapshots that the host's graph writes for the ubatch's sets, whose rows are ``head ..``."""
    if not table.n_rs_seq:
        return []
    # the state after each of a set's last tokens, and no more of them than it has tokens here
    kept = Snapshots(min(table.n_rs_seq, ubatch.n_seq_tokens - 1), 0)
    return [(cell_id, kept) for cell_id in range(head, head + ubatch.n_seqs)]


class _Draft:
    """The cells that one ubatch touches, as they would be; everything else is read from the table."""

    def __init__(self, table: CellTable, ubatch: UBatch) -> None:
        self.table = table
        self.ubatch = ubatch
        self.base_pos, self.base_src, self.base_owners, self.base_tail = table.raw()
        self.pos: dict[int, int] = {}
        self.src: dict[int, int] = {}
        self.owners: dict[int, Owners] = {}
        self.tails: dict[int, int] = {}
        self.moves: list[Move] = []
        self.empty = table.empty_mask
        self.first = 0
        self.last = 0

    def tail(self, seq_id: int) -> int:
        return self.tails[seq_id] if seq_id in self.tails else self.base_tail[seq_id]

    def owners_of(self, cell_id: int) -> Owners:
        return self.owners[cell_id] if cell_id in self.owners else self.base_owners[cell_id]

    def set(self, cell_id: int, pos: int, src: int, owners: Owners) -> None:
        self.pos[cell_id], self.src[cell_id], self.owners[cell_id] = pos, src, owners

    def get(self, cell_id: int) -> tuple[int, int, Owners]:
        if cell_id in self.pos:
            return self.pos[cell_id], self.src[cell_id], self.owners[cell_id]
        src = self.base_src[cell_id]
        if src != CELL_NONE:
            src = self.table.row_of(cell_id)
        return self.base_pos[cell_id], src, self.base_owners[cell_id]

    def leave(self, seq_id: int) -> None:
        """Takes a sequence out of its cell, if it has one."""
        cell_id = self.tail(seq_id)
        if cell_id == CELL_NONE:
            return
        self.tails[seq_id] = CELL_NONE
        pos, src, owners = self.get(cell_id)
        if len(owners) == 1:
            self.set(cell_id, POS_NONE, CELL_NONE, ())
            self.empty |= 1 << cell_id
        else:
            self.set(cell_id, pos, src, tuple(s for s in owners if s != seq_id))

    def free_joining(self) -> None:
        """Sequences that are to share another's cell give up their own state."""
        if self.ubatch.shared:
            for ids in self.ubatch.seq_ids:
                for seq_id in ids[1:]:
                    self.leave(seq_id)

    # classic placement

    def place_classic(self) -> bool:
        """A cell for each set, the next empty one for those without, then side by side from the lowest of them on."""
        start = self.table.head
        if start > self.table.used + 2 * self.ubatch.n_seqs:
            start = 0  # enough empty cells before the head: fill the table from its beginning
        cells = []
        for seq_id in self.ubatch.primary:
            cell_id = self.tail(seq_id)
            if cell_id == CELL_NONE or len(self.owners_of(cell_id)) != 1:
                taken = self.table.next_empty(start, self.empty)
                if taken == CELL_NONE:
                    return False
                start = (taken + 1) % self.table.size
                self.take(seq_id, cell_id, taken)
                cell_id = taken
            cells.append(cell_id)
        self.first, self.last = min(cells), max(cells)
        self.gather()
        return True

    def take(self, seq_id: int, shared: int, taken: int) -> None:
        """Gives a sequence an empty cell, into which the state that it shared, if any, is to be copied."""
        pos, src, _ = self.get(taken)
        if shared != CELL_NONE:
            pos, src, owners = self.get(shared)
            self.set(shared, pos, src, tuple(s for s in owners if s != seq_id))
        self.set(taken, pos, src, (seq_id,))
        self.empty &= ~(1 << taken)
        self.tails[seq_id] = taken

    def gather(self) -> None:
        """Exchanges cells until the sets stand in the ubatch's order."""
        for dst, seq_id in enumerate(self.ubatch.primary, self.first):
            cell_id = self.tail(seq_id)
            if cell_id == dst:
                continue
            self.exchange(dst, cell_id, self.get(dst), self.get(cell_id))

    def exchange(
        self, one: int, other: int, of_one: tuple[int, int, Owners], of_other: tuple[int, int, Owners]
    ) -> None:
        """Puts `of_one` into cell `other` and `of_other` into cell `one`; the tails of their owners follow."""
        self.set(one, *of_other)
        self.set(other, *of_one)
        for owner in of_one[2]:
            self.tails[owner] = other
        for owner in of_other[2]:
            self.tails[owner] = one

    # compact placement

    def own_cells(self) -> int:
        """Bit i: only sequences of this ubatch own cell i, so it is free once they have left it."""
        primary = set(self.ubatch.primary)
        own = 0
        for seq_id in self.ubatch.primary:
            cell_id = self.tail(seq_id)
            if cell_id != CELL_NONE and primary.issuperset(self.owners_of(cell_id)):
                own |= 1 << cell_id
        return own

    def clear_window(self, first: int, own: int) -> None:
        """Moves the bystanders out of the window from `first` on: to empty cells, then in exchange for own ones."""
        window = ((1 << self.ubatch.n_seqs) - 1) << first
        targets = itertools.chain(iter_bits(self.empty & ~window), iter_bits(own & ~window))
        for cell_id in list(iter_bits(window & ~(self.empty | own))):
            target = next(targets)
            swap = bool(own >> target & 1)
            (pos, _, owners), (pos_there, _, owners_there) = self.get(cell_id), self.get(target)
            # rows move before anything is read, so the state of each cell is then in its row
            there = (pos_there, cell_id if swap else CELL_NONE, owners_there)
            self.exchange(cell_id, target, (pos, target, owners), there)
            if not swap:
                self.empty ^= 1 << cell_id | 1 << target
            self.moves.append(Move(cell_id, target, swap))

    def place_at(self, first: int) -> None:
        """The sets side by side from `first` on, in cells that are empty or left by this ubatch."""
        n_seqs = self.ubatch.n_seqs
        old = [self.tail(seq_id) for seq_id in self.ubatch.primary]
        states = [(POS_NONE, CELL_NONE) if cell_id == CELL_NONE else self.get(cell_id)[:2] for cell_id in old]
        for seq_id in self.ubatch.primary:
            self.leave(seq_id)
        for cell_id, (pos, src), seq_id in zip(range(first, first + n_seqs), states, self.ubatch.primary, strict=True):
            self.set(cell_id, pos, src, (seq_id,))
            self.tails[seq_id] = cell_id
        self.first, self.last = first, first + n_seqs - 1

    # plan

    def plan(self, zero_row_always: bool) -> SlotPlan:
        """The plan for the cells as they stand; `zero_row_always`: name a zero row even if no set starts from zero."""
        ubatch, first, n = self.ubatch, self.first, self.last - self.first + 1
        n_seqs, step = ubatch.n_seqs, ubatch.n_seq_tokens
        window = range(first, first + n)
        states = [self.get(cell_id) for cell_id in window]
        src = [state[1] for state in states]
        rs_z = CELL_NONE
        if zero_row_always or CELL_NONE in src:
            # a row that is nobody's source; there is one whenever a row has no source. Cells outside the window read
            # their own rows only
            read = {row % self.table.size if row > 0 else row for row in src}
            rs_z = next((cell_id for cell_id in window if cell_id not in read), CELL_NONE)
        gaps = tuple(
            (seq_id, state[0], last)
            for seq_id, state, last in zip(ubatch.primary, states, ubatch.pos_last, strict=False)
            if state[0] >= 0 and last != state[0] + step
        )
        for cell_id, ids in enumerate(ubatch.seq_ids, first):
            for seq_id in ids:
                self.tails[seq_id] = cell_id
        rows = _frozen_rows(src)
        s_copy = _frozen_rows([rs_z if row < 0 else row for row in src]) if CELL_NONE in src else rows
        outside = [cell_id for cell_id in self.pos if not first <= cell_id <= self.last]
        others = [(cell_id, pos, min(row, cell_id), owners)
                  for cell_id in outside for pos, row, owners in (self.get(cell_id),)]
        delta = CellDelta(
            first, n, rs_z, first,
            ubatch.pos_last + [state[0] for state in states[n_seqs:]],
            list(window),
            ubatch.owners + [state[2] for state in states[n_seqs:]],
            others,
            list(self.tails.items()),
            self.snapshots(src, outside),
        )
        return SlotPlan(
            self.table.epoch, self.table.new_epoch(), first, n, n_seqs, rs_z, rows, s_copy, gaps, delta,
            ubatch, tuple(self.moves),
        )

    def snapshots(self, src: list[int], outside: list[int]) -> list[tuple[int, Snapshots]]:
        """The snapshots after the step: new ones of the ubatch's sets, the old ones of cells that are not moved."""
        table = self.table
        if not table.n_rs_seq:
            return []
        after = _kept_by(table, self.ubatch, self.first)
        after += [
            (cell_id, table.snapshots(cell_id) if src[cell_id - self.first] == cell_id else NO_SNAPSHOTS)
            for cell_id in range(self.first + self.ubatch.n_seqs, self.last + 1)
        ]
        after += [(cell_id, table.snapshots(cell_id) if self.owners[cell_id] else NO_SNAPSHOTS) for cell_id in outside]
        return after


def _cheapest_window(size: int, own: int, empty: int, length: int) -> int:
    """The start of the `length` cells that bystanders are moved out of with the fewest copies, the lowest of equals.

    A bystander that finds an empty cell is copied once, in an exchange two rows are copied.
    """
    in_use = length - _counts(own | empty, size, length)
    free = empty.bit_count() - _counts(empty, size, length)
    return int((in_use + np.maximum(in_use - free, 0)).argmin())


def _counts(mask: int, size: int, length: int) -> Int32Array:
    """How many bits are set in each `length` bits of `size`: int32 [size - length + 1]."""
    packed = np.frombuffer(mask.to_bytes(-(-size // 8), "little"), np.uint8)
    counted = np.zeros(size + 1, np.int32)
    np.cumsum(np.unpackbits(packed, count=size, bitorder="little"), out=counted[1:])
    return counted[length:] - counted[: size + 1 - length]


def _lowest_run(mask: int, length: int) -> int:
    """The lowest start of `length` set bits in a row; `CELL_NONE` if there is none."""
    have = 1
    while have < length and mask:
        step = min(have, length - have)
        mask &= mask >> step
        have += step
    return (mask & -mask).bit_length() - 1 if mask else CELL_NONE
