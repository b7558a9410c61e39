"""``rcache inspect``: what is in a state file."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import counted
from .exits import EXIT_NOT_INTACT

if TYPE_CHECKING:
    from ..states.inspect import Report


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("inspect", help="show what is in a state file", description=_inspect.__doc__)
    parser.set_defaults(command=_inspect)
    parser.add_argument("file", type=Path, metavar="FILE", help="of this package or of llama.cpp")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def _inspect(args: argparse.Namespace) -> int:
    """Show what is in a state file: sequences, positions, tokens, tensors, and whether it is intact (exit code 1: it is
    not, or that can't be told)."""
    from ..states.inspect import inspect

    report = inspect(args.file)
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _show_report(report)
    return 0 if report.intact else EXIT_NOT_INTACT


def _show_report(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    for name, value in _facts(report):
        console.print(f"{name:<13}{value}", soft_wrap=True)
    sequences = report.sequences()
    if sequences:
        table = Table("sequence", "part", "cells", "positions", "tokens")
        for row in sequences:
            span = str(row.pos_max) if row.n_cells == 1 else f"{row.pos_min} .. {row.pos_max}"
            seq_id = "not told" if row.seq_id is None else str(row.seq_id)
            table.add_row(seq_id, row.part, str(row.n_cells), span, "" if row.n_tokens is None else str(row.n_tokens))
        console.print(table)
    if report.parts:
        table = Table("part", "tensors", "type", "bytes of a cell in one", "bytes in all")
        for part in report.parts:
            for column, n in Counter(part.columns).items():
                n_bytes = n * column.row_bytes * len(part.cells)
                table.add_row(part.kind, f"{n} x {column.which}", column.type, str(column.row_bytes), str(n_bytes))
        console.print(table)


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    version = "" if report.version is None else f", version {report.version}"
    yield "file", f"{report.path}: {report.kind}{version}, {counted(report.n_bytes, 'byte')}"
    checked = "its checksum is right" if report.checksum else "it reads to the last byte; the format has no checksum"
    yield "intact", {True: f"yes, {checked}", False: "NO", None: "can't be told"}[report.intact]
    if report.seq_id is not None:
        yield "holds", f"sequence {report.seq_id}"
    elif not report.problems:
        yield "holds", "one sequence" if report.single else "all sequences"
    if report.architecture is not None:
        yield "model", report.architecture
    for part in report.parts:
        layers = "" if part.n_layer is None else f", {counted(part.n_layer, 'layer')}"
        streams = f", {part.n_streams} streams" if part.n_streams > 1 else ""
        yield part.kind, f"{counted(len(part.cells), 'cell')}{layers}{streams}, {counted(part.n_bytes, 'byte')}"
    if report.checkpoints:
        yield "checkpoints", f"{len(report.checkpoints)}, of {' '.join(map(str, report.checkpoints))} tokens"
    if report.fingerprint is not None:
        yield "fingerprint", report.fingerprint
    for seq, ids in report.tokens.items():
        of = "tokens" if seq == "prompt" else f"tokens of {seq}"
        yield of, f"{len(ids)}: {' '.join(map(str, ids[:8]))}{' ...' if len(ids) > 8 else ''}"
    for problem in report.problems:
        yield "problem", problem
