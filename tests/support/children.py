"""Python code in a child process: for what a test must not do to its own process (crash, exit, import a library)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""Top folder of the checkout."""


class ChildFailed(AssertionError):
    """A child did not end as it should; the message has all it printed."""


class Ended(ChildFailed):
    """It ended with another status than expected."""

    def __init__(self, code: int, out: str, err: str) -> None:
        super().__init__(f"exit status {_status(code)}\n{_shown(out, err)}")
        self.code, self.out, self.err = code, out, err


class StockDied(ChildFailed):
    """A child in which nothing of ours ran was killed by a fault of its own.

    Tests that need it can say nothing then; `outcomes` counts them apart.
    """

    def __init__(self, signal_name: str, shown: str) -> None:
        self.reason = f"stock itself died of {signal_name} on this processor"
        self.survivors: dict[str, Any] = {}
        """What children beside it did, by name, for tests that need no stock."""
        super().__init__(f"stock: {self.reason}\n{shown}")


FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
HEAP = ("double free", "corrupted", "corruption", "invalid pointer", "invalid size", "invalid next size")
"""What the C library says before it aborts because something was written past its end."""

WITHOUT_OURS = 'import sys; sys.modules["rcache_plugin"] = None  # importing it fails'


def stock_died(code: int, out: str | None, err: str | None) -> StockDied | None:
    """The error for a stock child that ended with `code`; None if that was no fault of the processor's kind.

    An assertion of llama.cpp is none: it fails everywhere alike, so the test is wrong. Nor is a kill from outside.
    """
    if code >= 0:
        return None
    told = f"{out or ''}{err or ''}"
    broken = -code == signal.SIGABRT and "GGML_A" not in told and any(words in told for words in HEAP)
    if -code not in FAULTS and not broken:
        return None
    return StockDied(signal.Signals(-code).name, _shown(out, err))


def run_code(
    code: str,
    *,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    expect: int = 0,
    stdin: str | None = None,
    cwd: Path = ROOT,
    stock: bool = False,
) -> str:
    """Runs `code` (dedented) in a fresh interpreter; returns its stdout. Raises `ChildFailed`.

    `stock`: nothing of ours can be imported there, and a fault of the process is a `StockDied`.
    """
    code = f"{WITHOUT_OURS}\n{textwrap.dedent(code)}" if stock else textwrap.dedent(code)
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    try:
        return run(command, timeout=timeout, env=env, expect=expect, stdin=stdin, cwd=cwd).stdout
    except Ended as e:
        died = stock_died(e.code, e.out, e.err) if stock else None
        if died is not None:
            raise died from None
        raise


def run(
    command: Sequence[str],
    *,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    expect: int | None = 0,
    stdin: str | None = None,
    cwd: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Runs `command` with `env` added to the environment; `expect` is its exit status, None: any but a signal's.

    Raises `ChildFailed` with stdout and stderr when it ends otherwise or takes more than `timeout` seconds.
    """
    source = {"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(
            list(command), env=_environment(env), cwd=cwd, timeout=timeout, capture_output=True, text=True, **source
        )
    except subprocess.TimeoutExpired as e:
        raise ChildFailed(f"no end within {timeout} s\n{_shown(_text(e.stdout), _text(e.stderr))}") from None
    if done.returncode < 0 or (expect is not None and done.returncode != expect):
        raise Ended(done.returncode, done.stdout, done.stderr)
    return done


def start(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path = ROOT, stderr: int = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Starts `command` with pipes for stdout and stderr; use it in a ``with`` and end it with `finish`.

    `stderr` may be a file descriptor instead.
    """
    return subprocess.Popen(
        list(command),
        env=_environment(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


class Answering:
    """A child that answers each line of JSON on its stdin with one on its stdout, and ends when stdin does."""

    def __init__(self, command: Sequence[str], *, log: Path | None = None) -> None:
        """`log` takes its stderr; without one it goes where ours goes."""
        self.log = log
        with open(log, "w", encoding="utf-8") if log else contextlib.nullcontext() as stderr:
            self.child = subprocess.Popen(
                list(command),
                env=_environment(None),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def ask(self, question: Any) -> Any:
        """Its answer. Raises `ChildFailed` when it ends instead."""
        assert self.child.stdin is not None and self.child.stdout is not None
        print(json.dumps(question), file=self.child.stdin, flush=True)
        line = self.child.stdout.readline()
        if not line:
            told = "\n" + self.log.read_text(encoding="utf-8") if self.log else ""
            raise ChildFailed(f"ended with {_status(self.child.wait())} in {question}{told}")
        return json.loads(line)

    def close(self) -> None:
        """Lets it end, and waits for that."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait(timeout=30)


def finish(child: subprocess.Popen[str], *, timeout: float = 120) -> tuple[int, str, str]:
    """Waits for the end of `child`; returns exit status and the rest of stdout and stderr. Raises `ChildFailed`."""
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        raise ChildFailed(f"no end within {timeout} s\n{_shown(out, err)}") from None
    return child.returncode, out or "", err or ""


def wait_until(ready: Callable[[], bool], *, timeout: float = 30, what: str = "condition") -> None:
    """Polls `ready` until it is true. Raises `ChildFailed` after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not ready():
        if time.monotonic() > end:
            raise ChildFailed(f"{what} not seen within {timeout} s")
        time.sleep(0.02)


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    paths = [str(ROOT / "tests" / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1", **(extra or {})}


def _text(what: bytes | str | None) -> str:
    return what.decode(errors="replace") if isinstance(what, bytes) else what or ""


def _shown(out: str | None, err: str | None) -> str:
    return f"--- stdout\n{out}\n--- stderr\n{err}"


def _status(code: int) -> str:
    return f"{code} ({signal.Signals(-code).name})" if code < 0 else str(code)


RCACHE = [sys.executable, "-m", "rcache_plugin"]


def rcache(*args: str, expect: int = 0, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command line with these arguments, as `run` runs it."""
    return run([*RCACHE, *args], expect=expect, stdin=stdin)
