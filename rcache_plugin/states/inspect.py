"""What is in a state file: one of ours, llama.cpp's session and sequence files, and the states of its sequences.

Needs neither ggml nor cffi. Nothing is loaded and rows are not read (but for our checksum), so memory use is that of
the descriptions. llama.cpp's formats tell neither their length nor the model's kind, and they have no checksum. A file
of theirs is therefore read in every way in which its parts could lie; it is described when exactly one of them fits to
the last byte. Otherwise the report says what could not be told.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, NamedTuple

from ..cells.spec import CacheSpec, StateType
from ..cells.ubatch import SEQ_ANY
from ..errors import InvalidArgument, StateError
from .file import MAGIC, VERSION, check_sum, read_header, spec_of
from .image import columns_of

SESSION_MAGIC, SESSION_VERSION = 0x6767736E, 10  # "ggsn"
SEQUENCE_MAGIC, SEQUENCE_VERSION = 0x67677371, 3  # "ggsq"
BLOB_MAGIC = 0xAF143CD8
"""In front of what ``llama_state_seq_get_data`` gives."""

# Types that attention keys and values may have beyond those of states: id -> (name, elements and bytes of a block).
_MORE_TYPES = {20: ("iq4_nl", 32, 18)}
_MOST_SEQUENCES = 1 << 16  # more than any llama.cpp allows; keeps a wrong way of reading short
_MOST_LAYERS = 1 << 16
_EXT_BYTES = 12  # what attention cells of some models carry beside position and sequences
_MOST_ARCHITECTURE_BYTES = 256
_MOST_STEPS = 8_000_000  # cells and columns looked at, over all ways of reading

# One memory, or attention of one or two kinds and a recurrent state; some models have attention of an index behind it.
_ORDERS = tuple(
    dict.fromkeys(
        ("attention",) * before + ("recurrent",) * recurrent + ("attention",) * behind
        for before, recurrent, behind in itertools.product((0, 1, 2), (1, 0), (0, 1))
        if before + recurrent + behind
    )
)


class Column(NamedTuple):
    """The rows of one tensor: of a layer that has such a one, in the order of the layers."""

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


@dataclass
class Report:
    """What `inspect` has found; `as_dict` has the same for ``--json``."""

    path: str
    n_bytes: int
    kind: str
    """``rcache``, ``llama session``, ``llama sequence`` or ``llama sequence data``."""
    version: int | None
    intact: bool | None
    """Whether the file is whole: by its checksum if it has one, else as far as its structure tells (rows could differ).
    None: it can't be told."""
    checksum: bool
    """Whether the format has a checksum."""
    seq_id: int | None = None
    """The sequence that was saved; None: all, or the format does not tell."""
    single: bool = False
    """Whether it is the state of one sequence."""
    architecture: str | None = None
    fingerprint: str | None = None
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """By sequence; ``prompt`` where the format does not tell the sequence."""
    checkpoints: list[int] = field(default_factory=list)
    """Tokens that each checkpoint beside the states has read."""
    parts: list[Part] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What is wrong or could not be told."""

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and dictionaries."""
        plain = asdict(self)
        plain["sequences"] = [row._asdict() for row in self.sequences()]
        for part, found in zip(plain["parts"], self.parts, strict=True):
            part["columns"] = [column._asdict() for column in found.columns]
            if part["kind"] == "attention":  # a cell a token: the sequences tell enough
                part["cells"] = len(found.cells)
        return plain

    def sequences(self) -> list[SequenceRow]:
        """One row for each sequence and part that holds something of it."""
        rows = []
        for part in self.parts:
            at: dict[int | None, list[int]] = {}
            for cell in part.cells:
                for seq_id in cell.seq_ids or (self.seq_id,):
                    at.setdefault(seq_id, []).append(cell.pos)
            for seq_id, pos in sorted(at.items(), key=lambda item: -1 if item[0] is None else item[0]):
                n_tokens = len(self.tokens[str(seq_id)]) if str(seq_id) in self.tokens else None
                rows.append(SequenceRow(seq_id, part.kind, len(pos), min(pos), max(pos), n_tokens))
        return rows


class SequenceRow(NamedTuple):
    """What one part holds of a sequence."""

    seq_id: int | None
    """None: the format does not tell."""
    part: str
    n_cells: int
    pos_min: int
    pos_max: int
    n_tokens: int | None
    """Tokens that were saved with it."""


class _NoFit(Exception):
    """This way of reading does not fit."""


class _TooLong(Exception):
    """Too much was tried."""


