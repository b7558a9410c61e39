"""A strict reader of GGUF headers: metadata and where each tensor lies. Needs the standard library and NumPy only.

It reads a file step by step and never further than the file goes, so that a truncated or damaged one ends in a
`ModelError` that names the field, and no count in it can make the reader loop or allocate more than the file could
hold. ``gguf.GGUFReader`` would do for sound files, but it needs seconds for a vocabulary of 50,000 tokens, where this
one needs tenths.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...errors import ModelError, counted

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Metadata value types of the format: number -> struct format; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NAME = 1 << 16
_MIN_FIELD = 8 + 4 + 1  # an empty key, a type, one byte
_MIN_TENSOR = 8 + 4 + 4 + 8  # an empty name, no dimensions, a type, an offset


@dataclass(frozen=True, slots=True)
class TensorType:
    """An element type as files store it."""

    name: str
    block: int
    """Elements in a block."""
    block_bytes: int
    """Bytes of a block."""


TENSOR_TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
}
"""Number in ``enum ggml_type`` -> type; those that ggml multiplies by on a CPU."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    """Elements in each dimension, ggml's order: the contiguous one first."""
    type_id: int
    """Number in ``enum ggml_type``, a key of `TENSOR_TYPES`."""
    offset: int
    """Bytes from the start of the file."""
    n_bytes: int

    @property
    def type(self) -> TensorType:
        """The element type."""
        return TENSOR_TYPES[self.type_id]


class GgufFile:
    """The header of a GGUF file: `fields` (key -> value; arrays of numbers are ndarrays) and `tensors` (name -> where).

    The file is closed again when the header is read. Raises `ModelError`: no such file, not a GGUF, another version or
    byte order, truncated, or a header that can't be; the message names the file and the field or tensor.
    """

    path: Path
    version: int
    size: int
    """Bytes of the file."""
    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                self._read(_Cursor(file, self.path, self.size))
        except OSError as error:
            raise ModelError(f"{self.path}: {error.strerror or error}") from error

    def _read(self, cursor: _Cursor) -> None:
        if cursor.size < len(MAGIC) or cursor.take(len(MAGIC), "magic") != MAGIC:
            raise cursor.error("not a GGUF file (it does not start with the letters GGUF)")
        self.version = cursor.number("I", "version")
        if self.version not in VERSIONS:
            swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big")
            hint = "; it is a big-endian file" if swapped in VERSIONS else ""
            raise cursor.error(f"GGUF version is {self.version}, this reader knows {VERSIONS}{hint}")
        n_tensors = cursor.count("Q", "tensor count", _MIN_TENSOR)
        n_fields = cursor.count("Q", "metadata count", _MIN_FIELD)
        self.fields = {}
        for i in range(n_fields):
            key = cursor.string(f"metadata key {i}", _MAX_NAME)
            self.fields[key] = cursor.value(cursor.number("I", f"{key}: type"), key)
        alignment = self.fields.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise cursor.error(f"general.alignment is {alignment!r}, not a power of two")
        infos = [_tensor_info(cursor, i) for i in range(n_tensors)]
        data = (cursor.at + alignment - 1) // alignment * alignment
        self.tensors = {}
        for info in infos:
            if info.name in self.tensors:
                raise cursor.error(f"tensor {info.name} stands in the file twice")
            if data + info.offset + info.n_bytes > self.size:
                raise cursor.error(
                    f"truncated: tensor {info.name} needs bytes {data + info.offset} to "
                    f"{data + info.offset + info.n_bytes}, the file has {self.size}"
                )
            self.tensors[info.name] = TensorInfo(
                info.name, info.shape, info.type_id, data + info.offset, info.n_bytes
            )

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of metadata `key`; `default` when the file has none, unless that is None.

        Raises `ModelError` when it is missing and there is no default, or is not a `kind`.
        """
        value = self.fields.get(key, default)
        if value is None:
            raise ModelError(f"{self.path}: metadata {key} is missing")
        # a bool is an int to Python, but never a count or an id in a file
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelError(f"{self.path}: metadata {key} is {_short(value)}, which is not of the expected type")
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _tensor_info(cursor: _Cursor, i: int) -> TensorInfo:
    """The description of tensor `i`, its offset still counted from the start of the data."""
    name = cursor.string(f"name of tensor {i}", _MAX_NAME)
    n_dims = cursor.number("I", f"tensor {name}: dimensions")
    if not 1 <= n_dims <= 4:
        raise cursor.error(f"tensor {name} has {counted(n_dims, 'dimension')}")
    shape = tuple(cursor.number("Q", f"tensor {name}: shape") for _ in range(n_dims))
    type_id = cursor.number("I", f"tensor {name}: type")
    offset = cursor.number("Q", f"tensor {name}: offset")
    if type_id not in TENSOR_TYPES:
        known = ", ".join(known.name for known in TENSOR_TYPES.values())
        raise cursor.error(f"tensor {name} is of ggml type {type_id}; supported are {known}")
    kind = TENSOR_TYPES[type_id]
    n_elements = 1
    for n in shape:
        n_elements *= n
    if n_elements == 0 or shape[0] % kind.block:
        raise cursor.error(f"tensor {name} has shape {shape}, which {kind.name} blocks of {kind.block} can't hold")
    return TensorInfo(name, shape, type_id, offset, n_elements // kind.block * kind.block_bytes)


class _Cursor:
    """Reads little-endian values one after the other, none beyond the end of the file."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file = file
        self.path = path
        self.size = size
        self.at = 0

    def error(self, text: str) -> ModelError:
        return ModelError(f"{self.path}: {text}")

    def take(self, n_bytes: int, what: str) -> bytes:
        data = self.file.read(n_bytes) if n_bytes <= self.size - self.at else b""
        if len(data) != n_bytes:
            needed = counted(n_bytes, "byte")
            raise self.error(f"truncated: {what} needs {needed} at {self.at}, the file has {self.size}")
        self.at += n_bytes
        return data

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def count(self, code: str, what: str, least_bytes: int) -> int:
        """A count of things that take at least `least_bytes` each."""
        n = int(self.number(code, what))
        if n * least_bytes > self.size - self.at:
            raise self.error(f"truncated: {what} is {n}, more than the rest of the file can hold")
        return n

    def string(self, what: str, longest: int | None = None) -> str:
        n_bytes = int(self.number("Q", what))
        if longest is not None and n_bytes > longest:
            raise self.error(f"{what} would be {n_bytes} bytes long")
        data = self.take(n_bytes, what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8") from error

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            raise self.error(f"metadata {what} is of unknown type {kind}")
        element = int(self.number("I", f"{what}: element type"))
        if element == _STRING:
            n = self.count("Q", f"{what}: length", 8)
            return [self.string(what) for _ in range(n)]
        if element not in _SCALARS:
            raise self.error(f"metadata {what} is an array of type {element}, which no Mamba file has")
        dtype = np.dtype("<" + _SCALARS[element]) if _SCALARS[element] != "?" else np.dtype(np.bool_)
        n = self.count("Q", f"{what}: length", dtype.itemsize)
        return np.frombuffer(self.take(n * dtype.itemsize, what), dtype=dtype)
