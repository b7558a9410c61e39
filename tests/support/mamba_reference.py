"""A Mamba-1 in float64 with NumPy alone, written from the paper (Gu and Dao 2023, arXiv:2312.00752), for tests.

One token at a time, no clever scan: slow and plain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass
class State:
    """What one sequence keeps: the last inputs of each convolution, and the ssm states."""

    conv: np.ndarray  # float64 [n_layer, d_inner, d_conv - 1], oldest first
    ssm: np.ndarray  # float64 [n_layer, d_inner, d_state]

    def copy(self) -> State:
        return State(self.conv.copy(), self.ssm.copy())


class ReferenceMamba:
    """`weights`: GGUF tensor names -> arrays in NumPy's order. `eps`: of the norms. `dt_b_c_rms`: as FalconMamba.

    `rounding`: what happens to the vector of each matrix product, by the matrix's name without ``blk.<il>.``: ggml
    rounds it to a type that goes with the matrix's. Matrices that are not in it are multiplied exactly.
    """

    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        eps: float,
        dt_b_c_rms: bool = False,
        rounding: Mapping[str, Callable[[np.ndarray], np.ndarray]] | None = None,
    ) -> None:
        self.rounding = rounding or {}
        self.w = {name: np.asarray(values, dtype=np.float64) for name, values in weights.items()}
        self.eps = eps
        self.dt_b_c_rms = dt_b_c_rms
        self.n_layer = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blk."))
        self.d_inner, self.d_conv = self.w["blk.0.ssm_conv1d.weight"].shape
        self.d_state = self.w["blk.0.ssm_a"].shape[1]
        self.dt_rank = self.w["blk.0.ssm_dt.weight"].shape[1]

    def start(self) -> State:
        """The state before the first token."""
        return State(
            np.zeros((self.n_layer, self.d_inner, self.d_conv - 1)),
            np.zeros((self.n_layer, self.d_inner, self.d_state)),
        )

    def run(self, tokens: object, state: State) -> np.ndarray:
        """Logits after each token, float64 [n_tokens, n_vocab]; `state` moves on."""
        embedding = self.w["token_embd.weight"]
        return self.run_embd(embedding[np.asarray(tokens, dtype=np.int64)], state)

    def run_embd(self, embd: np.ndarray, state: State) -> np.ndarray:
        """As `run`, from embeddings [n_tokens, n_embd]."""
        head = "output.weight" if "output.weight" in self.w else "token_embd.weight"
        rows = []
        for x in np.asarray(embd, dtype=np.float64):
            for il in range(self.n_layer):
                x = x + self._layer(il, self._norm(x) * self.w[f"blk.{il}.attn_norm.weight"], state)
            rows.append(self._times(head, self._norm(x) * self.w["output_norm.weight"]))
        return np.stack(rows)

    def _times(self, name: str, x: np.ndarray) -> np.ndarray:
        rounded = self.rounding.get(name.split(".", 2)[2] if name.startswith("blk.") else name)
        return self.w[name] @ (x if rounded is None else rounded(x))

    def _norm(self, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + self.eps)

    def _layer(self, il: int, x: np.ndarray, state: State) -> np.ndarray:
        w = {name.split(".", 2)[2]: values for name, values in self.w.items() if name.startswith(f"blk.{il}.")}

        def times(name: str, x: np.ndarray) -> np.ndarray:
            return self._times(f"blk.{il}.{name}", x)

        u, z = np.split(times("ssm_in.weight", x), 2)
        window = np.concatenate([state.conv[il], u[:, None]], axis=1)
        state.conv[il] = window[:, 1:]
        u = _silu((window * w["ssm_conv1d.weight"]).sum(axis=1) + w["ssm_conv1d.bias"])
        dt, b, c = np.split(times("ssm_x.weight", u), [self.dt_rank, self.dt_rank + self.d_state])
        if self.dt_b_c_rms:
            dt, b, c = self._norm(dt), self._norm(b), self._norm(c)
        step = np.logaddexp(0, times("ssm_dt.weight", dt) + w["ssm_dt.bias"])[:, None]
        state.ssm[il] = np.exp(step * w["ssm_a"]) * state.ssm[il] + step * b[None, :] * u[:, None]
        y = state.ssm[il] @ c + w["ssm_d"] * u
        return times("ssm_out.weight", y * _silu(z))


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rounded_f16(x: np.ndarray) -> np.ndarray:
    """To the nearest F16, as float64: what ggml multiplies an F16 matrix by."""
    return x.astype(np.float32).astype(np.float16).astype(np.float64)


def rounded_bf16(x: np.ndarray) -> np.ndarray:
    """To the nearest BF16, ties to even, as float64: what ggml multiplies a BF16 matrix by."""
    bits = x.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def rounded_q8(block: int) -> Callable[[np.ndarray], np.ndarray]:
    """To 8-bit whole numbers that share a scale in each `block`: what ggml multiplies a matrix of blocks by.

    Blocks of 32 keep the scale as F16 (Q8_0, Q8_1), blocks of 256 as F32 (Q8_K).
    """

    def rounded(x: np.ndarray) -> np.ndarray:
        blocks = x.astype(np.float32).reshape(-1, block)
        scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
        whole = np.round(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0))
        kept = scale.astype(np.float16) if block == 32 else scale
        return (whole * kept.astype(np.float64)).reshape(x.shape)

    return rounded
