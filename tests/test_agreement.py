"""Proves what the comparison of two builds of ggml allows by the weights' type, and that it fails for all else."""

from __future__ import annotations

from pathlib import Path

import agreement
import numpy as np
import pytest
from tiny_mamba import TinyMamba, Type


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyMamba(n_layer=1, matrix_type=Type.F16).write(tmp_path_factory.mktemp("models") / "f16.gguf")


def test_the_coarser_the_type_the_more_is_allowed(half: Path, tmp_path: Path) -> None:
    allowed = {}
    for kind in ("F32", "BF16", "Q8_0", "Q4_K"):
        path = TinyMamba(n_layer=1, matrix_type=Type[kind]).write(tmp_path / f"{kind}.gguf")
        allowed[kind] = agreement.tolerance(path)
    assert allowed["F32"] < 1e-4 < agreement.tolerance(half) < 1e-2 < allowed["BF16"]
    assert allowed["Q8_0"] == allowed["Q4_K"] == 12 / 254
    assert 0.0267 / 11.4 < agreement.tolerance(half)  # seen on a Sapphire Rapids


def rows(best: float, second: float, n: int = 4) -> np.ndarray:
    values = np.zeros((n, 8), np.float32)
    values[:, 3], values[:, 5], values[0, 3] = best, second, 10 if best > second else best
    return values


def test_what_rounding_may_do_is_allowed(half: Path) -> None:
    wanted = rows(9, 5)
    agreement.compare(wanted + np.float32(0.04), wanted, half, 4)


def test_logits_too_far_apart_fail(half: Path) -> None:
    with pytest.raises(AssertionError, match=r"differ by 0\.1, 0\.0586 allowed"):
        agreement.compare(rows(9, 5) + np.float32(0.1), rows(9, 5), half, 4)


def test_another_clear_winner_fails(half: Path) -> None:
    found = rows(9, 5)
    found[2, [3, 5]] = found[2, [5, 3]]
    with pytest.raises(AssertionError):
        agreement.compare(found, rows(9, 5), half, 4)


def test_a_winner_is_clear_by_more_than_two_logits_can_move() -> None:
    assert agreement.clear(rows(9, 5), 1.9).all()
    assert agreement.clear(rows(9, 5), 2.1).tolist() == [True, False, False, False]


def test_too_few_rows_to_compare_fail(half: Path) -> None:
    with pytest.raises(AssertionError, match="only 1 of 4 rows have a clear winner, 2 wanted"):
        agreement.compare(rows(9, 8.95), rows(9, 8.95), half, 2)


def test_no_number_fails(half: Path) -> None:
    found = rows(9, 5)
    found[1, 1] = np.nan
    with pytest.raises(AssertionError):
        agreement.compare(found, rows(9, 5), half, 1)
