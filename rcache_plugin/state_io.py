"""The wire format of states, llama.cpp's byte for byte. Needs neither ggml nor cffi: bytes, cell table and spec only.

All numbers are little endian, as the machines are that llama.cpp runs on::

    u32 cells
    for each cell: i32 position, u32 number of ids, then that many i32 sequence ids (none in a sequence's own state)
    u32 0 (s is not transposed), u32 layers of the model
    for each layer with r: i32 type, u64 row bytes, the rows of the cells; if it has p: u64 row bytes, the rows of p
    for each layer with s: i32 type, u64 row bytes, the rows of the cells

Reading gives a value, `StateImage`; nothing is changed before all of it has been read and found right.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .cells import CellTable
from .errors import StateError
from .spec import CacheSpec, StateType, Which
from .ubatch import POS_MAX, SEQ_ANY


class Writer(Protocol):
    """Takes the bytes of a state in order."""

    def write(self, data: bytes) -> object:
        """Takes `data`, all of it."""

    def write_rows(self, which: Which, il: int, first: int, n_rows: int) -> object:
        """Takes rows ``first .. first + n_rows - 1`` of layer `il`'s tensor `which` ("r", "s" or "p")."""


FLAG_ON_DEVICE = 2
"""``LLAMA_STATE_SEQ_FLAGS_ON_DEVICE``: rows go from and to the tensors, by `Writer.write_rows` and `read_rows`."""


class DeviceReader(Protocol):
    """A `Reader` that puts rows where they belong, without their passing through here."""

    def read(self, n_bytes: int) -> bytes:
        """As `Reader.read`."""

    def read_rows(self, which: Which, il: int, first: int, n_rows: int) -> object:
        """Puts the next rows to rows ``first .. first + n_rows - 1`` of layer `il`'s tensor `which`."""


class Reader(Protocol):
    """Gives the bytes of a state in order."""

    def read(self, n_bytes: int) -> bytes:
        """The next `n_bytes`. May give fewer, or raise, at the end."""


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


@dataclass(frozen=True, slots=True)
class StateImage:
    """A whole state in memory: what `read_state` found, every field of it checked."""

    cells: tuple[CellImage, ...]
    rows: dict[tuple[Which, int], bytes]
    """By (which, layer): the rows of the cells, one after the other."""

    def row(self, column: Column, i: int) -> bytes:
        """Row of the i-th cell."""
        return self.rows[column.which, column.il][i * column.row_bytes : (i + 1) * column.row_bytes]


def columns_of(spec: CacheSpec) -> Iterator[Column]:
    """The tensors in the order of the format. A layer with a state has both r and s there, if need be without bytes."""
    for il in spec.layers:
        yield Column("r", il, spec.type_r, spec.r_row_bytes(il))
        if spec.n_embd("p", il):
            yield Column("p", il, None, spec.p_row_bytes(il))
    for il in spec.layers:
        yield Column("s", il, spec.type_s, spec.s_row_bytes(il))


def cells_of(table: CellTable, seq_id: int) -> list[int]:
    """The cells that a state of `seq_id` holds, ascending; of all sequences with `SEQ_ANY`. Raises `SeqIdError`.

    A cell that only a checkpoint holds is no part of a state.
    """
    if seq_id == SEQ_ANY:
        return [cell_id for cell_id in table.used_cells() if table.cell(cell_id).seq_ids]
    cell_id = table.tail(seq_id)
    return [cell_id] if cell_id >= 0 else []


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
    runs = list(_runs([table.row_of(cell_id) for cell_id in cells]))
    for column in columns_of(spec):
        writer.write(_column_header(column))
        for first, n_rows in runs if column.row_bytes else ():
            writer.write_rows(column.which, column.il, first, n_rows)


def read_state(reader: Reader, table: CellTable, spec: CacheSpec, seq_id: int = SEQ_ANY) -> StateImage:
    """Reads and checks a whole state for `table`; changes nothing.

    Memory is bounded by what the table's cells hold. Raises `StateError` naming the field, what was expected and what
    was found, and `SeqIdError`.
    """
    cells = read_cells(reader, table, seq_id)
    rows: dict[tuple[Which, int], bytes] = {}

    def take(column: Column) -> None:
        n_bytes = len(cells) * column.row_bytes
        rows[column.which, column.il] = _exactly(reader, n_bytes, f"rows of layer {column.il}, {column.which}")

    read_columns(reader, spec, take)
    return StateImage(cells, rows)


def read_cells(reader: Reader, table: CellTable, seq_id: int = SEQ_ANY) -> tuple[CellImage, ...]:
    """The first part of a state: its cells, checked for `table`. Raises as `read_state`."""
    if seq_id != SEQ_ANY:
        table.check_seq_id(seq_id)
    n_cells = _number(reader, "<I", "cell count")
    most = table.size if seq_id == SEQ_ANY else 1
    if n_cells > most:
        raise StateError(f"cell count: the state has {n_cells} cells, there is room for {most}")
    seen: dict[int, int] = {}
    return tuple(_read_cell(reader, i, table, seq_id, seen) for i in range(n_cells))


def read_columns(reader: Reader, spec: CacheSpec, take: Callable[[Column], None]) -> None:
    """The second part of a state: checks what stands before the rows of each tensor, and has `take` read the rows.

    Raises as `read_state`, and what `take` raises.
    """
    _expect("s_trans", _number(reader, "<I", "s_trans"), 0)
    _expect("layer count", _number(reader, "<I", "layer count"), spec.n_layer)
    for column in columns_of(spec):
        where = f"layer {column.il}, {column.which}"
        if column.state_type is not None:
            _expect(f"type of {where}", _number(reader, "<i", f"type of {where}"), column.state_type.type_id)
        _expect(f"row bytes of {where}", _number(reader, "<Q", f"row bytes of {where}"), column.row_bytes)
        take(column)


def _column_header(column: Column) -> bytes:
    type_field = b"" if column.state_type is None else struct.pack("<i", column.state_type.type_id)
    return type_field + struct.pack("<Q", column.row_bytes)


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
    ids = struct.unpack(f"<{n_ids}i", _exactly(reader, 4 * n_ids, f"ids of cell {i}"))
    for found in ids:
        if not 0 <= found < table.n_seq_max:
            raise StateError(f"ids of cell {i}: {found} is not from 0 to {table.n_seq_max - 1} (n_seq_max)")
        if found in seen:
            raise StateError(f"ids of cell {i}: sequence {found} is already in cell {seen[found]}")
        seen[found] = i
    return CellImage(pos, tuple(sorted(ids)))


def _exactly(reader: Reader, n_bytes: int, what: str) -> bytes:
    data = reader.read(n_bytes) if n_bytes else b""
    if len(data) != n_bytes:
        raise StateError(f"{what}: the state ends after {len(data)} of {n_bytes} bytes")
    return data


def _number(reader: Reader, form: str, what: str) -> int:
    (value,) = struct.unpack(form, _exactly(reader, struct.calcsize(form), what))
    return int(value)


def _expect(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise StateError(f"{what}: expected {expected}, found {found}")


def _runs(rows: list[int]) -> Iterator[tuple[int, int]]:
    """(first, length) of consecutive rows."""
    first = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield rows[first], i - first
            first = i
