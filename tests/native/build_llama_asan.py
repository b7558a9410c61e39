"""Compiles the llama.cpp adapter with given flags, and writes small models: build_llama_asan.py FOLDER [FLAG ...]."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import llama_models

from rcache_plugin.hosts.llama.adapter.build import ADAPTER, Compiler, compile_object
from rcache_plugin.hosts.llama.adapter.found import find_install
from rcache_plugin.hosts.llama.adapter.headers import get_headers

folder = Path(sys.argv[1])
headers = get_headers(find_install().release, progress=None)
compile_object(Compiler.find(), headers, ADAPTER, folder / "adapter.so", ["-g", "-O1", *sys.argv[2:]])
for name in ("mamba", "granite-hybrid", "qwen35"):
    llama_models.write(name, folder)
