"""The streams that states are written to and read from: memory, binary files, and what a host offers itself.

Knows rows by layer, and nothing of the format that they are in.
"""

from __future__ import annotations

import io
from typing import Any, Protocol

from ..cells.spec import Which
from ..errors import InvalidArgument, StateError, counted

Bytes = bytes | bytearray | memoryview
"""The bytes of rows. A view is valid for the call: who takes one reads it before returning."""

FLAG_ON_DEVICE = 2
"""``LLAMA_STATE_SEQ_FLAGS_ON_DEVICE``: rows go from and to the tensors, by `Writer.write_rows` and `read_rows`."""


class Writer(Protocol):
    """Takes the bytes of a state in order."""

    def write(self, data: bytes) -> object:
        """Takes `data`, all of it."""

    def write_rows(self, which: Which, il: int, first: int, n_rows: int) -> object:
        """Takes rows ``first .. first + n_rows - 1`` of layer `il`'s tensor `which` ("r", "s" or "p")."""


class Reader(Protocol):
    """Gives the bytes of a state in order."""

    def read(self, n_bytes: int) -> Bytes:
        """The next `n_bytes`. May give fewer; none, or an exception, is the end."""


class DeviceReader(Protocol):
    """A `Reader` that puts rows into the tensors itself.

    One whose `read_rows` takes the rows from the stream, where they stand, says so with the attribute
    ``streams_rows = True``. It is then asked for rows without `FLAG_ON_DEVICE` too, if the cells are free, or if it has
    ``rows_wait = True``: rows reach the tensors only when all was read without an exception.
    """

    def read(self, n_bytes: int) -> Bytes:
        """As `Reader.read`."""

    def read_rows(self, which: Which, il: int, first: int, n_rows: int) -> object:
        """Puts the next rows to rows ``first .. first + n_rows - 1`` of layer `il`'s tensor `which`."""


class RowSource(Protocol):
    """Gives rows; `StateBuffers` is one."""

    def get_rows(self, which: Which, il: int, first: int, n_rows: int) -> bytes:
        """A copy of rows, [n_rows * row_bytes]."""

    def borrow_rows(self, which: Which, il: int, first: int, n_rows: int) -> memoryview:
        """As `get_rows`, without the copy if the rows lie in host memory."""

    def copy_rows_to(self, which: Which, il: int, first: int, n_rows: int, out: memoryview) -> int:
        """Copies rows to the beginning of `out`; returns their number of bytes."""


def writer_to(target: Any, rows: RowSource, n_bytes: int) -> Writer:
    """A `Writer` to `target`, which is one already, has ``write(bytes)``, or is memory of at least `n_bytes` bytes.

    Raises `InvalidArgument`, with nothing written, for memory that is too small or cannot be written.
    """
    if hasattr(target, "write_rows"):
        writer: Writer = target
        return writer
    if hasattr(target, "write"):
        return _StreamWriter(target, rows)
    return _MemoryWriter(target, rows, n_bytes)


def reader_from(source: Any) -> Any:
    """A `Reader` of `source`, which is one already or memory that holds a state and nothing else.

    Raises `InvalidArgument`.
    """
    return source if hasattr(source, "read") else MemoryReader(source)


class MemoryReader:
    """A `Reader` of memory. It gives views, so rows are copied once, to the tensors."""

    def __init__(self, data: Any) -> None:
        try:
            self._data = memoryview(data).cast("B")
        except TypeError as error:
            raise InvalidArgument(f"a state is read from a binary file or contiguous memory: {error}") from error
        self._at = 0

    def read(self, n_bytes: int) -> memoryview:
        """The next `n_bytes`, or what is left."""
        start = self._at
        self._at = min(start + n_bytes, len(self._data))
        return self._data[start : self._at]

    def check_end(self) -> None:
        """Raises `StateError` when something follows the state."""
        if self._at != len(self._data):
            raise StateError(f"length: the state ends after {counted(self._at, 'byte')}, found {len(self._data)}")


class _StreamWriter:
    """Rows as bytes, in order, to whatever takes bytes."""

    def __init__(self, target: Any, rows: RowSource) -> None:
        self._raw = isinstance(target, io.RawIOBase)
        # Python's own files are known not to keep what they are given.
        borrows = getattr(target, "borrows", False) or isinstance(target, io.IOBase)
        self._rows = rows.borrow_rows if borrows else rows.get_rows
        self._write = target.write

    def write(self, data: Bytes) -> None:
        written = self._write(data)
        while self._raw and written != len(data):  # takes as much as the system likes to
            if not written:
                raise StateError(f"write of {counted(len(data), 'byte')}: the file took none")
            data = memoryview(data)[written:]
            written = self._write(data)

    def write_rows(self, which: Which, il: int, first: int, n_rows: int) -> None:
        self.write(self._rows(which, il, first, n_rows))


class _MemoryWriter:
    """Rows from the tensors to memory, without a copy between."""

    def __init__(self, target: Any, rows: RowSource, n_bytes: int) -> None:
        try:
            self._out = memoryview(target).cast("B")
        except TypeError as error:
            raise InvalidArgument(f"a state is written to a binary file or contiguous memory: {error}") from error
        if self._out.readonly or len(self._out) < n_bytes:
            has = "cannot be written" if self._out.readonly else f"has {counted(len(self._out), 'byte')}"
            raise InvalidArgument(f"the state takes {counted(n_bytes, 'byte')}, the memory {has}")
        self._rows = rows
        self._at = 0

    def write(self, data: bytes) -> None:
        self._out[self._at : self._at + len(data)] = data
        self._at += len(data)

    def write_rows(self, which: Which, il: int, first: int, n_rows: int) -> None:
        self._at += self._rows.copy_rows_to(which, il, first, n_rows, self._out[self._at :])


def read_exactly(reader: Reader, n_bytes: int, what: str, data: Bytes | None = None) -> Bytes:
    """`n_bytes` of `reader`, which has given `data` of them already. Raises `StateError` naming `what`."""
    if data is None:
        data = reader.read(n_bytes) if n_bytes else b""
    if len(data) < n_bytes:  # a raw file or a pipe gives what it has
        data = bytearray(data)
        while len(data) < n_bytes:
            more = reader.read(n_bytes - len(data))
            if not more:
                raise StateError(f"{what}: the state ends after {len(data)} of {counted(n_bytes, 'byte')}")
            data += more
    if len(data) > n_bytes:
        raise StateError(f"{what}: the reader gave {counted(len(data), 'byte')} for {n_bytes}")
    return data
