"""Exceptions of the package and their mirror in the C interface, `enum rcache_status`.

Three outcomes have three channels: ``None`` or ``False`` is an ordinary "does not fit" or "refused", an
`InvalidArgument` is the caller's mistake, everything else is trouble below. Statuses exist at the C boundary only;
`status_of` and `check` are the one place that maps between the two. Needs neither ggml nor cffi.
"""

from __future__ import annotations

import enum


def counted(n: int, noun: str) -> str:
    """`n` and what it counts, for messages: ``1 cell``, ``17 cells``."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


class Status(enum.IntEnum):
    """`enum rcache_status`: 0 is success, positive an ordinary refusal, negative an error."""

    OK = 0
    NO_SLOT = 1
    REFUSED = 2
    INVALID = -1
    CLOSED = -2
    ABI = -3
    ALLOC = -4
    BACKEND = -5
    CORRUPT = -6
    IO = -7
    UNSUPPORTED = -8
    EXCEPTION = -9


class RcacheError(Exception):
    """Base of all errors of this package."""

    status = Status.EXCEPTION


class InvalidArgument(RcacheError, ValueError):
    """The caller asked for something that cannot be; the message has the numbers. Nothing has changed."""

    status = Status.INVALID


class SeqIdError(InvalidArgument):
    """A sequence id outside ``0 <= seq_id < n_seq_max``."""

    def __init__(self, seq_id: int, n_seq_max: int, what: str = "seq_id") -> None:
        super().__init__(
            f"{what} is {seq_id}, but ids run from 0 to {n_seq_max - 1} (n_seq_max={n_seq_max}); "
            f"make the cache with a larger n_seq_max"
        )
        self.seq_id = seq_id
        self.n_seq_max = n_seq_max


class ModelError(InvalidArgument):
    """A model file that cannot be used; the message names the file and the field."""


class StalePlan(RcacheError):
    """A plan was committed after the table had changed; plan again."""

    status = Status.INVALID


class StaleCheckpoint(RcacheError):
    """A checkpoint was used that is gone: released, evicted, or cleared with its sequence."""

    status = Status.INVALID


class ClosedError(RcacheError):
    """The object was closed (or its owner was) and can no longer be used."""

    status = Status.CLOSED


class AbiMismatch(RcacheError):
    """The other side of the C interface speaks another version."""

    status = Status.ABI


class AllocationError(RcacheError, MemoryError):
    """A buffer could not be had; the message says how many bytes were asked of which device."""

    status = Status.ALLOC


class BackendError(RcacheError):
    """A ggml call failed."""

    status = Status.BACKEND


class GgmlNotFound(RcacheError, ImportError):
    """No usable ggml library; the message lists where it was looked for."""

    status = Status.BACKEND


class CorruptTable(RcacheError):
    """An invariant of the cell table is broken: a bug of this package."""

    status = Status.CORRUPT


class StateError(RcacheError):
    """A reader or writer failed, or the bytes cannot be a state."""

    status = Status.IO


class Unsupported(RcacheError, NotImplementedError):
    """This cache has no such operation."""

    status = Status.UNSUPPORTED


_BY_STATUS: dict[int, type[RcacheError]] = {
    Status.INVALID: InvalidArgument,
    Status.CLOSED: ClosedError,
    Status.ABI: AbiMismatch,
    Status.ALLOC: AllocationError,
    Status.BACKEND: BackendError,
    Status.CORRUPT: CorruptTable,
    Status.IO: StateError,
    Status.UNSUPPORTED: Unsupported,
}


def status_of(error: BaseException) -> Status:
    """The status that stands for `error` at the C boundary."""
    if isinstance(error, RcacheError):
        return error.status
    if isinstance(error, MemoryError):
        return Status.ALLOC
    if isinstance(error, ValueError):
        return Status.INVALID
    return Status.EXCEPTION


def check(status: int, what: str) -> Status:
    """Turns a negative `status` of the C interface into its exception; returns the others as `Status`.

    `what` is the text for the exception. Raises the `RcacheError` that `status_of` maps to this status.
    """
    if status < 0:
        raise _BY_STATUS.get(status, RcacheError)(what)
    return Status(status)
