"""One side of bench_reuse.py: llama-cpp-python in a process of its own.

reuse_bench_child.py stock|rcache OPTIONS.json; then one case a line on stdin, one JSON answer a line. `OPTIONS` are
arguments of our `Llama`.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

MODE, OPTIONS = sys.argv[1], json.loads(sys.argv[2])
if MODE == "rcache":
    from rcache_plugin.hosts.llama import Llama
else:
    from llama_cpp import Llama
import llama_cpp  # noqa: E402 - after ours, which has to be first

N_THREADS = 2
HISTORY, NEW, ANSWER, CUT = 2000, 23, 24, 2
models: dict[str, Any] = {}


def model(path: str) -> Any:
    if path not in models:
        models[path] = Llama(path, n_ctx=4096, n_threads=N_THREADS, n_threads_batch=N_THREADS, verbose=False, **OPTIONS)
    return models[path]


def text(n: int, seed: int) -> list[int]:
    """Tokens that say nothing, and share no beginning with those of another seed."""
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(n)]


class Chat:
    """Prompts and answers of one `Llama`, as `Llama.create_completion` makes them with temperature 0."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.first: dict[str, float] = {}
        """Seconds from the call to its first token, by name."""
        self.answers: list[list[int]] = []

    def ask(self, name: str, prompt: list[int], n: int = ANSWER) -> list[int]:
        start = time.perf_counter()
        steps = self.llm.generate(prompt, temp=0.0)
        answer = [next(steps)]
        self.first[name] = time.perf_counter() - start
        answer += islice(steps, n - 1)
        steps.close()
        self.answers.append(answer)
        return answer


def turns(path: str, seed: int) -> dict[str, Any]:
    """The ways in which a second prompt follows a first one; seconds to the first token of each."""
    chat = Chat(model(path))
    history = text(HISTORY, 10 * seed)
    chat.ask("first prompt", history)
    chat.ask("second turn", [*history, *text(NEW, 10 * seed + 1)])
    edited = [*history, *text(NEW, 10 * seed + 2)]
    chat.ask("edited", edited)
    answer = chat.ask("again", edited)
    cut = [*edited, *answer[:-CUT], *text(NEW, 10 * seed + 3)]
    answer = chat.ask("cut", cut)
    longer = [*cut, *answer, *text(NEW, 10 * seed + 6)]
    answer = chat.ask("longer", longer)
    chat.ask("other", text(100, 10 * seed + 4))
    chat.ask("return", [*longer, *answer, *text(NEW, 10 * seed + 5)])
    return {"seconds": chat.first, "answers": chat.answers}


def growing(path: str, n_turns: int, seed: int) -> dict[str, Any]:
    """A chat of `n_turns` turns after a system prompt of 200 tokens; of each answer the last tokens are cut off."""
    chat = Chat(model(path))
    history = text(200, 1000 + 100 * seed)
    for turn in range(n_turns):
        history += text(NEW, 1001 + 100 * seed + turn)
        history += chat.ask(str(turn), history)[:-CUT]
    return {"seconds": {"growing": sum(chat.first.values())}, "answers": chat.answers}


def prefill(path: str, n_tokens: int, seed: int) -> dict[str, Any]:
    llm = model(path)
    llm.reset()
    tokens = text(n_tokens, 5000 + seed)
    start, cpu = time.perf_counter(), time.process_time()
    llm.eval(tokens)
    return {"seconds": {"prefill": time.perf_counter() - start, "prefill cpu": time.process_time() - cpu}}


