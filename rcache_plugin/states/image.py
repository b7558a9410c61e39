"""The wire format of states, llama.cpp's byte for byte. Needs neither ggml nor cffi: bytes, cell table and spec only.

All numbers are little endian, as the machines are that llama.cpp runs on::

    u32 cells
    for each cell: i32 position, u32 number of ids, then that many i32 sequence ids (none in a sequence's own state)
    u32 0 (s is not transposed), u32 layers of the model
    for each layer with r: i32 type, u64 row bytes, the rows of the cells; if it has p: u64 row bytes, the rows of p
    for each layer with s: i32 type, u64 row bytes, the rows of the cells

Reading gives a value, `StateImage`; nothing is changed before all of it has been read and found valid.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..cells.spec import CacheSpec, StateType, Which
from ..cells.table import CellTable
from ..cells.ubatch import POS_MAX, SEQ_ANY
from ..errors import StateError, counted
from .streams import Bytes, MemoryReader, Reader, Writer, read_exactly


class CellImage(NamedTuple):
    """A cell as a state describes it."""

    pos: int
    seq_ids: tuple[int, ...]


class Column(NamedTuple):
    """One layer's tensor, as the format puts them one after the other."""

    which: Which
    il: int
    state_type: StateType | None
    """None: the format names no type for it."""
    row_bytes: int
    header: bytes
    """What stands before its rows."""


@dataclass(frozen=True, slots=True)
class StateImage:
    """A whole state in memory: what `read_rows` found, every field of it checked."""

    cells: tuple[CellImage, ...]
    rows: dict[tuple[Which, int], Bytes]
    """By (which, layer): the rows of the cells, one after the other."""

    def cell_rows(self, column: Column, i: int, n_rows: int = 1) -> Bytes:
        """Rows of the i-th cell and those that follow, [n_rows * row_bytes]."""
        rows = self.rows[column.which, column.il]
        if n_rows == len(self.cells):
            return rows
        return rows[i * column.row_bytes : (i + n_rows) * column.row_bytes]


@lru_cache(maxsize=64)
def columns_of(spec: CacheSpec) -> tuple[Column, ...]:
    """The tensors in the order of the format. A layer with a state has both r and s there, if need be without bytes."""
    columns = []
    for il in spec.layers:
        columns.append(_column("r", il, spec.type_r, spec.r_row_bytes(il)))
        if spec.n_embd("p", il):
            columns.append(_column("p", il, None, spec.p_row_bytes(il)))
    columns += [_column("s", il, spec.type_s, spec.s_row_bytes(il)) for il in spec.layers]
    return tuple(columns)


def cells_of(table: CellTable, seq_id: int) -> list[int]:
    """The cells that a state of `seq_id` holds, ascending; of all sequences with `SEQ_ANY`. Raises `SeqIdError`.

    A cell that only a checkpoint holds is no part of a state.
    """
    if seq_id == SEQ_ANY:
        return [cell_id for cell_id in table.used_cells() if table.cell(cell_id).seq_ids]
    cell_id = table.tail(seq_id)
    return [cell_id] if cell_id >= 0 else []


def state_bytes(table: CellTable, spec: CacheSpec, seq_id: int = SEQ_ANY) -> int:
    """Bytes that `write_state` writes, rows included. Raises `SeqIdError`."""
    cells = cells_of(table, seq_id)
    n_ids = sum(len(table.cell(cell_id).seq_ids) for cell_id in cells) if seq_id == SEQ_ANY else 0
    columns = sum(len(column.header) + len(cells) * column.row_bytes for column in columns_of(spec))
    return 4 + 8 * len(cells) + 4 * n_ids + 8 + columns


def most_bytes(table: CellTable, spec: CacheSpec, seq_id: int = SEQ_ANY) -> int:
    """Bytes of the largest state that `table` could take."""
    n_cells, n_ids = (table.size, table.n_seq_max) if seq_id == SEQ_ANY else (1, 0)
    columns = sum(len(column.header) + n_cells * column.row_bytes for column in columns_of(spec))
    return 4 + 8 * n_cells + 4 * n_ids + 8 + columns


def write_state(writer: Writer, table: CellTable, spec: CacheSpec, seq_id: int = SEQ_ANY) -> None:
    """Writes the state of one sequence, or of all. Raises `SeqIdError` before anything is written."""
    cells = cells_of(table, seq_id)
    header = [struct.pack("<I", len(cells))]
    for cell_id in cells:
        cell = table.cell(cell_id)
        ids = cell.seq_ids if seq_id == SEQ_ANY else ()
        header.append(struct.pack(f"<iI{len(ids)}i", cell.pos, len(ids), *ids))
    header.append(struct.pack("<II", 0, spec.n_layer))
    writer.write(b"".join(header))
    runs = list(runs_of([table.row_of(cell_id) for cell_id in cells]))
    for column in columns_of(spec):
        writer.write(column.header)
        for _, first, n_rows in runs if column.row_bytes else ():
            writer.write_rows(column.which, column.il, first, n_rows)


