"""The child that answers for llama.cpp's own class, started once a session."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rcache_plugin.llama_build import Compiler, compile_object
from rcache_plugin.llama_headers import get_headers
from rcache_plugin.llama_install import find_install

HERE = Path(__file__).resolve().parent


def compile_oracle(folder: Path) -> Path:
    """tests/native/llama_oracle.cpp against the headers of the installed llama-cpp-python."""
    headers = get_headers(find_install().release)
    target = folder / "llama_oracle.so"
    compile_object(Compiler.find(), headers, HERE / "native" / "llama_oracle.cpp", target)
    return target


class OracleProcess:
    def __init__(self, library: Path, model: Path, log: Path) -> None:
        self.log = log
        with open(log, "w", encoding="utf-8") as stderr:
            self.child = subprocess.Popen(
                [sys.executable, str(HERE / "llama_oracle_child.py"), str(library), str(model)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def ask(self, job: dict[str, Any]) -> list[Any]:
        assert self.child.stdin is not None and self.child.stdout is not None
        print(json.dumps(job), file=self.child.stdin, flush=True)
        line = self.child.stdout.readline()
        if not line:
            raise AssertionError(f"the oracle ended with {self.child.wait()}\n{self.log.read_text(encoding='utf-8')}")
        answer: list[Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait(timeout=30)
