"""Runs scripts of operations on llama.cpp in a process of its own, with the stock memory class or with ours.

A test builds a `Script`, `run` executes it in a child as ``python llama_child.py stock|rcache MODEL SCRIPTS.json
OUT.npz`` and gives back a `Trace` for each script: every return value, the positions of all sequences after every
operation, all logits and embeddings, the bytes of all states. `differences` compares two of them, bit for bit.

Nothing here imports ggml-python; llama_cpp is imported in the child only.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import children
import numpy as np

MODES = ("stock", "rcache")
PARTIAL, ON_DEVICE = 1, 2  # flags of the states of one sequence
N_THREADS = 1  # threads that wait for each other cost seconds on a busy machine; some scripts ask for 2
QUIET = {"GGML_NO_BACKTRACE": "1"}  # an abort of ggml would start a debugger otherwise
WARNINGS = (3, 4)  # log levels of warnings and errors
MROPE_TYPES = (8, 40)  # rope types with four positions a token
Array = np.ndarray[Any, np.dtype[Any]]


class Script:
    """A named list of operations; each method adds one, in the order they are to run.

    `context` stands for one of several contexts of the script, which `new` makes and `free` frees; the first one is
    made with the settings given here (fields of llama_context_params).
    """

    def __init__(self, name: str, **settings: Any) -> None:
        self.name = name
        self.operations: list[dict[str, Any]] = []
        self._pos: dict[tuple[int, int], int] = {}
        self.new(0, **settings)

    def _add(self, op: str, context: int = 0, **arguments: Any) -> Script:
        self.operations.append({"op": op, "context": context, **arguments})
        return self

    def new(self, context: int = 0, **settings: Any) -> Script:
        """Makes a context."""
        self._forget(context)
        return self._add("new", context, settings=settings)

    def free(self, context: int = 0) -> Script:
        """Frees a context."""
        return self._add("free", context)

    def decode(
        self,
        tokens: Mapping[int, Sequence[int]] | Sequence[tuple[Sequence[int], int, int, bool]],
        *,
        outputs: str = "last",
        context: int = 0,
        embd: bool = False,
        interleave: bool = False,
        shift: Mapping[int, int] | None = None,
    ) -> Script:
        """Decodes one batch.

        `tokens`: sequence -> tokens, which continue where this script's last decode of that sequence ended; or a list
        of (sequence ids, token, position, output). `outputs`: "last" of each sequence, "all" or "none". `embd`: the
        rows of a table drawn in the child stand for the tokens. `interleave`: tokens of all sequences in turn. `shift`:
        by how much a sequence's positions moved meanwhile.
        """
        for seq, by in (shift or {}).items():
            self._pos[context, seq] = self._pos.get((context, seq), 0) + by
        rows = list(tokens) if not isinstance(tokens, Mapping) else self._rows(tokens, outputs, context, interleave)
        return self._add("decode", context, rows=[[list(s), int(t), int(p), bool(o)] for s, t, p, o in rows], embd=embd)

    def _rows(
        self, tokens: Mapping[int, Sequence[int]], outputs: str, context: int, interleave: bool
    ) -> list[tuple[Sequence[int], int, int, bool]]:
        rows = []
        for seq, ids in tokens.items():
            start = self._pos.get((context, seq), 0)
            self._pos[context, seq] = start + len(ids)
            last = len(ids) - 1
            rows.append(
                [
                    ((seq,), t, start + i, outputs == "all" or (outputs == "last" and i == last))
                    for i, t in enumerate(ids)
                ]
            )
        if not interleave:
            return [row for one in rows for row in one]
        longest = max(map(len, rows))
        return [one[i] for i in range(longest) for one in rows if i < len(one)]

    def at(self, seq: int, pos: int, context: int = 0) -> Script:
        """The next decode of `seq` starts at `pos`; no operation of its own."""
        self._pos[context, seq] = pos
        return self

    def pos(self, seq: int, context: int = 0) -> int:
        """Where the next decode of `seq` starts, as the script sees it."""
        return self._pos.get((context, seq), 0)

    def rm(self, seq: int, p0: int = -1, p1: int = -1, context: int = 0) -> Script:
        """llama_memory_seq_rm. If it removes all, say so to the script with `at`."""
        if p0 <= 0 and p1 < 0:
            self._forget(context, None if seq < 0 else seq)
        return self._add("rm", context, arguments=[seq, p0, p1])

    def cp(self, source: int, target: int, p0: int = -1, p1: int = -1, context: int = 0) -> Script:
        """llama_memory_seq_cp."""
        self._pos[context, target] = self.pos(source, context)
        return self._add("cp", context, arguments=[source, target, p0, p1])

    def keep(self, seq: int, context: int = 0) -> Script:
        """llama_memory_seq_keep."""
        before = self.pos(seq, context)
        self._forget(context)
        self._pos[context, seq] = before
        return self._add("keep", context, arguments=[seq])

    def add(self, seq: int, p0: int, p1: int, shift: int, context: int = 0) -> Script:
        """llama_memory_seq_add; like `div` left out where the memory says that it can't shift."""
        return self._add("add", context, arguments=[seq, p0, p1, shift])

    def div(self, seq: int, p0: int, p1: int, divisor: int, context: int = 0) -> Script:
        """llama_memory_seq_div."""
        return self._add("div", context, arguments=[seq, p0, p1, divisor])

    def clear(self, data: bool = True, context: int = 0) -> Script:
        """llama_memory_clear."""
        self._forget(context)
        return self._add("clear", context, arguments=[data])

    def save(self, name: str, seq: int | None = None, flags: int = 0, context: int = 0) -> Script:
        """Keeps the state of all, or of one sequence, under `name`."""
        return self._add("save", context, name=name, seq=seq, flags=flags)

    def load(self, name: str, seq: int | None = None, flags: int = 0, context: int = 0) -> Script:
        """Sets the state `name`, of all or of one sequence."""
        return self._add("load", context, name=name, seq=seq, flags=flags)

    def edit(self, name: str, target: str, *, cut: int | None = None, patch: Mapping[int, str] | None = None) -> Script:
        """`target` is a copy of the state `name`, cut to `cut` bytes (from the end if < 0) and with bytes, as hex."""
        return self._add("edit", name=name, target=target, cut=cut, patch=[[k, v] for k, v in (patch or {}).items()])

    def threads(self, *parts: Script) -> Script:
        """Runs the operations of several scripts, each on contexts of its own, in one thread each, at the same time."""
        return self._add("threads", parts=[part.operations for part in parts])

    def _forget(self, context: int, seq: int | None = None) -> None:
        for key in [k for k in self._pos if k[0] == context and seq in (None, k[1])]:
            del self._pos[key]


