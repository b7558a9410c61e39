"""llama-cpp-python on rcache against stock, both in this run: bench_llama.py [--json FILE] [--rounds N] [--only a,d].

Two processes, one of each kind, take turns round by round; per case the medians of all times, the ratio of stock's to
ours (above 1: ours is faster), and the spread of the ratio over the rounds. Models have real shapes and random weights.
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
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MODELS = ROOT / "build" / "bench"
sys.path.insert(0, str(ROOT / "tests"))

import children  # noqa: E402


class Side:
    def __init__(self, mode: str, options: dict[str, Any], oracle: Path) -> None:
        self.name = mode + "".join(f" {value}" for value in options.values())
        command = [sys.executable, str(HERE / "llama_bench_child.py"), mode, json.dumps(options), str(oracle)]
        self.child = children.Answering(command)

    def run(self, case: list[Any]) -> list[float]:
        try:
            times: list[float] = self.child.ask(case)
        except children.ChildFailed as e:
            raise SystemExit(f"{self.name} {e}") from None
        return times


def model(preset: str) -> str:
    path = MODELS / f"{preset}.gguf"
    if not path.exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(ROOT / "examples" / "make_random_gguf.py"), "--preset", preset, "-o", str(path)]
        subprocess.run(command, check=True)
    return str(path)


def cases(tiny: str, real: str) -> list[tuple[str, float | None, list[Any]]]:
    return [
        ("a  decode, 1 sequence, mamba-130m", 0.98, ["decode_one", real, 12]),
        ("b  prefill 2,000 tokens, mamba-130m", 0.98, ["prefill", real, 2000]),
        ("c  decode 1 of 256 slots, tiny", 1.3, ["one_of_many", tiny, 256, 200]),
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


def measure(stock: Side, ours: Side, case: list[Any], rounds: int) -> dict[str, Any]:
    seeded = case[0] in ("random_of_many", "trace")
    times: dict[Side, list[float]] = {stock: [], ours: []}
    ratios = []
    for i in range(rounds + 1):
        order = (stock, ours) if i % 2 else (ours, stock)
        this = {side: side.run([*case, i] if seeded else case) for side in order}
        if i == 0:
            continue  # warms up both
        for side in order:
            times[side] += this[side]
        ratios.append(statistics.median(this[stock]) / statistics.median(this[ours]))
    ratios.sort()
    return {
        "stock_ms": statistics.median(times[stock]) * 1e3, "ours_ms": statistics.median(times[ours]) * 1e3,
        "ratio": statistics.median(ratios), "ratio_low": ratios[0], "ratio_high": ratios[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="letters of cases, such as a,d")
    parser.add_argument("--options", default="{}", help="arguments of install(), as JSON")
    args = parser.parse_args()
    from llama_oracle import compile_oracle

    with tempfile.TemporaryDirectory() as folder:
        oracle = compile_oracle(Path(folder))
        stock, ours = Side("stock", {}, oracle), Side("rcache", json.loads(args.options), oracle)
        rows = []
        print(f"{'stock against ' + ours.name:46} {'stock ms':>9} {'ours ms':>9} {'ratio':>6}  (spread)      aim")
        for name, aim, case in cases(model("tiny"), model("mamba-130m")):
            if args.only and name[0] not in args.only.split(","):
                continue
            row = measure(stock, ours, case, args.rounds)
            rows.append({"case": name, "aim": aim, **row})
            verdict = "" if aim is None else f"{aim:5.2f}  {'met' if row['ratio'] >= aim else 'MISSED'}"
            print(f"{name:46} {row['stock_ms']:9.3f} {row['ours_ms']:9.3f} {row['ratio']:6.2f}  "
                  f"({row['ratio_low']:.2f} .. {row['ratio_high']:.2f})  {verdict}", flush=True)
    if args.json:
        about = {"date": datetime.date.today().isoformat(), "machine": f"{os.cpu_count()} cores, {platform.machine()}",
                 "options": json.loads(args.options)}
        Path(args.json).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
