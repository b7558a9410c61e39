"""Writing Mamba-1 models as GGUF files, shared by the training and the random-weight examples.

The names, shapes and metadata keys are those of the ``mamba`` architecture of GGUF (``gguf.MODEL_ARCH.MAMBA``).
Shapes below are NumPy shapes, so the last dimension is the contiguous one; ggml lists them the other way round.

====================== ========================= ========
tensor                 NumPy shape               type
====================== ========================= ========
token_embd.weight      [n_vocab, n_embd]         matrix
output_norm.weight     [n_embd]                  F32
blk.N.attn_norm.weight [n_embd]                  F32
blk.N.ssm_in.weight    [2*d_inner, n_embd]       matrix
blk.N.ssm_conv1d.weight [d_inner, d_conv]        F32
blk.N.ssm_conv1d.bias  [d_inner]                 F32
blk.N.ssm_x.weight     [dt_rank+2*d_state, d_inner] matrix
blk.N.ssm_dt.weight    [d_inner, dt_rank]        matrix
blk.N.ssm_dt.bias      [d_inner]                 F32
blk.N.ssm_a            [d_inner, d_state]        F32
blk.N.ssm_d            [d_inner]                 F32
blk.N.ssm_out.weight   [n_embd, d_inner]         matrix
====================== ========================= ========

"matrix" is the type asked for (F32, F16 or Q8_0). The output matrix is not stored: a loader that finds none uses the
token embedding in its place. ``ssm_a`` holds the negative decay rates themselves, ``-exp(A_log)`` and not ``A_log``.

Needs NumPy and ``gguf`` only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import gguf
import numpy as np

END_OF_TEXT = "<|endoftext|>"

_MATRIX_TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
MATRIX_TYPES = tuple(_MATRIX_TYPES)


class Sizes(Protocol):
    """The sizes that shapes follow from, all in elements; whoever has them may derive some from others."""

    n_vocab: int
    n_embd: int
    n_layer: int
    d_inner: int
    d_state: int
    d_conv: int
    dt_rank: int


@dataclass(frozen=True)
class MambaShape:
    """Sizes of a Mamba-1 model (Gu and Dao 2023, arXiv:2312.00752), all in elements."""

    n_vocab: int
    n_embd: int
    n_layer: int
    d_conv: int = 4
    d_state: int = 16
    expand: int = 2
    rms_eps: float = 1e-5
    n_ctx: int = 1_048_576

    @property
    def d_inner(self) -> int:
        """Channels of the convolution and of the scan."""
        return self.expand * self.n_embd

    @property
    def dt_rank(self) -> int:
        """Rank of the projection that makes the time step: n_embd / 16, rounded up."""
        return -(-self.n_embd // 16)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """GGUF tensor name -> NumPy shape, in the order in which the file holds them."""
        return tensor_shapes(self)

    def n_params(self) -> int:
        """Number of weights; the tied embedding counts once."""
        return sum(int(np.prod(shape)) for shape in self.tensor_shapes().values())


def tensor_shapes(sizes: Sizes, tied: bool = True) -> dict[str, tuple[int, ...]]:
    """GGUF tensor name -> NumPy shape, in the order in which files hold them.

    ``tied`` models have no output matrix of their own.
    """
    d, di, n, r = sizes.n_embd, sizes.d_inner, sizes.d_state, sizes.dt_rank
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (sizes.n_vocab, d), "output_norm.weight": (d,)}
    if not tied:
        shapes["output.weight"] = (sizes.n_vocab, d)
    for il in range(sizes.n_layer):
        shapes |= {
            f"blk.{il}.attn_norm.weight": (d,),
            f"blk.{il}.ssm_in.weight": (2 * di, d),
            f"blk.{il}.ssm_conv1d.weight": (di, sizes.d_conv),
            f"blk.{il}.ssm_conv1d.bias": (di,),
            f"blk.{il}.ssm_x.weight": (r + 2 * n, di),
            f"blk.{il}.ssm_dt.weight": (di, r),
            f"blk.{il}.ssm_dt.bias": (di,),
            f"blk.{il}.ssm_a": (di, n),
            f"blk.{il}.ssm_d": (di,),
            f"blk.{il}.ssm_out.weight": (d, di),
        }
    return shapes


@dataclass(frozen=True)
class Vocab:
    """A byte-level BPE vocabulary in GPT-2's notation; the index of a token is its id.

    ``tokens`` are spelled with the printable stand-ins of :func:`byte_symbols`, ``merges`` are pairs ``"left right"``
    in order of rank, ``types`` are ``gguf.TokenType`` values. ``eot_id`` is both BOS and EOS.
    """

    tokens: Sequence[str]
    merges: Sequence[str]
    types: Sequence[int]
    eot_id: int


@dataclass(frozen=True)
class ModelInfo:
    """What the file says about itself; every field is free text and lands in ``general.*``."""

    name: str
    description: str = ""
    license: str = ""
    author: str = ""
    tags: Sequence[str] = field(default_factory=tuple)


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte, ``str [256]``.

    GPT-2's convention: bytes that print in Latin-1 stand for themselves, all others take the next code point from
    U+0100 on, in order of byte value.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in symbols]
    symbols |= {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [symbols[byte] for byte in range(256)]


def byte_vocab(n_vocab: int) -> Vocab:
    """A vocabulary of the 256 bytes and an end-of-text token, filled up to ``n_vocab`` with unused tokens.

    Raises ValueError when ``n_vocab`` is under 258: GPT-2 style loaders want at least one merge, which needs a token
    of its own (here the space before a ``t``).
    """
    if n_vocab < 258:
        raise ValueError(f"n_vocab {n_vocab} is too small: 256 bytes, one merge and {END_OF_TEXT} need 258")
    symbols = byte_symbols()
    space = symbols[0x20]
    tokens = [*symbols, f"{space}t", END_OF_TEXT]
    tokens += [f"[unused{i}]" for i in range(n_vocab - len(tokens))]
    types = [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL]
    types += [gguf.TokenType.UNUSED] * (n_vocab - len(types))
    return Vocab(tokens=tokens, merges=[f"{space} t"], types=types, eot_id=257)


def _storage_type(name: str, shape: tuple[int, ...], matrix: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    """F32 for everything that is no matrix product, else the type asked for where the row length allows it."""
    if len(shape) < 2 or name.endswith(("ssm_a", "ssm_conv1d.weight")):
        return gguf.GGMLQuantizationType.F32
    block_len, _ = gguf.GGML_QUANT_SIZES[matrix]
    # A quantised row is a whole number of blocks; ssm_dt has rows of dt_rank elements, often too short for one.
    return matrix if shape[-1] % block_len == 0 else gguf.GGMLQuantizationType.F16


def _n_bytes(shape: tuple[int, ...], storage: gguf.GGMLQuantizationType) -> int:
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[storage]
    return int(np.prod(shape)) // block_len * block_bytes


def _encode(values: np.ndarray, storage: gguf.GGMLQuantizationType) -> np.ndarray:
    values = np.ascontiguousarray(values, dtype=np.float32)
    if storage == gguf.GGMLQuantizationType.F32:
        return values
    if storage == gguf.GGMLQuantizationType.F16:
        return values.astype(np.float16)
    return gguf.quants.quantize(values, storage)


def _add_metadata(writer: gguf.GGUFWriter, shape: MambaShape, vocab: Vocab, info: ModelInfo, file_type: int) -> None:
    writer.add_name(info.name)
    for value, add in (
        (info.description, writer.add_description),
        (info.license, writer.add_license),
        (info.author, writer.add_author),
    ):
        if value:
            add(value)
    if info.tags:
        writer.add_tags(list(info.tags))
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_ssm_conv_kernel(shape.d_conv)
    writer.add_ssm_inner_size(shape.d_inner)
    writer.add_ssm_state_size(shape.d_state)
    writer.add_ssm_time_step_rank(shape.dt_rank)

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(vocab.tokens))
    writer.add_token_types([int(t) for t in vocab.types])
    writer.add_token_merges(list(vocab.merges))
    writer.add_bos_token_id(vocab.eot_id)
    writer.add_eos_token_id(vocab.eot_id)
    writer.add_add_bos_token(False)


def write_mamba_gguf(
    path: str | os.PathLike[str],
    shape: MambaShape,
    vocab: Vocab,
    tensor: Callable[[str, tuple[int, ...]], np.ndarray],
    *,
    matrix_type: str = "f16",
    info: ModelInfo,
) -> int:
    """Write a model file; returns its size in bytes.

    ``tensor(name, shape)`` is called once for each tensor of ``shape.tensor_shapes()``, in file order, and returns the
    values as float32 (or something that converts to it). Each is encoded, written and dropped before the next one is
    asked for, so memory stays below three times the largest tensor. The file appears under ``path`` only when it is
    complete (written beside it, then renamed).

    Raises ValueError for an unknown ``matrix_type``, a vocabulary of another size than ``shape.n_vocab``, or a tensor
    of the wrong shape or with values that are not finite.
    """
    if matrix_type not in _MATRIX_TYPES:
        raise ValueError(f"matrix_type {matrix_type!r} is none of {', '.join(MATRIX_TYPES)}")
    if not len(vocab.tokens) == len(vocab.types) == shape.n_vocab:
        raise ValueError(f"{len(vocab.tokens)} tokens and {len(vocab.types)} types for n_vocab {shape.n_vocab}")
    matrix, file_type = _MATRIX_TYPES[matrix_type]
    shapes = shape.tensor_shapes()
    storage = {name: _storage_type(name, dims, matrix) for name, dims in shapes.items()}

    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    writer = gguf.GGUFWriter(part, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.MAMBA])
    try:
        _add_metadata(writer, shape, vocab, info, int(file_type))
        for name, dims in shapes.items():
            # The dtype only chooses a type where raw_dtype is absent; raw_dtype is always given here.
            writer.add_tensor_info(name, dims, np.dtype(np.float32), _n_bytes(dims, storage[name]), storage[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, dims in shapes.items():
            values = np.asarray(tensor(name, dims))
            if values.shape != dims:
                raise ValueError(f"{name} has shape {values.shape}, not {dims}")
            if not np.isfinite(values).all():
                raise ValueError(f"{name} has values that are not finite")
            writer.write_tensor_data(_encode(values, storage[name]))
        writer.close()
        os.replace(part, path)
    except BaseException:
        writer.close()
        part.unlink(missing_ok=True)
        raise
    return path.stat().st_size
