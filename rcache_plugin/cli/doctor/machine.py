"""Python, this package, the processor, the cache folder: what is looked at without loading anything."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import tempfile
from pathlib import Path

from ... import __version__
from ...errors import counted
from ...hosts.llama.adapter.errors import CacheFolderError
from ...hosts.llama.adapter.folders import ENV_CACHE_DIR, cache_dir
from ...memory.processor import processor_features, processor_name
from . import mend
from .report import Part


def python_part() -> Part:
    """The interpreter and the system."""
    version, name, machine = platform.python_version(), platform.python_implementation(), platform.machine()
    facts = {
        "version": version,
        "implementation": name,
        "executable": sys.executable,
        "system": platform.system(),
        "machine": machine,
        "libc": " ".join(platform.libc_ver()),
    }
    return Part("ok", [f"{version} ({name}), {platform.platform()}", sys.executable], facts)


def package_part() -> Part:
    """This package."""
    tree = mend.checkout()
    facts = {"version": __version__, "folder": str(mend.PACKAGE), "checkout": tree is not None}
    return Part("ok", [f"{__version__}{', from its source tree' if tree else ''}", str(mend.PACKAGE)], facts)


def processor_part() -> Part:
    """The processor, and what of it matters to ggml."""
    features = processor_features()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts = {"name": processor_name(), "cores": cores, "features": features}
    shown = "not told by this system" if features is None else " ".join(features) or "none that ggml knows"
    return Part("ok", [f"{processor_name()}, {counted(cores, 'core')}", f"features: {shown}"], facts)


def cache_part() -> Part:
    """The folder for what is built, with what lies in it."""
    part = Part("ok", [], {"folder": None, "exists": False, "writable": False, "bytes": 0, "entries": {}})
    try:
        folder = cache_dir()
    except CacheFolderError as e:
        part.state, part.lines = "unknown", [str(e)]  # platformdirs: said with the packages
        return part
    trouble, exists = _why_not_writable(folder), os.path.isdir(folder)
    entries = {path.name: n_bytes(path) for path in _children(folder) if not path.name.startswith(".")}
    total = sum(entries.values())
    part.facts.update(folder=str(folder), exists=exists, writable=not trouble, bytes=total, entries=entries)
    part.lines = [f"{folder}: {mib(total) if exists else 'not there yet'}"]
    part.lines += [f"{mib(n):>9}  {name}" for name, n in sorted(entries.items()) if n]
    if trouble:
        part.state = "broken"
        part.problem(f"the cache folder {folder} cannot be written: {trouble}", _mend_folder(folder))
    return part


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _why_not_writable(folder: Path) -> str:
    """Tries it, since rights do not tell of full and read-only disks; leaves nothing behind."""
    place = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as e:
        return e.strerror or str(e)
    return ""


def _mend_folder(folder: Path) -> str:
    if os.path.isdir(folder) and hasattr(os, "geteuid") and folder.stat().st_uid == os.geteuid():
        return f"chmod u+rwx {shlex.quote(str(folder))}"
    return f"export {ENV_CACHE_DIR}={shlex.quote(str(Path(tempfile.gettempdir(), 'rcache')))}"


def n_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; what cannot be read counts nothing."""
    files = [path] if not path.is_dir() else [Path(top, name) for top, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        try:
            total += file.lstat().st_size
        except OSError:
            continue
    return total


def mib(n: int) -> str:
    """Bytes for a reader."""
    return f"{n / 2**20:.1f} MiB"
