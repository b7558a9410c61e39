"""llama-cpp-python on this package's cache: an unmodified libllama calls `RecurrentCache` instead of its own class.

    import rcache_plugin.hosts.llama
    rcache_plugin.hosts.llama.install()     # before the first import of llama_cpp
    import llama_cpp

or ``from rcache_plugin.hosts.llama import Llama``, or ``python -m rcache_plugin exec script.py``. docs/llama-host.md
says how the class is replaced. Models without recurrent layers run without a cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._lazy import lazy_names

_MODULE_OF = {
    "HostOrderError": ".host",
    "Llama": ".model",
    "Options": ".options",
    "caches": ".host",
    "context_options": ".host",
    "install": ".host",
    "installed": ".host",
}

__all__ = ["HostOrderError", "Llama", "Options", "caches", "context_options", "install", "installed"]

if TYPE_CHECKING:
    from .host import HostOrderError, caches, context_options, install, installed
    from .model import Llama
    from .options import Options


_get, __dir__ = lazy_names(__name__, _MODULE_OF)


def __getattr__(name: str) -> Any:
    if name == "Llama":
        from . import host

        if not host.installed():
            host.install()  # before llama_cpp is imported, which the class derives from
    return _get(name)
