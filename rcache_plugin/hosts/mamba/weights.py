"""The sizes and weights of a Mamba-1 model: read from a GGUF file, checked, copied into one ggml buffer.

Shapes in this module are in ggml's order, the contiguous dimension first.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ...errors import AllocationError, BackendError, GgmlNotFound, ModelError, counted
from .gguf import GgufFile, TensorInfo

ARCHITECTURE = "mamba"
_CHUNK = 1 << 24  # bytes between two calls of a progress callback
_F32, _F16, _BF16 = 0, 1, 30
_MAX_SIZE = 1 << 31  # every size has to fit the C interface


@functools.cache
def load_ggml() -> Any:
    """The module ``ggml`` of ggml-python, imported on first use. Raises `GgmlNotFound`."""
    try:
        return importlib.import_module("ggml")
    except ImportError as error:
        raise GgmlNotFound(
            f"the Mamba host needs ggml-python ({error}); install it with: pip install 'rcache-plugin[mamba]'"
        ) from error


def cpu_buft() -> int:
    """Address of the CPU's buffer type.

    Asked of the device: ggml-python 0.0.45 declares ``ggml_backend_cpu_buffer_type`` so that ctypes cuts the pointer to
    32 bits. Raises `BackendError`.
    """
    ggml = load_ggml()
    device = ggml.ggml_backend_dev_by_type(ggml.GGML_BACKEND_DEVICE_TYPE_CPU)
    if not device:
        raise BackendError("this ggml has no CPU device")
    return int(ggml.ggml_backend_dev_buffer_type(device))


def tensor_pointer(address: int) -> Any:
    """A ``ggml_tensor *`` of ggml-python from an address."""
    return ctypes.cast(address, ctypes.POINTER(load_ggml().ggml_tensor))


@dataclass(frozen=True, slots=True)
class MambaParams:
    """Sizes of a Mamba-1 model, all in elements."""

    n_vocab: int
    n_embd: int
    n_layer: int
    d_inner: int
    """Channels of the convolution and of the scan."""
    d_state: int
    """State elements of a channel."""
    d_conv: int
    """Width of the convolution."""
    dt_rank: int
    """Rank of the projection that makes the time step."""
    rms_eps: float
    dt_b_c_rms: bool
    """Whether dt, B and C are RMS-normalised without weights, as FalconMamba does it."""

    @classmethod
    def of(cls, file: GgufFile) -> MambaParams:
        """From the metadata and the embedding's shape. Raises `ModelError`."""
        architecture = file.get("general.architecture", str)
        if architecture != ARCHITECTURE:
            raise ModelError(f"{file.path}: general.architecture is {architecture!r}, this host runs {ARCHITECTURE!r}")

        def size(key: str, least: int = 1) -> int:
            n = int(file.get(f"{ARCHITECTURE}.{key}", int))
            if not least <= n < _MAX_SIZE:
                raise ModelError(f"{file.path}: metadata {ARCHITECTURE}.{key} is {n}, it must be at least {least}")
            return n

        if int(file.get("split.count", int, 1)) != 1:
            raise ModelError(f"{file.path}: metadata split.count says that this is a part of a model; merge the parts")
        eps_key = f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon"
        eps = float(file.get(eps_key, (int, float)))
        if not (math.isfinite(eps) and eps >= 0):
            raise ModelError(f"{file.path}: metadata {eps_key} is {eps}")
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
        return cls(
            n_vocab=embedding.shape[-1],
            n_embd=size("embedding_length"),
            n_layer=size("block_count"),
            d_inner=size("ssm.inner_size"),
            d_state=size("ssm.state_size"),
            d_conv=size("ssm.conv_kernel", least=2),
            dt_rank=size("ssm.time_step_rank"),
            rms_eps=eps,
            dt_b_c_rms=bool(file.get(f"{ARCHITECTURE}.ssm.dt_b_c_rms", bool, False)),
        )

    def model_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors outside the layers; ``output.weight`` may be absent, then the embedding takes its place."""
        return {
            "token_embd.weight": (self.n_embd, self.n_vocab),
            "output_norm.weight": (self.n_embd,),
            "output.weight": (self.n_embd, self.n_vocab),
        }

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors of each layer, without the ``blk.<il>.`` in front."""
        return {
            "attn_norm.weight": (self.n_embd,),
            "ssm_in.weight": (self.n_embd, 2 * self.d_inner),
            "ssm_conv1d.weight": (self.d_conv, self.d_inner),
            "ssm_conv1d.bias": (self.d_inner,),
            "ssm_x.weight": (self.d_inner, self.dt_rank + 2 * self.d_state),
            "ssm_dt.weight": (self.dt_rank, self.d_inner),
            "ssm_dt.bias": (self.d_inner,),
            "ssm_a": (self.d_state, self.d_inner),
            "ssm_d": (self.d_inner,),
            "ssm_out.weight": (self.d_inner, self.n_embd),
        }


# The matrices that ggml multiplies by keep the type of the file; the rest is small and takes part in element-wise
# operations, which want F32.
_MATRICES = frozenset(
    {"token_embd.weight", "output.weight", "ssm_in.weight", "ssm_x.weight", "ssm_dt.weight", "ssm_out.weight"}
)


def _kind(name: str) -> str:
    """The name without ``blk.<il>.``."""
    return name.split(".", 2)[2] if name.startswith("blk.") else name


