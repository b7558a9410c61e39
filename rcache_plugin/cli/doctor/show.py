"""The report for a reader, in colour where rich is installed and stdout is a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from .report import Report

_STYLES = {"ok": "green", "missing": "bold red", "broken": "bold red", "unknown": "yellow"}
Pieces = tuple[tuple[str, str], ...]
"""A line: texts and their styles."""


def show(report: Report) -> None:
    """Prints the report."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        for line in _lines(report):
            print("".join(text for text, _ in line))
        return
    console = Console(highlight=False)
    for line in _lines(report):
        console.print(Text.assemble(*line), soft_wrap=True)  # a command is copied whole


def _lines(report: Report) -> Iterator[Pieces]:
    width = max(map(len, report.parts))
    for name, part in report.parts.items():
        first, *more = part.lines
        yield ((f"{part.state:<8}", _STYLES[part.state]), (f"{name:<{width}}  ", "bold"), (first, ""))
        for text in more:
            yield ((" " * (8 + width + 2) + text, ""),)
    for needed, title in ((True, "Missing for `rcache run`:"), (False, "Missing for other things:")):
        problems = [problem for _, problem in report.problems() if problem.needed is needed]
        if problems:
            yield (("", ""),)
            yield ((title, "bold"),)
        for problem in problems:
            yield ((f"- {problem.what}", ""),)
            mend = problem.mend or "no command mends this; report it with the output of rcache doctor --json"
            yield ((f"    {mend}", "cyan" if problem.mend else ""),)
    yield (("", ""),)
    yield (("`rcache run` works here", "green") if report.ready else ("`rcache run` does not work here", "bold red"),)
