"""A llama-cpp-python in small, for the tests of the build: a source distribution, an adapter and libraries.

Its libllama has the class in small, so that most of these tests need neither network nor llama.cpp.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from rcache_plugin.hosts.llama.adapter import build, headers
from rcache_plugin.hosts.llama.adapter.found import LlamaInstall
from rcache_plugin.hosts.llama.adapter.symbols import SharedObject

VERSION = "0.3.36"

CLASS_H = """
#pragma once
class llama_memory_recurrent {
public:
    explicit llama_memory_recurrent(int size);
    virtual ~llama_memory_recurrent() = default;
    virtual bool seq_rm(int seq_id, int p0, int p1);
    unsigned memory_breakdown() const;
    unsigned n_rs_seq = 0;
#ifdef ONE_MORE
    void one_more();
#endif
private:
    int ctxs_bufs = 0;
};
class llama_memory_recurrent_context {
public:
    explicit llama_memory_recurrent_context(llama_memory_recurrent * mem);
    virtual ~llama_memory_recurrent_context();
    int s_copy(int i) const;
    unsigned get_head() const;
    unsigned get_n_rs() const;
    int get_rs_z() const;
    void * get_r_l(int il) const;
    void * get_s_l(int il) const;
};
"""

CLASS_CPP = """
#include "llama-memory-recurrent.h"
llama_memory_recurrent::llama_memory_recurrent(int size) : ctxs_bufs(size) {}
bool llama_memory_recurrent::seq_rm(int, int, int) { return true; }
unsigned llama_memory_recurrent::memory_breakdown() const { return 0; }
llama_memory_recurrent_context::llama_memory_recurrent_context(llama_memory_recurrent *) {}
llama_memory_recurrent_context::~llama_memory_recurrent_context() {}
int llama_memory_recurrent_context::s_copy(int i) const { return i; }
unsigned llama_memory_recurrent_context::get_head() const { return 0; }
unsigned llama_memory_recurrent_context::get_n_rs() const { return 0; }
int llama_memory_recurrent_context::get_rs_z() const { return -1; }
void * llama_memory_recurrent_context::get_r_l(int) const { return nullptr; }
#ifndef ONE_LESS
void * llama_memory_recurrent_context::get_s_l(int) const { return nullptr; }
#endif
#ifdef ONE_MORE
void llama_memory_recurrent::one_more() {}
#endif
#ifdef THEIRS
extern "C" int llama_graph(void) { return 0; }
#endif
#ifdef NEEDS_FUNCTION
extern "C" void absent_function(void);
extern "C" void rcache_needs(void) { absent_function(); }
#endif
#ifdef NEEDS_DATA
extern "C" int absent_data;
extern "C" int * rcache_needs(void) { return &absent_data; }
#endif
"""

GRAPH_CPP = """
#include "llama-memory-recurrent.h"
extern "C" const char * ggml_version(void) { return "1.2.3"; }
extern "C" int llama_graph(void) {
    llama_memory_recurrent mem(4);
    llama_memory_recurrent_context context(&mem);
    return context.s_copy(0) + context.get_head() + context.get_n_rs() + context.get_rs_z() + mem.memory_breakdown()
        + (context.get_r_l(0) == context.get_s_l(0)) + mem.seq_rm(0, 0, 0);
}
"""

PKG_INFO = "Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {}\n\nText.\nVersion: 9.9\n"
GGML_CMAKE = "set(GGML_VERSION_MAJOR 1)\nset(GGML_VERSION_MINOR 2)\nset(GGML_VERSION_PATCH 3)\n"


class Kit:
    """A source distribution, an adapter and libraries in small."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sdist = write_sdist(folder / "sdist")
        self.adapter = folder / "adapter" / "llama_adapter.cpp"
        self.adapter.parent.mkdir()
        self.adapter.write_text(CLASS_CPP)
        (folder / "graph.cpp").write_text(GRAPH_CPP)
        self._made: dict[tuple[str, ...], Path] = {}

    def library(self, *flags: str) -> Path:
        """A libllama.so."""
        return self._make("libllama.so", ["graph.cpp"], flags)

    def object(self, *flags: str) -> Path:
        """An adapter, compiled as the package does it."""
        return self._make("librcache_llama.so", [], [*build._COMPILE_FLAGS, *flags])

    def install(self, folder: Path) -> LlamaInstall:
        """An install with a libllama of its own, so that a test may replace it."""
        lib = folder / "llama_cpp" / "lib"
        lib.mkdir(parents=True)
        return LlamaInstall(VERSION, lib.parent, Path(shutil.copy(self.library(), lib)))

    def _make(self, name: str, more: Sequence[str], flags: Sequence[str]) -> Path:
        key = (name, *flags)
        if key not in self._made:
            target = self.folder / str(len(self._made)) / name
            target.parent.mkdir()
            sources = [str(self.adapter), *(str(self.folder / source) for source in more)]
            include = f"-I{self.sdist}/vendor/llama.cpp/src"
            command = ["c++", "-O1", "-fPIC", "-shared", include, *flags, *sources, "-o", str(target)]
            subprocess.run(command, check=True)
            self._made[key] = target
        return self._made[key]


def write_sdist(folder: Path, version: str = VERSION, header: str = CLASS_H) -> Path:
    llama = folder / "vendor" / "llama.cpp"
    for part in headers._HEADER_FOLDERS:
        (llama / part).mkdir(parents=True)
    (folder / "PKG-INFO").write_text(PKG_INFO.format(version))
    (llama / "LICENSE").write_text("a licence")
    (llama / "ggml" / "CMakeLists.txt").write_text(GGML_CMAKE)
    (llama / "src" / "llama-memory-recurrent.h").write_text(header)
    (llama / "src" / "llama-memory-recurrent.cpp").write_text("not a header")
    (llama / "ggml" / "src" / "ggml-impl.h").write_text("// ggml\n")
    return folder


def pack(folder: Path, target: Path) -> Path:
    with tarfile.open(target, "w:gz") as tar:
        tar.add(folder, arcname=f"llama_cpp_python-{VERSION}")
    return target


def read(path: Path) -> SharedObject:
    return SharedObject.read(path)
