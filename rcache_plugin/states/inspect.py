"""Describes state files: our own, llama.cpp's session and sequence files, and the states of its sequences.

Needs neither ggml nor cffi. Nothing is loaded and rows are not read (but for our checksum), so memory use is that of
the descriptions. llama.cpp's formats tell neither their length nor the model's kind, and they have no checksum. A file
of theirs is therefore parsed in every possible way (see `parse`); it is described when exactly one parse fits to the
last byte. Otherwise the report says what is unknown.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, NamedTuple

from ..cells.ubatch import SEQ_ANY
from ..errors import InvalidArgument, StateError, counted
from .file import MAGIC, VERSION, check_sum, read_header, spec_of
from .parse import Part, TooLong, parse_of_spec, parses

SESSION_MAGIC, SESSION_VERSION = 0x6767736E, 10  # "ggsn"
SEQUENCE_MAGIC, SEQUENCE_VERSION = 0x67677371, 3  # "ggsq"
BLOB_MAGIC = 0xAF143CD8
"""In front of what ``llama_state_seq_get_data`` gives."""

_MOST_ARCHITECTURE_BYTES = 256


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
    """Tokens of each checkpoint that was saved with the states."""
    parts: list[Part] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What is wrong or unknown."""

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
        part = parse_of_spec(file, start, start + header.payload_bytes, report.single, spec_of(header))
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
        report.problems.append(f"token count: the file is too short for {counted(n_tokens, 'token')}")
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
        report.problems.append("architecture: its name is missing")
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
        found = parses(file, file.tell(), report.n_bytes, report.single)
    except TooLong:
        report.problems.append("the state has too many parses to try them all, it was not read")
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
        report.problems.append(f"the state has {len(found)} parses: it is unknown which of them is meant")
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
