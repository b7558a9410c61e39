"""When two builds of ggml agree on a model: how far logits may differ, by the type of the weights, and what may not.

One build gives the same bits every time. Two builds do not, and how they differ depends on the processor: before a
product, activations are rounded to the type that goes with the weights; sums run in another order and, for F16 on a
processor with AVX-512 FP16, in half precision; VNNI and AMX scale the sums of a block elsewhere. Seen with the bundled
model, which is F16: 0.0267 of a largest logit of 11.4 on a Sapphire Rapids, where `tolerance` gives 0.067, and
0.0028 of 13.5 with AVX2.

So logits are compared within `tolerance`, and the token that wins has to be the same wherever the two best logits are
further apart than both of them may have moved. `compare` says how many such places there must be, or it could pass by
looking at none; where only tokens are at hand, `clear` is the whole comparison.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

ROUNDING = {
    # Nothing is rounded on the way. The error of a sum of n products in F32 grows like the root of n, 2^4 to 2^5 for
    # rows of 256 to 512, and exp and the like are right to a few units of 2^-23; with as much again in reserve.
    "F32": 2**-17,
    "F16": 2**-11,  # half a unit in the last place
    "BF16": 2**-8,  # AVX-512 BF16 also flushes what is very small
}
"""One rounding of a value of order one, by the type of the weights."""

BLOCKS = 1 / 254
"""The same for all types in blocks: activations become Q8_0, Q8_1 or Q8_K, 127 steps to a block's largest value."""

GROWTH = 12
"""How much a rounding grows on its way to the logits: 3 by the depth (as tests/hosts/mamba has it for two layers), 2
since activations and sums may both be rounded, 2 since both builds do."""


def tolerance(path: Path) -> float:
    """How far logits of two builds of ggml may differ on this model, relative to the largest logit."""
    matrices = [t for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1 and t.name.endswith(".weight")]
    return GROWTH * max(ROUNDING.get(t.tensor_type.name, BLOCKS) for t in matrices)


def clear(logits: np.ndarray, allowed: float) -> np.ndarray:
    """At which rows the best token wins by more than two logits can move, each by `allowed`: bool [n_rows]."""
    second, best = np.sort(logits, axis=1)[:, -2:].T
    return np.asarray(best - second > 2 * allowed)


def compare(found: np.ndarray, wanted: np.ndarray, path: Path, least: int) -> None:
    """Asserts that two builds agree on the logits of the model at `path`, float32 [n_rows, n_vocab].

    At least `least` rows must have a clear winner, which then is the same in both; the others say nothing.
    """
    assert found.shape == wanted.shape and np.isfinite(found).all() and np.isfinite(wanted).all()
    allowed = tolerance(path) * float(np.abs(wanted).max())
    worst = float(np.abs(found - wanted).max())
    assert worst <= allowed, f"logits differ by {worst:.3g}, {allowed:.3g} allowed"
    at = clear(wanted, allowed)
    assert at.sum() >= least, f"only {at.sum()} of {len(at)} rows have a clear winner, {least} wanted"
    assert np.array_equal(found[at].argmax(axis=1), wanted[at].argmax(axis=1))