def decode(path: str, n: int, seed: int) -> dict[str, Any]:
    """`n` single tokens after a prompt; the median of the times, and the mean of the processor's."""
    llm = model(path)
    llm.reset()
    llm.eval(text(40, 6000 + seed))
    tokens, seconds = text(n + 2, 7000 + seed), []
    for token in tokens[:2]:
        llm.eval([token])
    cpu = time.process_time()
    for token in tokens[2:]:
        start = time.perf_counter()
        llm.eval([token])
        seconds.append(time.perf_counter() - start)
    return {"seconds": {"decode": sorted(seconds)[n // 2], "decode cpu": (time.process_time() - cpu) / n}}


def rollback(path: str, n: int) -> dict[str, Any]:
    """Rollback of 2 tokens to a checkpoint, medians of `n`; seconds of making it, of the rollback, and of a second
    rollback at once, when the memory that it reads is in the processor's caches.

    Stock's way is to get the sequence's state, and to set it.
    """
    llm = model(path)
    llm.reset()
    prompt = text(16, 8000)
    llm.eval(prompt)
    memory, seconds = llama_cpp.llama_get_memory(llm.ctx), {"checkpoint": [], "rollback": [], "once more": []}
    size = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
    buffer = (ctypes.c_uint8 * size)()

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        done = call()
        seconds[name].append(time.perf_counter() - start)
        assert done and llama_cpp.llama_memory_seq_pos_max(memory, 0) == len(prompt) - 1
        return done

    def roll_back() -> Any:
        if MODE == "stock":
            return llama_cpp.llama_state_seq_set_data(llm.ctx, buffer, size, 0)
        return llama_cpp.llama_memory_seq_rm(memory, 0, len(prompt), -1)

    for _ in range(n):
        if MODE == "stock":
            timed("checkpoint", lambda: llama_cpp.llama_state_seq_get_data(llm.ctx, buffer, size, 0))
            llm.eval(text(2, 8001))
            timed("rollback", roll_back)
            timed("once more", roll_back)
        else:
            made = timed("checkpoint", lambda: llm.rcache.checkpoints.make(0))
            llm.eval(text(2, 8001))
            ahead = llm.rcache.checkpoints.make(0)
            timed("rollback", roll_back)
            llm.rcache.checkpoints.restore(ahead, 0)
            timed("once more", roll_back)
            llm.rcache.checkpoints.release(ahead)
            assert made.valid
            llm.rcache.checkpoints.release(made)
        llm.n_tokens = len(prompt)
    return {"seconds": {name: sorted(each)[n // 2] for name, each in seconds.items()}, "state_bytes": size}


def copies(path: str) -> dict[str, Any]:
    """What is copied when a checkpoint is made, continued from, and rolled back to: counted, not timed."""
    llm = model(path)
    llm.reset()
    llm.eval(text(64, 9000))
    cache = llm.rcache
    calls = {"copies": 0, "writes": 0, "reads": 0, "bystanders": 0}
    block = type(cache.buffers._storage)
    watched = {"copy": "copies", "write": "writes", "zero": "writes", "read": "reads"}
    originals = {name: getattr(block, name) for name in watched}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[watched[name]] += 1
            return originals[name](*args)

        return call

    def rows() -> dict[tuple[int, str, int], bytes]:
        return {
            (cell, which, il): cache.buffers.get_row(which, il, cell)
            for cell in range(cache.table.size) for il in range(cache.spec.n_layer) for which in ("r", "s")
        }

    before = rows()
    for name in watched:
        setattr(block, name, counted(name))
    made = cache.checkpoints.make(0)
    making = dict(calls)
    for name in watched:
        setattr(block, name, originals[name])
    changed = sum(row != before[key] for key, row in rows().items())
    for name in watched:
        setattr(block, name, counted(name))
    llm.eval([1])
    calls["bystanders"] += cache.plan.n - cache.plan.n_seqs
    moved = cache.table.tail(0) != cache.table.pin_cell(made.pin)
    cache.checkpoints.restore(made, 0)
    llm.n_tokens = 64
    llm.eval([1])
    calls["bystanders"] += cache.plan.n - cache.plan.n_seqs
    for name in watched:
        setattr(block, name, originals[name])
    cell = cache.table.pin_cell(made.pin)
    same = all(before[key] == row for key, row in rows().items() if key[0] == cell)
    cache.checkpoints.release(made)
    return {"making": making, "bytes_changed": changed, "round": calls, "moved": moved, "same": same}


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    f.__name__: f for f in (turns, growing, prefill, decode, rollback, copies)
}


def main(lines: Sequence[str] | Any = sys.stdin) -> None:
    for line in lines:
        name, *args = json.loads(line)
        print(json.dumps(CASES[name](*args)), flush=True)


if __name__ == "__main__":
    main()
