"""The cell table: which sequence's state is in which cell, at which position. Needs neither ggml nor cffi.

A cell holds one sequence's whole state. Several sequences may share a cell (after `CellTable.seq_cp`) until one of
them decodes a token. A pin is an owner that never does: it shares a cell and keeps its state, which is all that a
checkpoint needs. The table knows nothing of plans: `slots` reads it and hands it a `CellDelta` to apply.

Columns are Python lists, because a step touches single entries; the set of empty cells is one big integer, so that
"next empty cell" costs a shift instead of a scan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import CorruptTable, InvalidArgument, SeqIdError, counted
from .invariants import problems
from .ubatch import CELL_NONE, POS_MAX, POS_NONE, Int32Array

Owners = tuple[int, ...]
"""Sequences of one cell in ascending order; empty for an empty cell. Pin k is owner ``n_seq_max + k``."""


class Snapshots(NamedTuple):
    """The states after earlier tokens that the host's graphs have kept behind a cell's row, and its rollback."""

    kept: int
    """Tokens that the state can be rolled back by."""
    back: int
    """Tokens that it was rolled back by since it was written: the snapshot that it is read from."""


NO_SNAPSHOTS = Snapshots(0, 0)


class Cell(NamedTuple):
    """One cell as it stands."""

    pos: int
    """Position of the last token folded into the state; `POS_NONE` when empty."""
    src: int
    """`CELL_NONE`: the next sequence starts from zero; else the cell itself."""
    seq_ids: Owners
    """Without pins."""
    pins: tuple[int, ...] = ()


class Columns(NamedTuple):
    """The whole table as arrays, copied."""

    pos: Int32Array
    """int32 [size]"""
    src: Int32Array
    """int32 [size]"""
    tail: Int32Array
    """int32 [n_seq_max]: the cell of each sequence's latest state, `CELL_NONE` for an empty sequence."""
    seq_ids: tuple[Owners, ...]
    """[size], without pins"""


class CellDelta(NamedTuple):
    """New values for the cells that one step touches: the slot's window as slices, the few others one by one.

    `CellTable.apply` returns the delta that undoes it, so an undo costs what the cells touched cost.
    """

    head: int
    n: int
    rs_z: int
    window: int
    """First cell of the slices below."""
    pos: list[int]
    src: list[int]
    owners: list[Owners] | None
    """None: the owners stay."""
    others: Sequence[tuple[int, int, int, Owners]] = ()
    """(cell, pos, src, owners) outside the window."""
    tails: Sequence[tuple[int, int]] = ()
    """(seq_id, cell)"""
    snapshots: Sequence[tuple[int, Snapshots]] = ()
    """(cell, snapshots), anywhere"""


_EPOCHS = itertools.count(1)
"""One counter for all tables, so that a plan fits no state but the one it was made on."""


def _span(p0: int, p1: int) -> tuple[int, int]:
    """The half-open range of positions meant by ``[p0, p1)``, where negative is from the start, to the end."""
    return max(p0, 0), p1 if 0 <= p1 < POS_MAX else POS_MAX + 1


def _check_size(size: int) -> None:
    if not 1 <= size <= POS_MAX:
        raise InvalidArgument(f"size is {size}, not from 1 to {POS_MAX}")


