"""Runs operations on llama.cpp's own class and tells its fields: llama_oracle_child.py ORACLE.so MODEL.gguf.

One job a line on stdin, ``{"n_seq_max": 4, "ops": [["find_slot", ...], ...]}``; one answer a line on stdout, the return
value and the fields after each operation. Stock llama.cpp only, in a process of its own.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import llama_cpp


class Oracle:
    def __init__(self, library: str, model: str) -> None:
        mode = ctypes.RTLD_GLOBAL
        ctypes.CDLL(llama_cpp._lib._name if hasattr(llama_cpp, "_lib") else llama_cpp.llama_cpp._lib._name, mode=mode)
        self.lib = ctypes.CDLL(library)
        self.lib.oracle_memory.restype = ctypes.c_void_p
        self.lib.oracle_memory.argtypes = [ctypes.c_void_p]
        self.lib.oracle_fields.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]
        self.lib.oracle_find_slot.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, *[ctypes.c_void_p] * 3]
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, user: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        self.contexts: dict[int, tuple[Any, Any, Any]] = {}
        self.room = (ctypes.c_int32 * 200_000)()

    def context(self, n_seq_max: int) -> tuple[Any, Any, Any]:
        if n_seq_max not in self.contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 64 * n_seq_max, 64, 64, n_seq_max
            params.n_threads = params.n_threads_batch = 1
            ctx = llama_cpp.llama_init_from_model(self.model, params)
            self.contexts[n_seq_max] = ctx, llama_cpp.llama_get_memory(ctx), self.lib.oracle_memory(ctx)
        return self.contexts[n_seq_max]

    def fields(self, memory: Any) -> dict[str, Any]:
        n = self.lib.oracle_fields(memory, self.room, len(self.room))
        numbers = iter(self.room[:n])
        out: dict[str, Any] = {name: next(numbers) for name in ("head", "n", "used", "rs_z", "size")}
        out["cells"] = []
        for _ in range(out["size"]):
            pos, src, src0, tail, n_ids = (next(numbers) for _ in range(5))
            out["cells"].append([pos, src, src0, tail, [next(numbers) for _ in range(n_ids)]])
        return out

    def run(self, job: dict[str, Any]) -> list[Any]:
        _, public, memory = self.context(job["n_seq_max"])
        llama_cpp.llama_memory_clear(public, False)
        answers = []
        for name, *args in job["ops"]:
            if name == "find_slot":
                sets, n_seq_tokens, pos = args
                counts, flat = [len(ids) for ids in sets], [seq_id for ids in sets for seq_id in ids]
                arrays = [(ctypes.c_int32 * len(values))(*values) for values in (counts, flat, pos)]
                result = bool(self.lib.oracle_find_slot(memory, len(sets), n_seq_tokens, *arrays))
            elif name == "clear":
                result = llama_cpp.llama_memory_clear(public, False)
            else:
                result = getattr(llama_cpp, f"llama_memory_{name}")(public, *args)
            answers.append([result, self.fields(memory)])
        return answers


def main() -> None:
    oracle = Oracle(*sys.argv[1:3])
    for line in sys.stdin:
        print(json.dumps(oracle.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
