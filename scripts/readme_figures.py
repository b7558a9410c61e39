"""Writes the figures of benchmarks/bench_reuse.py into README.md and docs/benchmarks.md, between their two markers.

    python scripts/readme_figures.py [build/bench/reuse.json]

With a file, that is copied to docs/figures/reuse.json first; without, the blocks are written from that file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures" / "reuse.json"
BEGIN, END = "<!-- begin: figures of scripts/readme_figures.py -->", "<!-- end of figures -->"

SHORT = {
    "turns second turn": "second turn, without the first answer",
    "turns edited": "the last message edited",
    "turns again": "the same prompt again",
    "turns return": "the conversation before, after another one",
    "turns longer": "next turn, nothing cut off (stock continues too)",
    "checkpoint state-80mb": "checkpoint of a state of 80 MB (stock: a copy)",
    "rollback state-80mb": "rollback to it (stock: a copy)",
}


def amount(value: float, unit: str) -> str:
    """A figure with three digits, in the unit that suits it."""
    if unit == "rows":
        return f"{value:.0f}"
    seconds = value * {"ms": 1e-3, "us": 1e-6}[unit]
    scale, name = next(((s, n) for s, n in ((1, "s"), (1e-3, "ms")) if seconds >= s), (1e-6, "us"))
    return f"{seconds / scale:.3g} {name}" if seconds / scale < 100 else f"{seconds / scale:.0f} {name}"


def ratio(row: dict[str, Any]) -> str:
    """How many times sooner ours is."""
    return "" if row["ratio"] is None else f"{row['ratio']:.2f}" if row["ratio"] < 10 else f"{row['ratio']:.0f}"


def about(figures: dict[str, Any]) -> str:
    """When and on what."""
    busy = f", shared with other work (load {figures['load']})" if figures["load"] > 1 else ""
    return f"{figures['date']}, {figures['machine']}{busy}"


def readme(figures: dict[str, Any]) -> str:
    """The block for README.md."""
    rows = {row["case"]: row for row in figures["rows"]}
    lines = ["| 2,000 tokens are known, 23 are new: time to the first token | stock | rcache | ratio |"]
    lines.append("|---|---:|---:|---:|")
    for case, name in SHORT.items():
        if case in rows:
            row = rows[case]
            lines.append(f"| {name} | {amount(row['stock'], row['unit'])} | {amount(row['ours'], row['unit'])} | "
                         f"{ratio(row)} |")
    lines += ["", f"Mamba of 130M parameters' shape; {about(figures)}; [all figures](docs/benchmarks.md)."]
    return "\n".join(lines)


def page(figures: dict[str, Any]) -> str:
    """The block for docs/benchmarks.md."""
    lines = [f"{about(figures)}.", "", "| case | stock | ours | ratio (spread) | aim | |"]
    lines.append("|---|---:|---:|---|---|---|")
    for row in figures["rows"]:
        stock = "" if row["stock"] is None else amount(row["stock"], row["unit"])
        spread = "" if row["ratio"] is None else f"{ratio(row)} ({row['low']:.2f} .. {row['high']:.2f})"
        ours = amount(row["ours"], row["unit"])
        lines.append(f"| {row['name']} | {stock} | {ours} | {spread} | {row['aim']} | {row['verdict']} |")
    same = "the same, token for token" if figures["same_answers"] else "different"
    return "\n".join([*lines, "", f"The answers of the two sides were {same}."])


def filled(text: str, block: str) -> str:
    """`text` with `block` between its markers. Raises ValueError when it has not just one pair of them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(f"the text needs {BEGIN} and {END}, once")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def main() -> None:
    """Writes both."""
    if len(sys.argv) > 1:
        FIGURES.parent.mkdir(exist_ok=True)
        FIGURES.write_text(Path(sys.argv[1]).read_text(encoding="utf-8"), encoding="utf-8")
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    for path, block in ((ROOT / "README.md", readme(figures)), (ROOT / "docs" / "benchmarks.md", page(figures))):
        path.write_text(filled(path.read_text(encoding="utf-8"), block), encoding="utf-8")


if __name__ == "__main__":
    main()
