"""Proves how tokens are drawn from logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rcache_plugin.errors import InvalidArgument
from rcache_plugin.hosts.mamba.sampling import sample


def test_tokens_come_as_often_as_their_weight_says() -> None:
    rng = np.random.default_rng(0)
    logits = np.log(np.array([0.5, 0.25, 0.25, 1e-30], np.float32))
    logits[3] = -np.inf
    assert {sample(logits, 0, rng) for _ in range(9)} == {0}
    drawn = np.bincount([sample(logits, 1.0, rng) for _ in range(4000)], minlength=4)
    assert drawn[3] == 0 and np.allclose(drawn[:3] / 4000, [0.5, 0.25, 0.25], atol=0.03)
    cold = np.bincount([sample(logits, 0.5, rng) for _ in range(4000)], minlength=4)
    assert np.allclose(cold[:3] / 4000, [2 / 3, 1 / 6, 1 / 6], atol=0.03)
    assert {sample(logits, 1e-300, rng) for _ in range(9)} == {0}
    same = [np.random.default_rng(4) for _ in range(2)]
    assert [sample(logits, 1.0, same[0]) for _ in range(20)] == [sample(logits, 1.0, same[1]) for _ in range(20)]


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_sampling_at_the_ends_of_the_draw(draw: float) -> None:
    class Fixed:
        def random(self) -> float:
            return draw

    for scale in np.linspace(0.1, 3, 50):
        logits = np.array([-np.inf, 0.0, -scale, -np.inf], np.float32)
        assert sample(logits, 1.0, Fixed()) == (1 if draw == 0 else 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("temp", [-0.1, float("nan"), float("inf")])
def test_temperatures_that_cannot_be(temp: float) -> None:
    with pytest.raises(InvalidArgument, match="temp is"):
        sample(np.zeros(3, np.float32), temp, np.random.default_rng(0))


@pytest.mark.parametrize("logits", [[], [[1.0, 2.0]], [1.0, float("nan")], [float("-inf")] * 2, [float("inf"), 0.0]])
def test_logits_that_cannot_be(logits: list[Any]) -> None:
    for temp in (0, 1.0):
        with pytest.raises(InvalidArgument, match="logits"):
            sample(np.array(logits, np.float32), temp, np.random.default_rng(0))
