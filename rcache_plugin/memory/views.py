"""Views of rows in host memory: numpy arrays of them, without a copy.

An array holds the `Storage` that its row lies in, so memory is never read after it was freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgument
from .storage import Storage, Tensor

# What numpy has no type for (bf16, quantised) is shown as bytes.
_DTYPES: dict[str, npt.DTypeLike] = {"f32": np.float32, "f16": np.float16, "f64": np.float64}


class RowView:
    """One row of a `StateBuffers` in host memory, where it lies: nothing is copied.

    Give it to numpy (``np.asarray(view)``) or call `array`. What it shows changes with the next graph that is computed,
    and with each write to the cell. It is valid until its `StateBuffers` is closed; then it raises `ClosedError`. An
    array obtained before keeps the memory of all the buffers from being freed, so drop arrays with the cache.
    """

    __slots__ = ("_locate",)

    def __init__(self, locate: Callable[[], tuple[Storage, Tensor, int]]) -> None:
        """`locate` gives the storage, the tensor and the byte offset of the row; it raises `ClosedError`."""
        self._locate = locate

    def array(self) -> npt.NDArray[Any]:
        """The row as a read-only array: [n_embd] of float32, float16 or float64, or [row_bytes] of uint8 for a type
        that numpy does not have. Raises `ClosedError`."""
        storage, tensor, offset = self._locate()
        if tensor.data is None:
            raise InvalidArgument("only rows in host memory can be viewed; read this one with get_row")
        dtype = _DTYPES.get(tensor.state_type.name)
        block = HostBlock(storage, tensor.data + offset, tensor.row_bytes)
        array = np.asarray(block)
        return array if dtype is None else array.view(dtype)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        array = self.array()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError(f"a row of {array.dtype} cannot be shown as {np.dtype(dtype)} without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __len__(self) -> int:
        return len(self.array())

    def __getitem__(self, key: Any) -> Any:
        return self.array()[key]


class HostBlock:
    """Bytes of host memory in numpy's array interface. An array made from it holds it, and so holds the memory."""

    __slots__ = ("__array_interface__", "_storage")

    def __init__(self, storage: Storage, address: int, n_bytes: int) -> None:
        self._storage = storage
        self.__array_interface__ = {"version": 3, "shape": (n_bytes,), "typestr": "|u1", "data": (address, True)}
