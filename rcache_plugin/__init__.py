"""rcache: a recurrent-state cache for llama.cpp hosts.

The public names are loaded when they are first used; importing the package loads no foreign library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULE_OF = {
    "Batch": "batch",
    "CacheSpec": "spec",
    "CellTable": "cells",
    "GgmlLib": "ggml_lib",
    "HostVTable": "vtable",
    "RcacheError": "errors",
    "RecurrentCache": "cache",
    "SlotPlan": "slots",
    "StateBuffers": "buffers",
    "TableClient": "table_client",
    "UBatch": "ubatch",
    "factory_address": "vtable",
    "plan_slots": "slots",
    "split_equal": "batch",
    "split_seq": "batch",
}

__all__ = [
    "Batch",
    "CacheSpec",
    "CellTable",
    "GgmlLib",
    "HostVTable",
    "RcacheError",
    "RecurrentCache",
    "SlotPlan",
    "StateBuffers",
    "TableClient",
    "UBatch",
    "__version__",
    "factory_address",
    "plan_slots",
    "split_equal",
    "split_seq",
]

if TYPE_CHECKING:
    from .batch import Batch, split_equal, split_seq
    from .buffers import StateBuffers
    from .cache import RecurrentCache
    from .cells import CellTable
    from .errors import RcacheError
    from .ggml_lib import GgmlLib
    from .slots import SlotPlan, plan_slots
    from .spec import CacheSpec
    from .table_client import TableClient
    from .ubatch import UBatch
    from .vtable import HostVTable, factory_address


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
