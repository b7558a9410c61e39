"""The command line in tests: quick arguments for ``rcache run``, and what it prints, taken apart."""

from __future__ import annotations

import re

RUN = ("run", "--threads", "1", "-p")  # the model is so small that more threads only wait for each other
PROMPT = "In the beginning"


def tables(out: str) -> list[tuple[str, list[dict[str, str]]]]:
    """(title, rows) of each cell table in `out`; a row is column -> text."""
    found: list[tuple[str, list[dict[str, str]]]] = []
    lines = out.splitlines()
    for i, line in enumerate(lines):
        if line.startswith("┏"):
            found.append((lines[i - 1].strip(), []))
        elif line.startswith("│"):
            columns = ("cell", "pos", "sequences", "read from", "marks")
            found[-1][1].append(dict(zip(columns, (s.strip() for s in line.strip("│").split("│")), strict=True)))
    return found


def parts(out: str) -> tuple[list[str], list[str]]:
    """Labels and texts of a run of several sequences."""
    pieces = re.split(r"^--- (.+)\n", out, flags=re.M)
    return pieces[1::2], [text.strip("\n") for text in pieces[2::2]]
