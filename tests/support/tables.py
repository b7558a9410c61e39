"""Comparing cell tables."""

from __future__ import annotations

import numpy as np

from rcache_plugin.cells.table import Columns


def same_columns(a: Columns, b: Columns) -> bool:
    return a.seq_ids == b.seq_ids and all(np.array_equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))
