"""The cell table as ``rcache run --cells`` shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...cells.ubatch import CELL_NONE, POS_NONE

if TYPE_CHECKING:
    from ...capi.client import TableClient
    from ...cells.table import CellTable


def show_cells(title: str, cells: CellTable, table: TableClient) -> None:
    """Prints the cell table under a title."""
    from rich.console import Console
    from rich.table import Table

    shown = Table("cell", "pos", "sequences", "read from", "", title=title, title_justify="left")
    for row in _rows(cells, table):
        shown.add_row(*row)
    Console(highlight=False).print(shown)


def _rows(cells: CellTable, table: TableClient) -> Iterator[tuple[str, str, str, str, str]]:
    """The cell table and what the last slot did: cell, pos, sequences, row that its state was read from, marks."""
    info = table.info()
    sources = table.s_copy(info.n) if info.n else ()
    for i in range(info.size):
        cell = cells.cell(i)
        in_slot = info.head <= i < info.head + len(sources)
        marks = ["head"] if i == info.head else []
        marks += ["n"] if i == info.head + info.n - 1 else []
        marks += ["rs_z"] if i == info.rs_z else []
        source = int(sources[i - info.head]) if in_slot else CELL_NONE
        yield (
            str(i),
            "-" if cell.pos == POS_NONE else str(cell.pos),
            " ".join(map(str, cell.seq_ids)) or "-",
            "-" if source == CELL_NONE else str(source),
            " ".join(marks),
        )
