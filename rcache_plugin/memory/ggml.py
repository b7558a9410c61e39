"""`GgmlLib`: one opened ggml. Every foreign ggml call of the package is made here.

ggml aborts the process when a call makes no sense to it. So the methods here are not a second public API of ggml:
they are what `buffers` and `storage` need, and the callers check shapes, ranges and sizes first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import AllocationError, BackendError, GgmlNotFound, InvalidArgument, counted
from ._ffi import BASE_FUNCTIONS, REGISTRY_FUNCTIONS, function_names, ggml_ffi
from .libraries import find_libraries, library_of, open_library
from .rpc import ENDPOINT, rpc_connectable, rpc_connection, split_endpoint

_MAX_BYTES = 1 << 62  # keeps every sum of sizes inside ggml's size_t and int64_t


@dataclass(frozen=True, slots=True)
class Device:
    """A device that a ggml build has registered."""

    name: str
    """As ggml calls it: ``CPU``, ``CUDA0``, ``Metal``, ``RPC0``."""
    description: str
    kind: str
    """``CPU``, ``GPU``, ``IGPU``, ``ACCEL``, ``META``, or ``TYPE<n>`` for a kind that is new to this package."""
    memory_free: int
    """Bytes, as the device tells; 0 when it does not."""
    memory_total: int
    """Bytes, as the device tells; 0 when it does not."""
    handle: Any = field(repr=False, compare=False)
    """``ggml_backend_dev_t``."""


class GgmlLib:
    """One opened ggml: ``libggml-base`` (tensors, buffers) and ``libggml`` (the registry of devices).

    Make it with `find`, `open` or `from_handle`. The libraries stay in the process until it ends, since tensors, buffer
    types and devices point into them.
    """

    path: Path | None
    """File of ``libggml-base``; None when it came as a handle."""
    registry_path: Path | None
    """File of ``libggml``; None when it came as a handle."""
    version: str
    """What ``ggml_version`` says; empty for a build that has no such function."""
    commit: str
    """What ``ggml_commit`` says; empty for a build that has no such function."""

    def __init__(self, base: Any, registry: Any, path: Path | None, registry_path: Path | None) -> None:
        """Takes opened cffi libraries. Raises `GgmlNotFound` naming the functions that they lack."""
        self.ffi = ggml_ffi()
        self.path = path
        self.registry_path = registry_path
        _require(base, BASE_FUNCTIONS, path)
        _require(registry, REGISTRY_FUNCTIONS, registry_path)
        self._base = base
        self._registry = registry
        self.version = self._optional_text("ggml_version")
        self.commit = self._optional_text("ggml_commit")

    def __repr__(self) -> str:
        return f"<GgmlLib {self.path or 'from a handle'} version {self.version or 'unknown'}>"

    # libraries

    @classmethod
    def find(cls, where: str | os.PathLike[str] | None = None) -> GgmlLib:
        """The ggml of `where` (a file or a folder), or else of the first of these places that has one:

        the environment variable ``RCACHE_GGML`` (file or folder); the ggml that this process has mapped; the installed
        package ggml-python; the installed package llama-cpp-python.

        Raises `GgmlNotFound` with the places looked at, or, when several different copies of ggml are mapped, with
        their paths: tensors of one copy mean nothing to another, so the caller has to choose; or when a library lacks
        a function.
        """
        return cls.open(*find_libraries(where))

    @classmethod
    def open(cls, base: Path, registry: Path) -> GgmlLib:
        """Opens two library files. Raises `GgmlNotFound` with the loader's message, or naming the missing functions."""
        return cls(open_library(base), open_library(registry), base, registry)

    @classmethod
    def from_handle(cls, base: Any, registry: Any = None) -> GgmlLib:
        """From what a host has opened: a ``ctypes.CDLL``, or the address that ``dlopen`` gave, of ``libggml-base`` and
        of ``libggml``. One handle is enough when the library depends on the other (``libggml``, ``libllama``).

        The host keeps the libraries open. Raises `InvalidArgument` for a null handle, `GgmlNotFound` naming the
        functions that they lack.
        """
        opened = library_of(base)
        return cls(opened, opened if registry is None else library_of(registry), None, None)

    def same_copy(self, other: GgmlLib) -> bool:
        """Whether both stand for one copy of ggml in this process, so that each understands the other's tensors."""
        return bool(self.cpu_buft() == other.cpu_buft())

    def _optional_text(self, function: str) -> str:
        try:
            return self._text(getattr(self._base, function)())
        except AttributeError:
            return ""

    def _text(self, chars: Any) -> str:
        return "" if chars == self.ffi.NULL else self.ffi.string(chars).decode("utf-8", "replace")

    # devices and buffer types

    def devices(self) -> tuple[Device, ...]:
        """All devices that this ggml has registered, in its order. One that cannot be reached tells no memory."""
        return tuple(self._device(handle) for handle in self._device_handles())

    def device(self, name: str) -> Device:
        """The device called `name`, without regard to case. Raises `InvalidArgument` with the names of all."""
        return self._device(self._handle_of(name))

    def _device_handles(self) -> list[Any]:
        return [self._registry.ggml_backend_dev_get(i) for i in range(self._registry.ggml_backend_dev_count())]

    def _handle_of(self, name: str) -> Any:
        handles = {self._text(self._base.ggml_backend_dev_name(handle)): handle for handle in self._device_handles()}
        for known, handle in handles.items():
            if known.lower() == name.lower():
                return handle
        raise InvalidArgument(f"no device {name!r}; this ggml has {', '.join(handles) or 'none'}")

    def _device(self, handle: Any) -> Device:
        free, total = self._device_memory(handle)
        return Device(
            name=self._text(self._base.ggml_backend_dev_name(handle)),
            description=self._text(self._base.ggml_backend_dev_description(handle)),
            kind=self._kind(self._base.ggml_backend_dev_type(handle)),
            memory_free=free,
            memory_total=total,
            handle=handle,
        )

    def _kind(self, number: int) -> str:
        # IGPU came in at 2, before ACCEL, at about the time when ggml learned to tell its version.
        names = ("CPU", "GPU", "IGPU", "ACCEL", "META") if self.version else ("CPU", "GPU", "ACCEL")
        return names[number] if 0 <= number < len(names) else f"TYPE{number}"

    def _device_memory(self, handle: Any) -> tuple[int, int]:
        endpoint = self.endpoint_of(handle)
        if endpoint is not None and rpc_connection(endpoint) is False:
            return 0, 0
        free, total = self.ffi.new("size_t *"), self.ffi.new("size_t *")
        self._base.ggml_backend_dev_memory(handle, free, total)
        return int(free[0]), int(total[0])

    def memory_total(self, buft: Any) -> int:
        """Bytes that the device of `buft` has in all; 0 when it does not tell."""
        handle = self.device_of(buft)
        return 0 if handle is None else self._device_memory(handle)[1]

    def cpu_buft(self) -> Any:
        """The buffer type of ordinary host memory."""
        return self._base.ggml_backend_cpu_buffer_type()

    def buft_of(self, device: Device | str | None) -> Any:
        """The default buffer type of a device; None is the CPU. Raises `InvalidArgument` for an unknown name,
        `BackendError` when the device cannot be reached or has no buffer type."""
        if device is None:
            return self.cpu_buft()
        handle = self._handle_of(device) if isinstance(device, str) else device.handle
        self.require_reachable(self.endpoint_of(handle))
        buft = self._base.ggml_backend_dev_buffer_type(handle)
        if buft == self.ffi.NULL:
            name = self._text(self._base.ggml_backend_dev_name(handle))
            raise BackendError(f"device {name} cannot be reached, or has no memory of its own")
        return buft

    def buft_at(self, address: int) -> Any:
        """The ``ggml_backend_buffer_type_t`` that a host has given as an address. Raises `InvalidArgument` for 0."""
        if not address:
            raise InvalidArgument("a buffer type's address must not be 0")
        return self.ffi.cast("ggml_buft *", address)

    def device_of(self, buft: Any) -> Any:
        """``ggml_backend_dev_t`` of a buffer type, or None when ggml does not know it."""
        handle = self._base.ggml_backend_buft_get_device(buft)
        if handle != self.ffi.NULL:
            return handle
        # ggml leaves the device of its plain host memory open.
        if buft == self.cpu_buft():
            for handle in self._device_handles():
                if self._kind(self._base.ggml_backend_dev_type(handle)) == "CPU":
                    return handle
        return None

    def buft_name(self, buft: Any) -> str:
        """The device's name for a device's default buffer type, else ggml's name of the buffer type."""
        handle = self.device_of(buft)
        if handle is not None and self._base.ggml_backend_dev_buffer_type(handle) == buft:
            return self._text(self._base.ggml_backend_dev_name(handle))
        return self._text(self._base.ggml_backend_buft_name(buft))

    def is_host(self, buft: Any) -> bool:
        """Whether the processor can read and write buffers of this type in place."""
        return bool(self._base.ggml_backend_buft_is_host(buft))

    def alignment(self, buft: Any) -> int:
        """Bytes to which each tensor in such a buffer is padded."""
        return int(self._base.ggml_backend_buft_get_alignment(buft))

    def alloc_size(self, buft: Any, tensor: Any) -> int:
        """Bytes that `tensor` takes in a buffer of this type, alignment aside."""
        return int(self._base.ggml_backend_buft_get_alloc_size(buft, tensor))

    # RPC

    def add_rpc_server(self, endpoint: str) -> Device:
        """Registers the devices of the RPC server at `endpoint` (``host:port``); returns the first of them.

        Adding a server again gives the same device. One server serves one process at a time: the call waits while
        another one is connected. Raises `InvalidArgument` for an endpoint of another form, `BackendError` when this
        ggml was built without RPC or nobody listens there.
        """
        split_endpoint(endpoint)
        reg = self._registry.ggml_backend_reg_by_name(b"RPC")
        if reg == self.ffi.NULL:
            raise BackendError(f"the ggml at {self.path or 'the given handle'} was built without RPC (-DGGML_RPC=ON)")
        add_server = self._base.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_rpc_add_server")
        if add_server == self.ffi.NULL:
            raise BackendError(f"the RPC backend of {self!r} has no ggml_backend_rpc_add_server")
        self.require_reachable(endpoint)
        server = self.ffi.cast("rpc_add_server_t", add_server)(endpoint.encode())
        if server == self.ffi.NULL or not self._base.ggml_backend_reg_dev_count(server):
            raise BackendError(f"no RPC server answers at {endpoint}, or it has no device")
        first = self._base.ggml_backend_reg_dev_get(server, 0)
        if first not in self._device_handles():  # not every ggml sees by itself that it has it already
            self._registry.ggml_backend_register(server)
        return self._device(first)

    def endpoint_of(self, device_handle: Any) -> str | None:
        """``host:port`` behind an RPC device, else None."""
        reg = self._base.ggml_backend_dev_backend_reg(device_handle)
        if reg == self.ffi.NULL or not self._text(self._base.ggml_backend_reg_name(reg)).startswith("RPC"):
            return None
        match = ENDPOINT.search(self._text(self._base.ggml_backend_dev_description(device_handle)))
        return None if match is None else match.group()

    def endpoint_of_buft(self, buft: Any) -> str | None:
        """``host:port`` behind an RPC device's buffer type, else None."""
        handle = self.device_of(buft)
        return None if handle is None else self.endpoint_of(handle)

    @staticmethod
    def require_reachable(endpoint: str | None) -> None:
        """Raises `BackendError` when the connection to the RPC server at `endpoint` is lost; None is always reachable.

        ggml's RPC client ends the process at the first call on a lost connection, so each call on an RPC device is
        preceded by this one.
        """
        if endpoint is not None and rpc_connection(endpoint) is False:
            raise BackendError(f"the RPC server at {endpoint} is gone; what it held is lost")

    @contextmanager
    def connected(self, buft: Any) -> Iterator[None]:
        """Keeps one connection to the RPC server of `buft` meanwhile; does nothing for other buffer types.

        ggml connects for a single call when no buffer of that server is alive, and crashes when it cannot. So the
        server is tried first, and a buffer of some bytes holds the connection. Raises `BackendError` when the server
        cannot be reached, `AllocationError` when it does not even have these bytes.
        """
        endpoint = self.endpoint_of_buft(buft)
        if endpoint is None:
            yield
            return
        self.require_reachable(endpoint)
        if rpc_connection(endpoint) is None and not rpc_connectable(endpoint):
            raise BackendError(f"no RPC server answers at {endpoint}")
        n_bytes = self.alignment(buft)
        buffer = self._base.ggml_backend_buft_alloc_buffer(buft, n_bytes)
        if buffer == self.ffi.NULL:
            raise AllocationError(f"{counted(n_bytes, 'byte')} could not be allocated on {self.buft_name(buft)}")
        try:
            yield
        finally:
            if rpc_connection(endpoint) is not False:
                self._base.ggml_backend_buffer_free(buffer)

    # tensors and buffers

    def row_size(self, type_id: int, n_elements: int) -> int:
        """Bytes of a row of whole blocks of a ggml type."""
        return int(self._base.ggml_row_size(type_id, n_elements))

    def new_context(self, n_tensors: int) -> Any:
        """A context for the descriptions of `n_tensors` tensors, not for their data. Freed by
        `free_context`. Raises `BackendError` when ggml gives none."""
        params = self.ffi.new("struct ggml_init_params *")
        params.mem_size = max(n_tensors, 1) * self._base.ggml_tensor_overhead()
        params.mem_buffer = self.ffi.NULL
        params.no_alloc = True
        ctx = self._base.ggml_init(params[0])
        if ctx == self.ffi.NULL:
            raise BackendError(f"ggml gave no context for {counted(n_tensors, 'tensor')}")
        return ctx

    def free_context(self, ctx: Any) -> None:
        """Frees a context and the descriptions of its tensors."""
        self._base.ggml_free(ctx)

    def new_tensor_2d(self, ctx: Any, type_id: int, ne0: int, ne1: int, name: str) -> Any:
        """A tensor [ne0, ne1] without data. Raises `InvalidArgument` when its size cannot be counted."""
        if ne0 < 0 or ne1 < 1 or self.row_size(type_id, ne0) * ne1 > _MAX_BYTES:
            raise InvalidArgument(f"a tensor cannot have [{ne0}, {ne1}] elements")
        tensor = self._base.ggml_new_tensor_2d(ctx, type_id, ne0, ne1)
        self._base.ggml_set_name(tensor, name.encode())
        return tensor

    def address(self, cdata: Any) -> int:
        """The address that a pointer holds."""
        return int(self.ffi.cast("uintptr_t", cdata))

    def data_address(self, tensor: Any) -> int:
        """Address of a tensor's data; host buffers only."""
        return self.address(self._base.ggml_get_data(tensor))

    def alloc_tensors(self, ctx: Any, buft: Any) -> Any:
        """A buffer for all tensors of `ctx`, or None when there is not enough memory. Freed by `free_buffer`."""
        buffer = self._base.ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft)
        return None if buffer == self.ffi.NULL else buffer

    def free_buffer(self, buffer: Any) -> None:
        """Frees a buffer."""
        self._base.ggml_backend_buffer_free(buffer)

    def buffer_size(self, buffer: Any) -> int:
        """Bytes of a buffer, padding included."""
        return int(self._base.ggml_backend_buffer_get_size(buffer))

    def clear_buffer(self, buffer: Any) -> None:
        """Sets a buffer to zero."""
        self._base.ggml_backend_buffer_clear(buffer, 0)

    def tensor_set(self, tensor: Any, data: Any, offset: int, size: int) -> None:
        """Writes `size` bytes from host memory (cdata pointer) at byte `offset` of a tensor."""
        self._base.ggml_backend_tensor_set(tensor, data, offset, size)

    def tensor_get(self, tensor: Any, data: Any, offset: int, size: int) -> None:
        """Reads `size` bytes at byte `offset` of a tensor into host memory (cdata pointer)."""
        self._base.ggml_backend_tensor_get(tensor, data, offset, size)

    def copy_elements(self, src: Any, src_offset: int, dst: Any, dst_offset: int, n_elements: int) -> None:
        """Copies `n_elements` elements between two tensors of one type, from byte offset to byte offset, by the best
        way that their backends know. The ranges must not overlap. Raises `BackendError` when a view is refused."""
        ctx = self.new_context(2)
        try:
            views = (
                self._base.ggml_view_1d(ctx, src, n_elements, src_offset),
                self._base.ggml_view_1d(ctx, dst, n_elements, dst_offset),
            )
            for view in views:
                status = self._base.ggml_backend_view_init(view)
                if status:
                    raise BackendError(f"ggml refused a view of a state tensor (status {status})")
            self._base.ggml_backend_tensor_copy(*views)
        finally:
            self.free_context(ctx)


def _require(library: Any, declarations: str, path: Path | None) -> None:
    missing = [name for name in function_names(declarations) if not _has(library, name)]
    if missing:
        raise GgmlNotFound(
            f"{path or 'the given handle'} is no ggml that this package can use; it lacks {', '.join(missing)}"
        )


def _has(library: Any, name: str) -> bool:
    try:
        getattr(library, name)
    except AttributeError:
        return False
    return True
