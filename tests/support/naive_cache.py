"""A second model of the cell table for the tests: loops over all cells, no cleverness, plain Python only.

`NaiveCache` does what the seed file describes, one mutation after the other in the seed's order. It differs from the
seed in these points, and in no other:

(a) the head returns to 0 when ``head > used + 2 * n_seqs`` (the seed counts tokens there);
(b) rs_z: after placement it is the first cell of [min, max] that no cell's src names, or -1. Each cell of the window
    whose src is below 0 stages rs_z as the row to read, the others stage their src; then every cell of the window,
    empty ones too, has itself as src. The seed does that later, inside s_copy and s_mask;
(c) `used` is counted anew after each call, so it is the exact number of cells with a sequence;
(d) validation comes first: a bad argument or a ubatch that does not fit changes nothing;
(e) removing everything of every sequence also takes the tails;
(f) tails are a list of their own, ``[n_seq_max]``, because n_seq_max may differ from the number of cells. An empty
    range in seq_rm succeeds and does nothing. A range without an end has no end, not even the largest position. Ids
    outside the limit raise, except in seq_rm, which answers False. seq_cp with a range that does not cover the
    source's state, a position shifted out of [0, 2**31 - 1] and a divisor below 1 raise;
(g) when two cells swap, every tail that names one of them follows. The seed looks at the sequences in the two cells
    only, and so loses a new sequence that has been given a cell but is not yet in the cell's set.

`ToyRows` stands for the buffers and the graph: it executes a slot on numbers instead of states, and `Ledger` knows
the number that each sequence must then have. Together they tell whether any state was lost, mixed up or leaked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

POS_MAX = 2**31 - 1
_PRIME = 2**61 - 1


class NaiveBadId(Exception):
    """A sequence id outside ``[0, n_seq_max)``."""


class NaiveBadArgument(Exception):
    """A range, a shift or a divisor that cannot be."""


@dataclass
class NaiveCell:
    """Room for one state."""

    pos: int = -1
    src: int = -1
    seq_id: set[int] = field(default_factory=set)

    def is_empty(self) -> bool:
        return len(self.seq_id) == 0

    def wipe(self) -> None:
        self.pos, self.src, self.seq_id = -1, -1, set()


@dataclass
class NaiveSlot:
    """What find_slot found; the same names as in `rcache_plugin.cells.slots.SlotPlan`."""

    head: int
    n: int
    n_seqs: int
    rs_z: int
    src: list[int]  # [n], -1: starts from zero
    s_copy: list[int]  # [n], rows to read
    s_mask: list[float]  # [n], 1.0 keep, 0.0 start from zero
    gaps: list[tuple[int, int, int]]  # (seq_id, pos before, last pos)


class NaiveCache:
    """The seed's table with the changes (a) to (g) of the module docstring, plus toy rows."""

    def __init__(self, size: int, n_seq_max: int | None = None) -> None:
        self.size = size
        self.n_seq_max = size if n_seq_max is None else n_seq_max
        self.cells = [NaiveCell() for _ in range(size)]
        self.tails = [-1] * self.n_seq_max
        self.head = 0
        self.n = 0
        self.used = 0
        self.rs_z = -1
        self.rows = ToyRows(size)

    def copy(self) -> NaiveCache:
        other = copy.copy(self)
        other.cells = [NaiveCell(cell.pos, cell.src, set(cell.seq_id)) for cell in self.cells]
        other.tails = list(self.tails)
        other.rows = copy.copy(self.rows)
        other.rows.values = list(self.rows.values)
        return other

    def become(self, other: NaiveCache) -> None:
        self.__dict__.update(other.__dict__)

    # ---- find_slot

    def find_slot(self, sets: Sequence[Sequence[int]], last_pos: Sequence[int], n_seq_tokens: int) -> NaiveSlot | None:
        """Finds and takes a slot; None and nothing changed when the ubatch does not fit."""
        for ids in sets:
            for seq_id in ids:
                self._check_id(seq_id)
        trial = self.copy()
        slot = trial._place(sets, last_pos, n_seq_tokens)
        if slot is not None:
            self.become(trial)
        return slot

    def _place(self, sets: Sequence[Sequence[int]], last_pos: Sequence[int], n_seq_tokens: int) -> NaiveSlot | None:
        n_seqs = len(sets)
        if self.head > self.used + 2 * n_seqs:
            self.head = 0

        # sequences that become shared give up what they have
        for ids in sets:
            for seq_id in ids[1:]:
                if self.tails[seq_id] >= 0:
                    cell = self.cells[self.tails[seq_id]]
                    cell.seq_id.remove(seq_id)
                    self.tails[seq_id] = -1
                    if cell.is_empty():
                        cell.wipe()

        # a cell for each: its own one, or the next empty one
        given: set[int] = set()
        empty = self._next_empty(self.head, given)
        low, high = self.size - 1, 0
        for ids in sets:
            seq_id = ids[0]
            tail = self.tails[seq_id]
            if tail < 0 or self.cells[tail].seq_id != {seq_id}:
                if empty is None:
                    return None
                if tail >= 0:  # leaves a shared cell: starts from a copy
                    old, new = self.cells[tail], self.cells[empty]
                    new.pos, new.src = old.pos, old.src
                    old.seq_id.remove(seq_id)
                    new.seq_id.add(seq_id)
                given.add(empty)
                self.tails[seq_id] = empty
                empty = self._next_empty(empty + 1, given)
            low = min(low, self.tails[seq_id])
            high = max(high, self.tails[seq_id])

        # in the order of the ubatch, from the lowest cell on
        for s, ids in enumerate(sets):
            here, there = low + s, self.tails[ids[0]]
            if here != there:
                self.cells[here], self.cells[there] = self.cells[there], self.cells[here]
                for seq_id in range(self.n_seq_max):
                    if self.tails[seq_id] == here:
                        self.tails[seq_id] = there
                    elif self.tails[seq_id] == there:
                        self.tails[seq_id] = here

        gaps = []
        for s, ids in enumerate(sets):
            cell = self.cells[low + s]
            if cell.pos >= 0 and last_pos[s] != cell.pos + n_seq_tokens:
                gaps.append((ids[0], cell.pos, last_pos[s]))
            cell.pos = last_pos[s]
            cell.seq_id = set(ids)
            for seq_id in ids:
                self.tails[seq_id] = low + s

        # sources
        named = {cell.src for cell in self.cells}
        self.rs_z = -1
        for i in range(low, high + 1):
            if i not in named:
                self.rs_z = i
                break
        src, s_copy, s_mask = [], [], []
        for i in range(low, high + 1):
            cell = self.cells[i]
            src.append(cell.src)
            s_copy.append(self.rs_z if cell.src < 0 else cell.src)
            s_mask.append(0.0 if cell.src < 0 else 1.0)
            cell.src = i

        self.head = low
        self.n = high - low + 1
        self._count()
        return NaiveSlot(self.head, self.n, n_seqs, self.rs_z, src, s_copy, s_mask, gaps)

    def _next_empty(self, start: int, given: set[int]) -> int | None:
        for i in range(self.size):
            at = (start + i) % self.size
            if self.cells[at].is_empty() and at not in given:
                return at
        return None

    def decode(
        self, sets: Sequence[Sequence[int]], last_pos: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> NaiveSlot | None:
        """`find_slot`, then the graph on the toy rows; `tokens` are those of each set."""
        slot = self.find_slot(sets, last_pos, len(tokens[0]))
        if slot is not None:
            self.rows.run(slot, tokens)
        return slot

    # ---- the sequence operations

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        start, end = _range(p0, p1)
        if seq_id >= self.n_seq_max:
            return False
        if start >= end:
            return True
        if seq_id >= 0:
            tail = self.tails[seq_id]
            if tail >= 0:
                pos = self.cells[tail].pos
                if 0 < start <= pos or end <= pos:
                    return False
                if start <= pos < end:
                    self.tails[seq_id] = -1
        elif start > 0 or end <= POS_MAX:
            return False
        else:
            self.tails = [-1] * self.n_seq_max
        freed = []
        for i, cell in enumerate(self.cells):
            if not start <= cell.pos < end:
                continue
            if seq_id < 0:
                cell.seq_id.clear()
            elif seq_id in cell.seq_id:
                cell.seq_id.remove(seq_id)
            else:
                continue
            if cell.is_empty():
                cell.wipe()
                freed.append(i)
        self._head_back(freed)
        self._count()
        return True

    def seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int = -1, p1: int = -1) -> None:
        self._check_id(seq_id_src)
        self._check_id(seq_id_dst)
        if seq_id_src == seq_id_dst:
            return
        start, end = _range(p0, p1)
        tail = self.tails[seq_id_src]
        if tail >= 0 and not (start == 0 and self.cells[tail].pos < end):
            raise NaiveBadArgument
        self._leave(seq_id_dst)
        if tail >= 0:
            self.cells[tail].seq_id.add(seq_id_dst)
            self.tails[seq_id_dst] = tail
        self._count()

    def seq_keep(self, seq_id: int) -> None:
        self._check_id(seq_id)
        without = []
        for i, cell in enumerate(self.cells):
            if seq_id in cell.seq_id:
                cell.seq_id = {seq_id}
            else:
                cell.wipe()
                without.append(i)
        for other in range(self.n_seq_max):
            if other != seq_id:
                self.tails[other] = -1
        self._head_back(without)
        self._count()

    def seq_add(self, seq_id: int, p0: int, p1: int, shift: int) -> None:
        self._move(seq_id, p0, p1, lambda pos: pos + shift)

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        self._check_id(seq_id)
        if d < 1:
            raise NaiveBadArgument
        self._move(seq_id, p0, p1, lambda pos: pos // d)

    def seq_pos_min(self, seq_id: int) -> int:
        self._check_id(seq_id)
        return min((cell.pos for cell in self.cells if seq_id in cell.seq_id), default=-1)

    def seq_pos_max(self, seq_id: int) -> int:
        self._check_id(seq_id)
        return max((cell.pos for cell in self.cells if seq_id in cell.seq_id), default=-1)

    def clear(self) -> None:
        for cell in self.cells:
            cell.wipe()
        self.tails = [-1] * self.n_seq_max
        self.head = self.used = 0

    # ---- what the seed does not have

    def discard(self, slot: Any) -> None:
        """The graph of `slot` failed. Rows that it was to change are dirt from then on, and whoever has one loses it:
        the ubatch's sequences and the bystanders that were to move."""
        for i in range(slot.n):
            at = slot.head + i
            if i >= slot.n_seqs and slot.src[i] == at:
                continue
            for seq_id in self.cells[at].seq_id:
                self.tails[seq_id] = -1
            self.cells[at].wipe()
            self.rows.spoil(at)
        self._count()

    def resize(self, n_cells: int, n_seq_max: int, moves: Iterable[tuple[int, int]]) -> None:
        """Takes the moves (old cell, new cell) that the table chose; the caller has checked that they can be. Rows and
        sources of empty cells are forgotten, and so is the last slot."""
        target = {i: i for i, cell in enumerate(self.cells) if not cell.is_empty()}
        target.update(dict(moves))
        self.rows.resize(n_cells, target)
        old_cells, old_tails = self.cells, self.tails
        self.cells = [NaiveCell() for _ in range(n_cells)]
        for old, new in target.items():
            self.cells[new] = NaiveCell(old_cells[old].pos, new, old_cells[old].seq_id)
        self.tails = [-1] * n_seq_max
        for seq_id, tail in enumerate(old_tails):
            if tail >= 0:
                self.tails[seq_id] = target[tail]
        self.size, self.n_seq_max = n_cells, n_seq_max
        self.n, self.rs_z = 0, -1
        if self.head >= n_cells:
            self.head = 0
        self._count()

    # ---- parts

    def _check_id(self, seq_id: int) -> None:
        if not 0 <= seq_id < self.n_seq_max:
            raise NaiveBadId(seq_id)

    def _leave(self, seq_id: int) -> None:
        if self.tails[seq_id] >= 0:
            cell = self.cells[self.tails[seq_id]]
            cell.seq_id.remove(seq_id)
            self.tails[seq_id] = -1
            if cell.is_empty():
                cell.wipe()

    def _move(self, seq_id: int, p0: int, p1: int, new_pos: Callable[[int], int]) -> None:
        self._check_id(seq_id)
        start, end = _range(p0, p1)
        for cell in self.cells:
            if seq_id in cell.seq_id and start <= cell.pos < end:
                if not 0 <= new_pos(cell.pos) <= POS_MAX:
                    raise NaiveBadArgument
                cell.pos = new_pos(cell.pos)

    def _head_back(self, freed: list[int]) -> None:
        if freed and freed[0] < self.head:
            self.head = freed[0]

    def _count(self) -> None:
        self.used = sum(not cell.is_empty() for cell in self.cells)

    def dump(self) -> dict[str, Any]:
        """Everything that is compared, as plain values."""
        return {
            "head": self.head,
            "n": self.n,
            "used": self.used,
            "rs_z": self.rs_z,
            "pos": [cell.pos for cell in self.cells],
            "src": [cell.src for cell in self.cells],
            "tail": list(self.tails),
            "seq_ids": [tuple(sorted(cell.seq_id)) for cell in self.cells],
        }


def _range(p0: int, p1: int) -> tuple[int, int]:
    return max(p0, 0), (p1 if 0 <= p1 < POS_MAX else POS_MAX + 1)


def row_of(row: int, tokens: Iterable[int]) -> int:
    """The toy step of a model: a running hash; 0 is the zero state."""
    for token in tokens:
        row = (row * 1_000_003 + token + 1) % _PRIME
    return row


class ToyRows:
    """One number a cell in the place of a state, and the gather of a host's graph.

    Rows start as dirt, not as zeros: a new sequence must get its zeros from the slot.
    """

    def __init__(self, size: int) -> None:
        self._n_dirt = 0
        self.values = [self._dirt() for _ in range(size)]

    def _dirt(self) -> int:
        self._n_dirt += 1
        return -self._n_dirt

    def run(self, slot: Any, tokens: Sequence[Sequence[int]]) -> None:
        """Moves rows, clears row rs_z, gathers n rows, steps the first n_seqs, writes n rows back. The older form,
        which has no rs_z and multiplies by s_mask, has to write the same rows."""
        for src, dst, swap in getattr(slot, "moves", ()):  # the naive model has none
            moved, self.values[dst] = self.values[dst], self.values[src]
            self.values[src] = moved if swap else self._dirt()
        assert len(slot.s_copy) == len(slot.s_mask) == len(slot.src) == slot.n
        by_mask = [self.values[row] if keep else 0 for row, keep in zip(slot.s_copy, slot.s_mask, strict=True)]
        if slot.rs_z >= 0:
            self.values[slot.rs_z] = 0
        rows = [self.values[row] for row in slot.s_copy]
        assert rows == by_mask, "rs_z and s_mask disagree"
        for s in range(slot.n_seqs):
            rows[s] = row_of(rows[s], tokens[s])
        self.values[slot.head : slot.head + slot.n] = rows

    def spoil(self, cell: int) -> None:
        """A graph that failed may have left anything here."""
        self.values[cell] = self._dirt()

    def resize(self, n_cells: int, kept: dict[int, int]) -> None:
        """New rows are zeros, as new buffers are; `kept` maps old cells to new ones."""
        old = self.values
        self.values = [0] * n_cells
        for before, after in kept.items():
            self.values[after] = old[before]


class Ledger:
    """The tokens that each sequence has seen, whatever the cells do."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def decode(self, sets: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> None:
        after = {}
        for ids, new in zip(sets, tokens, strict=True):
            seen = [*self.tokens.get(ids[0], []), *new]
            after.update({seq_id: list(seen) for seq_id in ids})
        self.tokens.update(after)

    def remove(self, seq_ids: Iterable[int]) -> None:
        for seq_id in list(seq_ids):
            self.tokens.pop(seq_id, None)

    def cp(self, src: int, dst: int) -> None:
        if src == dst:
            return
        self.remove([dst])
        if src in self.tokens:
            self.tokens[dst] = list(self.tokens[src])

    def keep(self, seq_id: int) -> None:
        self.remove([other for other in self.tokens if other != seq_id])

    def rows(self) -> dict[int, int]:
        """Sequence id to the number its row must hold."""
        return {seq_id: row_of(0, tokens) for seq_id, tokens in self.tokens.items()}
