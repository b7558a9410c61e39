"""Loads adapter and libllama as a host does, and looks what libllama's references are bound to.

`llama_symbols.check_loaded` runs this file in a process of its own: a job as JSON on stdin, what was found as JSON on
stdout. It runs without any package, so it imports none.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("fname", ctypes.c_char_p),
        ("fbase", ctypes.c_void_p),
        ("sname", ctypes.c_char_p),
        ("saddr", ctypes.c_void_p),
    )


class _Linker:
    """The dynamic linker's own functions.

    ctypes.CDLL adds RTLD_NOW to any mode, and the adapter has to be bound lazily (libllama is not there yet).
    """

    def __init__(self) -> None:
        c = self.c = ctypes.CDLL(None)
        c.dlopen.restype = c.dlsym.restype = ctypes.c_void_p
        c.dlopen.argtypes = [ctypes.c_char_p, ctypes.c_int]
        c.dlsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        c.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
        c.dlerror.restype = ctypes.c_char_p

    def load(self, path: str) -> int:
        """Handle of a library whose names all others see from now on."""
        handle: int | None = self.c.dlopen(os.fsencode(path), os.RTLD_LAZY | os.RTLD_GLOBAL)
        if not handle:
            sys.exit((self.c.dlerror() or b"no reason given").decode(errors="replace"))
        return handle

    def place(self, name: str, handle: int | None = None) -> Any:
        """Address of a name, as all see it or (`handle`) as this library has it; None if there is none."""
        return self.c.dlsym(handle, name.encode())

    def owner(self, address: int | None) -> str:
        """The library's file that has this address."""
        info = _DlInfo()
        found = self.c.dladdr(address, ctypes.byref(info)) and info.fname
        return os.path.realpath(os.fsdecode(info.fname)) if found else ""


def _look(job: dict[str, Any]) -> dict[str, Any]:
    linker = _Linker()
    place = linker.place
    linker.load(job["adapter"])
    libllama = linker.load(job["libllama"])
    base = place(job["anchor"][0], libllama) - job["anchor"][1]
    adapter = os.path.realpath(job["adapter"])
    version = place("ggml_version")
    return {
        "elsewhere": [name for name in job["members"] if linker.owner(place(name)) != adapter],
        "unbound": [
            name
            for name, places in job["words"].items()
            for offset, addend in places
            if ctypes.c_void_p.from_address(base + offset).value != place(name) + addend
        ],
        "unresolved": [name for name in job["undefined"] if not place(name)],
        "ggml": ctypes.CFUNCTYPE(ctypes.c_char_p)(version)().decode() if version else None,
    }


if __name__ == "__main__":
    print(json.dumps(_look(json.load(sys.stdin))))
