#!/usr/bin/env python3
"""Write a Mamba-1 model file with random weights and real shapes, for benchmarks that need no sense in the text.

    python examples/make_random_gguf.py --preset mamba-130m --type q8_0 -o mamba-130m-random.gguf
    python examples/make_random_gguf.py --preset tiny

The weights are scaled so that the numbers stay in the range of a trained model's: decay rates from -1 to -16, time
steps from 1e-3 to 1e-1, residual branches that keep the variance of their input. The vocabulary is the 256 bytes, one
merge and an end-of-text token, filled up with unused tokens, so any text can be tokenized. The same seed gives the same
file, whatever the type: values are drawn in float32 and rounded afterwards.

Needs NumPy and ``gguf`` only, and memory for less than twice the largest tensor in float32 (0.65 GB for mamba-1.4b).
"""

from __future__ import annotations

import argparse
import sys
import zlib
from pathlib import Path

import numpy as np
from mamba_gguf import MATRIX_TYPES, MambaShape, ModelInfo, byte_vocab, write_mamba_gguf

# Rows are multiples of 256, as in released models: with others, some kernels of ggml crash on some processors.
PRESETS = {
    "mamba-130m": MambaShape(n_vocab=50280, n_embd=768, n_layer=24),
    "mamba-1.4b": MambaShape(n_vocab=50280, n_embd=2048, n_layer=48),
    "tiny": MambaShape(n_vocab=288, n_embd=256, n_layer=4),
    # few weights beside a large state, 24 and 80 MB a sequence: that of mamba-2.8b, and that of a hybrid of 80B
    "state-24mb": MambaShape(n_vocab=288, n_embd=256, n_layer=24, d_state=480),
    "state-80mb": MambaShape(n_vocab=288, n_embd=256, n_layer=24, d_state=1632),
    "large-state": MambaShape(n_vocab=288, n_embd=256, n_layer=64, d_state=192),  # about the bytes of a Mamba 2.8B's
}


def random_tensor(name: str, dims: tuple[int, ...], shape: MambaShape, seed: int) -> np.ndarray:
    """float32 values for one GGUF tensor; they depend on its name, its shape and the seed only."""
    # A generator for each tensor, so that a change in one does not move all the others.
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith("norm.weight") or name.endswith("ssm_d"):
        return np.ones(dims, dtype=np.float32)
    if name.endswith("ssm_a"):
        return np.tile(-np.arange(1, shape.d_state + 1, dtype=np.float32), (dims[0], 1))
    if name.endswith("ssm_dt.bias"):
        dt = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), dims))
        return np.log(np.expm1(dt)).astype(np.float32)  # softplus of this is dt again
    if name.endswith("ssm_conv1d.bias"):
        return np.zeros(dims, dtype=np.float32)

    values = rng.standard_normal(dims, dtype=np.float32)
    if name == "token_embd.weight":
        scale = 0.02  # also the output matrix: logits of about 0.02 * sqrt(n_embd)
    elif name.endswith("ssm_dt.weight"):
        scale = 0.1 / shape.dt_rank**0.5  # small beside the bias, so that the time steps stay in their range
    elif name.endswith("ssm_out.weight"):
        scale = 1 / (dims[-1] * 2 * shape.n_layer) ** 0.5  # all branches together add about as much as they start from
    else:
        scale = 1 / dims[-1] ** 0.5
    values *= np.float32(scale)
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--type", choices=MATRIX_TYPES, default="f16", help="type of the matrices (default: f16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: PRESET-TYPE-random.gguf")
    args = parser.parse_args()

    shape = PRESETS[args.preset]
    path = args.output or Path(f"{args.preset}-{args.type}-random.gguf")
    info = ModelInfo(name=f"{args.preset} (random weights)", description=f"Random weights, seed {args.seed}.")
    size = write_mamba_gguf(
        path,
        shape,
        byte_vocab(shape.n_vocab),
        lambda name, dims: random_tensor(name, dims, shape, args.seed),
        matrix_type=args.type,
        info=info,
    )
    print(f"{path}: {shape.n_params() / 1e6:,.1f} million weights, {size / 1e6:,.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