def inspect(path: str | os.PathLike[str]) -> Report:
    """Describes the file at `path`. Raises `InvalidArgument` for a file that is none of these, and `OSError`."""
    with open(path, "rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        start = file.read(len(MAGIC))
        file.seek(0)
        magic = struct.unpack("<I", start[:4])[0] if len(start) >= 4 else None
        report = Report(os.fspath(path), n_bytes, "", None, None, False)
        if start == MAGIC:
            _ours(report, file)
        elif magic in (SESSION_MAGIC, SEQUENCE_MAGIC):
            _llama_file(report, file, magic == SESSION_MAGIC)
        elif magic == BLOB_MAGIC:
            _llama_data(report, file)
        else:
            raise InvalidArgument(f"{os.fspath(path)}: neither a state file of ours nor one of llama.cpp's")
        return report


def _ours(report: Report, file: BinaryIO) -> None:
    report.kind, report.checksum, report.intact = "rcache", True, False
    try:
        header = read_header(file)
        report.version = VERSION
        report.fingerprint, report.single = header.fingerprint, header.seq_id != SEQ_ANY
        report.seq_id = header.seq_id if report.single else None
        report.tokens = {str(seq_id): list(ids) for seq_id, ids in header.tokens.items()}
        report.checkpoints = [len(ids) for ids in header.checkpoints]
        start = file.tell()
        part = _of_spec(file, start, start + header.payload_bytes, report.single, spec_of(header))
        check_sum(file)
        report.intact = True
    except StateError as error:
        report.problems.append(str(error))
        return
    _settle(report, [] if part is None else [[part]])


def _llama_file(report: Report, file: BinaryIO, session: bool) -> None:
    report.kind, report.single = ("llama session", False) if session else ("llama sequence", True)
    head = file.read(12)
    if len(head) < 12:
        report.intact = False
        report.problems.append(f"length: the file ends after {len(head)} of 12 bytes")
        return
    _, report.version, n_tokens = struct.unpack("<III", head)
    if 4 * n_tokens > report.n_bytes - 12:
        report.intact = False
        report.problems.append(f"token count: {n_tokens} tokens do not fit into the file")
        return
    report.tokens = {"prompt": list(struct.unpack(f"<{n_tokens}i", file.read(4 * n_tokens)))}
    known = SESSION_VERSION if session else SEQUENCE_VERSION
    if report.version != known:
        report.problems.append(f"version {report.version}: only version {known} is known, the state was not read")
        return
    if session and not _architecture(report, file):
        return
    _memory(report, file)


def _architecture(report: Report, file: BinaryIO) -> bool:
    size = file.read(4)
    n_bytes = struct.unpack("<I", size)[0] if len(size) == 4 else -1
    name = file.read(n_bytes) if 0 <= n_bytes <= _MOST_ARCHITECTURE_BYTES else b""
    if len(size) != 4 or len(name) != n_bytes or not name.isascii() or not name.decode().isprintable():
        report.intact = False
        report.problems.append("architecture: there is no name of one where it should stand")
        return False
    report.architecture = name.decode()
    return True


def _llama_data(report: Report, file: BinaryIO) -> None:
    report.kind = "llama sequence data"
    head = file.read(8)
    if len(head) < 8:
        report.intact = False
        report.problems.append(f"length: the data ends after {len(head)} of 8 bytes")
        return
    seq_id = struct.unpack("<i", head[4:])[0]
    report.single = seq_id >= 0
    report.seq_id = seq_id if report.single else None
    _memory(report, file)


def _memory(report: Report, file: BinaryIO) -> None:
    try:
        found = _ways(file, file.tell(), report.n_bytes, report.single, _ORDERS)
    except _TooLong:
        report.problems.append("the state could be read in too many ways to try them all, it was not read")
        return
    _settle(report, found)


def _settle(report: Report, found: list[list[Part]]) -> None:
    if len(found) == 1:
        report.parts = found[0]
        doubts = [] if report.checksum else list(_doubts(report.parts))
        report.problems += doubts
        if not doubts and report.intact is None:
            report.intact = True
    elif found:
        report.problems.append(f"the state can be read in {len(found)} ways, which of them is meant can't be told")
    else:
        report.intact = False
        report.problems.append("the state can't be read to its last byte: it is damaged, or of an unknown kind")


def _doubts(parts: list[Part]) -> Iterator[str]:
    """Why a file that reads to its last byte may have been cut all the same."""
    if all(part.kind != "recurrent" for part in parts):
        yield "there is no recurrent part: the model has none, or the file was cut behind the attention"
    for part in parts:
        kinds = {column._replace(which="") for column in part.columns}
        if part.kind == "recurrent" and len(kinds) < 2:
            yield "r and s look the same: the file may have been cut between two of them"


# --- reading in every way ---


class _Place:
    """A file between two offsets."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self.file, self.end = file, end
        self._steps = 0

    def numbers(self, at: int, form: str) -> tuple[int, ...]:
        """The numbers at an offset."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise _TooLong
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


_Way = tuple[Part, int]
"""A part, and the offset behind it."""


def _ways(file: BinaryIO, start: int, end: int, single: bool, orders: tuple[tuple[str, ...], ...]) -> list[list[Part]]:
    """Every list of parts that fills the file from `start` to `end`, in one of `orders`; at most eight."""
    place = _Place(file, end)
    readers = {"recurrent": _recurrent, "attention": _attention}
    known: dict[tuple[str, int], list[_Way]] = {}

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

    return list(itertools.islice((way for order in orders for way in follow(order, start)), 8))


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


def _of_spec(file: BinaryIO, start: int, end: int, single: bool, spec: CacheSpec) -> Part | None:
    """The state that fills the file from `start` to `end`; its tensors are known."""
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


def _recurrent(place: _Place, at: int, single: bool) -> Iterator[_Way]:
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


def _attention(place: _Place, at: int, single: bool) -> Iterator[_Way]:
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