def read_rows(reader: Reader, spec: CacheSpec, cells: tuple[CellImage, ...]) -> StateImage:
    """The second part of a state with its rows, in memory; changes nothing. Raises as `read_cells`."""
    rows: dict[tuple[Which, int], Bytes] = {}

    def take(column: Column) -> None:
        n_bytes = len(cells) * column.row_bytes
        found = reader.read(n_bytes) if n_bytes else b""
        if len(found) != n_bytes:
            found = read_exactly(reader, n_bytes, f"rows of layer {column.il}, {column.which}", found)
        rows[column.which, column.il] = found

    read_columns(reader, spec, take)
    return StateImage(cells, rows)


def read_image(data: Bytes, table: CellTable, spec: CacheSpec, seq_id: int = SEQ_ANY) -> StateImage:
    """A whole state of which `data` holds the bytes and nothing else; changes nothing. Raises as `read_cells`."""
    reader = MemoryReader(data)
    image = read_rows(reader, spec, read_cells(reader, table, seq_id))
    reader.check_end()
    return image


def read_cells(reader: Reader, table: CellTable, seq_id: int = SEQ_ANY) -> tuple[CellImage, ...]:
    """The first part of a state: its cells, checked for `table`. Memory is bounded by what the table's cells hold.

    Raises `StateError` naming the field, what was expected and what was found, and `SeqIdError`.
    """
    if seq_id != SEQ_ANY:
        table.check_seq_id(seq_id)
    n_cells = _number(reader, "<I", "cell count")
    most = table.size if seq_id == SEQ_ANY else 1
    if n_cells > most:
        raise StateError(f"cell count: the state has {counted(n_cells, 'cell')}, expected at most {most}")
    seen: dict[int, int] = {}
    return tuple(_read_cell(reader, i, table, seq_id, seen) for i in range(n_cells))


def read_columns(reader: Reader, spec: CacheSpec, take: Callable[[Column], None]) -> None:
    """The second part of a state: checks what stands before the rows of each tensor, and has `take` read the rows.

    Raises as `read_cells`, and what `take` raises.
    """
    _expect("s_trans", _number(reader, "<I", "s_trans"), 0)
    _expect("layer count", _number(reader, "<I", "layer count"), spec.n_layer)
    for column in columns_of(spec):
        n_bytes = len(column.header)
        found = reader.read(n_bytes)
        if found != column.header:
            what = f"type and row bytes of layer {column.il}, {column.which}"
            _check_header(column, read_exactly(reader, n_bytes, what, found))
        take(column)


def _column(which: Which, il: int, state_type: StateType | None, row_bytes: int) -> Column:
    type_field = b"" if state_type is None else struct.pack("<i", state_type.type_id)
    return Column(which, il, state_type, row_bytes, type_field + struct.pack("<Q", row_bytes))


def _check_header(column: Column, found: Bytes) -> None:
    where = f"layer {column.il}, {column.which}"
    if column.state_type is not None:
        _expect(f"type of {where}", struct.unpack("<i", found[:4])[0], column.state_type.type_id)
    _expect(f"row bytes of {where}", struct.unpack("<Q", found[-8:])[0], column.row_bytes)


def _read_cell(reader: Reader, i: int, table: CellTable, seq_id: int, seen: dict[int, int]) -> CellImage:
    pos = _number(reader, "<i", f"position of cell {i}")
    if not 0 <= pos <= POS_MAX:
        raise StateError(f"position of cell {i}: {pos} is not one")
    n_ids = _number(reader, "<I", f"number of ids of cell {i}")
    if seq_id != SEQ_ANY:
        _expect(f"number of ids of cell {i}", n_ids, 0)
        return CellImage(pos, (seq_id,))
    if not 1 <= n_ids <= table.n_seq_max:
        raise StateError(f"number of ids of cell {i}: {n_ids} is not from 1 to {table.n_seq_max} (n_seq_max)")
    ids = struct.unpack(f"<{n_ids}i", read_exactly(reader, 4 * n_ids, f"ids of cell {i}"))
    for found in ids:
        if not 0 <= found < table.n_seq_max:
            raise StateError(f"ids of cell {i}: {found} is not from 0 to {table.n_seq_max - 1} (n_seq_max)")
        if found in seen:
            raise StateError(f"ids of cell {i}: sequence {found} is already in cell {seen[found]}")
        seen[found] = i
    return CellImage(pos, tuple(sorted(ids)))


def _number(reader: Reader, form: str, what: str) -> int:
    (value,) = struct.unpack(form, read_exactly(reader, struct.calcsize(form), what))
    return int(value)


def _expect(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise StateError(f"{what}: expected {expected}, found {found}")


def runs_of(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(index of the first, first, length) of consecutive numbers among `rows`."""
    first = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield first, rows[first], i - first
            first = i
