"""Saving and restoring one sequence of 24 MB: bench_state.py [--json FILE] [--rounds N].

First the cache itself, with the tensors of a Mamba 2.8B (64 layers), against a memcpy of as many bytes between two
pieces of memory that are in use. Then llama-cpp-python on it and stock, two processes in turn, with a model of the same
number of layers and of bytes a layer. Medians, spread between the 10th and 90th percentile (of the ratio: over the
rounds), and the best of all, which a busy machine disturbs least. The aim is 1.3 times the memcpy of the same run plus
1 ms, for the medians.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import hashlib
import io
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench_llama import ROOT, Side, model

from rcache_plugin import CacheSpec, RecurrentCache, UBatch

SPEC = CacheSpec.mamba(n_layer=64, d_inner=5120, d_state=16, d_conv=4)


def aim(memcpy_ms: float) -> float:
    return 1.3 * memcpy_ms + 1


def row(rows: list[dict[str, Any]], what: str, times: list[float], memcpy_ms: float | None, aimed: bool) -> float:
    times = sorted(1e3 * t for t in times)
    median, low, high = statistics.median(times), times[len(times) // 10], times[len(times) * 9 // 10]
    limit = aim(memcpy_ms) if aimed and memcpy_ms is not None else None
    spread = {"median_ms": median, "p10_ms": low, "p90_ms": high, "best_ms": times[0]}
    rows.append({"what": what, "aim_ms": limit, **spread})
    verdict = "" if limit is None else f"   aim {limit:6.2f}   {'met' if median <= limit else 'MISSED'}"
    print(f"{what:44} {times[0]:8.2f} {median:8.2f}  ({low:.2f} .. {high:.2f}){verdict}", flush=True)
    return median


def in_python(folder: Path, rounds: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    with RecurrentCache(SPEC, 3) as cache:
        assert cache.buffers is not None
        cache.find_slot(UBatch([(0,), (1,)], [5, 5]))
        for il in SPEC.layers:
            for which in ("r", "s"):
                cache.buffers.set_row(which, il, 0, rng.standard_normal(SPEC.n_embd(which, il), dtype=np.float32))
        size = cache.state_size(0)
        source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
        memory = bytearray(size)
        cache.state_write(memory, 0)
        path = folder / "state"

        def stream_out() -> None:
            cache.state_write(io.BytesIO(), 0)

        def free() -> None:
            cache.seq_rm(2)

        cases: list[tuple[str, bool, Callable[[], object], Callable[[], object]]] = [
            ("memcpy", False, lambda: ctypes.memmove(target.ctypes.data, source.ctypes.data, size), free),
            ("state_write to memory", True, lambda: cache.state_write(memory, 0), free),
            ("state_read from memory, to a free cell", True, lambda: cache.state_read(memory, 2), free),
            ("state_read from memory, over the sequence", True, lambda: cache.state_read(memory, 1), free),
            ("state_write to a BytesIO, which grows", False, stream_out, free),
            ("state_read from a BytesIO", False, lambda: cache.state_read(io.BytesIO(memory), 2), free),
            ("save, with sha256 and fsync", False, lambda: cache.save(path, 0), free),
            ("load, with sha256", False, lambda: cache.load(path, 2), free),
            ("sha256 alone", False, lambda: hashlib.sha256(memory).digest(), free),
        ]
        times: dict[str, list[float]] = {name: [] for name, *_ in cases}
        for i in range(rounds * 5 + 1):  # each case once a round, so that all meet the same machine
            for name, _, call, before in cases:
                before()
                start = time.perf_counter()
                call()
                if i:
                    times[name].append(time.perf_counter() - start)
        memcpy_ms = statistics.median(times["memcpy"]) * 1e3
        rows: list[dict[str, Any]] = []
        for name, aimed, *_ in cases:
            row(rows, name, times[name], memcpy_ms, aimed)
    return rows


def both(found: dict[str, Any]) -> str:
    return " ".join(f"{found[f'{side}_ms']:7.2f} ({found[f'{side}_best_ms']:5.2f})" for side in ("stock", "ours"))


CASES = ("get", "set", "set over", "get all", "set all", "save file", "load file")
NAMES = {
    "get": "llama_state_seq_get_data",
    "set": "llama_state_seq_set_data, to an empty sequence",
    "set over": "llama_state_seq_set_data, over the sequence",
    "get all": "llama_state_get_data",
    "set all": "llama_state_set_data",
    "save file": "llama_state_seq_save_file (no fsync)",
    "load file": "llama_state_seq_load_file",
}


def measure(stock: Side, ours: Side, case: list[Any], rounds: int) -> dict[str, Any]:
    times: dict[Side, list[float]] = {stock: [], ours: []}
    ratios = []
    for i in range(rounds + 1):
        this = {side: side.run(case) for side in ((stock, ours) if i % 2 else (ours, stock))}
        if i == 0:
            continue  # warms up both
        for side, seconds in this.items():
            times[side] += seconds
        ratios.append(statistics.median(this[stock]) / statistics.median(this[ours]))
    found = {"ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}
    for name, side in (("stock", stock), ("ours", ours)):
        found[f"{name}_ms"], found[f"{name}_best_ms"] = statistics.median(times[side]) * 1e3, min(times[side]) * 1e3
    return found


def in_llama(folder: Path, rounds: int) -> list[dict[str, Any]]:
    from llama_oracle import compile_oracle

    path = model("large-state")
    oracle = compile_oracle(folder)
    stock, ours = Side("stock", "stock", {}, oracle), Side("ours", "rcache", {}, oracle)
    rows = []
    print(f"\n{'median (best) in milliseconds':46} {'stock':>15} {'ours':>15} {'ratio':>6}  (spread)      aim")
    memcpy = measure(stock, ours, ["state", path, "memcpy", 9], rounds)
    for case in CASES:
        found = measure(stock, ours, ["state", path, case, 9], rounds)
        limit = aim(memcpy["ours_ms"]) if "file" not in case else None
        rows.append({"case": NAMES[case], "aim_ms": limit, **found})
        verdict = "" if limit is None else f"{limit:5.2f}  {'met' if found['ours_ms'] <= limit else 'MISSED'}"
        ratio = f"{found['ratio']:6.2f}  ({found['ratio_low']:.2f} .. {found['ratio_high']:.2f})"
        print(f"{NAMES[case]:46} {both(found)} {ratio}  {verdict}", flush=True)
    rows.append({"case": "memcpy", "aim_ms": None, **memcpy})
    print(f"{'memcpy':46} {both(memcpy)}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    (ROOT / "build" / "bench").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build" / "bench") as folder:
        print(f"{'the cache alone, in milliseconds':44} {'best':>8} {'median':>8}  (p10 .. p90)")
        rows = in_python(Path(folder), args.rounds)
        llama = in_llama(Path(folder), args.rounds)
    if args.json:
        about = {"date": datetime.date.today().isoformat(), "machine": f"{os.cpu_count()} cores, {platform.machine()}"}
        found = {**about, "rows": rows, "llama": llama}
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
