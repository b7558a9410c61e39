"""The invariants of the cell table: what holds of its columns between any two calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import counted
from .ubatch import CELL_NONE, POS_MAX, POS_NONE

if TYPE_CHECKING:
    from .table import CellTable, Snapshots


def problems(table: CellTable, free_pins: Sequence[int], snapshots: Mapping[int, Snapshots]) -> Iterator[str]:
    """Each invariant that `table` breaks, in words; those that come first are what later ones rely on."""
    yield from _lengths(table)
    yield from _empty_mask(table)
    yield from _cells(table)
    yield from _tails(table)
    yield from _pins(table, free_pins)
    yield from _snapshots(table, snapshots)
    yield from _slot(table)


def _lengths(table: CellTable) -> Iterator[str]:
    """pos, src and owners have an entry for each cell, tail has one for each sequence at least."""
    pos, src, owners, tail = table.raw()
    for name, column in (("pos", pos), ("src", src), ("owners", owners)):
        if len(column) != table.size:
            yield f"column {name}: expected {table.size} entries, found {len(column)}"
    if len(tail) < table.n_seq_max:
        yield f"column tail: expected at least {table.n_seq_max} entries, found {len(tail)}"


def _empty_mask(table: CellTable) -> Iterator[str]:
    """The mask has a bit for each cell without owners."""
    empty = sum(1 << i for i, owners in enumerate(table.raw()[2]) if not owners)
    if empty != table.empty_mask:
        yield f"the mask of empty cells: expected {empty:#x}, found {table.empty_mask:#x}"


def _cells(table: CellTable) -> Iterator[str]:
    """A cell with owners has a position and a state, which is in its own row; another has neither."""
    pos, src, all_owners, _ = table.raw()
    for i, owners in enumerate(all_owners):
        if list(owners) != sorted(set(owners)):
            yield f"cell {i} has owners {owners}, not in ascending order or repeated"
        if bool(owners) != (pos[i] != POS_NONE):
            yield f"cell {i} is at position {pos[i]} with owners {owners}"
        if not POS_NONE <= pos[i] <= POS_MAX:
            yield f"cell {i} is at position {pos[i]}"
        if src[i] not in (CELL_NONE, i):
            yield f"cell {i} still has the source {src[i]}"
        if owners and src[i] == CELL_NONE:
            yield f"cell {i} has owners {owners} and no state"


def _tails(table: CellTable) -> Iterator[str]:
    """Each owner is in one cell, which is its tail."""
    _, _, all_owners, tail = table.raw()
    cells = [CELL_NONE] * len(tail)
    for i, owners in enumerate(all_owners):
        for owner in owners:
            if not 0 <= owner < len(cells):
                yield f"cell {i} belongs to sequence {owner}, but n_seq_max is {table.n_seq_max}"
            elif cells[owner] != CELL_NONE:
                yield f"sequence {owner} is in the cells {cells[owner]} and {i}"
            else:
                cells[owner] = i
    for owner, (expected, found) in enumerate(zip(cells, tail, strict=False)):
        if found != expected:
            yield f"the tail of sequence {owner} is {found}, but its cell is {expected}"


def _pins(table: CellTable, free_pins: Sequence[int]) -> Iterator[str]:
    """A pin either holds a cell or is free, once."""
    for pin in range(len(table.raw()[3]) - table.n_seq_max):
        if table.is_pin(pin) == (pin in free_pins):
            yield f"pin {pin} is {'both held and free' if table.is_pin(pin) else 'neither held nor free'}"
    if len(set(free_pins)) != len(free_pins):
        yield f"a pin is free twice: {free_pins}"


def _snapshots(table: CellTable, snapshots: Mapping[int, Snapshots]) -> Iterator[str]:
    """Only cells in use have snapshots, at most n_rs_seq of them."""
    owners = table.raw()[2]
    for cell_id, (kept, back) in snapshots.items():
        if (kept, back) == (0, 0) or not owners[cell_id]:
            yield f"cell {cell_id} with owners {owners[cell_id]} has snapshots {kept}, {back} on record"
        if not (0 <= kept <= table.n_rs_seq and 0 <= back <= table.n_rs_seq):
            yield f"cell {cell_id} has snapshots {kept}, {back} of {table.n_rs_seq}"


def _slot(table: CellTable) -> Iterator[str]:
    """The last slot lies within the table."""
    if not 0 <= table.head < table.size:
        yield f"head is {table.head} of {counted(table.size, 'cell')}"
    if table.n < 0 or table.n > table.size or not CELL_NONE <= table.rs_z < table.size:
        yield f"n is {table.n}, rs_z is {table.rs_z}, of {counted(table.size, 'cell')}"
