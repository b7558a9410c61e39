"""Writes tiny Mamba-1 models with random weights as GGUF files, and reads weights back, for tests.

Values are drawn so that logits are of order one and states matter: a wrong state shows in the first digits. Sizes keep
to `granularity`, which has the reasons.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import granularity
import numpy as np
from children import ROOT

sys.path.append(str(ROOT / "examples"))

from mamba_gguf import byte_symbols, tensor_shapes

Type = gguf.GGMLQuantizationType
MATRICES = ("token_embd.weight", "output.weight", "ssm_in.weight", "ssm_x.weight", "ssm_dt.weight", "ssm_out.weight")


@dataclass(frozen=True)
class TinyMamba:
    """What to write. `matrix_type`: of the matrices whose rows fill whole blocks; the others become F16."""

    n_vocab: int = 64
    n_embd: int = 256
    n_layer: int = 2
    d_inner: int = 512
    d_state: int = 16
    d_conv: int = 4
    dt_rank: int = 16
    eps: float = 1e-5
    tied: bool = True
    dt_b_c_rms: bool | None = None
    matrix_type: Type = Type.F32
    vector_type: Type = Type.F32
    gain: float = 1.5
    """Size of the matrices' values: the larger, the more a rounding error grows on its way."""
    seed: int = 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """NumPy shapes: the contiguous dimension last."""
        return tensor_shapes(self, self.tied)

    def weights(self) -> dict[str, np.ndarray]:
        """float32 values before any conversion."""
        rng = np.random.default_rng(self.seed)
        return {name: _values(name, shape, self.gain, rng) for name, shape in self.shapes().items()}

    def metadata(self) -> dict[str, tuple[Any, gguf.GGUFValueType]]:
        """Key -> (value, type)."""
        u32, f32, boolean = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.BOOL
        fields: dict[str, tuple[Any, gguf.GGUFValueType]] = {
            "mamba.context_length": (1 << 20, u32),
            "mamba.embedding_length": (self.n_embd, u32),
            "mamba.feed_forward_length": (0, u32),
            "mamba.attention.head_count": (0, u32),
            "mamba.block_count": (self.n_layer, u32),
            "mamba.ssm.conv_kernel": (self.d_conv, u32),
            "mamba.ssm.inner_size": (self.d_inner, u32),
            "mamba.ssm.state_size": (self.d_state, u32),
            "mamba.ssm.time_step_rank": (self.dt_rank, u32),
            "mamba.attention.layer_norm_rms_epsilon": (self.eps, f32),
        }
        if self.dt_b_c_rms is not None:
            fields["mamba.ssm.dt_b_c_rms"] = (self.dt_b_c_rms, boolean)
        return fields

    def write(
        self,
        path: Path,
        *,
        architecture: str = "mamba",
        fields: Mapping[str, Any] | None = None,
        drop: Sequence[str] = (),
        tensors: Mapping[str, np.ndarray] | None = None,
        types: Mapping[str, Type] | None = None,
    ) -> Path:
        """Writes the model to `path` and returns it.

        `fields`: more metadata, or other values. `drop`: fields and tensors to leave out. `tensors`: more tensors, or
        other values. `types`: of single tensors, by name without ``blk.<il>.``. With these four a file is made that a
        loader has to refuse, so they are not asked for real sizes; the model itself is. Raises `granularity.OddSize`.
        """
        sizes = {key.removeprefix("mamba."): value for key, (value, _) in self.metadata().items()}
        granularity.check("mamba", sizes, {name: shape[::-1] for name, shape in self.shapes().items()})
        writer = gguf.GGUFWriter(path, architecture)
        for key, (value, kind) in self.metadata().items():
            if key not in drop and key not in (fields or {}):
                writer.add_key_value(key, value, kind)
        for key, value in (fields or {}).items():
            _add(writer, key, value)
        for name, values in (self.weights() | dict(tensors or {})).items():
            if name not in drop:
                kind = (types or {}).get(_kind(name), self._type(name, values))
                writer.add_tensor(name, encode(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _type(self, name: str, values: np.ndarray) -> Type:
        if _kind(name) not in MATRICES:
            return self.vector_type if not name.endswith("ssm_a") else Type.F32
        block, _ = gguf.GGML_QUANT_SIZES[self.matrix_type]
        return self.matrix_type if values.shape[-1] % block == 0 else Type.F16

    def but(self, **changes: Any) -> TinyMamba:
        """A copy with other values."""
        return replace(self, **changes)


def _kind(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("blk.") else name


def _values(name: str, shape: tuple[int, ...], gain: float, rng: np.random.Generator) -> np.ndarray:
    if name.endswith("norm.weight"):
        values = 1 + 0.1 * rng.standard_normal(shape)
    elif name.endswith("ssm_a"):
        values = -np.exp(rng.uniform(-1, 1.5, shape))
    elif name.endswith("ssm_d"):
        values = 1 + 0.2 * rng.standard_normal(shape)
    elif name.endswith("ssm_dt.bias"):
        values = rng.uniform(-3, 0.5, shape)
    elif name.endswith("conv1d.weight"):
        values = 0.5 * rng.standard_normal(shape)
    elif name.endswith("bias"):
        values = 0.1 * rng.standard_normal(shape)
    else:
        values = rng.standard_normal(shape) * (gain / np.sqrt(shape[-1]))
    return values.astype(np.float32)


def encode(values: np.ndarray, kind: Type) -> np.ndarray:
    """float32 [..., n] -> what a file of type `kind` holds; block types through ggml's own quantiser."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if kind == Type.F32:
        return values
    if kind in (Type.F16, Type.F64):
        return values.astype(np.float16 if kind == Type.F16 else np.float64)
    if kind == Type.BF16:
        return gguf.quants.quantize(values, kind)
    import ggml

    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    n_rows, n_cols = int(np.prod(values.shape[:-1])), values.shape[-1]
    out = np.empty((n_rows, n_cols // block * block_bytes), dtype=np.uint8)
    pointer = ctypes.POINTER(ctypes.c_float)
    ggml.ggml_quantize_chunk(
        int(kind), values.ctypes.data_as(pointer), out.ctypes.data_as(ctypes.c_void_p), 0, n_rows, n_cols, None
    )
    return out.reshape(*values.shape[:-1], -1)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = gguf.GGUFValueType
    if isinstance(value, (list, np.ndarray)):
        writer.add_array(key, list(value))
    else:
        kind = {bool: kinds.BOOL, str: kinds.STRING, float: kinds.FLOAT32}.get(type(value), kinds.UINT32)
        writer.add_key_value(key, value, kind)


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """The weights as a file holds them, dequantised, float64; by way of ``gguf``, not of the package under test."""
    return {
        tensor.name: np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float64)
        for tensor in gguf.GGUFReader(path).tensors
    }


def byte_vocab(n_vocab: int = 300, pre: str | None = "gpt-2") -> dict[str, Any]:
    """Tokenizer metadata: 256 bytes, some merges, some control and user-defined tokens, then unused ones."""
    symbol = byte_symbols()
    tokens = list(symbol)
    space = symbol[0x20]
    merges = [f"{space} t", "h e", f"{space}t he", "l l", "e r", f"{symbol[0xC3]} {symbol[0xA9]}", "1 2", "12 3"]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [gguf.TokenType.NORMAL] * len(tokens)
    for text, kind in (
        ("<|endoftext|>", gguf.TokenType.CONTROL),
        ("<|end|>", gguf.TokenType.CONTROL),
        ("    ", gguf.TokenType.USER_DEFINED),
        ("  ", gguf.TokenType.USER_DEFINED),
    ):
        tokens.append(text)
        types.append(kind)
    while len(tokens) < n_vocab:
        types.append(gguf.TokenType.UNUSED)
        tokens.append(f"[unused{len(tokens)}]")
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eot_token_id": tokens.index("<|end|>"),
    }
    return fields if pre is None else fields | {"tokenizer.ggml.pre": pre}
