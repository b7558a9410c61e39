"""Compiles the llama.cpp adapter with given flags, and writes small models: build_llama_asan.py FOLDER [FLAG ...]."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import llama_models

from rcache_plugin import llama_build

folder = Path(sys.argv[1])
install = llama_build.find_install()
headers = llama_build.get_headers(install.release, progress=None)
llama_build.compile_object(
    llama_build.Compiler.find(), headers, llama_build.ADAPTER, folder / "adapter.so", ["-g", "-O1", *sys.argv[2:]]
)
for name in ("mamba", "granite-hybrid", "qwen35"):
    llama_models.write(name, folder)