@dataclass
class Trace:
    """What a script did: one record an operation, arrays by name (``<number of operation>.<what>``), warnings."""

    name: str
    records: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    n_caches: int = 0
    """Caches of ours that were still open after the last context was freed."""

    def of(self, op: str) -> list[dict[str, Any]]:
        """The records of all operations `op`, in order."""
        return [record for record in self.records if record["op"] == op]

    def logits(self, n: int = -1) -> Array:
        """float32 [n_outputs, n_vocab] of the `n`-th decode; NaN-free when it succeeded."""
        return self.arrays[f"{self.of('decode')[n]['number']}.logits"]

    def all_logits(self) -> list[Array]:
        """Those of every decode that succeeded."""
        return [self.arrays[f"{r['number']}.logits"] for r in self.of("decode") if r["rc"] == 0]


def differences(ours: Trace, stock: Trace, limit: int = 5) -> list[str]:
    """In words, the first operations at which two traces differ by anything but warnings and the sign of a zero.

    llama.cpp zeroes a state by multiplying what was there by 0, which keeps the sign, infinities and NaN; ours is all
    zero bytes before. So a state that was saved before its first few tokens have filled it may have -0.0 for 0.0.
    """
    found = []  # (number of the operation, words)
    if len(ours.records) != len(stock.records):
        found.append((-1, f"{len(ours.records)} operations instead of {len(stock.records)}"))
    for mine, theirs in zip(ours.records, stock.records, strict=False):
        for key in sorted((mine.keys() | theirs.keys()) - {"caches"}):
            if mine.get(key) != theirs.get(key):
                found.append((theirs["number"], f"{key} is {mine.get(key)} instead of {theirs.get(key)}"))
    for name in sorted(ours.arrays.keys() | stock.arrays.keys()):
        number, what = name.split(".", 1)
        words = _unequal(ours.arrays.get(name), stock.arrays.get(name))
        found += [(int(number), f"{what}{words}")] if words else []
    found.sort()
    lines = [f"{_words(stock.records[n]) if 0 <= n < len(stock.records) else n}: {words}" for n, words in found[:limit]]
    return lines + ([f"... and {len(found) - limit} more"] if len(found) > limit else [])


