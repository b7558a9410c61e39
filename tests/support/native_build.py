"""Compiles the C programs of tests/native into shared objects."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rcache_plugin.capi import INCLUDE

NATIVE = Path(__file__).resolve().parents[1] / "native"


def compile_shared(source: str, folder: Path, flags: Sequence[str] = ()) -> Path:
    """``tests/native/<source>`` as a shared object in `folder`. Fails the test with the compiler's words."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise AssertionError("no C compiler: set CC, or install gcc")
    target = folder / (Path(source).stem + ".so")
    command = [*compiler.split(), "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-shared", "-fPIC", *flags,
               f"-I{INCLUDE}", str(NATIVE / source), "-o", str(target), "-lm", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}\n{done.stderr}")
    return target


def load_scenario(path: Path) -> ctypes.CDLL:
    """The compiled abi_scenario.c with its argument types set."""
    library = ctypes.CDLL(str(path))
    library.abi_run_factory.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_char_p]
    library.abi_run_checkpoints.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
    library.abi_run_threads.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    library.abi_run_closed.argtypes = [ctypes.c_void_p]
    library.abi_call_at_exit.argtypes = [ctypes.c_void_p]
    library.abi_call_forever.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return library
