"""What may crash is looked at in a process of its own: `ask` starts it, `main` is what it runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...hosts.llama.adapter.process import last_lines, python

TIMEOUT = 120.0
"""Seconds that a probe may take."""

# The child imports what the parent would, however that was started.
_START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from {} import main; main()"


@dataclass(frozen=True)
class Answer:
    """What a probe has found, or why it has not."""

    facts: dict[str, Any] | None = None
    error: str = ""
    """One line."""
    kind: str = ""
    """Class of the exception, or the signal that it died of."""
    module: str | None = None
    """Name of the module that could not be found."""
    output: str = ""
    """The end of what it wrote on stderr, where it died."""

    @property
    def trouble(self) -> dict[str, str | None]:
        """The facts that every probe has: its error and the end of its output, if any."""
        return {"error": self.error or None, "output": self.output or None}


def ask(probe: str, *words: str) -> Answer:
    """Runs a probe in a child process."""
    command = [python(), "-X", "faulthandler", "-c", _START.format(__name__), json.dumps(sys.path), probe, *words]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return Answer(error=f"it took more than {TIMEOUT:.0f} s", kind="timeout")
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return Answer(error=f"it died of {name}", kind=name, output=last_lines(done.stderr, 24))
    try:
        return Answer(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        error = f"it ended with exit status {done.returncode} and no answer"
        return Answer(error=error, kind="exit", output=last_lines(done.stderr, 24))


def main() -> None:
    """Runs the probe that the command line names; prints an `Answer` as JSON."""
    probe: Callable[..., dict[str, Any]] = {f.__name__: f for f in (compiled, ggml, model, run)}[sys.argv[1]]
    try:
        answer: dict[str, Any] = {"facts": probe(*sys.argv[2:])}
    except Exception as error:
        answer = {"error": "; ".join(str(error).splitlines()), "kind": type(error).__name__, "module": _absent(error)}
    print("\n" + json.dumps(answer))


def _absent(error: BaseException | None) -> str | None:
    """The module whose absence caused `error`, however it was passed on."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name.partition(".")[0]
        error = error.__cause__
    return None


def compiled() -> dict[str, Any]:
    """The compiled part."""
    from ... import _rcache

    return {"file": _rcache.__file__, "abi_version": _rcache.lib.RCACHE_ABI_VERSION}


def ggml(where: str | None = None) -> dict[str, Any]:
    """A ggml: the one that the cache finds, or that of a folder."""
    from ...memory.ggml import GgmlLib
    from ...memory.processor import ggml_features

    lib = GgmlLib.find(where)
    keys = ("name", "kind", "description", "memory_free", "memory_total")
    return {
        "library": str(lib.path),
        "version": lib.version,
        "commit": lib.commit,
        "devices": [{key: getattr(device, key) for key in keys} for device in lib.devices()],
        "uses": ggml_features(lib.path) if lib.path is not None else None,
    }


def model() -> dict[str, Any]:
    """The bundled model."""
    from ...hosts.mamba import bundled_model

    path = Path(bundled_model())
    return {"file": str(path), "bytes": path.stat().st_size}


def run() -> dict[str, Any]:
    """The main job in small: one token through the bundled model."""
    import numpy as np

    from ...hosts.mamba import MambaContext, MambaModel, bundled_model

    started = time.perf_counter()
    with MambaModel(bundled_model()) as weights, MambaContext(weights, n_threads=1) as context:
        token = weights.tokenizer.encode("In the beginning")[0]
        logits = context.decode([token])
        if not np.isfinite(logits).all():
            raise ArithmeticError("the logits are not finite")
        return {"seconds": round(time.perf_counter() - started, 3)}
