"""Proves that calls in the wrong order are an error or a refusal, never a crash; each runs in a child process."""

from __future__ import annotations

from pathlib import Path

import pytest
from children import run_code
from native_build import compile_shared

HEAD = """
    import sys
    sys.path.insert(0, "tests/support")
    from pathlib import Path
    from native_build import load_scenario
    from rcache_plugin import CacheSpec, HostVTable, RecurrentCache, TableClient, UBatch, factory_address
    spec = CacheSpec.make([8, 0, 4], [16, 0, 12])
    cache = RecurrentCache(spec, 8, allocate=False)
    table = HostVTable(cache)
"""


@pytest.fixture(scope="module")
def shared_object(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_shared("abi_scenario.c", tmp_path_factory.mktemp("native"))


def test_interpreter_exit_with_a_live_table(shared_object: Path) -> None:
    """The host calls from its own exit handler, after Python has ended."""
    out = run_code(HEAD + f"""
    scenario = load_scenario(Path({str(shared_object)!r}))
    TableClient(table.address).find_slot(UBatch.single(0, 0))
    assert scenario.abi_call_at_exit(table.address) == 0
    """)
    assert out.strip() == "late calls: closed"


@pytest.mark.parametrize("attempt", range(3))
def test_interpreter_exit_while_other_threads_call(shared_object: Path, attempt: int) -> None:
    run_code(HEAD + f"""
    import time
    scenario = load_scenario(Path({str(shared_object)!r}))
    assert scenario.abi_call_forever(table.address, 4) == 0
    time.sleep(0.2)
    """)


def test_exit_with_a_cache_that_only_a_host_holds(shared_object: Path) -> None:
    """A cache of the factory's that nobody destroyed."""
    run_code(HEAD + """
    from rcache_plugin._rcache import ffi, lib
    factory = ffi.cast("const struct rcache_factory *", factory_address())
    n_embd = ffi.new("uint32_t[]", [4])
    c_spec = ffi.new("struct rcache_spec *", dict(abi_version=lib.RCACHE_ABI_VERSION,
                     struct_size=ffi.sizeof("struct rcache_spec"), n_cells=2, n_layer=1, n_embd_r=n_embd,
                     n_embd_s=n_embd))
    out = ffi.new("const struct rcache_vtable **")
    assert factory.create(factory.user, c_spec, out) == 0
    client = TableClient(int(ffi.cast("uintptr_t", out[0])))
    assert client.find_slot(UBatch.single(0, 0)) == (0, 1, 0)
    """)


def test_closing_in_every_order() -> None:
    run_code(HEAD + """
    import itertools
    for order in itertools.permutations(range(3)):
        cache = RecurrentCache(spec, 4)
        table = HostVTable(cache)
        client = TableClient(table.address)
        client.find_slot(UBatch.single(0, 0))
        parts = [cache.close, table.close, client.destroy]
        for i in order:
            parts[i]()
            parts[i]() if i != 2 else client.destroy()
        cache.close(); table.close()
    """)


def test_fork_of_a_process_with_a_table() -> None:
    run_code(HEAD + """
    import os
    client = TableClient(table.address)
    client.find_slot(UBatch.single(0, 0))
    pid = os.fork()
    if pid == 0:
        ok = client.find_slot(UBatch.single(0, 1)) == (0, 1, -1) and cache.seq_pos_max(0) == 1
        os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert cache.seq_pos_max(0) == 0, "the child's step is its own"
    """)


def test_a_callback_that_closes_its_own_table() -> None:
    run_code(HEAD + """
    from rcache_plugin.errors import ClosedError
    def s_copy(i):
        mine.close()
        return 0
    mine = HostVTable(cache, s_copy=s_copy)
    client = TableClient(mine.address)
    client.find_slot(UBatch.single(0, 0))
    assert client.s_copy(1).tolist() == [0]
    try:
        client.info()
    except ClosedError:
        pass
    else:
        raise SystemExit("the table is still open")
    client.destroy()
    """)


def test_half_made_cache_is_collected_quietly() -> None:
    out = run_code("""
    import gc
    from rcache_plugin import CacheSpec, RecurrentCache
    for bad in (dict(n_cells=0), dict(n_cells=4, placement="else"), dict(n_cells=4, devices="NoSuchDevice")):
        try:
            RecurrentCache(CacheSpec.make([4], [4]), **bad)
        except ValueError as error:
            print(type(error).__name__)
    gc.collect()
    """)
    assert out.split() == ["InvalidArgument"] * 3