def iter_bits(mask: int) -> Iterator[int]:
    """The set bits of `mask`, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class CellTable:
    """`size` cells for sequences ``0 .. n_seq_max - 1`` (default: as many as cells).

    With `n_rs_seq` the host's graphs keep the states of that many earlier tokens in rows behind the cells' (snapshot k
    of cell c is row ``k * size + c``), so that `seq_rm` can roll back the last tokens of a step.

    Every change draws a new `epoch`; `slots.commit` refuses a plan made at another one. Raises `InvalidArgument` for a
    size or n_seq_max below 1, or a negative n_rs_seq.
    """

    __slots__ = (
        "_empty", "_free_pins", "_owners", "_pos", "_snapshots", "_src", "_tail", "epoch", "head", "n", "n_rs_seq",
        "n_seq_max", "rs_z", "size",
    )

    size: int
    n_seq_max: int
    head: int
    """First cell of the last slot; the search for an empty cell starts here."""
    n: int
    """Cells in the last slot."""
    rs_z: int
    """Row that the last slot's new sequences read zeros from; `CELL_NONE` if none."""
    epoch: int

    def __init__(self, size: int, n_seq_max: int | None = None, n_rs_seq: int = 0) -> None:
        _check_size(size)
        if n_seq_max is not None and n_seq_max < 1:
            raise InvalidArgument(f"n_seq_max is {n_seq_max}, it must be at least 1")
        if n_rs_seq < 0 or size * (1 + n_rs_seq) > POS_MAX:
            raise InvalidArgument(f"n_rs_seq is {n_rs_seq} for {counted(size, 'cell')}")
        self.size = size
        self.n_seq_max = size if n_seq_max is None else n_seq_max
        self.n_rs_seq = n_rs_seq
        self.n = 0
        self.rs_z = CELL_NONE
        self.clear()

    def _touch(self) -> None:
        self.epoch = next(_EPOCHS)

    # reading

    @property
    def used(self) -> int:
        """Cells with at least one sequence or pin."""
        return self.size - self._empty.bit_count()

    @property
    def n_rows(self) -> int:
        """Rows of each tensor: those of the cells, and behind them those of the snapshots."""
        return self.size * (1 + self.n_rs_seq)

    @property
    def can_shift(self) -> bool:
        """Whether positions may be shifted: always, a state does not contain its position."""
        return True

    @property
    def empty_mask(self) -> int:
        """Bit i is set when cell i is empty."""
        return self._empty

    def used_cells(self) -> Iterator[int]:
        """The cells with at least one sequence or pin, ascending."""
        return iter_bits(((1 << self.size) - 1) ^ self._empty)

    def cell(self, cell_id: int) -> Cell:
        """Cell `cell_id`. Raises `InvalidArgument` outside ``0 <= cell_id < size``."""
        if not 0 <= cell_id < self.size:
            raise InvalidArgument(f"cell {cell_id} is outside the table of {counted(self.size, 'cell')}")
        owners, n_seq_max = self._owners[cell_id], self.n_seq_max
        if not owners or owners[-1] < n_seq_max:
            return Cell(self._pos[cell_id], self._src[cell_id], owners)
        pins = tuple(owner - n_seq_max for owner in owners if owner >= n_seq_max)
        return Cell(self._pos[cell_id], self._src[cell_id], owners[: -len(pins)], pins)

    def tail(self, seq_id: int) -> int:
        """The cell of a sequence's state; `CELL_NONE` for an empty sequence. Raises `SeqIdError`."""
        return self._tail[self.check_seq_id(seq_id)]

    def columns(self) -> Columns:
        """A copy of the whole table as arrays."""
        return Columns(
            np.array(self._pos, dtype=np.int32),
            np.array(self._src, dtype=np.int32),
            np.array(self._tail[: self.n_seq_max], dtype=np.int32),
            tuple(self.cell(cell_id).seq_ids for cell_id in range(self.size)),
        )

    def raw(self) -> tuple[list[int], list[int], list[Owners], list[int]]:
        """The columns pos, src, owners and tail themselves, for the planner, which only reads them."""
        return self._pos, self._src, self._owners, self._tail

    def snapshots(self, cell_id: int) -> Snapshots:
        """What cell `cell_id` can be rolled back by. Raises `InvalidArgument` outside the table."""
        self.cell(cell_id)
        return self._snapshots.get(cell_id, NO_SNAPSHOTS)

    def row_of(self, cell_id: int) -> int:
        """The row that holds the cell's state as it stands: its own, or a snapshot behind it."""
        if not self._snapshots:
            return cell_id
        return cell_id + self._snapshots.get(cell_id, NO_SNAPSHOTS).back * self.size

    def check_seq_id(self, seq_id: int, what: str = "seq_id") -> int:
        """`seq_id`, if it is one. Raises `SeqIdError` with the id and the limit."""
        if not 0 <= seq_id < self.n_seq_max:
            raise SeqIdError(seq_id, self.n_seq_max, what)
        return seq_id

    def next_empty(self, start: int, empty: int | None = None) -> int:
        """The first empty cell from `start` on, wrapping at the end; `CELL_NONE` when there is none.

        `empty` stands in for the table's own mask of empty cells.
        """
        mask = self._empty if empty is None else empty
        if not mask:
            return CELL_NONE
        after = mask >> start
        if after:
            return start + (after & -after).bit_length() - 1
        return (mask & -mask).bit_length() - 1

    # sequences

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        """Removes the positions ``[p0, p1)`` of a sequence; of all sequences with `SEQ_ANY`.

        A state can't be erased in part: False, and nothing has changed, when the range takes some of a sequence's
        positions but not all, and for a seq_id that cannot be. True when there was nothing to remove. `SEQ_ANY` takes
        everything or nothing. Pins stay. With `n_rs_seq` the last tokens can be rolled back, once, as far as the last
        step of this sequence has kept snapshots of them and no other sequence or pin shares the state.
        """
        p0, p1 = _span(p0, p1)
        if seq_id >= self.n_seq_max:
            return False
        if p0 >= p1:
            return True
        if seq_id < 0:
            if p0 > 0 or p1 <= POS_MAX:
                return False
            self.drop_sequences()
            return True
        cell_id = self._tail[seq_id]
        if cell_id == CELL_NONE or p0 > self._pos[cell_id]:
            return True
        if p0 > 0 and p1 > self._pos[cell_id]:
            return self._roll_back(cell_id, p0)
        if p0 > 0 or p1 <= self._pos[cell_id]:
            return False
        self._leave(seq_id)
        if not self._owners[cell_id] and cell_id < self.head:
            self.head = cell_id  # the next search starts at the cell just freed
        self._touch()
        return True

    def seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int = -1, p1: int = -1) -> None:
        """Lets `seq_id_dst` share the state of `seq_id_src`; what it had is dropped. No row is copied.

        Raises `SeqIdError`, and `InvalidArgument` when ``[p0, p1)`` leaves out a part of the source's positions: the
        state of a part does not exist.
        """
        self.check_seq_id(seq_id_src, "seq_id_src")
        self.check_seq_id(seq_id_dst, "seq_id_dst")
        if seq_id_src == seq_id_dst:
            return
        cell_id = self._tail[seq_id_src]
        p0, p1 = _span(p0, p1)
        if cell_id != CELL_NONE and (p0 > 0 or p1 <= self._pos[cell_id]):
            raise InvalidArgument(
                f"seq_cp of positions [{p0}, {p1}): a recurrent state can only be copied whole, sequence {seq_id_src} "
                f"is at position {self._pos[cell_id]}"
            )
        self._leave(seq_id_dst)
        if cell_id != CELL_NONE:
            self._join(seq_id_dst, cell_id)
        self._touch()

    def seq_keep(self, seq_id: int) -> None:
        """Drops every sequence but this one; pins stay. Raises `SeqIdError`."""
        kept = self._tail[self.check_seq_id(seq_id)]
        for other in range(self.n_seq_max):
            if other != seq_id:
                self._leave(other)
        for cell_id in iter_bits(self._empty):
            self._src[cell_id] = CELL_NONE
        # the next search starts at the first cell that is not the kept one
        self.head = min(self.head, 1 if kept == 0 else 0)
        self._touch()

    def drop_sequences(self) -> None:
        """Drops every sequence; pins stay."""
        first = self.size
        for seq_id in range(self.n_seq_max):
            first = min(first, self._tail[seq_id] if self._tail[seq_id] != CELL_NONE else first)
            self._leave(seq_id)
        self.head = min(self.head, first)
        self._touch()

    # positions

    def seq_add(self, seq_id: int, p0: int, p1: int, shift: int) -> None:
        """Adds `shift` to the position of a sequence if that is in ``[p0, p1)``; the state itself has no position.

        Sequences that share the cell are shifted with it. Raises `SeqIdError`, and `InvalidArgument` when the result
        is negative or too large; then nothing has changed.
        """
        self._move_pos(seq_id, p0, p1, lambda pos: pos + shift, f"seq_add by {shift}")

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divides the position of a sequence by `d`, rounding down, if it is in ``[p0, p1)``.

        Sequences that share the cell are moved with it. Raises `SeqIdError`, and `InvalidArgument` for ``d < 1``.
        """
        if d < 1:
            raise InvalidArgument(f"seq_div by {d}: the divisor must be at least 1")
        self._move_pos(seq_id, p0, p1, lambda pos: pos // d, f"seq_div by {d}")

    def seq_pos_min(self, seq_id: int) -> int:
        """Smallest position that the sequence can be asked for: the same as `seq_pos_max`, a state has only one."""
        return self.seq_pos_max(seq_id)

    def seq_pos_max(self, seq_id: int) -> int:
        """Position of the last token in the sequence's state; `POS_NONE` when it is empty. Raises `SeqIdError`."""
        cell_id = self.tail(seq_id)
        return POS_NONE if cell_id == CELL_NONE else self._pos[cell_id]

    def positions(self) -> list[int]:
        """`seq_pos_max` of every sequence, [n_seq_max]."""
        pos = self._pos
        tails = self._tail[: self.n_seq_max]
        return [POS_NONE if cell_id == CELL_NONE else pos[cell_id] for cell_id in tails]

    # pins

    def pin(self, seq_id: int) -> int:
        """A new pin on the cell of a sequence: its state stays when the sequence decodes or is removed.

        No row is copied. Raises `SeqIdError`, and `InvalidArgument` when the sequence is empty.
        """
        cell_id = self.tail(seq_id)
        if cell_id == CELL_NONE:
            raise InvalidArgument(f"sequence {seq_id} is empty: it has no state to pin")
        pin = self._new_pin()
        self._join(self.n_seq_max + pin, cell_id)
        self._touch()
        return pin

    def pin_empty(self, cell_id: int, pos: int) -> int:
        """A new pin on an empty cell, for a state at position `pos` whose rows the caller has put there.

        Raises `InvalidArgument` for a cell that is not empty or a position that is none.
        """
        self.cell(cell_id)
        if self._owners[cell_id] or not 0 <= pos <= POS_MAX:
            raise InvalidArgument(f"a state at position {pos} can't be put into cell {cell_id}: {self.cell(cell_id)}")
        self._pos[cell_id], self._src[cell_id] = pos, cell_id
        pin = self._new_pin()
        self._join(self.n_seq_max + pin, cell_id)
        self._touch()
        return pin

    def of_pins(self, pins: Sequence[int]) -> CellTable:
        """A table of the same cells in which the state of the i-th of these pins is sequence i's, and no others.

        Raises `InvalidArgument` as `pin_cell`; two of the pins must not share a cell.
        """
        other = CellTable(self.size, max(len(pins), 1), self.n_rs_seq)
        for seq_id, pin in enumerate(pins):
            cell_id = self.pin_cell(pin)
            other._pos[cell_id], other._src[cell_id] = self._pos[cell_id], cell_id
            other._join(seq_id, cell_id)
            other._set_snapshots(cell_id, self.snapshots(cell_id))
        other.check()
        return other

    def _new_pin(self) -> int:
        if self._free_pins:
            return self._free_pins.pop()
        self._tail.append(CELL_NONE)
        return len(self._tail) - 1 - self.n_seq_max

    def unpin(self, pin: int) -> None:
        """Releases a pin; a cell without other owners is empty then. Raises `InvalidArgument` as `pin_cell`."""
        cell_id = self.pin_cell(pin)
        self._leave(self.n_seq_max + pin)
        self._free_pins.append(pin)
        if not self._owners[cell_id] and cell_id < self.head:
            self.head = cell_id
        self._touch()

    def pin_cell(self, pin: int) -> int:
        """The cell of a pin. Raises `InvalidArgument` for one that holds no cell."""
        owner = self.n_seq_max + pin
        cell_id = self._tail[owner] if self.n_seq_max <= owner < len(self._tail) else CELL_NONE
        if cell_id == CELL_NONE:
            raise InvalidArgument(f"pin {pin} holds no cell")
        return cell_id

    def is_pin(self, pin: int) -> bool:
        """Whether `pin` holds a cell."""
        owner = self.n_seq_max + pin
        return self.n_seq_max <= owner < len(self._tail) and self._tail[owner] != CELL_NONE

    def go_to_pin(self, seq_id: int, pin: int) -> None:
        """Lets a sequence share the pinned state; what it had is dropped. No row is copied.

        Raises `SeqIdError`, and `InvalidArgument` as `pin_cell`.
        """
        self.check_seq_id(seq_id)
        cell_id = self.pin_cell(pin)
        if self._tail[seq_id] != cell_id:
            self._leave(seq_id)
            self._join(seq_id, cell_id)
        self._touch()

    # whole table

    def clear(self) -> None:
        """Forgets every sequence and pin. Rows are the caller's: new sequences start from zero."""
        self._pos = [POS_NONE] * self.size
        self._src = [CELL_NONE] * self.size
        self._owners: list[Owners] = [()] * self.size
        self._tail = [CELL_NONE] * self.n_seq_max
        self._free_pins: list[int] = []
        self._snapshots: dict[int, Snapshots] = {}  # of the cells that have any
        self._empty = (1 << self.size) - 1
        self.head = 0
        self._touch()

    def resize(self, n_cells: int, n_seq_max: int | None = None) -> tuple[tuple[int, int], ...]:
        """Changes the number of cells and keeps every state and pin; returns which cells move, as (old, new).

        States beyond the new end move to the first empty cells; the others stay. Each is then in its own row: snapshots
        are dropped, and a state that was rolled back has to be copied from `row_of` its old cell. `n_seq_max` defaults
        to the larger of what it was and `n_cells`. The slot of the last step is forgotten. Raises `InvalidArgument`,
        with nothing changed, when the states or the ids in use do not fit.
        """
        _check_size(n_cells)
        if n_seq_max is None:
            n_seq_max = max(self.n_seq_max, n_cells)
        if n_cells < self.used:
            raise InvalidArgument(f"{n_cells} is too small: {counted(self.used, 'cell')} in use")
        live = [seq_id for seq_id, cell_id in enumerate(self._tail[: self.n_seq_max]) if cell_id != CELL_NONE]
        if n_seq_max < max(live, default=0) + 1:
            in_use = f"sequence {max(live)} is in use" if live else "it must be at least 1"
            raise InvalidArgument(f"n_seq_max={n_seq_max} is too small: {in_use}")
        beyond = [cell_id for cell_id in self.used_cells() if cell_id >= n_cells]
        moves = tuple(zip(beyond, iter_bits(self._empty), strict=False))
        new_place = dict(moves)
        kept = [
            (new_place.get(cell_id, cell_id), self._pos[cell_id], self._src[cell_id], self._owners[cell_id])
            for cell_id in self.used_cells()
        ]
        head = self.head if self.head < n_cells else 0
        n_pins, free_pins = len(self._tail) - self.n_seq_max, self._free_pins
        first_pin, shift = self.n_seq_max, n_seq_max - self.n_seq_max
        self.size, self.n_seq_max = n_cells, n_seq_max
        self.n, self.rs_z = 0, CELL_NONE
        self.clear()
        self.head = head
        self._tail += [CELL_NONE] * n_pins
        self._free_pins = free_pins
        for cell_id, pos, src, owners in kept:
            self._pos[cell_id] = pos
            self._src[cell_id] = cell_id if src != CELL_NONE else CELL_NONE
            for owner in owners:
                self._join(owner + shift if owner >= first_pin else owner, cell_id)
        return moves

    def unpinned_cells(self) -> list[int]:
        """The cells that `restore` puts states into, in order: all that no pin holds."""
        first_pin = self.n_seq_max
        return [cell_id for cell_id, owners in enumerate(self._owners) if not owners or owners[-1] < first_pin]

    def restore(self, cells: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Replaces all sequences by these states, (position, sequences) of the cells of `unpinned_cells` in order.

        Pins stay; rows are the caller's. Raises `InvalidArgument`, with nothing changed, when they do not fit, and
        `CorruptTable` for a sequence in two cells or an id that cannot be.
        """
        free = self.unpinned_cells()
        if len(cells) > len(free):
            raise InvalidArgument(f"not enough cells: {counted(len(cells), 'state')} for {counted(len(free), 'cell')}")
        other = self.copy()
        other.drop_sequences()
        for cell_id, (pos, seq_ids) in zip(free, cells, strict=False):
            other._pos[cell_id], other._src[cell_id] = pos, cell_id
            for seq_id in seq_ids:
                other._join(other.check_seq_id(seq_id), cell_id)
        other.check()
        self._pos, self._src, self._owners, self._tail = other._pos, other._src, other._owners, other._tail
        self._empty, self._snapshots, self.head = other._empty, other._snapshots, 0
        self._touch()

    def drop_cells(self, cell_ids: Iterable[int]) -> None:
        """Removes every sequence and pin of these cells: the next sequence in them starts from zero.

        Raises `InvalidArgument` for a cell outside the table, with nothing changed.
        """
        ids = list(cell_ids)
        for cell_id in ids:
            self.cell(cell_id)
        self._drop(ids)

    def become(self, other: CellTable) -> None:
        """Takes on the content and epoch of `other`, which is not to be used any more."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))

    def copy(self) -> CellTable:
        """A table of its own with the same content and epoch."""
        other = CellTable(self.size, self.n_seq_max, self.n_rs_seq)
        other._snapshots, other._free_pins = self._snapshots.copy(), self._free_pins.copy()
        other._pos, other._src, other._tail = self._pos.copy(), self._src.copy(), self._tail.copy()
        other._owners, other._empty = self._owners.copy(), self._empty
        other.head, other.n, other.rs_z, other.epoch = self.head, self.n, self.rs_z, self.epoch
        return other

    def check(self) -> None:
        """Verifies every invariant of the table. Raises `CorruptTable` with the first that does not hold."""
        for problem in problems(self, self._free_pins, self._snapshots):
            raise CorruptTable(problem)

    # steps

    def new_epoch(self) -> int:
        """An epoch that no state of this table has had."""
        return next(_EPOCHS)

    def apply(self, delta: CellDelta, epoch: int) -> CellDelta:
        """Writes the new values and takes on `epoch`; returns the delta that undoes it.

        Only for values that were planned on this very state, see `slots.commit`.
        """
        pos, src, owners, tail = self._pos, self._src, self._owners, self._tail
        first, end = delta.window, delta.window + len(delta.pos)
        undo_owners = None
        undo_others = []
        for cell_id, new_pos, new_src, new_owners in delta.others:
            undo_others.append((cell_id, pos[cell_id], src[cell_id], owners[cell_id]))
            pos[cell_id], src[cell_id] = new_pos, new_src
            self._set_owners(cell_id, new_owners)
        if delta.owners is not None:
            undo_owners = owners[first:end]
            for cell_id, new_owners in enumerate(delta.owners, first):
                if owners[cell_id] != new_owners:
                    self._set_owners(cell_id, new_owners)
        undo_tails = [(seq_id, tail[seq_id]) for seq_id, _ in delta.tails]
        for seq_id, cell_id in delta.tails:
            tail[seq_id] = cell_id
        undo = CellDelta(self.head, self.n, self.rs_z, first, pos[first:end], src[first:end], undo_owners, undo_others,
                         undo_tails, [(cell_id, self.snapshots(cell_id)) for cell_id, _ in delta.snapshots])
        for cell_id, snapshots in delta.snapshots:
            self._set_snapshots(cell_id, snapshots)
        pos[first:end] = delta.pos
        src[first:end] = delta.src
        self.head, self.n, self.rs_z, self.epoch = delta.head, delta.n, delta.rs_z, epoch
        return undo

    # single entries

    def _set_owners(self, cell_id: int, owners: Owners) -> None:
        if bool(owners) != bool(self._owners[cell_id]):
            self._empty ^= 1 << cell_id
        self._owners[cell_id] = owners

    def _join(self, seq_id: int, cell_id: int) -> None:
        self._set_owners(cell_id, tuple(sorted((*self._owners[cell_id], seq_id))))
        self._tail[seq_id] = cell_id

    def _leave(self, seq_id: int) -> None:
        """Takes a sequence out of its cell, if it has one; a cell without owners is empty."""
        cell_id = self._tail[seq_id]
        if cell_id == CELL_NONE:
            return
        self._tail[seq_id] = CELL_NONE
        self._set_owners(cell_id, tuple(s for s in self._owners[cell_id] if s != seq_id))
        if not self._owners[cell_id]:
            self._pos[cell_id] = POS_NONE
            self._src[cell_id] = CELL_NONE
            self._snapshots.pop(cell_id, None)

    def _set_snapshots(self, cell_id: int, snapshots: Snapshots) -> None:
        if snapshots == NO_SNAPSHOTS:
            self._snapshots.pop(cell_id, None)
        else:
            self._snapshots[cell_id] = snapshots

    def _roll_back(self, cell_id: int, p0: int) -> bool:
        """Rolls a cell back to the state before position `p0`, if there is a snapshot of it."""
        kept, back = self._snapshots.get(cell_id, NO_SNAPSHOTS)
        n_tokens = self._pos[cell_id] - (p0 - 1)
        if back or n_tokens > kept or len(self._owners[cell_id]) > 1:
            return False
        self._snapshots[cell_id] = Snapshots(kept, n_tokens)
        self._pos[cell_id] = p0 - 1
        self._touch()
        return True

    def _drop(self, cell_ids: Iterable[int]) -> None:
        first = self.size
        for cell_id in cell_ids:
            for owner in self._owners[cell_id]:
                self._tail[owner] = CELL_NONE
                if owner >= self.n_seq_max:
                    self._free_pins.append(owner - self.n_seq_max)
            self._set_owners(cell_id, ())
            self._pos[cell_id] = POS_NONE
            self._src[cell_id] = CELL_NONE
            self._snapshots.pop(cell_id, None)
            first = min(first, cell_id)
        self.head = min(self.head, first)
        self._touch()

    def _move_pos(self, seq_id: int, p0: int, p1: int, moved: Callable[[int], int], what: str) -> None:
        cell_id = self.tail(seq_id)
        p0, p1 = _span(p0, p1)
        if cell_id == CELL_NONE or not p0 <= self._pos[cell_id] < p1:
            return
        pos = moved(self._pos[cell_id])
        if not 0 <= pos <= POS_MAX:
            raise InvalidArgument(
                f"{what} would move sequence {seq_id} from position {self._pos[cell_id]} to {pos}; "
                f"positions run from 0 to {POS_MAX}"
            )
        self._pos[cell_id] = pos
        self._touch()
