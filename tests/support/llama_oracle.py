"""The child that answers for llama.cpp's own class, started once a session."""

from __future__ import annotations

import sys
from pathlib import Path

import children

from rcache_plugin.hosts.llama.adapter.build import Compiler, compile_object
from rcache_plugin.hosts.llama.adapter.found import find_install
from rcache_plugin.hosts.llama.adapter.headers import get_headers

HERE = Path(__file__).resolve().parent


def compile_oracle(folder: Path) -> Path:
    """tests/native/llama_oracle.cpp against the headers of the installed llama-cpp-python."""
    headers = get_headers(find_install().release)
    target = folder / "llama_oracle.so"
    compile_object(Compiler.find(), headers, children.ROOT / "tests" / "native" / "llama_oracle.cpp", target)
    return target


class OracleProcess(children.Answering):
    def __init__(self, library: Path, model: Path, log: Path) -> None:
        super().__init__([sys.executable, str(HERE / "llama_oracle_child.py"), str(library), str(model)], log=log)