def checked_tensors(file: GgufFile, params: MambaParams) -> list[TensorInfo]:
    """The model's tensors in file order.

    Raises `ModelError` when one is missing, has another shape, is of a type that its use does not allow, or when the
    file has one that this host does not know (it would change what the model computes).
    """
    wanted = params.model_shapes()
    if "output.weight" not in file.tensors:
        del wanted["output.weight"]
    layer = params.layer_shapes()
    for il in range(params.n_layer):
        if f"blk.{il}.attn_norm.weight" not in file.tensors:  # a wrong count must not make a list of billions
            n_layer = counted(params.n_layer, "layer")
            raise ModelError(f"{file.path}: tensor blk.{il}.attn_norm.weight is missing ({n_layer})")
        wanted |= {f"blk.{il}.{name}": shape for name, shape in layer.items()}
    for name, shape in wanted.items():
        info = file.tensors.get(name)
        if info is None:
            raise ModelError(f"{file.path}: tensor {name} is missing")
        if info.shape != shape:
            raise ModelError(f"{file.path}: tensor {name} has shape {info.shape}, expected {shape}")
        if _kind(name) not in _MATRICES and info.type_id not in (_F32, _F16, _BF16):
            raise ModelError(f"{file.path}: tensor {name} is {info.type.name}; it must be F32, F16 or BF16")
    unknown = [name for name in file.tensors if name not in wanted]
    if unknown:
        such = counted(len(unknown), "such tensor")
        raise ModelError(f"{file.path}: tensor {unknown[0]} is unknown to this host ({such})")
    return sorted((file.tensors[name] for name in wanted), key=lambda info: info.offset)


def _to_f32(data: bytes, type_id: int) -> npt.NDArray[np.float32]:
    if type_id == _F16:
        return np.frombuffer(data, dtype="<f2").astype(np.float32)
    return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)


class Weights:
    """All tensors of a model in one ggml buffer on the CPU; `tensors` maps names to ``ggml_tensor *``.

    Raises `ModelError` (the file changed or shrank meanwhile) and `AllocationError`. `close` frees the buffer, any
    number of times.
    """

    tensors: dict[str, Any]
    n_bytes: int
    """Bytes of the buffer."""

    _context: Any = None
    _buffer: Any = None

    def __init__(
        self, file: GgufFile, infos: list[TensorInfo], progress: Callable[[float], None] | None = None
    ) -> None:
        self._ggml = ggml = load_ggml()
        self.tensors = {}
        mem_size = (len(infos) + 1) * ggml.ggml_tensor_overhead()
        try:
            self._context = ggml.ggml_init(ggml.ggml_init_params(mem_size=mem_size, mem_buffer=None, no_alloc=True))
            if not self._context:
                raise AllocationError(f"ggml could not make a context of {mem_size} bytes for {file.path}")
            for info in infos:
                type_id = info.type_id if _kind(info.name) in _MATRICES else _F32
                shape = (ctypes.c_int64 * len(info.shape))(*info.shape)
                tensor = ggml.ggml_new_tensor(self._context, type_id, len(info.shape), shape)
                ggml.ggml_set_name(tensor, info.name.encode())
                self.tensors[info.name] = tensor
            self._buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(self._context, cpu_buft())
            if not self._buffer:
                asked = sum(int(ggml.ggml_nbytes(tensor)) for tensor in self.tensors.values())
                raise AllocationError(f"the CPU could not allocate {asked} bytes for the weights of {file.path}")
            self.n_bytes = int(ggml.ggml_backend_buffer_get_size(self._buffer))
            self._fill(file, infos, progress)
        except BaseException:
            self.close()
            raise

    def _fill(self, file: GgufFile, infos: list[TensorInfo], progress: Callable[[float], None] | None) -> None:
        total = sum(info.n_bytes for info in infos)
        done = 0
        try:
            with open(file.path, "rb", buffering=0) as source:
                for info in infos:
                    tensor = self.tensors[info.name]
                    n_bytes = int(self._ggml.ggml_nbytes(tensor))
                    source.seek(info.offset)
                    target = memoryview((ctypes.c_char * n_bytes).from_address(tensor.contents.data)).cast("B")
                    if tensor.contents.type == info.type_id:
                        if n_bytes != info.n_bytes:
                            raise BackendError(f"ggml counts {n_bytes} bytes for {info.name}, not {info.n_bytes}")
                        for start in range(0, n_bytes, _CHUNK):
                            part = target[start : start + _CHUNK]
                            _read_exactly(source, part, file, info)
                            done += len(part)
                            if progress is not None and done < total:
                                progress(done / total)
                    else:
                        raw = bytearray(info.n_bytes)
                        _read_exactly(source, memoryview(raw), file, info)
                        target[:] = _to_f32(bytes(raw), info.type_id).tobytes()
                        done += info.n_bytes
            if progress is not None:
                progress(1.0)
        except OSError as error:
            raise ModelError(f"{file.path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Frees the buffer and its context."""
        self.tensors = {}
        if self._buffer:
            self._ggml.ggml_backend_buffer_free(self._buffer)
            self._buffer = None
        if self._context:
            self._ggml.ggml_free(self._context)
            self._context = None


def _read_exactly(source: BinaryIO, target: memoryview, file: GgufFile, info: TensorInfo) -> None:
    at = 0
    while at < len(target):
        n = source.readinto(target[at:])  # type: ignore[attr-defined]
        if not n:
            raise ModelError(f"{file.path}: truncated while tensor {info.name} was read")
        at += n


def default_threads() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
