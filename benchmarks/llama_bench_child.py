"""One side of bench_llama.py: llama-cpp-python in a process of its own, stock or on rcache.

llama_bench_child.py stock|rcache OPTIONS.json ORACLE.so; then one case a line on stdin, one JSON answer a line.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

MODE, OPTIONS, ORACLE = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
if MODE == "rcache":
    import rcache_plugin.hosts.llama

    rcache_plugin.hosts.llama.install(**OPTIONS)
import llama_cpp  # noqa: E402 - after install()

N_THREADS = 2


class Context:
    """A model and a context; the low-level API, as a server would use it."""

    def __init__(self, model: str, n_seq_max: int, n_ctx: int, n_threads: int) -> None:
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, 2048, 512, n_seq_max
        params.n_threads = params.n_threads_batch = n_threads
        self.ctx = llama_cpp.llama_init_from_model(self.model, params)
        if not self.ctx:
            raise SystemExit("no context")
        self.memory = llama_cpp.llama_get_memory(self.ctx)
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)
        self.pos = [0] * n_seq_max
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def decode(self, wanted: Sequence[tuple[int, int]]) -> float:
        """Decodes (sequence, number of tokens) in one batch, an output for each sequence's last; seconds."""
        batch, i = self.batch, 0
        for seq_id, n_tokens in wanted:
            for j in range(n_tokens):
                batch.token[i] = (self.pos[seq_id] * 31 + seq_id * 7) % self.n_vocab
                batch.pos[i] = self.pos[seq_id]
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = seq_id
                batch.logits[i] = j == n_tokens - 1
                self.pos[seq_id] += 1
                i += 1
        batch.n_tokens = i
        start = time.perf_counter()
        status = llama_cpp.llama_decode(self.ctx, batch)
        llama_cpp.llama_synchronize(self.ctx)
        seconds = time.perf_counter() - start
        if status != 0:
            raise SystemExit(f"llama_decode returned {status} for {wanted}")
        return seconds

    def remove(self, seq_id: int) -> None:
        llama_cpp.llama_memory_seq_rm(self.memory, seq_id, -1, -1)
        self.pos[seq_id] = 0

    def fill(self, n_tokens: int = 2) -> None:
        """Gives every sequence a state."""
        todo = [s for s in range(len(self.pos)) if self.pos[s] == 0]
        for at in range(0, len(todo), 64):
            self.decode([(s, n_tokens) for s in todo[at : at + 64]])


contexts: dict[tuple[Any, ...], Context] = {}


def context(model: str, n_seq_max: int, n_ctx: int, n_threads: int = N_THREADS) -> Context:
    key = model, n_seq_max, n_threads
    if key not in contexts:
        contexts[key] = Context(model, n_seq_max, n_ctx, n_threads)
    return contexts[key]


def decode_one(model: str, n: int) -> list[float]:
    c = context(model, 1, 4096)
    c.remove(0)
    c.decode([(0, 16)])
    return [c.decode([(0, 1)]) for _ in range(n)]


def prefill(model: str, n_tokens: int) -> list[float]:
    c = context(model, 1, 4096)
    c.remove(0)
    return [c.decode([(0, n_tokens)])]


def one_of_many(model: str, n_slots: int, n_threads: int, n: int) -> list[float]:
    c = context(model, n_slots, 64 * n_slots, n_threads)
    c.fill()
    return [c.decode([(17, 1)]) for _ in range(n)]


def random_of_many(model: str, n_slots: int, n_busy: int, n: int, seed: int) -> list[float]:
    c = context(model, n_slots, 64 * n_slots)
    c.fill()
    rng = random.Random(seed)
    return [c.decode([(s, 1) for s in rng.sample(range(n_slots), n_busy)]) for _ in range(n)]


def pair(model: str, slots: list[int], n: int) -> list[float]:
    c = context(model, 3, 4096)
    c.fill()
    return [c.decode([(s, 1) for s in slots]) for _ in range(n)]


