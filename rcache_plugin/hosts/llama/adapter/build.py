"""Compiles the llama.cpp adapter for the llama-cpp-python that is installed, and keeps it in the user's cache folder.

The adapter (``cpp/llama_adapter.cpp``, which includes the files beside it) defines a class of libllama anew, so it
must be compiled against the internal headers of that very version. `build` finds the install, fetches the headers
once, compiles, checks that libllama will really use the result, and returns its path; later calls return the same path
at once. Neither ``llama_cpp`` nor ``ggml`` is imported, and nothing is loaded into this process.

In the cache folder, KEY stands for our C interface, the adapter's files, the compiler and its flags; Python's own
version plays no part. Beside each object, ``checked-*`` files tell for which libllama it was checked.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....capi import INCLUDE
from .errors import CompileFailed, CompilerNotFound, LlamaBuildError
from .folders import Progress, cache_dir, digest, locked, say_with, using_cache
from .found import DISTRIBUTION, LlamaInstall, check_platform, check_version, find_install
from .headers import Headers, locked_headers
from .process import run
from .symbols import SharedObject, check_interposable, check_loaded, check_symbols

OBJECT_NAME = "librcache_llama.so"
ABOUT = "build.json"
"""File beside the object: what it was made of."""

ADAPTER = Path(__file__).resolve().parent / "cpp" / "llama_adapter.cpp"
"""The one file that is compiled; it includes its parts, which lie beside it."""

# Never -Bsymbolic or -z now: libllama is loaded after this object, and finds its functions through it.
_COMPILE_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=default", "-Wl,-z,lazy", "-Wl,-z,nodelete")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the words of `CXX`, or the first of c++, g++ and clang++ on the path."""

    command: tuple[str, ...]
    """Words to start it with; the first is a full path."""
    version: str
    machine: str
    """What it compiles for: ``x86_64-linux-gnu``."""

    @classmethod
    def find(cls) -> Compiler:
        """Raises `CompilerNotFound`."""
        own = shlex.split(os.environ.get("CXX", ""))
        candidates = [own] if own else [["c++"], ["g++"], ["clang++"]]
        for words in candidates:
            path = shutil.which(words[0])
            if path is not None:
                command = (path, *words[1:])
                # clang has no -dumpfullversion, and an old gcc's -dumpversion is its first number only.
                version = _answer(command, "-dumpfullversion") or _answer(command, "-dumpversion")
                machine = _answer(command, "-dumpmachine")
                if version and machine:
                    return cls(command, version, machine)
        looked = f"CXX={shlex.join(own)}" if own else "looked for c++, g++ and clang++ on PATH"
        raise CompilerNotFound(
            f"no working C++ compiler ({looked}); install one (Debian and Ubuntu: apt install g++; Fedora: "
            "dnf install gcc-c++), or name one in CXX"
        )

    def __str__(self) -> str:
        return f"{shlex.join(self.command)} {self.version} ({self.machine})"


