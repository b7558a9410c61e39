"""The prefix cache and rollback, against stock: bench_reuse.py [--json FILE] [--rounds N] [--only turns,rollback].

Two processes, one of each kind, take turns round by round; the figures are medians of all rounds, the ratio is that of
stock's to ours (above 1: ours is faster), and its spread is over the rounds. mamba-130m has real shapes and random
weights; so have the two models whose only purpose is a large state. "Without" is ours with checkpoint_cells=0.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_llama import model

HERE = Path(__file__).resolve().parent


@dataclass
class Row:
    """One line of the table."""

    case: str
    name: str
    unit: str
    ours: float
    stock: float | None = None
    """Or ours without checkpoints, where the name says so."""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    least: float | None = None
    """The ratio that is aimed at."""
    most: float | None = None
    """The figure of ours that is aimed at, in `unit`."""

    @property
    def verdict(self) -> str:
        if self.least is None and self.most is None:
            return ""
        met = (self.least is None or (self.ratio or 0) >= self.least) and (self.most is None or self.ours <= self.most)
        return "met" if met else "MISSED"

    @property
    def aim(self) -> str:
        if self.least is not None:
            return f">= {self.least:g} x"
        return "" if self.most is None else f"<= {self.most:g} {self.unit}"


class Side:
    def __init__(self, mode: str, options: dict[str, Any]) -> None:
        self.child = subprocess.Popen(
            [sys.executable, str(HERE / "reuse_bench_child.py"), mode, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )

    def run(self, case: list[Any]) -> dict[str, Any]:
        assert self.child.stdin is not None and self.child.stdout is not None
        print(json.dumps(case), file=self.child.stdin, flush=True)
        line = self.child.stdout.readline()
        if not line:
            raise SystemExit(f"a child ended with {self.child.wait()} in {case}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Bench:
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.stock = Side("stock", {})
        self.ours = Side("rcache", {})
        self.without = Side("rcache", {"checkpoint_cells": 0})
        self.same_answers = True

    def measure(
        self, case: list[Any], rounds: int, *, other: Side | None = None, seeded: bool = True, warm: bool = False
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(of the other side, of ours) by round; with `warm` one round more, which is thrown away."""
        other = other or self.stock
        found = []
        for i in range(rounds + warm):
            order = (other, self.ours) if i % 2 else (self.ours, other)
            answers = {side: side.run([*case, i] if seeded else case) for side in order}
            if i >= warm:
                found.append((answers[other], answers[self.ours]))
        self.same_answers &= all(theirs.get("answers") == ours.get("answers") for theirs, ours in found)
        return found

    @staticmethod
    def row(
        found: list[tuple[dict[str, Any], dict[str, Any]]], key: str, case: str, name: str, *, unit: str = "ms",
        least: float | None = None, most: float | None = None,
    ) -> Row:
        scale = {"ms": 1e3, "us": 1e6}[unit]
        pairs = [(theirs["seconds"][key], ours["seconds"][key]) for theirs, ours in found]
        ratios = sorted(theirs / ours for theirs, ours in pairs)
        return Row(
            case, name, unit, statistics.median(ours for _, ours in pairs) * scale,
            statistics.median(theirs for theirs, _ in pairs) * scale,
            statistics.median(ratios), ratios[0], ratios[-1], least, most,
        )

    def turns(self) -> list[Row]:
        found = self.measure(["turns", model("mamba-130m")], self.rounds)
        names = [
            ("first prompt", "first prompt, 2,000 tokens", None),
            ("second turn", "second turn: 2,000-token history without the answer, 23 new tokens", 50),
            ("edited", "edited: another last message of 23 tokens", 50),
            ("again", "the same prompt again", 50),
            ("cut", "next turn after an answer of 24 tokens, of which the last 2 are cut off", None),
            ("longer", "next turn, nothing cut off (stock continues too)", None),
            ("return", "back from another conversation, 23 new tokens", None),
        ]
        return [self.row(found, key, f"turns {key}", name, least=least) for key, name, least in names]

    def growing(self) -> list[Row]:
        found = self.measure(["growing", model("mamba-130m"), 10], max(1, self.rounds // 2))
        return [self.row(found, "growing", "growing", "10 turns of a growing chat, 200 to 605 tokens, together")]

    def prefill(self) -> list[Row]:
        found = self.measure(["prefill", model("mamba-130m"), 2000], self.rounds, other=self.without)
        name = "prefill of 2,000 tokens, against ours without checkpoints"
        rows = [self.row(found, "prefill", "prefill", name, least=0.97)]
        return [*rows, self.row(found, "prefill cpu", "prefill cpu", name + ", processor time")]

    def decode(self) -> list[Row]:
        case, rounds = ["decode", model("mamba-130m"), 31], 3 * self.rounds
        name = "decode of a token after a prompt"
        rows = [self.row(self.measure(case, rounds, warm=True), "decode", "decode stock", name)]
        found = self.measure(case, rounds, other=self.without, warm=True)
        name += ", against ours without checkpoints"
        rows.append(self.row(found, "decode", "decode", name, least=0.98))
        return [*rows, self.row(found, "decode cpu", "decode cpu", name + ", processor time")]

    def rollback(self) -> list[Row]:
        rows = []
        for preset in ("mamba-130m", "state-24mb", "state-80mb"):
            found = self.measure(["rollback", model(preset), 9], self.rounds, seeded=False, warm=True)
            size = f"{found[0][0]['state_bytes'] / 1e6:.1f} MB"
            name = f"checkpoint of a state of {size}"
            rows.append(self.row(found, "checkpoint", f"checkpoint {preset}", name, unit="us"))
            names = {"rollback": "rollback to it after a step", "once more": "rollback to it once more"}
            for key, name in names.items():
                rows.append(self.row(found, key, f"{key} {preset}", f"{name}, {size}", unit="us", most=100))
        return rows

    def copies(self) -> list[Row]:
        rows = []
        for preset in ("mamba-130m", "state-80mb"):
            found = self.ours.run(["copies", model(preset)])
            if not (found["moved"] and found["same"]):
                raise SystemExit(f"{preset}: the checkpoint did not stay in its cell: {found}")
            n_calls = sum(found["making"].values())
            name = f"making a checkpoint, {preset}"
            rows.append(Row(f"copies {preset}", name + ": rows changed", "rows", found["bytes_changed"], most=0))
            rows.append(Row(f"calls {preset}", name + ": rows copied, written or read", "rows", n_calls, most=0))
            total = sum(found["round"].values())
            name = f"a checkpoint, a step on it, a rollback, and a step from there, {preset}: rows of others moved"
            rows.append(Row(f"round {preset}", name, "rows", total, most=0))
        return rows


def show(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="prefix cache and rollback, mamba-130m unless said", title_justify="left")
    table.add_column("case")
    for name in ("stock", "ours", "ratio", "spread", "aim", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        verdict = row.verdict
        table.add_row(
            row.name, "" if row.stock is None else f"{row.stock:,.1f} {row.unit}", f"{row.ours:,.1f} {row.unit}",
            "" if row.ratio is None else f"{row.ratio:,.2f}",
            "" if row.ratio is None else f"{row.low:,.2f} .. {row.high:,.2f}",
            row.aim, f"[bold red]{verdict}[/]" if verdict == "MISSED" else verdict,
        )
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="written; with --only, its other rows stay")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="names of cases, such as turns,rollback")
    args = parser.parse_args()
    load = os.getloadavg()[2]  # what others do meanwhile; the benchmark itself keeps one core busy, or two
    bench, rows = Bench(args.rounds), []
    for name in ("copies", "rollback", "decode", "prefill", "turns", "growing"):
        if not args.only or name in args.only.split(","):
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            rows += getattr(bench, name)()
    show(rows)
    print("the answers of the two sides were " + ("the same, token for token" if bench.same_answers else "DIFFERENT"))
    if args.json:
        about = {
            "date": datetime.date.today().isoformat(), "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "load": round(load), "same_answers": bench.same_answers,
        }
        described = [asdict(row) | {"aim": row.aim, "verdict": row.verdict, "rounds": args.rounds} for row in rows]
        if args.only and args.json.exists():
            measured = {row.case for row in rows}
            before = json.loads(args.json.read_text(encoding="utf-8"))
            described = [row for row in before["rows"] if row["case"] not in measured] + described
            about["load"] = max(about["load"], before["load"])
            about["same_answers"] &= before["same_answers"]
        args.json.write_text(json.dumps({**about, "rows": described}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
