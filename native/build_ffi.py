"""Builds the extension module `rcache_plugin._rcache` with cffi's API mode (setuptools calls this file)."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "rcache_plugin" / "capi" / "include"
NATIVE = ROOT / "native"

ffibuilder = FFI()
ffibuilder.cdef((INCLUDE / "rcache_decl.h").read_text(encoding="utf-8"))
ffibuilder.cdef((NATIVE / "rcache_handle.h").read_text(encoding="utf-8"))
ffibuilder.cdef(
    'extern "Python+C" {\n' + (NATIVE / "rcache_callbacks.h").read_text(encoding="utf-8") + "\n}\n"
    "#define RCACHE_ABI_VERSION ...\n"
)
ffibuilder.set_source(
    "rcache_plugin._rcache",
    '#include "rcache_plugin.h"\n#include "rcache_handle.h"\n',
    sources=["native/rcache.c"],
    include_dirs=[str(INCLUDE), str(NATIVE)],
    depends=[
        "rcache_plugin/capi/include/rcache_plugin.h",
        "rcache_plugin/capi/include/rcache_decl.h",
        "native/rcache_handle.h",
        "native/rcache_callbacks.h",
    ],
    extra_compile_args=["-std=gnu11", "-Wall", "-Wextra"],
    libraries=["pthread"],
)

if __name__ == "__main__":
    ffibuilder.compile(tmpdir=str(ROOT), verbose=True)
