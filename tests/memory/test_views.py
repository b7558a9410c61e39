"""Proves that a view shows its row in place, read-only, and keeps the memory that it shows."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from buffer_kit import SpyLib

from rcache_plugin.cells.spec import CacheSpec, StateType
from rcache_plugin.errors import ClosedError
from rcache_plugin.memory.buffers import StateBuffers
from rcache_plugin.memory.views import RowView

SPEC = CacheSpec.make([6, 0, 4, 0], [5, 3, 0, 0])


@pytest.fixture
def buffers(lib: SpyLib) -> Iterator[StateBuffers]:
    with StateBuffers(lib, SPEC, 8) as made:
        yield made


def test_view_shows_the_row_where_it_lies(buffers: StateBuffers) -> None:
    view = buffers.view_row("s", 0, 6)
    array = np.asarray(view)
    assert isinstance(view, RowView) and array.dtype == np.float32 and array.shape == (5,) and len(view) == 5
    values = np.arange(5, dtype=np.float32)
    buffers.set_row("s", 0, 6, values)
    assert array.tolist() == values.tolist() == view[:].tolist() and view[3] == 3.0
    assert np.shares_memory(array, np.asarray(view))


def test_view_is_read_only(buffers: StateBuffers) -> None:
    array = np.asarray(buffers.view_row("r", 0, 0))
    with pytest.raises(ValueError):
        array[0] = 1
    with pytest.raises(ValueError):
        array.flags.writeable = True


@pytest.mark.parametrize(
    "name, dtype, n", [("f16", np.float16, 32), ("f64", np.float64, 32), ("bf16", np.uint8, 64), ("q8_0", np.uint8, 34)]
)
def test_view_of_other_types(lib: SpyLib, name: str, dtype: type, n: int) -> None:
    with StateBuffers(lib, CacheSpec.make([32], [0], name), 2) as buffers:
        array = buffers.view_row("r", 0, 1).array()
        assert array.dtype == dtype and array.shape == (n,)
        assert array.nbytes == StateType.of(name).row_bytes(32)


def test_view_converts_and_copies_as_numpy_asks(buffers: StateBuffers) -> None:
    buffers.set_row("r", 0, 0, np.arange(6, dtype=np.float32))
    view = buffers.view_row("r", 0, 0)
    assert np.asarray(view, dtype=np.float64).tolist() == [0, 1, 2, 3, 4, 5]
    copied = np.array(view)
    buffers.clear()
    assert copied.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="without a copy"):
        view.__array__(np.float64, copy=False)


def test_view_after_close(lib: SpyLib) -> None:
    buffers = StateBuffers(lib, SPEC, 2)
    buffers.set_row("r", 0, 1, np.full(6, 7, np.float32))
    view = buffers.view_row("r", 0, 1)
    array = view.array()[1:]
    buffers.close()
    for use in (view.array, lambda: np.asarray(view), lambda: view[0], lambda: len(view)):
        with pytest.raises(ClosedError):
            use()
    assert array.tolist() == [7] * 5 and lib.leaked()  # the array keeps the memory ...
    del array
    gc.collect()
    assert not lib.leaked()  # ... and the last one frees it
