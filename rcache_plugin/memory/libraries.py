"""The library files of ggml: found on the disk or among those that this process has mapped, and opened.

Neither ``ggml`` nor ``llama_cpp`` is imported: their folders are looked up, and on Linux the libraries that this
process has mapped are read from ``/proc/self/maps``. Elsewhere, modules that are imported already tell their folder.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import GgmlNotFound, InvalidArgument
from ._ffi import ggml_ffi

ENV_VAR = "RCACHE_GGML"
"""Environment variable that names a ggml library file or the folder of one."""

_PACKAGES = ("ggml", "llama_cpp")
# libggml-base.so, libggml-base.so.0, libggml-base.so.0.25.3, libggml-base.dylib, libggml-base.0.dylib, ggml-base.dll
_LIB_NAME = re.compile(r"(?:lib)?(ggml(?:-base)?)((?:\.so(?:\.\d+)*)|(?:(?:\.\d+)*\.dylib)|(?:\.dll))")
_MAPS = Path("/proc/self/maps")
_RTLD_NOLOAD = getattr(os, "RTLD_NOLOAD", 0)
_RTLD_NODELETE = getattr(os, "RTLD_NODELETE", 0)


def find_libraries(where: str | os.PathLike[str] | None = None) -> tuple[Path, Path]:
    """``libggml-base`` and ``libggml``, as `GgmlLib.find` describes it. Raises `GgmlNotFound`."""
    if where is None:
        where = os.environ.get(ENV_VAR) or None
        named = ENV_VAR
    else:
        named = "where"
    if where is not None:
        pair = _pair_at(Path(where))
        if pair is None:
            raise GgmlNotFound(f"no ggml library at {Path(where)} (given by {named})")
        return pair

    mapped = _mapped_bases()
    if len(mapped) > 1:
        raise GgmlNotFound(
            "several copies of ggml are mapped into this process: "
            + ", ".join(str(path) for path in mapped)
            + f"; name the one to use (GgmlLib.find(where), or {ENV_VAR})"
        )
    folders = [folder for package in _PACKAGES for folder in _package_folders(package)]
    for pair in (*map(_pair_at, mapped), *map(_pair_in, folders)):
        if pair is not None:
            return pair
    missing = [f"package {package} (not installed)" for package in _PACKAGES if not _package_folders(package)]
    raise GgmlNotFound(
        "no ggml library found; looked at: the libraries mapped into this process, "
        + ", ".join([*map(str, folders), *missing])
        + f". Install ggml-python or llama-cpp-python, or name a library (GgmlLib.find(where), or {ENV_VAR})"
    )


def open_library(path: Path) -> Any:
    """The library at `path` as cffi opens it. Raises `GgmlNotFound` with the loader's message."""
    flags = getattr(os, "RTLD_NOW", 2) | _RTLD_NODELETE
    # A second copy of a mapped library would have devices and memory of its own; NOLOAD can't make one.
    if path in _mapped_files():
        flags |= _RTLD_NOLOAD
    try:
        return ggml_ffi().dlopen(str(path), flags)
    except OSError as error:
        raise GgmlNotFound(f"{path} cannot be opened: {error}") from error


def library_of(handle: Any) -> Any:
    """The library that a host has opened, from its ``ctypes.CDLL`` or handle. Raises `InvalidArgument`."""
    address = getattr(handle, "_handle", handle)
    if not isinstance(address, int) or not address:
        raise InvalidArgument(f"{handle!r} is neither an opened library nor a handle of one")
    ffi = ggml_ffi()
    return ffi.dlopen(ffi.cast("void *", address))


def _mapped_files() -> tuple[Path, ...]:
    """Files of ggml libraries mapped into this process; empty where the system does not tell."""
    try:
        maps = _MAPS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ()
    files: dict[Path, None] = {}
    for line in maps.splitlines():
        columns = line.split(maxsplit=5)
        if len(columns) == 6:
            path = Path(columns[5].removesuffix(" (deleted)"))
            if _LIB_NAME.fullmatch(path.name):
                files[path] = None
    return tuple(files)


def _mapped_bases() -> tuple[Path, ...]:
    """Copies of ``libggml-base`` in this process. Where the system does not tell: those in the folders of packages that
    are imported already."""
    if _MAPS.exists():
        return tuple(path for path in _mapped_files() if _stem(path) == "ggml-base")
    folders = (folder for package in _PACKAGES if package in sys.modules for folder in _package_folders(package))
    pairs = (_pair_in(folder) for folder in folders)
    return tuple(pair[0] for pair in pairs if pair is not None)


def _package_folders(package: str) -> tuple[Path, ...]:
    """The ``lib`` folders of an installed package, which is not imported for that."""
    module = sys.modules.get(package)
    spec = module.__spec__ if module is not None else importlib.util.find_spec(package)
    places: Iterable[str] = () if spec is None else spec.submodule_search_locations or ()
    return tuple(Path(place).resolve() / "lib" for place in places)


def _stem(path: Path) -> str | None:
    match = _LIB_NAME.fullmatch(path.name)
    return None if match is None else match.group(1)


def _pair_at(where: Path) -> tuple[Path, Path] | None:
    """``libggml-base`` and ``libggml`` of a file or folder that a caller has named."""
    if where.is_dir():
        return _pair_in(where.resolve()) or _pair_in(where.resolve() / "lib")
    if not where.is_file() and where not in _mapped_files():
        return None
    path = where if where in _mapped_files() else where.resolve()
    stem = _stem(path)
    if stem is None:  # a host's library that has all of ggml in it
        return path, path
    other = path.with_name(path.name.replace(stem, "ggml" if stem == "ggml-base" else "ggml-base", 1))
    if not other.exists():
        pair = _pair_in(path.parent)
        if pair is None:
            return None
        other = pair[1] if stem == "ggml-base" else pair[0]
    return (path, other) if stem == "ggml-base" else (other, path)


def _pair_in(folder: Path) -> tuple[Path, Path] | None:
    found = tuple(next(_candidates(folder, stem), None) for stem in ("ggml-base", "ggml"))
    base, registry = found
    return None if base is None or registry is None else (base, registry)


def _candidates(folder: Path, stem: str) -> Iterator[Path]:
    """Library files in `folder`, the likeliest first: a mapped one, then one whose name is a soname (what a dependent
    library asks the loader for), then the plain name. Wheels carry copies where a system has links."""
    if not folder.is_dir():
        return
    mapped = _mapped_files()
    paths = (path for path in folder.iterdir() if _stem(path) == stem)
    yield from sorted(paths, key=lambda path: (path not in mapped, *_name_rank(path)))


def _name_rank(path: Path) -> tuple[int, str]:
    numbers = len(re.findall(r"\.\d+", path.name))
    return ({1: 0, 0: 1}.get(numbers, 2), path.name)
