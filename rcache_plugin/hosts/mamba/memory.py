"""Where graphs find their inputs, their scratch memory and their threads: ggml's CPU side of the Mamba host."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import AllocationError, BackendError, InvalidArgument, counted
from .weights import cpu_buft, load_ggml


def new_context(g: Any, mem_size: int) -> Any:
    """A ggml context for descriptions only, freed by ``ggml_free``. Raises `AllocationError`."""
    context = g.ggml_init(g.ggml_init_params(mem_size=mem_size, mem_buffer=None, no_alloc=True))
    if not context:
        raise AllocationError(f"ggml could not make a context of {mem_size} bytes")
    return context


def array_on(tensor: Any, dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """The tensor's memory as an array; the caller sees to it that the memory outlives it."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = (ctypes.c_char * n_bytes).from_address(tensor.contents.data)
    return np.frombuffer(memory, dtype=dtype).reshape(shape)


class Inputs:
    """Input tensors for up to `n_ubatch` tokens and `n_cells` rows, with NumPy arrays on the same memory.

    The arrays may be written until `close`. Raises `AllocationError`.
    """

    token: npt.NDArray[np.int32]
    """Token ids, int32 [n_ubatch]."""
    embd: npt.NDArray[np.float32]
    """Embeddings, float32 [n_ubatch, n_embd]."""
    src: npt.NDArray[np.int32]
    """Rows to read: of the sequences, then of the moved bystanders, int32 [n_cells]."""
    dst: npt.NDArray[np.int64]
    """Rows to write, same order, int64 [n_cells]."""
    out_ids: npt.NDArray[np.int32]
    """Indices of the tokens whose output is wanted, int32 [n_ubatch]."""

    _context: Any = None
    _buffer: Any = None

    def __init__(self, n_ubatch: int, n_cells: int, n_embd: int) -> None:
        self._ggml = g = load_ggml()
        self.tensors: dict[str, Any] = {}
        try:
            self._context = new_context(g, 8 * g.ggml_tensor_overhead())
            for name, kind, n in (
                ("token", g.GGML_TYPE_I32, n_ubatch),
                ("embd", g.GGML_TYPE_F32, n_ubatch * n_embd),
                ("src", g.GGML_TYPE_I32, n_cells),
                ("dst", g.GGML_TYPE_I64, n_cells),
                ("out_ids", g.GGML_TYPE_I32, n_ubatch),
                # rows of gathered states, 0, 1, 2, ...: for state types that the scan can't read by itself
                ("iota", g.GGML_TYPE_I32, n_cells),
            ):
                tensor = g.ggml_new_tensor_1d(self._context, kind, n)
                g.ggml_set_name(tensor, b"inp_" + name.encode())
                self.tensors[name] = tensor
            self._buffer = g.ggml_backend_alloc_ctx_tensors_from_buft(self._context, cpu_buft())
            if not self._buffer:
                tokens, rows = counted(n_ubatch, "token"), counted(n_cells, "row")
                raise AllocationError(f"the CPU could not allocate the inputs of {tokens}, {rows}")
            self.token = array_on(self.tensors["token"], np.int32, (n_ubatch,))
            self.embd = array_on(self.tensors["embd"], np.float32, (n_ubatch, n_embd))
            self.src = array_on(self.tensors["src"], np.int32, (n_cells,))
            self.dst = array_on(self.tensors["dst"], np.int64, (n_cells,))
            self.out_ids = array_on(self.tensors["out_ids"], np.int32, (n_ubatch,))
            array_on(self.tensors["iota"], np.int32, (n_cells,))[:] = np.arange(n_cells)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the tensors; any number of times."""
        self.tensors = {}
        if self._buffer:
            # the arrays point into the buffer
            del self.token, self.embd, self.src, self.dst, self.out_ids
            self._ggml.ggml_backend_buffer_free(self._buffer)
            self._buffer = None
        if self._context:
            self._ggml.ggml_free(self._context)
            self._context = None


class Allocator:
    """Places graphs in one compute buffer on the CPU, which grows on demand. Raises `AllocationError`."""

    _galloc: Any = None

    def __init__(self) -> None:
        self._ggml = load_ggml()
        self._galloc = self._ggml.ggml_gallocr_new(cpu_buft())
        if not self._galloc:
            raise AllocationError("ggml could not make a graph allocator")

    @property
    def n_bytes(self) -> int:
        """Bytes of the compute buffer."""
        return int(self._ggml.ggml_gallocr_get_buffer_size(self._galloc, 0))

    def reserve(self, cgraph: Any) -> None:
        """Makes the buffer large enough for the ``ggml_cgraph *``."""
        if not self._ggml.ggml_gallocr_reserve(self._galloc, cgraph):
            raise AllocationError("the CPU could not allocate the compute buffer of a graph")

    def place(self, cgraph: Any) -> bool:
        """Gives the graph's tensors their memory. True: the buffer has moved, graphs placed earlier are void."""
        before = self.n_bytes
        if not self._ggml.ggml_gallocr_alloc_graph(self._galloc, cgraph):
            raise AllocationError("the CPU could not allocate the compute buffer of a graph")
        return self.n_bytes != before

    def close(self) -> None:
        """Frees the buffer; any number of times."""
        if self._galloc:
            self._ggml.ggml_gallocr_free(self._galloc)
            self._galloc = None


class Backend:
    """ggml's CPU backend with a number of threads. Raises `BackendError` and `InvalidArgument`."""

    _backend: Any = None

    def __init__(self, n_threads: int) -> None:
        self._ggml = load_ggml()
        most = self._ggml.GGML_MAX_N_THREADS
        if not 1 <= n_threads <= most:
            raise InvalidArgument(f"n_threads is {n_threads}, it must be 1 to {most}")
        self._backend = self._ggml.ggml_backend_cpu_init()
        if not self._backend:
            raise BackendError("ggml could not start its CPU backend")
        self._ggml.ggml_backend_cpu_set_n_threads(self._backend, n_threads)
        self.n_threads = n_threads

    def compute(self, cgraph: Any) -> None:
        """Raises `BackendError` when ggml reports a failure."""
        status = self._ggml.ggml_backend_graph_compute(self._backend, cgraph)
        if status != self._ggml.GGML_STATUS_SUCCESS:
            name = self._ggml.ggml_status_to_string(status).decode()
            raise BackendError(f"computing the graph failed: {name} ({status})")

    def close(self) -> None:
        """Frees the backend; any number of times."""
        if self._backend:
            self._ggml.ggml_backend_free(self._backend)
            self._backend = None
