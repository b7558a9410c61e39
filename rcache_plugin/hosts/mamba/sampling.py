"""Choosing a token from logits. Needs NumPy only."""

from __future__ import annotations

import math

import numpy as np

from ...cells.ubatch import Float32Array
from ...errors import InvalidArgument


def sample(logits: Float32Array, temp: float, rng: np.random.Generator) -> int:
    """A token id drawn from `logits`, float32 [n_vocab], at temperature `temp`; 0 takes the likeliest.

    Raises `InvalidArgument`: `logits` is not a flat array of at least one value, holds NaN or only infinities, or
    `temp` is negative or not finite.
    """
    values = np.asarray(logits, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise InvalidArgument(f"logits have shape {values.shape}, expected [n_vocab]")
    if not (math.isfinite(temp) and temp >= 0):
        raise InvalidArgument(f"temp is {temp}, it must be 0 or more")
    best = int(np.argmax(values))  # a NaN, if there is one
    if not math.isfinite(values[best]):
        raise InvalidArgument(f"logits are not finite: {values[best]} at {best}")
    if temp == 0:
        return best
    with np.errstate(over="ignore"):  # a tiny temperature: the others' weight is 0
        weights = np.exp((values - values[best]) / temp)
    # searching the running sum, as Generator.choice does it, without its checks of the whole vocabulary
    total = np.cumsum(weights)
    # random() is at most 1 - 2^-53, and that times the sum is never rounded up to the sum
    return int(np.searchsorted(total, rng.random() * total[-1], side="right"))
