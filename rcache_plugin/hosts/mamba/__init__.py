"""The reference host: a Mamba-1 GGUF on ggml's CPU backend, with its states in a recurrent-state cache.

It calls the cache through the C table only, as a host written in C would. Models are read-only and may be shared; a
context is for one thread at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._lazy import lazy_names

_MODULE_OF = {"CacheFull": ".context", "MambaContext": ".context", "MambaModel": ".model", "bundled_model": ".model"}

__all__ = ["CacheFull", "MambaContext", "MambaModel", "bundled_model"]

if TYPE_CHECKING:
    from .context import CacheFull, MambaContext
    from .model import MambaModel, bundled_model


__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
