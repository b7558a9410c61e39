"""The child that answers for llama.cpp's own class, started once a session."""

from __future__ import annotations

import sys
from pathlib import Path

import children

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


class OracleProcess(children.Answering):
    def __init__(self, library: Path, model: Path, log: Path) -> None:
        super().__init__([sys.executable, str(HERE / "llama_oracle_child.py"), str(library), str(model)], log=log)