def _answer(command: Sequence[str], option: str) -> str:
    """One line that the compiler prints for `option`, or an empty text."""
    try:
        done = subprocess.run([*command, option], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def compile_object(compiler: Compiler, headers: Headers, source: Path, target: Path, flags: Sequence[str] = ()) -> None:
    """Compiles one C++ file against `headers` and our own into the shared object `target`. Raises `CompileFailed`."""
    command = [*compiler.command, *_COMPILE_FLAGS, *flags, f"-I{INCLUDE}", *headers.flags]
    done = run([*command, str(source), "-o", str(target)])
    if done.returncode:
        lines = done.stdout.splitlines()
        wanted = [line for line in lines if re.search(r"\b(?:error|undefined)\b", line)] or lines
        raise CompileFailed(
            f"{compiler} could not compile {source.name} for {DISTRIBUTION} {headers.version} (exit status "
            f"{done.returncode}); try another compiler (CXX), g++ 9 or later, and report it with this output:\n"
            + "\n".join(wanted[:10]),
            done.stdout,
        )


def abi_version() -> int:
    """`RCACHE_ABI_VERSION` of the header that the adapter is compiled with."""
    found = re.search(r"#define\s+RCACHE_ABI_VERSION\s+(\d+)", (INCLUDE / "rcache_plugin.h").read_text())
    if found is None:
        raise LlamaBuildError(f"{INCLUDE / 'rcache_plugin.h'} has no RCACHE_ABI_VERSION; reinstall rcache-plugin")
    return int(found[1])


def _source_key() -> str:
    """Stands for our side: C interface, all files of the adapter, and flags."""
    adapter = {ADAPTER, *ADAPTER.parent.glob("*.cpp"), *ADAPTER.parent.glob("*.h")}
    files = [*sorted(adapter), *sorted(INCLUDE.glob("*.h"))]
    try:
        parts = [part for path in files for part in (path.name.encode(), path.read_bytes())]
    except OSError as e:
        raise LlamaBuildError(f"{e.filename} is missing from the package; reinstall rcache-plugin") from e
    return f"abi{abi_version()}-{digest(*parts, ' '.join(_COMPILE_FLAGS).encode())[:12]}"


def _compiler_key(compiler: Compiler) -> str:
    return digest(json.dumps([compiler.command, compiler.version, compiler.machine]).encode())[:12]


def object_path(install: LlamaInstall, compiler: Compiler) -> Path:
    """Where `build` keeps the adapter for this version, made by this compiler. Raises `CacheFolderError`."""
    return cache_dir() / f"llama-{install.version}" / f"{_source_key()}-{_compiler_key(compiler)}" / OBJECT_NAME


Smoke = Callable[[Path, LlamaInstall], None]
"""A further check of a new adapter; raises what `build` is to raise."""


def build(
    install: LlamaInstall | None = None,
    *,
    force: bool = False,
    progress: Progress | None = print,
    smoke: Smoke | None = None,
) -> Path:
    """The compiled adapter for `install` (default: `find_install`), from the cache folder if it was built before.

    A new one is compiled, checked and only then put in place; an old one is checked again when libllama has changed.
    `force` compiles in any case. `progress` gets lines that say what takes its time; none when it was built before.
    `smoke` is called with the object (a new one: not yet in its final place) after the other checks, once for each
    libllama.

    The object must be loaded with ``RTLD_LAZY | RTLD_GLOBAL``, and before libllama.
    Processes may call this at the same time: one builds, the others wait. Raises `LlamaBuildError`.
    """
    check_platform()
    install = install or find_install()
    check_version(install.version)
    say = say_with(progress)
    if not force:
        ready = _ready(install, smoke, say)
        if ready is not None:
            return ready
    with locked(install.release, say) as scratch:
        ready = None if force else _ready(install, smoke, say)  # another process may have been faster
        return ready or _build(install, smoke, scratch, say)


def cached_object(install: LlamaInstall) -> Path | None:
    """The adapter in the cache folder, whether or not it was checked for this libllama; nothing is built.

    Without compiler, it is the one of any compiler: built in one image of a container, it is used in another. Raises
    `CacheFolderError`.
    """
    try:
        path = object_path(install, Compiler.find())
    except CompilerNotFound:
        folder = cache_dir() / f"llama-{install.version}"
        path = next(iter(sorted(folder.glob(f"{_source_key()}-*/{OBJECT_NAME}"))), folder / OBJECT_NAME)
    return path if path.is_file() else None


def _ready(install: LlamaInstall, smoke: Smoke | None, say: Progress) -> Path | None:
    """The adapter in the cache folder, checked for this libllama."""
    with using_cache():
        path = cached_object(install)
        if path is None:
            return None
        stamp = _stamp(path, install, smoke)
        if stamp.is_file():
            return path
        try:
            ggml_version = json.loads((path.parent / ABOUT).read_text())["ggml"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):  # somebody tidied up, or is building right now
            return None
    say(f"checking the llama.cpp adapter for {install.libllama}")
    _check(path, install, ggml_version, smoke)
    try:
        stamp.touch()
    except OSError as e:
        say(f"cannot keep in {stamp.parent} that this was checked ({e.strerror}): it will be, each time")
    return path


def _stamp(path: Path, install: LlamaInstall, smoke: Smoke | None) -> Path:
    name = f"{getattr(smoke, '__module__', '')}.{getattr(smoke, '__qualname__', '')}" if smoke else ""
    return path.with_name(f"checked-{digest(install.identity().encode(), name.encode())[:16]}")


def _check(path: Path, install: LlamaInstall, ggml_version: str | None, smoke: Smoke | None) -> None:
    libllama = SharedObject.read(install.libllama)
    check_interposable(libllama)
    adapter = SharedObject.read(path)
    check_symbols(adapter, libllama)
    check_loaded(adapter, libllama, ggml_version)
    if smoke is not None:
        smoke(path, install)


def _build(install: LlamaInstall, smoke: Smoke | None, scratch: Path, say: Progress) -> Path:
    """Compiles, checks and publishes; the caller holds the lock."""
    started = time.monotonic()
    check_interposable(SharedObject.read(install.libllama))  # before the slow steps
    compiler = Compiler.find()
    target = object_path(install, compiler)
    headers = locked_headers(install.release, scratch, say)
    headers.check()
    say(f"compiling the llama.cpp adapter for {DISTRIBUTION} {install.version} with {compiler}")
    fresh = scratch / OBJECT_NAME
    compile_object(compiler, headers, ADAPTER, fresh)
    say(f"checking it with {install.libllama}")
    _check(fresh, install, headers.ggml_version, smoke)
    about = {
        "llama_cpp_python": install.version,
        "compiler": str(compiler),
        "features": sorted(headers.features),
        "ggml": headers.ggml_version,
        "rcache_abi": abi_version(),
    }
    with using_cache():
        target.parent.mkdir(parents=True, exist_ok=True)
        for old in target.parent.glob("checked-*"):
            old.unlink(missing_ok=True)
        (target.parent / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
        os.replace(fresh, target)
        _stamp(target, install, smoke).touch()
    say(f"the adapter is ready after {time.monotonic() - started:.0f} s: {target}")
    return target
