"""Exercises the llama.cpp adapter, for runs under a sanitizer: run_llama.py ADAPTER.so MODEL.gguf ..."""

from __future__ import annotations

import ctypes
import logging
import sys

logging.disable(logging.CRITICAL)  # errors are provoked on purpose

import rcache_plugin.hosts.llama as host  # noqa: E402

host.install(adapter=sys.argv[1], consecutive_seq_ids=False)

import llama_cpp  # noqa: E402


def context(model: object, n_seq_max: int, n_rs_seq: int = 0) -> object:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 64 * n_seq_max, 64, 16, n_seq_max
    params.n_threads = params.n_threads_batch = 1
    params.n_rs_seq = n_rs_seq
    params.kv_unified = True
    return llama_cpp.llama_init_from_model(model, params)


def decode(ctx: object, wanted: list[tuple[list[int], int, int]]) -> int:
    """(ids, first position, number of tokens) of each set in one batch."""
    batch = llama_cpp.llama_batch_init(256, 0, 8)
    i = 0
    for ids, first, n in wanted:
        for j in range(n):
            batch.token[i], batch.pos[i] = 5 + i % 90, first + j
            batch.n_seq_id[i], batch.logits[i] = len(ids), j == n - 1
            for k, seq_id in enumerate(ids):
                batch.seq_id[i][k] = seq_id
            i += 1
    batch.n_tokens = i
    status = llama_cpp.llama_decode(ctx, batch)
    llama_cpp.llama_batch_free(batch)
    return int(status)


def exercise(path: str) -> None:
    quiet = llama_cpp.llama_log_callback(lambda level, text, user: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    first, second = context(model, 4), context(model, 4, n_rs_seq=3)
    for ctx in (first, second):
        memory = llama_cpp.llama_get_memory(ctx)
        assert decode(ctx, [([0], 0, 20), ([1], 0, 3), ([3], 0, 7)]) == 0
        assert decode(ctx, [([3], 7, 1), ([0], 20, 1)]) == 0
        llama_cpp.llama_memory_seq_cp(memory, 0, 2, -1, -1)
        assert decode(ctx, [([2], 21, 4), ([0], 21, 4)]) == 0
        for p0, p1 in ((24, -1), (3, 5), (1, -1), (-1, -1)):
            llama_cpp.llama_memory_seq_rm(memory, 2, p0, p1)
        size = llama_cpp.llama_state_get_size(ctx)
        blob = (ctypes.c_uint8 * size)()
        n = llama_cpp.llama_state_get_data(ctx, blob, size)
        assert n > 0 and llama_cpp.llama_state_set_data(ctx, blob, n) == n
        one = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(ctx, 0))()
        n_one = llama_cpp.llama_state_seq_get_data(ctx, one, len(one), 0)
        assert llama_cpp.llama_state_seq_set_data(ctx, one, n_one, 1) > 0
        for cut in range(0, n_one, 37):
            assert llama_cpp.llama_state_seq_set_data(ctx, one, cut, 3) == 0
        for flags in (1, 2):
            part = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size_ext(ctx, 0, flags))()
            llama_cpp.llama_state_seq_get_data_ext(ctx, part, len(part), 0, flags)
            llama_cpp.llama_state_seq_set_data_ext(ctx, part, len(part), 0, flags)
        llama_cpp.llama_memory_seq_keep(memory, 0)
        if "qwen35" not in path:  # llama.cpp's attention half asserts for models with several positions a token
            llama_cpp.llama_memory_seq_add(memory, 0, 0, -1, 2)
        llama_cpp.llama_memory_clear(memory, True)
        assert decode(ctx, [([0, 1, 2], 0, 5)]) == 0
    cache = host.caches()[0]
    cache.find_slot = cache.prepare = lambda *args: 1 / 0  # type: ignore[method-assign]
    for ctx in (first, second):
        decode(ctx, [([3], 0, 1)])
    llama_cpp.llama_free(first)
    for cache in host.caches():
        cache.close()
    decode(second, [([3], 1, 1)])
    llama_cpp.llama_free(second)
    left = context(model, 2)
    assert decode(left, [([0], 0, 3), ([1], 0, 3)]) == 0
    # `left` is alive when the interpreter ends


for path in sys.argv[2:]:
    exercise(path)
    print(f"  {path.rsplit('/', 1)[-1]}: ok", flush=True)