def find_slot(model: str, n_seqs: int, n: int) -> list[float]:
    library = ctypes.CDLL(ORACLE)
    library.oracle_memory.restype = ctypes.c_void_p
    library.oracle_memory.argtypes = [ctypes.c_void_p]
    library.oracle_time_find_slot.argtypes = [ctypes.c_void_p] + [ctypes.c_int32] * 3
    library.oracle_time_find_slot.restype = ctypes.c_double
    c = context(model, 256, 64 * 256)
    memory = library.oracle_memory(c.ctx)
    llama_cpp.llama_memory_clear(c.memory, False)
    c.pos = [0] * 256
    library.oracle_time_find_slot(memory, n_seqs, 20, 0)
    seconds = [library.oracle_time_find_slot(memory, n_seqs, 20, 20 + 20 * i) * 1e-9 for i in range(n)]
    llama_cpp.llama_memory_clear(c.memory, False)
    return seconds


def trace(model: str, n_steps: int, seed: int) -> list[float]:
    """Continuous batching: eight slots, prompts of 8 to 64 tokens, answers of 4 to 40, in whatever slot is free."""
    c = context(model, 8, 4096)
    for seq_id in range(8):
        c.remove(seq_id)
    rng = random.Random(seed)
    left: dict[int, int] = {}
    total = 0.0
    for _ in range(n_steps):
        step = [(s, 1) for s in left]
        free = [s for s in range(8) if s not in left]
        if free and rng.random() < 0.4:
            slot = rng.choice(free)
            step.append((slot, rng.randint(8, 64)))
            left[slot] = rng.randint(4, 40)
        if not step:
            continue
        rng.shuffle(step)
        total += c.decode(step)
        for s, _n in step:
            left[s] -= 1
            if left[s] == 0:
                del left[s]
                c.remove(s)
    return [total]


def state(model: str, what: str, n: int) -> list[float]:
    """The state of sequence 0 through the calls that users of llama.cpp make; seconds."""
    c = context(model, 2, 128)
    if c.pos[0] == 0:
        c.decode([(0, 4)])
    c.remove(1)
    lib, path = llama_cpp, f"{model}.{MODE}.state".encode()
    size = lib.llama_state_get_size(c.ctx)
    key = model, "buffers"
    if key not in buffers:
        buffers[key] = [(ctypes.c_uint8 * size)() for _ in range(2)]
        ctypes.memset(buffers[key][1], 1, size)
    data, other = buffers[key]
    seq_size = lib.llama_state_seq_get_size(c.ctx, 0)
    tokens = (ctypes.c_int32 * 4)()
    count = ctypes.c_size_t()
    calls: dict[str, Callable[[], int]] = {
        "memcpy": lambda: ctypes.memmove(other, data, seq_size),
        "get": lambda: lib.llama_state_seq_get_data(c.ctx, data, seq_size, 0),
        "set": lambda: lib.llama_state_seq_set_data(c.ctx, data, seq_size, 1),
        "set over": lambda: lib.llama_state_seq_set_data(c.ctx, data, seq_size, 0),
        "get all": lambda: lib.llama_state_get_data(c.ctx, data, size),
        "set all": lambda: lib.llama_state_set_data(c.ctx, data, size),
        "save file": lambda: lib.llama_state_seq_save_file(c.ctx, path, 0, tokens, 4),
        "load file": lambda: lib.llama_state_seq_load_file(c.ctx, path, 1, tokens, 4, ctypes.byref(count)),
    }
    writer = {"set": "get", "set over": "get", "set all": "get all", "load file": "save file"}.get(what)
    if writer is not None:
        calls[writer]()
    seconds = []
    for _ in range(n):
        if what in ("set", "load file"):
            lib.llama_memory_seq_rm(c.memory, 1, -1, -1)
        start = time.perf_counter()
        done = calls[what]()
        seconds.append(time.perf_counter() - start)
        if not done:
            raise SystemExit(f"{what} failed")
    lib.llama_memory_seq_rm(c.memory, 1, -1, -1)
    if what.endswith("file"):
        os.unlink(path)
    return seconds


buffers: dict[tuple[str, str], list[Any]] = {}
CASES: dict[str, Callable[..., list[float]]] = {
    f.__name__: f for f in (decode_one, prefill, one_of_many, random_of_many, pair, find_slot, trace, state)
}


def main() -> None:
    quiet = llama_cpp.llama_log_callback(lambda level, text, user: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    ctypes.CDLL(llama_cpp.llama_cpp._lib._name, mode=ctypes.RTLD_GLOBAL)  # for the accessor
    for line in sys.stdin:
        name, *args = json.loads(line)
        print(json.dumps(CASES[name](*args)), flush=True)


if __name__ == "__main__":
    main()
