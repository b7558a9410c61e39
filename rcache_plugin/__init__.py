"""rcache: a recurrent-state cache for llama.cpp hosts.

The public names are loaded when they are first used; importing the package loads no foreign library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._lazy import lazy_names

__version__ = "0.1.0"

_MODULE_OF = {
    "Batch": ".cells.batch",
    "CacheSpec": ".cells.spec",
    "CellTable": ".cells.table",
    "GgmlLib": ".memory.ggml",
    "HostVTable": ".capi.vtable",
    "RcacheError": ".errors",
    "RecurrentCache": ".cache",
    "SlotPlan": ".cells.slots",
    "StateBuffers": ".memory.buffers",
    "TableClient": ".capi.client",
    "UBatch": ".cells.ubatch",
    "factory_address": ".capi.vtable",
    "plan_slots": ".cells.slots",
    "split_equal": ".cells.batch",
    "split_seq": ".cells.batch",
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
    from .cache import RecurrentCache
    from .capi.client import TableClient
    from .capi.vtable import HostVTable, factory_address
    from .cells.batch import Batch, split_equal, split_seq
    from .cells.slots import SlotPlan, plan_slots
    from .cells.spec import CacheSpec
    from .cells.table import CellTable
    from .cells.ubatch import UBatch
    from .errors import RcacheError
    from .memory.buffers import StateBuffers
    from .memory.ggml import GgmlLib


__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
