"""Atomic replacement of a file: at every moment there is the old file or the new one, whole."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # not on Windows: what a killed process left is not cleaned up there
    fcntl = None  # type: ignore[assignment]

_BUFFER_BYTES = 1 << 20
_TEMPORARY = ".rcache-tmp"
_LEFT_OVER_SECONDS = 60.0


class AtomicFile:
    """A temporary file in the folder of `path`, which takes that name with `commit` and is removed by `discard`.

    A temporary file of a killed process (``.NAME.*.rcache-tmp``) is removed when the same name is next written, a
    minute later at the earliest. Raises `OSError`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.realpath(os.fsdecode(path))  # a link stays one
        folder, name = os.path.split(self._path)
        start = f".{name[:50]}."  # names have a limit
        _remove_left_overs(folder, start)
        self._temporary = os.path.join(folder, f"{start}{os.getpid()}-{time.time_ns():x}{_TEMPORARY}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        self._file: BinaryIO = open(os.open(self._temporary, flags, 0o666), "wb", buffering=_BUFFER_BYTES)
        try:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # no locks on this file system: others wait for its age
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(OSError):
                os.chmod(self._temporary, stat.S_IMODE(os.stat(self._path).st_mode))
        except BaseException:
            self.discard()
            raise

    def write(self, data: Any) -> int:
        """Writes `data`, all of it, and does not keep it."""
        return self._file.write(data)

    def commit(self) -> None:
        """Brings the file to the disk and gives it its name, in place of an older one; discards it on failure."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._temporary, self._path)
        except BaseException:
            self.discard()
            raise
        self._file.close()
        _sync_folder(os.path.dirname(self._path))

    def discard(self) -> None:
        """Removes the temporary file; the older file stays."""
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)
        with contextlib.suppress(OSError):  # it may not be able to write what it still holds
            self._file.close()


def _sync_folder(folder: str) -> None:
    """Brings the new name to the disk, where folders can be opened for that."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has no such thing
                raise
        finally:
            os.close(descriptor)


def _remove_left_overs(folder: str, start: str) -> None:
    """Removes temporary files of killed processes: old, and locked by nobody."""
    if fcntl is None:
        return
    for entry in _left_overs(folder, start):
        with contextlib.suppress(OSError):
            descriptor = os.open(entry.path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            try:
                if time.time() - os.fstat(descriptor).st_mtime > _LEFT_OVER_SECONDS:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)
            finally:
                os.close(descriptor)


def _left_overs(folder: str, start: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(start) and entry.name.endswith(_TEMPORARY):
                    yield entry
    except OSError:
        return
