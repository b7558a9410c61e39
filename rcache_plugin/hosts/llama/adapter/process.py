"""Child processes of the build: how they are run, and what of their output is shown."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs `command` to its end, stdout and stderr in one text; messages in English, as they are searched."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"LC_ALL": "C.UTF-8"},
        encoding="utf-8",
        errors="replace",
    )


def python() -> str:
    """The word that starts this interpreter."""
    return sys.executable or shutil.which("python3") or "python3"


def last_lines(text: str, count: int = 8) -> str:
    """The end of `text`, without empty lines."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:])
