"""llama-cpp-python on rcache against stock, all in this run: bench_llama.py [--json FILE] [--rounds N] [--only a,d].

Three processes take turns round by round: stock, ours with the same splits and places (*as stock*), and ours as it is
by default. Per case the medians of all times, the median over the rounds of stock's time divided by ours (above 1: ours
is faster), and the spread of that. Models have real shapes and random weights. The table printed is Markdown.
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
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MODELS = ROOT / "build" / "bench"
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "examples")]

import children  # noqa: E402
import make_random_gguf  # noqa: E402


class Side:
    def __init__(self, name: str, mode: str, options: dict[str, Any], oracle: Path) -> None:
        self.name = name
        command = [sys.executable, str(HERE / "llama_bench_child.py"), mode, json.dumps(options), str(oracle)]
        self.child = children.Answering(command)

    def run(self, case: list[Any]) -> list[float]:
        try:
            times: list[float] = self.child.ask(case)
        except children.ChildFailed as e:
            raise SystemExit(f"{self.name} {e}") from None
        return times


def model(preset: str) -> str:
    # A preset whose sizes have changed is another file.
    path = MODELS / f"{preset}-{zlib.crc32(repr(make_random_gguf.PRESETS[preset]).encode()):08x}.gguf"
    if not path.exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(ROOT / "examples" / "make_random_gguf.py"), "--preset", preset, "-o", str(path)]
        subprocess.run(command, check=True)
    return str(path)


def cases(tiny: str, real: str) -> list[tuple[str, float | None, list[Any]]]:
    return [
        ("a  decode, 1 sequence, mamba-130m", 0.98, ["decode_one", real, 12]),
        ("b  prefill 2,000 tokens, mamba-130m", 0.98, ["prefill", real, 2000]),
        ("c  decode 1 of 256 slots, tiny, 1 thread", 1.3, ["one_of_many", tiny, 256, 1, 200]),
        ("c  decode 1 of 256 slots, tiny, 2 threads", None, ["one_of_many", tiny, 256, 2, 200]),
        ("d  32 random of 256, tiny", 2.0, ["random_of_many", tiny, 256, 32, 30]),
        ("d  32 random of 256, mamba-130m", 2.0, ["random_of_many", real, 256, 32, 2]),
        ("e  slots {0,1} of 3, mamba-130m", None, ["pair", real, [0, 1], 8]),
        ("e  slots {1,2} of 3, mamba-130m", None, ["pair", real, [1, 2], 8]),
        ("e  slots {0,2} of 3, mamba-130m", None, ["pair", real, [0, 2], 8]),
        ("f  find_slot alone, 1 sequence of 256", None, ["find_slot", tiny, 1, 30]),
        ("f  find_slot alone, 64 sequences of 256", None, ["find_slot", tiny, 64, 20]),
        ("f  find_slot alone, 256 sequences of 256", None, ["find_slot", tiny, 256, 10]),
        ("g  8 sequences that come and go, tiny", 1.0, ["trace", tiny, 300]),
        ("g  8 sequences that come and go, mamba-130m", 1.0, ["trace", real, 16]),
    ]


def measure(sides: Sequence[Side], case: list[Any], rounds: int) -> dict[str, Any]:
    """Medians and ratios; the first of the sides is what the others are compared with."""
    seeded = case[0] in ("random_of_many", "trace")
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    ratios: dict[str, list[float]] = {side.name: [] for side in sides[1:]}
    for i in range(rounds + 1):
        order = sides if i % 2 else sides[::-1]
        this = {side.name: side.run([*case, i] if seeded else case) for side in order}
        if i == 0:
            continue  # warms up all
        for side in sides:
            times[side.name] += this[side.name]
        for name, found in ratios.items():
            found.append(statistics.median(this[sides[0].name]) / statistics.median(this[name]))
    return {
        "ms": {name: statistics.median(found) * 1e3 for name, found in times.items()},
        "ratio": {name: [statistics.median(found), min(found), max(found)] for name, found in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="letters of cases, such as a,d")
    parser.add_argument("--options", default="{}", help="arguments of install() for the last column, as JSON")
    args = parser.parse_args()
    from llama_oracle import compile_oracle

    options = json.loads(args.options)
    as_stock = {"placement": "classic", "consecutive_seq_ids": True, "checkpoint_cells": 0}
    with tempfile.TemporaryDirectory() as folder:
        oracle = compile_oracle(Path(folder))
        sides = [Side("stock", "stock", {}, oracle), Side("as stock", "rcache", as_stock, oracle),
                 Side("default", "rcache", options, oracle)]
        rows = []
        print("| case | stock ms | as stock ms | ratio (spread) | default ms | ratio (spread) | aim |\n|" + "---|" * 7)
        for name, aim, case in cases(model("tiny"), model("mamba-130m")):
            if args.only and name[0] not in args.only.split(","):
                continue
            row = measure(sides, case, max(1, args.rounds // 2) if case[0] == "prefill" else args.rounds)
            rows.append({"case": name, "aim": aim, **row})
            cells = [f"{row['ms']['stock']:.3f}"]
            for side, (ratio, low, high) in row["ratio"].items():
                cells += [f"{row['ms'][side]:.3f}", f"{ratio:.2f} ({low:.2f} .. {high:.2f})"]
            verdict = "met" if row["ratio"]["default"][0] >= (aim or 0) else "MISSED"
            print(f"| {name} | {' | '.join(cells)} | {'' if aim is None else f'{aim}, {verdict}'} |", flush=True)
    if args.json:
        about = {"date": datetime.date.today().isoformat(), "machine": f"{os.cpu_count()} cores, {platform.machine()}",
                 "options": options}
        Path(args.json).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