def _unequal(mine: Array | None, theirs: Array | None) -> str:
    if mine is None or theirs is None:
        return " only here" if theirs is None else " only in stock"
    if mine.shape != theirs.shape:
        return f" has shape {mine.shape} instead of {theirs.shape}"
    bad = _differing(mine, theirs) if mine.dtype == np.uint8 else mine.view(np.uint32) != theirs.view(np.uint32)
    if not bad.any():
        return ""
    size = f", by up to {np.abs(mine.astype(np.float64) - theirs).max():.3g}"
    return f" differs at {bad.sum()} of {mine.size} values, the first at {np.argwhere(bad)[0].tolist()}{size}"


def _differing(mine: Array, theirs: Array) -> Array:
    """Which bytes of two states differ, but for the last byte of a float32 that is 0.0 in one and -0.0 in the other."""
    zeros = (mine == 0) & (theirs == 0)
    before = np.zeros(len(mine), dtype=bool)
    before[3:] = zeros[2:-1] & zeros[1:-2] & zeros[:-3]
    signs = before & ((mine | theirs) == 0x80)
    return np.asarray((mine != theirs) & ~signs)


def _words(record: Mapping[str, Any]) -> str:
    return f"{record['number']}: {record['op']} {record.get('arguments', '')}".rstrip()


def _command(mode: str, model: Path, scripts: Path, out: Path) -> list[str]:
    return [sys.executable, "-X", "faulthandler", __file__, mode, str(model), str(scripts), str(out)]


