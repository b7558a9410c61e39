"""Restores a state that was read: plans its cells, and writes its rows to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..cells.slots import commit, plan_slots
from ..cells.table import CellTable
from ..cells.ubatch import SEQ_ANY, UBatch
from ..errors import StateError, counted
from .image import CellImage, Column, StateImage, columns_of, runs_of

if TYPE_CHECKING:
    from ..memory.buffers import StateBuffers


def find_room(
    table: CellTable, placement: str, cells: Sequence[CellImage], seq_id: int, evict: Callable[[], bool]
) -> tuple[list[int], CellTable]:
    """The cells for the states `cells` of one sequence, or of all with `SEQ_ANY`, and the table with them in it.

    `table` changes only by `evict`, which frees cells and is called until the states fit; false: it can free no more.
    Raises `StateError` when they do not fit.
    """
    while True:
        after = table.copy()
        if seq_id == SEQ_ANY:
            room = after.unpinned_cells()
            if len(room) >= len(cells):
                after.restore(cells)
                return room[: len(cells)], after
            problem = f"not enough cells: {counted(len(cells), 'state')} for {counted(len(room), 'cell')}"
        else:
            after.seq_rm(seq_id, -1, -1)
            if not cells:
                return [], after
            plans = plan_slots(after, (UBatch.single(seq_id, cells[0].pos),), placement)
            if plans is not None:
                commit(after, plans[0])
                return [plans[0].head], after
            problem = f"no free cell for sequence {seq_id}: {counted(after.size, 'cell')}, all in use"
        if not evict():
            raise StateError(problem)


def take_rows(reader: Any, columns: Iterable[Column], cell_ids: Sequence[int]) -> None:
    """Has `reader` put the rows of `columns` into the tensors itself."""
    for column in columns:
        for _, first, n_rows in runs_of(cell_ids) if column.row_bytes else ():
            reader.read_rows(column.which, column.il, first, n_rows)


def set_rows(image: StateImage, buffers: StateBuffers, cell_ids: Sequence[int]) -> None:
    """Writes all rows of `image`, whose i-th cell goes to ``cell_ids[i]``."""
    runs = list(runs_of(cell_ids))
    for column in columns_of(buffers.spec):
        for i, first, n_rows in runs if column.row_bytes else ():
            buffers.set_rows(column.which, column.il, first, n_rows, image.cell_rows(column, i, n_rows))
