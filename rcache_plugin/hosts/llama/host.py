"""Puts the cache under the llama-cpp-python of this process: loads the adapter, then libllama, once."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cffi import FFI

from ...cache import RecurrentCache
from ...capi.vtable import ABI_VERSION, CacheRequest, new_factory
from ...checkpoints.policy import DefaultPolicy
from ...errors import AbiMismatch, RcacheError
from ...memory.ggml import GgmlLib
from .adapter.build import build
from .adapter.found import LlamaInstall, find_install
from .options import PROMPT_TAIL, PROMPT_TAIL_FROM, Options

log = logging.getLogger(__name__)

_ADAPTER_FUNCTIONS = """
    uint32_t rcache_llama_abi_version(void);
    void rcache_llama_set_factory(const void * factory);
    void rcache_llama_set_consecutive(int32_t consecutive);
    void rcache_llama_set_tail(uint32_t n_tail, uint32_t n_from);
"""


class HostOrderError(RcacheError, ImportError):
    """Something was imported before `install` that makes the replacement impossible in this process."""


class _Host:
    """What `install` has loaded into this process: once, since a process has one libllama."""

    def __init__(self, found: LlamaInstall, adapter: Any, libllama: Any, ggml: GgmlLib) -> None:
        self.found = found
        self.adapter = adapter
        self.libllama = libllama  # keeps it mapped, globally
        self.ggml = ggml
        self.options = Options()
        self.caches: weakref.WeakSet[RecurrentCache] = weakref.WeakSet()
        self.local = threading.local()

    def create(self, request: CacheRequest) -> RecurrentCache:
        """Makes the cache of a new context; runs inside libllama's constructor."""
        options: Options = getattr(self.local, "options", self.options)
        n_seq_max = request.n_seq_max or request.n_cells
        checkpoint_cells = options.cells_for_checkpoints(request.spec.cell_bytes * (1 + request.n_rs_seq))
        cache = RecurrentCache(
            request.spec,
            request.n_cells + options.spare_cells,
            n_seq_max=n_seq_max,
            placement=options.placement,
            ggml=self.ggml,
            bufts=request.bufts,
            n_rs_seq=request.n_rs_seq,
            empty_tensors=True,
            checkpoint_cells=checkpoint_cells,
            policy=DefaultPolicy(options.checkpoint_interval),
            hybrid=request.hybrid,
            max_replay=options.max_replay,
        )
        self.adapter.rcache_llama_set_consecutive(int(options.consecutive_seq_ids))
        self.adapter.rcache_llama_set_tail(PROMPT_TAIL if checkpoint_cells else 0, PROMPT_TAIL_FROM)
        self.caches.add(cache)
        getattr(self.local, "made", []).append(cache)
        return cache


_host: _Host | None = None
_install_lock = threading.Lock()


def install(*, adapter: str | os.PathLike[str] | None = None, **options: Any) -> None:
    """Loads the adapter and libllama, so that `import llama_cpp` finds the class replaced. Again: sets the options.

    `options` are the fields of `Options`.

    With ``placement="classic", consecutive_seq_ids=True, checkpoint_cells=0`` everything equals stock llama.cpp to the
    last bit; the defaults are faster with several sequences, can roll back, and are equal up to rounding.

    The adapter is built when this machine has not built it yet (`adapter.build.build`, some seconds); `adapter` names a
    built one instead. Raises `HostOrderError` when llama_cpp or ggml is in the process already, `LlamaBuildError` when
    there is no adapter to be had, `AbiMismatch` for one of another version.
    """
    global _host
    wanted = Options(**options)
    with _install_lock:
        if _host is None:
            _check_order()
            found = find_install()
            path = Path(adapter) if adapter is not None else build(found, progress=_say)
            _host = _load(found, path)
        _host.options = wanted


def installed() -> bool:
    """Whether `install` has succeeded in this process."""
    return _host is not None


def caches() -> tuple[RecurrentCache, ...]:
    """The open caches of all contexts in this process, in no order."""
    return () if _host is None else tuple(cache for cache in _host.caches if not cache.closed)


@contextlib.contextmanager
def context_options(**changes: Any) -> Iterator[list[RecurrentCache]]:
    """While inside, contexts made by this thread use these `Options`; gives the list that their caches are put into.

    Raises `HostOrderError` before `install`.
    """
    if _host is None:
        raise HostOrderError("call rcache_plugin.hosts.llama.install() first")
    before = dict(vars(_host.local))
    made: list[RecurrentCache] = []
    _host.local.options = replace(before.get("options", _host.options), **changes)
    _host.local.made = made
    try:
        yield made
    finally:
        vars(_host.local).clear()
        vars(_host.local).update(before)


def _say(line: str) -> None:
    print(f"rcache: {line}", file=sys.stderr)  # stdout is the user's


def _check_order() -> None:
    if "llama_cpp" in sys.modules:
        raise HostOrderError(
            "llama_cpp is imported already, with its own class bound: call rcache_plugin.hosts.llama.install(), or "
            "import rcache_plugin.hosts.llama.Llama, before the first import of llama_cpp"
        )
    if "ggml" in sys.modules:
        raise HostOrderError(
            "ggml (ggml-python) is imported already: llama_cpp's library would silently use its older functions. Use "
            "the two in different processes, or import ggml after llama_cpp"
        )
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    mapped = sorted({line.split(maxsplit=5)[5] for line in maps.splitlines() if "/libllama.so" in line})
    if mapped:
        raise HostOrderError(f"a libllama is loaded already ({', '.join(mapped)}): install() has to come before it")


def _load(found: LlamaInstall, path: Path) -> _Host:
    # the adapter first: the linker takes the first definition in the global scope for libllama's own calls; lazily,
    # because what it calls itself is in libllama. Not with ctypes, which always adds RTLD_NOW
    ffi = FFI()
    ffi.cdef(_ADAPTER_FUNCTIONS)
    adapter = ffi.dlopen(str(path), os.RTLD_GLOBAL | os.RTLD_LAZY)
    version = adapter.rcache_llama_abi_version()
    if version != ABI_VERSION:
        raise AbiMismatch(f"{path} has version {version} of the interface, this is {ABI_VERSION}: build it again")
    libllama = ctypes.CDLL(str(found.libllama), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
    host = _Host(found, adapter, libllama, GgmlLib.find(found.libllama.parent))
    adapter.rcache_llama_set_factory(ffi.cast("const void *", new_factory(host.create)))
    log.info("llama-cpp-python %s runs on rcache (%s)", found.version, path)
    return host
