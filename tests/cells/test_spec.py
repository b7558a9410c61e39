"""Proves the sizes of states, as computed from a spec."""

from __future__ import annotations

import dataclasses

import pytest

from rcache_plugin.cells.spec import F32, CacheSpec, StateType
from rcache_plugin.errors import InvalidArgument


def test_mamba_130m() -> None:
    spec = CacheSpec.mamba(n_layer=24, d_inner=1536, d_state=16, d_conv=4)
    assert (spec.n_layer, spec.layers) == (24, tuple(range(24)))
    assert (spec.n_embd_r[0], spec.n_embd_s[0]) == (4608, 24576)
    assert (spec.r_row_bytes(5), spec.s_row_bytes(5)) == (18432, 98304)
    assert (spec.r_cell_bytes, spec.s_cell_bytes) == (442368, 2359296)
    assert spec.cell_bytes == 2801664  # 2.8 MB
    assert round(spec.cell_bytes / 1e6, 1) == 2.8


def test_mamba_2_8b() -> None:
    spec = CacheSpec.mamba(n_layer=64, d_inner=5120, d_state=16, d_conv=4)
    assert spec.cell_bytes == 64 * (3 + 16) * 5120 * 4 == 24903680
    assert spec.cell_bytes / 2**20 == 23.75  # 23.8 MB in the units of the table of sizes


def test_half_precision_takes_half_of_the_bytes() -> None:
    spec = CacheSpec.mamba(64, 5120, 16, 4, type_r="f16", type_s="bf16")
    assert spec.cell_bytes == 24903680 // 2
    mixed = CacheSpec.mamba(64, 5120, 16, 4, type_s="f16")
    assert (mixed.r_cell_bytes, mixed.s_cell_bytes) == (64 * 3 * 5120 * 4, 64 * 16 * 5120 * 2)


def test_layers_without_state_are_skipped() -> None:
    spec = CacheSpec.make([6, 0, 0, 2], [8, 0, 4, 0])
    assert (spec.n_layer, spec.layers) == (4, (0, 2, 3))
    assert [spec.r_row_bytes(il) for il in range(4)] == [24, 0, 0, 8]
    assert [spec.s_row_bytes(il) for il in range(4)] == [32, 0, 16, 0]
    assert spec.cell_bytes == 24 + 8 + 32 + 16


@pytest.mark.parametrize(
    ("name", "type_id", "row_of_64"),
    [
        ("f32", 0, 256), ("f16", 1, 128), ("q4_0", 2, 36), ("q4_1", 3, 40), ("q5_0", 6, 44), ("q5_1", 7, 48),
        ("q8_0", 8, 68), ("f64", 28, 512), ("bf16", 30, 128),
    ],
)  # fmt: skip
def test_types_by_name_and_by_number(name: str, type_id: int, row_of_64: int) -> None:
    kind = StateType.of(name)
    assert (kind.name, kind.type_id, kind.row_bytes(64)) == (name, type_id, row_of_64)
    assert StateType.of(type_id) == StateType.of(name.upper()) == StateType.of(kind) == kind
    assert kind.row_bytes(0) == 0


def test_f32_is_the_default() -> None:
    spec = CacheSpec.make([1], [1])
    assert spec.type_r == spec.type_s == F32 == StateType.of("f32")


@pytest.mark.parametrize("what", ["q9_9", "", 4, 31, -1, 1000])
def test_unknown_types_are_refused(what: str | int) -> None:
    with pytest.raises(InvalidArgument, match="f32"):
        StateType.of(what)


def test_rows_fill_whole_blocks() -> None:
    assert CacheSpec.make([32], [64], "q8_0", "q8_0").cell_bytes == 34 + 68
    with pytest.raises(InvalidArgument, match=r"33 elements.*32"):
        CacheSpec.make([33], [64], "q8_0")
    with pytest.raises(InvalidArgument, match=r"16 elements.*32"):
        CacheSpec.make([32, 0], [0, 16], "f32", "q8_0")


@pytest.mark.parametrize(
    ("r", "s"), [([1, 2], [1]), ([], []), ([0, 0], [0, 0]), ([-1], [4]), ([4], [-1]), ([1], [1, 2])]
)
def test_impossible_lists_are_refused(r: list[int], s: list[int]) -> None:
    with pytest.raises(InvalidArgument):
        CacheSpec.make(r, s)


def test_a_spec_is_a_value() -> None:
    spec = CacheSpec.make([1], [1])
    assert spec == CacheSpec.make((1,), (1,), F32, 0)
    assert hash(spec) == hash(CacheSpec.make([1], [1]))
    assert spec != CacheSpec.make([1], [1], "f16")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.n_embd_r = (2,)  # type: ignore[misc]