def run(
    modes: Sequence[str], model: Path, scripts: Iterable[Script], folder: Path, *, timeout: float = 180
) -> list[list[Trace]]:
    """Runs `scripts` on `model`, in one child for each of `modes`, all at once; gives back what each did.

    Raises `children.ChildFailed`. When nothing failed but stock died of a fault of its own, that is a
    `children.StockDied`, and `survivors` of it has what the others did.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "scripts.json"
    source.write_text(json.dumps([{"name": script.name, "operations": script.operations} for script in scripts]))
    outs = [folder / f"{i}-{mode}.npz" for i, mode in enumerate(modes)]
    started = [
        children.start(_command(mode, model, source, out), env=QUIET) for mode, out in zip(modes, outs, strict=True)
    ]
    failed, died = [], {}
    for mode, child in zip(modes, started, strict=True):
        try:
            status, printed, errors = children.finish(child, timeout=timeout)
        except children.ChildFailed as e:
            failed.append(f"{mode}: {e}")
            continue
        fault = children.stock_died(status, printed, errors) if mode == "stock" else None
        if fault is not None:
            died[mode] = fault
        if status != 0:
            failed.append(f"{mode}: exit status {status}\n{printed}\n{errors}")
    if len(failed) > len(died):
        raise children.ChildFailed("\n".join(failed))
    for fault in died.values():
        fault.survivors = {mode: read(out) for mode, out in zip(modes, outs, strict=True) if mode not in died}
        raise fault
    return [read(out) for out in outs]


def write(path: Path, traces: Sequence[Trace]) -> None:
    """Keeps `traces` in a file, for `read`."""
    heads = [{"name": t.name, "records": t.records, "warnings": t.warnings, "n_caches": t.n_caches} for t in traces]
    arrays = {f"{i}.{key}": values for i, trace in enumerate(traces) for key, values in trace.arrays.items()}
    np.savez(path, traces=np.frombuffer(json.dumps(heads).encode(), dtype=np.uint8), **arrays)


def read(path: Path) -> list[Trace]:
    """The traces in a file that a child wrote."""
    with np.load(path) as stored:
        heads = json.loads(bytes(stored["traces"]).decode())
        traces = [Trace(head["name"], head["records"], {}, head["warnings"], head["n_caches"]) for head in heads]
        for name in stored.files:
            if name != "traces":
                index, key = name.split(".", 1)
                traces[int(index)].arrays[key] = stored[name]
    return traces


# --- in the child ---------------------------------------------------------------------------------------------------


class Machine:
    """Executes operations on one loaded model; what `main` does, and what tests of single cases build on."""

    def __init__(self, model: Path) -> None:
        import llama_cpp

        self.lib = llama_cpp
        self.warnings: list[str] = []
        self._log = llama_cpp.llama_log_callback(self._on_log)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        settings = llama_cpp.llama_model_default_params()
        settings.use_mmap = False
        self.model = llama_cpp.llama_model_load_from_file(str(model).encode(), settings)
        if not self.model:
            raise RuntimeError(f"{model}: not loaded: {''.join(self.warnings)}")
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.n_embd = llama_cpp.llama_model_n_embd(self.model)
        self.n_pos = 4 if llama_cpp.llama_model_rope_type(self.model) in MROPE_TYPES else 1
        self.table = np.random.default_rng(1).standard_normal((self.n_vocab, self.n_embd)).astype(np.float32)
        self.contexts: dict[int, Any] = {}
        self.settings: dict[int, Any] = {}
        self.states: dict[str, bytes] = {}
        self.trace = Trace("")

    def _on_log(self, level: int, text: bytes, _user: Any) -> None:
        if level in WARNINGS:
            self.warnings.append(text.decode(errors="replace"))

    def execute(self, script: Script) -> Trace:
        """Runs `script`; its contexts are freed at the end."""
        self.trace, self.states, self.warnings = Trace(script.name), {}, []
        for operation in script.operations:
            self.step(operation)
        for context in list(self.contexts):
            self.free(context)
        self.trace.warnings, self.trace.n_caches = self.warnings, n_caches()
        return self.trace

    def step(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        """Runs one operation and records it."""
        name, context = operation["op"], operation["context"]
        record: dict[str, Any] = {"number": len(self.trace.records), "op": name, "context": context}
        if "arguments" in operation:
            record["arguments"] = operation["arguments"]
        self.trace.records.append(record)
        getattr(self, f"_{name}")(operation, record)
        if context in self.contexts and name != "threads":
            record["positions"] = self.positions(context)
        return record

    def positions(self, context: int) -> list[list[int]]:
        """[smallest, largest] position of each sequence."""
        memory = self.memory(context)
        low, high = self.lib.llama_memory_seq_pos_min, self.lib.llama_memory_seq_pos_max
        return [[low(memory, s), high(memory, s)] for s in range(self.settings[context].n_seq_max)]

    def memory(self, context: int) -> Any:
        """The memory of a context."""
        return self.lib.llama_get_memory(self.contexts[context])

    def free(self, context: int) -> None:
        """Frees a context."""
        self.lib.llama_free(self.contexts.pop(context))

    def close(self) -> None:
        """Frees the model, after its contexts."""
        for context in list(self.contexts):
            self.free(context)
        self.lib.llama_model_free(self.model)

    def new(self, context: int = 0, **settings: Any) -> bool:
        """Makes a context; false if llama.cpp does not."""
        params = self.lib.llama_context_default_params()
        defaults = {"n_ctx": 1024, "n_batch": 256, "n_ubatch": 16, "n_seq_max": 4}
        threads = {"n_threads": N_THREADS, "n_threads_batch": N_THREADS}
        for key, value in {**defaults, **threads, "no_perf": True, **settings}.items():
            setattr(params, key, value)
        made = self.lib.llama_init_from_model(self.model, params)
        if made:
            self.contexts[context], self.settings[context] = made, params
        return bool(made)

    def decode(
        self, rows: Sequence[Sequence[Any]], context: int = 0, embd: bool = False
    ) -> tuple[int, Array | None, Array | None]:
        """Decodes (sequence ids, token, position, output) rows: status, logits and embeddings of the outputs."""
        n = len(rows)
        n_pos = self.n_pos if embd else 1
        tokens = np.array([row[1] for row in rows], dtype=np.int32)
        # With embeddings and several positions a token, the first three sections hold it, as for text.
        pos = np.array(
            [[row[2]] * (3 if n_pos > 1 else 1) + [0] * (n_pos > 1) for row in rows], dtype=np.int32
        ).T.copy()
        values = np.ascontiguousarray(self.table[tokens]) if embd else None
        flags = np.array([row[3] for row in rows], dtype=np.int8)
        counts = np.array([len(row[0]) for row in rows], dtype=np.int32)
        ids = [np.array(row[0], dtype=np.int32) for row in rows]
        pointers = (ctypes.POINTER(ctypes.c_int32) * (n + 1))()
        for i, one in enumerate(ids):
            pointers[i] = one.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        i32, f32, i8 = (ctypes.POINTER(kind) for kind in (ctypes.c_int32, ctypes.c_float, ctypes.c_int8))
        batch = self.lib.llama_batch()
        batch.n_tokens = n
        if values is not None:
            batch.embd = values.ctypes.data_as(f32)
        else:
            batch.token = tokens.ctypes.data_as(i32)
        batch.pos = pos.ctypes.data_as(i32)
        batch.n_seq_id = counts.ctypes.data_as(i32)
        batch.seq_id = pointers
        batch.logits = flags.ctypes.data_as(i8)
        handle = self.contexts[context]
        status = self.lib.llama_decode(handle, batch)
        if status != 0:
            return status, None, None
        wanted = range(n) if self.settings[context].embeddings else [i for i in range(n) if flags[i]]
        logits = self._outputs(self.lib.llama_get_logits_ith, handle, wanted, self.n_vocab)
        if not self.settings[context].embeddings:
            return 0, logits, None
        return 0, logits, self._outputs(self.lib.llama_get_embeddings_ith, handle, wanted, self.n_embd)

    @staticmethod
    def _outputs(get: Any, handle: Any, wanted: Iterable[int], width: int) -> Array:
        found = [np.ctypeslib.as_array(get(handle, i), (width,)).copy() for i in wanted]
        return np.array(found, dtype=np.float32).reshape(-1, width)

    def save(self, context: int = 0, seq: int | None = None, flags: int = 0) -> bytes:
        """The state of all, or of one sequence."""
        handle, lib = self.contexts[context], self.lib
        whole = seq is None
        size = lib.llama_state_get_size(handle) if whole else lib.llama_state_seq_get_size_ext(handle, seq, flags)
        buffer = (ctypes.c_uint8 * max(size, 1))()
        if whole:
            written = lib.llama_state_get_data(handle, buffer, size)
        else:
            written = lib.llama_state_seq_get_data_ext(handle, buffer, size, seq, flags)
        return bytes(buffer[:written])

    def load(self, state: bytes, context: int = 0, seq: int | None = None, flags: int = 0) -> int:
        """Sets a state; the number of bytes read, 0 on failure."""
        buffer = (ctypes.c_uint8 * max(len(state), 1)).from_buffer_copy(state or b"\0")
        handle = self.contexts[context]
        if seq is None:
            return int(self.lib.llama_state_set_data(handle, buffer, len(state)))
        return int(self.lib.llama_state_seq_set_data_ext(handle, buffer, len(state), seq, flags))

    def _new(self, operation: Mapping[str, Any], record: dict[str, Any]) -> None:
        record["rc"] = self.new(operation["context"], **operation["settings"])
        record["caches"] = n_caches()
        if record["rc"]:
            handle = self.contexts[operation["context"]]
            record["sizes"] = [
                self.lib.llama_n_ctx(handle),
                self.lib.llama_n_seq_max(handle),
                self.lib.llama_n_rs_seq(handle),
                self.lib.llama_memory_can_shift(self.memory(operation["context"])),
            ]

    def _free(self, operation: Mapping[str, Any], record: dict[str, Any]) -> None:
        self.free(operation["context"])

    def _decode(self, operation: Mapping[str, Any], record: dict[str, Any]) -> None:
        record["arguments"] = _summary(operation["rows"])
        status, logits, embeddings = self.decode(operation["rows"], operation["context"], operation["embd"])
        record["rc"] = status
        for what, values in (("logits", logits), ("embeddings", embeddings)):
            if values is not None:
                self.trace.arrays[f"{record['number']}.{what}"] = values

    def _rm(self, operation: Mapping[str, Any], record: dict[str, Any]) -> None:
        record["rc"] = self.lib.llama_memory_seq_rm(self.memory(operation["context"]), *operation["arguments"])

    def _cp(self, operation: Mapping[str, Any], record: dict[str, Any]) -> None:
        self.lib.llama_memory_seq_cp(self.memory(operation["context"]), *operation["arguments"])

    def _keep(self, operation: Mapping[str, Any], record: dict[str, Any]) -> None:
        self.lib.llama_memory_seq_keep(self.memory(operation["context"]), *operation["arguments"])

    def _add(self, operation: Mapping[str, Any], record: dict[str, Any]) -> None:
        memory = self.memory(operation["context"])
        record["rc"] = self.lib.llama_memory_can_shift(memory)
        if record["rc"]:
            self.lib.llama_memory_seq_add(memory, *operation["arguments"])

    def _div(self, operation: Mapping[str, Any], record: dict[str, Any]) -> None:
        memory = self.memory(operation["context"])
        record["rc"] = self.lib.llama_memory_can_shift(memory)
        if record["rc"]:
            self.lib.llama_memory_seq_div(memory, *operation["arguments"])

    def _clear(self, operation: Mapping[str, Any], record: dict[str, Any]) -> None:
        self.lib.llama_memory_clear(self.memory(operation["context"]), *operation["arguments"])

    def _save(self, operation: Mapping[str, Any], record: dict[str, Any]) -> None:
        state = self.save(operation["context"], operation["seq"], operation["flags"])
        self.states[operation["name"]] = state
        record["rc"] = len(state)
        record["arguments"] = [operation["name"], operation["seq"], operation["flags"]]
        self.trace.arrays[f"{record['number']}.state"] = np.frombuffer(state, dtype=np.uint8)

    def _load(self, operation: Mapping[str, Any], record: dict[str, Any]) -> None:
        record["arguments"] = [operation["name"], operation["seq"], operation["flags"]]
        state = self.states[operation["name"]]
        record["rc"] = self.load(state, operation["context"], operation["seq"], operation["flags"])

    def _edit(self, operation: Mapping[str, Any], record: dict[str, Any]) -> None:
        state = bytearray(self.states[operation["name"]][: operation["cut"]])
        for offset, data in operation["patch"]:
            state[offset : offset + len(data) // 2] = bytes.fromhex(data)
        self.states[operation["target"]] = bytes(state)
        record["rc"] = len(state)

    def _threads(self, operation: Mapping[str, Any], record: dict[str, Any]) -> None:
        traces = [Trace(str(i)) for i in range(len(operation["parts"]))]
        failed: list[BaseException] = []
        gate = threading.Barrier(len(traces))
        runners = [
            threading.Thread(target=self._part, args=(part, trace, gate, failed))
            for part, trace in zip(operation["parts"], traces, strict=True)
        ]
        for runner in runners:
            runner.start()
        for runner in runners:
            runner.join()
        if failed:
            raise failed[0]
        record["parts"] = [trace.records for trace in traces]
        for i, trace in enumerate(traces):
            for key, values in trace.arrays.items():
                self.trace.arrays[f"{record['number']}.part{i}.{key}"] = values

    def _part(
        self, part: Sequence[Mapping[str, Any]], trace: Trace, gate: threading.Barrier, failed: list[BaseException]
    ) -> None:
        try:
            view = object.__new__(Machine)
            view.__dict__ = {**self.__dict__, "trace": trace}  # shares contexts and states, writes a trace of its own
            for operation in part:
                if operation["op"] == "new":
                    gate.wait(60)
                view.step(operation)
        except BaseException as e:  # handed to the thread that started this one
            failed.append(e)


def _summary(rows: Sequence[Sequence[Any]]) -> str:
    """Sequences, tokens and positions of a batch, short."""
    spans: dict[str, list[int]] = {}
    for ids, _, pos, _ in rows:
        spans.setdefault(",".join(map(str, ids)), []).append(pos)
    return "; ".join(f"{ids}: {min(at)}..{max(at)}" for ids, at in list(spans.items())[:8])


def install() -> None:
    """Switches our cache on as stock works, to the last bit, in a process that has not imported llama_cpp yet."""
    import rcache_plugin.hosts.llama as host

    host.install(placement="classic", consecutive_seq_ids=True, checkpoint_cells=0)


def n_caches() -> int:
    """Open caches of ours in this process; 0 in a stock one."""
    host = sys.modules.get("rcache_plugin.hosts.llama")
    return len(host.caches()) if host is not None else 0


def main(argv: Sequence[str]) -> int:
    """``llama_child.py stock|rcache MODEL SCRIPTS.json OUT.npz``."""
    mode, model, source, out = argv
    if mode not in MODES:
        raise SystemExit(f"{mode}: not one of {', '.join(MODES)}")
    if mode == "rcache":
        install()
    else:
        sys.modules["rcache_plugin"] = None  # type: ignore[assignment]  # importing it fails: stock has no part of ours
    machine = Machine(Path(model))
    traces = []
    for entry in json.loads(Path(source).read_text()):
        script = Script(entry["name"])
        script.operations = entry["operations"]
        print(f"script: {script.name}", file=sys.stderr, flush=True)  # where a crash happened
        traces.append(machine.execute(script))
    machine.close()
    write(Path(out), traces)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
