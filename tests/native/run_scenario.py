"""Drives the functions of abi_scenario.c, for runs under a sanitizer: run_scenario.py SHARED_OBJECT [--short]."""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from native_build import load_scenario

from rcache_plugin import CacheSpec, HostVTable, RecurrentCache, TableClient, UBatch, factory_address


def main() -> int:
    logging.disable(logging.CRITICAL)  # the scenario provokes errors on purpose
    scenario = load_scenario(Path(sys.argv[1]))
    n_steps = 20 if "--short" in sys.argv else 500
    failed = 0

    def report(what: str, line: int) -> None:
        nonlocal failed
        failed += line != 0
        print(f"  {what}: {'ok' if line == 0 else f'failed at line {line}'}", flush=True)

    for placement in (0, 1):
        for use_mask in (0, 1):
            line = scenario.abi_run_factory(factory_address(), placement, use_mask, None)
            report(f"scenario, placement {placement}, {'s_mask' if use_mask else 'rs_z'}", line)
    for flags in (0, 1):
        line = scenario.abi_run_checkpoints(factory_address(), flags)
        report(f"checkpoints, {'hybrid' if flags else 'pure'}", line)
    cache = RecurrentCache(CacheSpec.make([8, 0, 4], [16, 0, 12]), 8, allocate=False)
    table = HostVTable(cache)
    report("8 threads", scenario.abi_run_threads(table.address, 8, n_steps))
    address = table.address
    client = TableClient(address)
    client.find_slot(UBatch.single(0, n_steps))
    del table, cache
    gc.collect()
    report("closed", scenario.abi_run_closed(address))
    client.destroy()
    late = HostVTable(RecurrentCache(CacheSpec.make([4], [4]), 2, allocate=False))
    report("late calls are registered", scenario.abi_call_at_exit(late.address))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
