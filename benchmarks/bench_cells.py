"""What the bookkeeping of a step costs, in microseconds, against the aims: bench_cells.py [--json FILE].

Medians over many steps with the spread between the 10th and 90th percentile. Nothing of ggml or llama.cpp runs here;
steady: the same sequences in the same order each step; shuffled: another order each step.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from rcache_plugin import CacheSpec, CellTable, RecurrentCache, UBatch, plan_slots
from rcache_plugin.cells.slots import commit

SPEC = CacheSpec.make([4], [4])


def ubatches(n_seqs: int, n: int, shuffled: bool) -> Iterator[UBatch]:
    order = list(range(n_seqs))
    rng = random.Random(0)
    for pos in range(n):
        if shuffled:
            rng.shuffle(order)
        yield UBatch([(i,) for i in order], [pos] * n_seqs)


def sample(step: Callable[[UBatch], None], steps: list[UBatch]) -> dict[str, float]:
    times = []
    for ubatch in steps:
        start = time.perf_counter()
        step(ubatch)
        times.append((time.perf_counter() - start) * 1e6)
    times = sorted(times[len(times) // 10 :])
    return {"median_us": statistics.median(times), "p10_us": times[len(times) // 10],
            "p90_us": times[len(times) * 9 // 10]}


def find_and_commit(size: int, n_seqs: int, shuffled: bool, placement: str, n: int) -> dict[str, float]:
    table = CellTable(size, max(size, n_seqs))

    def step(ubatch: UBatch) -> None:
        plans = plan_slots(table, (ubatch,), placement)
        commit(table, plans[0])  # type: ignore[index]

    result = sample(step, list(ubatches(n_seqs, n, shuffled)))
    table.check()
    return result


def prepare_then_apply(size: int, n_seqs: int, n: int) -> tuple[dict[str, float], dict[str, float]]:
    """(prepare and find_slot of a prepared ubatch, find_slot alone): the first is not twice the second."""
    steps = list(ubatches(n_seqs, n, False))

    def both(cache: RecurrentCache) -> Callable[[UBatch], None]:
        def step(ubatch: UBatch) -> None:
            cache.prepare((ubatch,))
            cache.find_slot(ubatch)

        return step

    with RecurrentCache(SPEC, size, allocate=False) as one, RecurrentCache(SPEC, size, allocate=False) as other:
        return sample(both(one), steps), sample(lambda u: other.find_slot(u) and None, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def row(what: str, aim: float | None, figures: dict[str, float]) -> None:
        rows.append({"what": what, "aim_us": aim, **figures})
        met = "" if aim is None else f"   aim {aim:5.0f}   {'met' if figures['median_us'] <= aim else 'MISSED'}"
        print(f"{what:62} {figures['median_us']:8.1f}  ({figures['p10_us']:.1f} .. {figures['p90_us']:.1f}){met}")

    print(f"{'median (p10 .. p90) in microseconds':62}")
    for placement in ("classic", "compact"):
        row(f"find_slot + commit, 1 sequence, 1 cell, {placement}", 15, find_and_commit(1, 1, False, placement, 4000))
        row(f"find_slot + commit, 1 sequence, 4,096 cells, {placement}", 25,
            find_and_commit(4096, 1, False, placement, 4000))
        row(f"find_slot + commit, 256 of 256 sequences, steady, {placement}", 400,
            find_and_commit(256, 256, False, placement, 600))
        row(f"find_slot + commit, 256 of 256 sequences, shuffled, {placement}", 400,
            find_and_commit(256, 256, True, placement, 600))
    for n_seqs in (1, 256):
        both, alone = prepare_then_apply(256, n_seqs, 1000)
        row(f"prepare, then find_slot of the prepared, {n_seqs} sequences", None, both)
        row(f"find_slot alone, {n_seqs} sequences", None, alone)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            about = {"python": platform.python_version(), "machine": platform.machine()}
            json.dump({**about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
