"""The folder where the build keeps its results, and the lock that lets one process at a time change them.

It holds, for each version of llama-cpp-python, ``headers-VERSION/`` and ``llama-VERSION/KEY/librcache_llama.so``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CacheFolderError

ENV_CACHE_DIR = "RCACHE_CACHE_DIR"
"""Environment variable: folder for what is built, instead of the user's cache folder."""

Progress = Callable[[str], object]
"""Takes one line of text that says what is being done."""


def cache_dir() -> Path:
    """The folder for what is built; it need not exist yet. Raises `CacheFolderError`."""
    own = os.environ.get(ENV_CACHE_DIR)
    if own:
        return Path(own).expanduser().absolute()
    try:
        import platformdirs
    except ModuleNotFoundError as e:
        raise CacheFolderError(f"platformdirs is missing: pip install platformdirs, or set {ENV_CACHE_DIR}") from e
    return Path(platformdirs.user_cache_dir("rcache")).absolute()


@contextmanager
def locked(version: str, say: Progress) -> Iterator[Path]:
    """Holds the lock of one version; yields a folder for temporary files, in the cache folder's file system."""
    import fcntl  # not at the top: elsewhere than on Linux and macOS there is none, and this module shall say it better

    root = cache_dir()
    prefix = f".tmp-{version}-"
    with using_cache():
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / f"llama-{version}.lock", "w")
    with lock:
        with using_cache():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another process is building the llama.cpp adapter; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            for left in root.glob(f"{prefix}*"):  # by a process that was killed: nobody else holds the lock
                shutil.rmtree(left, ignore_errors=True)
            scratch = tempfile.TemporaryDirectory(prefix=prefix, dir=root, ignore_cleanup_errors=True)
        with scratch as folder:
            yield Path(folder)


@contextmanager
def using_cache() -> Iterator[None]:
    """Turns an `OSError` on the cache folder into `CacheFolderError`."""
    try:
        yield
    except OSError as e:
        raise CacheFolderError(
            f"cannot use the folder {cache_dir()}: {e}; free some space or correct its rights, or set {ENV_CACHE_DIR}"
        ) from e


def say_with(progress: Progress | None) -> Progress:
    """`progress`, or what takes its lines and drops them."""
    return progress if progress is not None else lambda _: None


def digest(*parts: bytes) -> str:
    """SHA-256 in hexadecimal of `parts` and their lengths."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(b"%d:" % len(part))
        hasher.update(part)
    return hasher.hexdigest()
