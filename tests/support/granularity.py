"""The sizes that every written model keeps to, with the reasons, and the check that all who write one go through.

ggml's kernels are written for the sizes of released models. What they do with others depends on the processor, so a
model with odd sizes may work on one machine and write past its memory on the next. Seen with head size 32: the kernel
of RWKV-7 walks a head in whole steps, which are 32 floats with AVX2 and 64 with AVX-512. So no test may depend on odd
sizes, and `check` refuses them on every machine. Shapes stand in ggml's order, the contiguous dimension first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf

HEAD = 64
"""Of a head, and of a state with a matrix a head: AVX-512 takes 4 vectors of 16 floats a step. All released RWKV models
have heads of 64; attention, Mamba-2 and the delta rule have 64 or 128."""

ROW = 256
"""Of a matrix's row: the block of the K quants. It is also a multiple of the block of Q8_0 and the other small types
(32), of AMX's tiles (32), and of the longest step for half precision (128 with AVX-512 FP16). It holds for F32 too, so
that a model may be written in any type."""

RANK = 16
"""Of the narrow side of a factor of low rank: Mamba has n_embd / 16 (48 in mamba-130m), RWKV 32 and more. 16 is what
AMX wants of F16; block types need more, so such a matrix is F16 then, as converters write it."""

OUTPUTS = 32
"""Number of rows of a matrix: AMX computes two tiles of 16 at once."""

VOCABULARY = 8
"""Number of tokens: Mamba's 50280 is no multiple of 16, and AMX leaves such a matrix to the other kernels."""

MAMBA1_STATE = 16
"""Floats of a channel's state in Mamba-1: 16 in all released models."""

# By the end of a tensor's name.
NOT_MULTIPLIED = (
    "conv1d.weight", "conv.weight", "ssm_a", "ssm_d", "ssm_norm.weight", "norm.weight", "norm_2.weight", "bias",
    "time_mix_first.weight", "time_mix_ln.weight", "lerp_x.weight", "lerp_k.weight", "lerp_r.weight",
    "lerp_fused.weight",
)  # fmt: skip
NARROW_ROWS = (
    "ssm_dt.weight", "time_mix_w2.weight", "time_mix_decay_w2.weight", "time_mix_a2.weight", "time_mix_v2.weight",
    "time_mix_g2.weight",
)  # fmt: skip
NARROW_OUTPUTS = ("ssm_x.weight", "time_mix_a1.weight", "time_mix_v1.weight", "time_mix_g1.weight", "_w1.weight")
PER_HEAD_OUTPUTS = ("ssm_beta.weight", "ssm_alpha.weight")  # a value a head

MAMBA1 = ("mamba", "jamba")
MAMBA2 = ("mamba2", "granitehybrid")

Shapes = Mapping[str, Sequence[int]]


class OddSize(ValueError):
    """A model has sizes that no released one has; the message has all of them."""


def problems(architecture: str, fields: Mapping[str, Any], shapes: Shapes) -> list[str]:
    """What is odd, in words. `fields`: the metadata, without ``<architecture>.``."""
    found = odd_heads(architecture, fields)
    for name, shape in shapes.items():
        wide = [n for n in shape if n != 1]
        if len(wide) < 2 or name.endswith(NOT_MULTIPLIED):
            continue
        found += _odd(f"{name}: rows", shape[0], RANK if name.endswith(NARROW_ROWS) else ROW)
        outputs = shape[1]
        if architecture in MAMBA2 and name.endswith("ssm_in.weight"):
            outputs -= fields["ssm.time_step_rank"]  # a value a head stands behind the others
        if not name.endswith(PER_HEAD_OUTPUTS):
            found += _odd(f"{name}: number of rows", outputs, _step_of_outputs(name))
    return found


def _step_of_outputs(name: str) -> int:
    if name in ("token_embd.weight", "output.weight"):
        return VOCABULARY
    return RANK if name.endswith(NARROW_OUTPUTS) else OUTPUTS


def odd_heads(architecture: str, fields: Mapping[str, Any]) -> list[str]:
    """What is odd about the heads and states: where a kernel that walks in whole steps writes past its memory."""
    found: list[str] = []
    for key in ("wkv.head_size", "attention.key_length", "attention.value_length"):
        if key in fields:
            found += _odd(key, fields[key], HEAD)
    n_head = fields.get("attention.head_count") or 0  # of each layer, where they differ
    n_head = max(n_head) if isinstance(n_head, (list, tuple)) else n_head
    if n_head and "attention.key_length" not in fields:
        found += _odd("head of attention", fields["embedding_length"] / n_head, HEAD)
    if "ssm.state_size" in fields:
        found += _odd("ssm.state_size", fields["ssm.state_size"], MAMBA1_STATE if architecture in MAMBA1 else HEAD)
    if architecture in MAMBA2:
        found += _odd("head of Mamba-2", fields["ssm.inner_size"] / fields["ssm.time_step_rank"], HEAD)
    return found


def _odd(what: str, n: float, step: int) -> list[str]:
    return [f"{what}: {n:g} is no multiple of {step}"] if n <= 0 or n % step else []


def check(architecture: str, fields: Mapping[str, Any], shapes: Shapes) -> None:
    """Raises `OddSize`."""
    found = problems(architecture, fields, shapes)
    if found:
        raise OddSize(f"{architecture} model that no kernel of ggml was written for: {'; '.join(found)}")


def problems_of(path: Path) -> list[str]:
    """What is odd about the model in a file."""
    architecture, fields, file = _read(path)
    return problems(architecture, fields, {tensor.name: tensor.shape.tolist() for tensor in file.tensors})


def odd_heads_of(path: Path) -> list[str]:
    """`odd_heads` of the model in a file."""
    architecture, fields, _ = _read(path)
    return odd_heads(architecture, fields)


def _read(path: Path) -> tuple[str, dict[str, Any], gguf.GGUFReader]:
    file = gguf.GGUFReader(path)
    values = {name: field.contents() for name, field in file.fields.items() if not name.startswith("tokenizer.")}
    architecture = values["general.architecture"]
    prefix = f"{architecture}."
    fields = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    return architecture, fields, file
