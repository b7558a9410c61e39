"""Parses llama.cpp's states without their model: every parse that fills a file to its last byte.

The formats tell neither their length nor the model's kind. So each order of parts and each kind of row is tried. Rows
are not read, so memory use is that of the descriptions.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from ..cells.spec import CacheSpec, StateType
from ..errors import InvalidArgument
from .image import columns_of

# Types that attention keys and values may have beyond those of states: id -> (name, elements and bytes of a block).
_MORE_TYPES = {20: ("iq4_nl", 32, 18)}
_MOST_SEQUENCES = 1 << 16  # more than any llama.cpp allows; keeps a wrong parse short
_MOST_LAYERS = 1 << 16
_EXT_BYTES = 12  # what attention cells of some models carry beside position and sequences
_MOST_STEPS = 8_000_000  # cells and columns looked at, over all parses

# One memory, or attention of one or two kinds and a recurrent state; some models have attention of an index behind it.
_ORDERS = tuple(
    dict.fromkeys(
        ("attention",) * before + ("recurrent",) * recurrent + ("attention",) * behind
        for before, recurrent, behind in itertools.product((0, 1, 2), (1, 0), (0, 1))
        if before + recurrent + behind
    )
)


class Column(NamedTuple):
    """The rows of one tensor. Columns are in the order of the layers that have such a tensor."""

    which: str
    """``r``, ``s``, ``p``, ``k`` or ``v``."""
    type: str
    row_bytes: int
    """Bytes of one cell."""


@dataclass
class Cell:
    """A cell with its sequences; none in a state of one sequence, which names none."""

    pos: int
    seq_ids: tuple[int, ...]


@dataclass
class Part:
    """One memory of the model."""

    kind: str
    """``recurrent`` or ``attention``."""
    cells: list[Cell]
    columns: list[Column]
    n_layer: int | None
    """As the part tells: of the model in a recurrent one, with attention in the other; None when it is empty."""
    n_streams: int = 1
    n_bytes: int = 0


class _NoFit(Exception):
    """This parse does not fit."""


class TooLong(Exception):
    """There are too many parses to try them all."""


class _Place:
    """A file between two offsets."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self.file, self.end = file, end
        self._steps = 0

    def numbers(self, at: int, form: str) -> tuple[int, ...]:
        """The numbers at an offset."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise TooLong
        n_bytes = struct.calcsize(form)
        if n_bytes > self.end - at:
            raise _NoFit
        self.file.seek(at)
        data = self.file.read(n_bytes)
        if len(data) != n_bytes:
            raise _NoFit
        return struct.unpack(form, data)

    def after(self, at: int, n_bytes: int) -> int:
        """The offset behind `n_bytes`."""
        if not 0 <= n_bytes <= self.end - at:
            raise _NoFit
        return at + n_bytes


_Parsed = tuple[Part, int]
"""A part, and the offset behind it."""


def parses(file: BinaryIO, start: int, end: int, single: bool) -> list[list[Part]]:
    """Every parse of the file from `start` to `end`: a list of parts that fills it; at most eight.

    `single`: it is the state of one sequence. Raises `TooLong`.
    """
    place = _Place(file, end)
    readers = {"recurrent": _recurrent, "attention": _attention}
    known: dict[tuple[str, int], list[_Parsed]] = {}

    def follow(order: tuple[str, ...], at: int) -> Iterator[list[Part]]:
        if not order:
            if at == end:
                yield []
            return
        if (order[0], at) not in known:
            known[order[0], at] = list(readers[order[0]](place, at, single))
        for part, behind in known[order[0], at]:
            part.n_bytes = behind - at
            for rest in follow(order[1:], behind):
                yield [part, *rest]

    return list(itertools.islice((parts for order in _ORDERS for parts in follow(order, start)), 8))


def parse_of_spec(file: BinaryIO, start: int, end: int, single: bool, spec: CacheSpec) -> Part | None:
    """The state of a cache of `spec` that fills the file from `start` to `end`; None when it is another."""
    place, columns = _Place(file, end), []
    try:
        cells, n_layer, at = _recurrent_head(place, start, single)
        for column in columns_of(spec):
            if column.state_type is not None and place.numbers(at, "<i") != (column.state_type.type_id,):
                return None
            at += 0 if column.state_type is None else 4
            if place.numbers(at, "<Q") != (column.row_bytes,):
                return None
            at = place.after(at + 8, len(cells) * column.row_bytes)
            columns.append(Column(column.which, spec.type_of(column.which).name, column.row_bytes))
    except _NoFit:
        return None
    if at != end or n_layer != spec.n_layer:
        return None
    return Part("recurrent", cells, columns, n_layer, n_bytes=end - start)


def _cells(place: _Place, at: int, n_cells: int, n_ids: int | None, n_extra: int = 0) -> tuple[list[Cell], int]:
    """Cells with `n_ids` ids each (None: one or more), each with `n_extra` bytes before its ids."""
    cells = []
    for _ in range(n_cells):
        pos, n = place.numbers(at, "<iI")
        if pos < 0 or n > _MOST_SEQUENCES or (n < 1 if n_ids is None else n != n_ids):
            raise _NoFit
        at = place.after(at + 8, n_extra)
        ids = place.numbers(at, f"<{n}i")
        if n and not 0 <= min(ids) <= max(ids) < _MOST_SEQUENCES:
            raise _NoFit
        cells.append(Cell(pos, ids))
        at += 4 * n
    return cells, at


def _column(place: _Place, at: int, n_cells: int, which: str) -> tuple[Column, int]:
    """A type, bytes of a row, and that many for each cell."""
    type_id, row_bytes = place.numbers(at, "<iQ")
    name, _, block_bytes = _type(type_id)
    if row_bytes % block_bytes:
        raise _NoFit
    return Column(which, name, row_bytes), place.after(at + 12, n_cells * row_bytes)


def _type(type_id: int) -> tuple[str, int, int]:
    try:
        found = StateType.of(type_id)
    except InvalidArgument:
        if type_id in _MORE_TYPES:
            return _MORE_TYPES[type_id]
        raise _NoFit from None
    return found.name, found.block, found.block_bytes


def _recurrent_head(place: _Place, at: int, single: bool) -> tuple[list[Cell], int, int]:
    (n_cells,) = place.numbers(at, "<I")
    if single and n_cells > 1:
        raise _NoFit
    cells, at = _cells(place, at + 4, n_cells, 0 if single else None)
    ids = [seq_id for cell in cells for seq_id in cell.seq_ids]
    transposed, n_layer = place.numbers(at, "<II")
    if transposed or not 0 < n_layer <= _MOST_LAYERS or len(ids) != len(set(ids)):
        raise _NoFit
    return cells, n_layer, at + 8


def _recurrent(place: _Place, at: int, single: bool) -> Iterator[_Parsed]:
    try:
        cells, n_layer, at = _recurrent_head(place, at, single)
        r, at = _column(place, at, len(cells), "r")
        unit = StateType.of(r.type).block_bytes
    except (_NoFit, InvalidArgument):
        return
    # llama.cpp's layers are alike: r of each that has a state, p behind some of them, then as many s
    columns: list[Column] = [r]
    n_r, p = 1, None
    while True:
        with contextlib.suppress(_NoFit):
            s, behind = _alike(place, at, len(cells), "s", n_r)
            yield Part("recurrent", cells, columns + s, n_layer), behind
        if n_r < n_layer:
            with contextlib.suppress(_NoFit):
                next_r, behind = _column(place, at, len(cells), "r")
                if next_r == r:
                    columns, at, n_r = [*columns, r], behind, n_r + 1
                    continue
        try:  # a p has no type of its own
            (row_bytes,) = place.numbers(at, "<Q")
            unlike = row_bytes % unit or (p is not None and p.row_bytes != row_bytes)
            if columns[-1].which == "p" or not row_bytes or unlike:
                return
            p = Column("p", r.type, row_bytes)
            columns, at = [*columns, p], place.after(at + 8, len(cells) * row_bytes)
        except _NoFit:
            return


def _alike(place: _Place, at: int, n_cells: int, which: str, n: int) -> tuple[list[Column], int]:
    """`n` equal columns."""
    first, at = _column(place, at, n_cells, which)
    for _ in range(n - 1):
        column, at = _column(place, at, n_cells, which)
        if column != first:
            raise _NoFit
    return [first] * n, at


def _attention(place: _Place, at: int, single: bool) -> Iterator[_Parsed]:
    try:
        (n_streams,) = place.numbers(at, "<I")
        if not 1 <= n_streams <= _MOST_SEQUENCES:
            return
    except _NoFit:
        return
    tried = set()
    for n_extra, with_values in itertools.product((0, _EXT_BYTES), (True, False)):
        try:
            part, behind = _streams(place, at + 4, single, n_streams, n_extra, with_values)
        except _NoFit:
            continue
        if (behind, not part.cells) not in tried:  # empty ones are the same each way
            tried.add((behind, not part.cells))
            yield part, behind


def _streams(
    place: _Place, at: int, single: bool, n_streams: int, n_extra: int, with_values: bool
) -> tuple[Part, int]:
    cells: list[Cell] = []
    known: tuple[int, list[Column]] | None = None
    for _ in range(n_streams):
        (n_cells,) = place.numbers(at, "<I")
        at += 4
        if not n_cells:
            continue
        more, at = _cells(place, at, n_cells, 1 if single else None, n_extra)
        transposed, n_layer = place.numbers(at, "<II")
        if transposed > 1 or n_layer > _MOST_LAYERS:
            raise _NoFit
        columns, at = [], at + 8
        for _ in range(n_layer):
            column, at = _column(place, at, n_cells, "k")
            columns.append(column)
        for _ in range(n_layer if with_values else 0):
            column, at = (_transposed if transposed else _column)(place, at, n_cells, "v")
            columns.append(column)
        if known not in (None, (n_layer, columns)):
            raise _NoFit
        known = n_layer, columns
        cells += more
    if known is None:
        return Part("attention", [], [], None, n_streams), at
    return Part("attention", cells, known[1], known[0], n_streams), at


def _transposed(place: _Place, at: int, n_cells: int, which: str) -> tuple[Column, int]:
    """Element after element, each of all cells."""
    type_id, element_bytes, n_elements = place.numbers(at, "<iII")
    name, block, block_bytes = _type(type_id)
    if element_bytes != block_bytes or n_elements % block:
        raise _NoFit
    n_bytes = n_elements * element_bytes
    return Column(which, name, n_bytes), place.after(at + 12, n_cells * n_bytes)
