"""One side of the exchange of states, stock llama.cpp or ours: ``exchange_child.py stock|rcache MODEL FOLDER``.

Both sides run at once. Each computes the same, saves its states as FOLDER/<side>.<kind> and what it computes next,
waits for the other (unless it has died), loads all states of both into fresh contexts and continues from there. What
came of it is in FOLDER/<side>.json: by "<writer> <kind>" whether it was taken, the positions, and what differed.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_child
import numpy as np
from llama_child import ON_DEVICE, PARTIAL, Machine
from llama_scripts import tokens

KINDS = ("data", "seq data", "seq data partial", "session file", "sequence file")
PROMPTS = {0: tokens(20), 1: tokens(9, 1)}
NEXT = {0: 7, 1: 8, 3: 9}  # sequence 3 is a fork of 1
SAVED = {"seq data": 0, "seq data partial": 0, "sequence file": 1}
WHOLE = ("data", "session file")


class Side:
    def __init__(self, mode: str, model: Path, folder: Path) -> None:
        if mode == "rcache":
            llama_child.install()
        else:
            sys.modules["rcache_plugin"] = None  # type: ignore[assignment]  # importing it fails
        self.mode, self.folder = mode, folder
        self.machine = Machine(model)
        self.hybrid = False
        self.found: dict[str, Any] = {}

    def file(self, mode: str, kind: str) -> Path:
        return self.folder / f"{mode}.{kind}"

    def prepare(self, context: int, new: bool = True) -> None:
        if new:
            self.machine.new(context)
        rows = [((s,), t, i, False) for s, ts in PROMPTS.items() for i, t in enumerate(ts)]
        status, _, _ = self.machine.decode(rows, context)
        assert status == 0, status
        self.machine.lib.llama_memory_seq_cp(self.machine.memory(context), 1, 3, -1, -1)
        # llama.cpp copies the attention of a fork at the next step only, and saves the attention from before
        assert self.machine.decode([((2,), 11, 0, True)], context)[0] == 0

    def go_on(self, context: int, seqs: dict[int, int]) -> dict[int, bytes]:
        """Logits of one more token of the sequences: sequence -> token."""
        logits = {}
        for seq, token in seqs.items():
            at = len(PROMPTS[1 if seq == 3 else seq])
            status, values, _ = self.machine.decode([((seq,), token, at, True)], context)
            assert values is not None, (status, seq)
            logits[seq] = values.tobytes()
        return logits

    def save(self, kind: str, context: int, path: Path) -> None:
        machine, lib = self.machine, self.machine.lib
        ids = (ctypes.c_int32 * 20)(*PROMPTS[0])
        handle = machine.contexts[context]
        if kind == "session file":
            assert lib.llama_state_save_file(handle, str(path).encode(), ids, 20)
        elif kind == "sequence file":
            assert lib.llama_state_seq_save_file(handle, str(path).encode(), 1, ids, 9) > 0
        else:
            path.write_bytes(machine.save(context, SAVED.get(kind), PARTIAL if "partial" in kind else 0))

    def load(self, kind: str, context: int, path: Path) -> int:
        machine, lib = self.machine, self.machine.lib
        ids, count = (ctypes.c_int32 * 64)(), ctypes.c_size_t()
        handle, name = machine.contexts[context], str(path).encode()
        if kind == "session file":
            taken = int(lib.llama_state_load_file(handle, name, ids, 64, ctypes.byref(count)))
            assert list(ids[: count.value]) == PROMPTS[0]
            return taken
        if kind == "sequence file":
            taken = int(lib.llama_state_seq_load_file(handle, name, 1, ids, 64, ctypes.byref(count)))
            assert count.value == 9
            return taken
        return machine.load(path.read_bytes(), context, SAVED.get(kind), PARTIAL if "partial" in kind else 0)

    def write(self) -> None:
        self.prepare(0)
        for kind in KINDS:
            self.save(kind, 0, self.file(self.mode, kind))
        for flags in (ON_DEVICE, ON_DEVICE | PARTIAL):
            self.file(self.mode, f"device {flags}").write_bytes(self.machine.save(0, 1, flags))
        self.found["sizes"] = self.sizes()
        if self.mode == "rcache":
            import rcache_plugin.hosts.llama as host

            (cache,) = host.caches()
            self.hybrid = len(cache.spec.layers) < cache.spec.n_layer
            cache.save(self.file("rcache", "own"), 1, PROMPTS[1])
            cache.save(self.file("rcache", "own whole"))
        logits = self.go_on(0, NEXT)
        np.savez(self.file(self.mode, "logits.npz"), **{str(s): np.frombuffer(b, np.uint8) for s, b in logits.items()})
        (self.folder / f"{self.mode}.written").touch()

    def sizes(self) -> dict[str, list[Any]]:
        """States of 4 sequences restored into contexts for fewer and for more: [bytes read, positions]."""
        machine, found = self.machine, {}
        for unified in (False, True):
            machine.new(5, kv_unified=unified)
            self.prepare(5, new=False)
            saved = {kind: machine.save(5, SAVED.get(kind)) for kind in ("seq data", "data")}
            for n in (1, 2, 8):
                machine.new(6, n_seq_max=n, kv_unified=unified)
                for kind, state in saved.items():
                    taken = machine.load(state, 6, SAVED.get(kind))
                    name = f"{kind}, {n}{', unified' if unified else ''}"
                    found[name] = [taken, [high for _, high in machine.positions(6)]]
                    machine.lib.llama_memory_clear(machine.memory(6), True)
                machine.free(6)
            machine.free(5)
        return found

    def read(self) -> None:
        end = time.monotonic() + 120
        other = {"stock": "rcache", "rcache": "stock"}[self.mode]
        while not (self.folder / f"{other}.written").exists():
            if (self.folder / f"{other}.died").exists():
                break
            assert time.monotonic() < end, f"{other} has written nothing"
            time.sleep(0.02)
        for writer in ("stock", "rcache"):
            if not (self.folder / f"{writer}.written").exists():
                continue
            with np.load(self.file(writer, "logits.npz")) as stored:
                expected = {int(seq): stored[seq].tobytes() for seq in stored.files}
            for kind in KINDS:
                self.found[f"{writer} {kind}"] = self.exchanged(writer, kind, expected)
            if self.mode == "rcache" and not self.hybrid:
                self.found[f"{writer} python"] = self.in_python(writer, expected)
                if writer == "rcache":
                    self.found[f"{writer} own"] = self.own(expected)

    def exchanged(self, writer: str, kind: str, expected: dict[int, bytes]) -> dict[str, Any]:
        machine, path = self.machine, self.file(writer, kind)
        if "partial" in kind:  # the attention half exists and is ahead
            self.prepare(1)
            self.go_on(1, {0: 5})
        else:
            machine.new(1)
        taken = self.load(kind, 1, path)
        if "partial" in kind:
            assert machine.lib.llama_memory_seq_rm(machine.memory(1), 0, 20, -1)
        positions = [high for _, high in machine.positions(1)]
        again = self.folder / f"{self.mode}.again"
        self.save(kind, 1, again)
        same_bytes = again.read_bytes() == path.read_bytes()
        seqs = NEXT if kind in WHOLE else {SAVED[kind]: NEXT[SAVED[kind]]}
        logits = self.go_on(1, seqs)
        machine.free(1)
        return {
            "taken": taken > 0,
            "positions": positions,
            "same bytes when saved again": same_bytes,
            "same logits": all(logits[seq] == expected[seq] for seq in seqs),
        }

    def in_python(self, writer: str, expected: dict[int, bytes]) -> dict[str, Any]:
        """What a sequence's data has behind its 8 bytes, read and written by `RecurrentCache`."""
        import rcache_plugin.hosts.llama as host

        before = set(map(id, host.caches()))
        self.machine.new(1)
        (cache,) = (cache for cache in host.caches() if id(cache) not in before)
        blob = self.file(writer, "seq data").read_bytes()
        cache.state_read(blob[8:], 0)
        again = bytearray(cache.state_size(0))
        cache.state_write(again, 0)
        logits = self.go_on(1, {0: NEXT[0]})
        positions = [high for _, high in self.machine.positions(1)]
        self.machine.free(1)
        return {"taken": True, "positions": [p - (p > 0) for p in positions],
                "same bytes when saved again": bytes(again) == blob[8:], "same logits": logits[0] == expected[0]}

    def own(self, expected: dict[int, bytes]) -> dict[str, Any]:
        """Files of our own: one sequence goes to another one, then all."""
        import rcache_plugin.hosts.llama as host

        before = set(map(id, host.caches()))
        self.machine.new(1)
        (cache,) = (cache for cache in host.caches() if id(cache) not in before)
        loaded = cache.load(self.file("rcache", "own"), 3)
        assert loaded == {3: PROMPTS[1]}, loaded
        again = self.folder / "own again"
        same = self.go_on(1, {3: NEXT[1]})[3] == expected[1]
        cache.load(self.file("rcache", "own whole"))
        positions = [high for _, high in self.machine.positions(1)]
        cache.save(again)
        same_bytes = again.read_bytes() == self.file("rcache", "own whole").read_bytes()
        logits = self.go_on(1, NEXT)
        self.machine.free(1)
        return {"taken": True, "positions": positions, "same bytes when saved again": same_bytes,
                "same logits": same and logits == expected}


def main() -> int:
    side = Side(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    side.write()
    side.read()
    side.machine.close()
    (side.folder / f"{side.mode}.json").write_text(json.dumps(side.found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
