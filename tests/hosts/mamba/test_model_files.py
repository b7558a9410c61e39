"""Proves that each wrong model file ends in a `ModelError` that names the file and the field or tensor."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_mamba import TinyMamba, Type, byte_vocab

from rcache_plugin.cells.spec import CacheSpec
from rcache_plugin.errors import ModelError
from rcache_plugin.hosts.mamba import MambaModel

PLAIN = TinyMamba()


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return PLAIN.write(tmp_path / "model.gguf")


def test_the_sizes_of_a_model(whole: Path) -> None:
    with MambaModel(whole) as plain:
        assert (plain.n_vocab, plain.n_embd, plain.n_layer) == (64, 256, 2)
        assert (plain.d_inner, plain.d_state, plain.d_conv, plain.dt_rank) == (512, 16, 4, 16)
        assert plain.spec == CacheSpec.mamba(2, 512, 16, 4)
        assert plain.n_bytes >= sum(w.nbytes for w in PLAIN.weights().values())


def test_progress_rises_to_one(whole: Path) -> None:
    seen: list[float] = []
    MambaModel(whole, progress=seen.append).close()
    assert seen == sorted(seen) and 0 < seen[0] < 1 and seen.count(1.0) == 1 and seen[-1] == 1.0


def test_an_exception_from_progress_ends_the_loading(whole: Path) -> None:
    def stop(fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        MambaModel(whole, progress=stop)


REQUIRED = [key for key in PLAIN.metadata() if "feed_forward" not in key and "head_count" not in key]
REQUIRED.remove("mamba.context_length")


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_field_is_named(key: str, tmp_path: Path) -> None:
    path = PLAIN.write(tmp_path / "model.gguf", drop=[key])
    with pytest.raises(ModelError, match=f"model.gguf: metadata {key} is missing"):
        MambaModel(path)


@pytest.mark.parametrize("name", PLAIN.shapes())
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    path = PLAIN.write(tmp_path / "model.gguf", drop=[name])
    with pytest.raises(ModelError, match=f"model.gguf: tensor {name} is missing"):
        MambaModel(path)


@pytest.mark.parametrize("name", PLAIN.but(tied=False).shapes())
def test_a_tensor_of_another_shape_is_named(name: str, tmp_path: Path) -> None:
    tiny = PLAIN.but(tied=False)
    shape = tiny.shapes()[name]
    path = tiny.write(tmp_path / "model.gguf", tensors={name: np.zeros((*shape[:-1], shape[-1] + 1), np.float32)})
    with pytest.raises(ModelError, match=f"model.gguf: tensor {name} has shape .*expected"):
        MambaModel(path)


BAD_FILES: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "mamba2"}, "general.architecture is 'mamba2'"),
    "unknown tensor": ({"tensors": {"blk.0.ssm_dt_norm.weight": np.zeros(16, np.float32)}}, "blk.0.ssm_dt_norm.weight"),
    "tensor of a later layer": ({"tensors": {"blk.7.ssm_d": np.zeros(512, np.float32)}}, "blk.7.ssm_d is unknown"),
    "no layers": ({"fields": {"mamba.block_count": 0}}, "mamba.block_count is 0"),
    "absurd layers": ({"fields": {"mamba.block_count": 2**31 - 1}}, "blk.2.attn_norm.weight is missing"),
    "no width": ({"fields": {"mamba.embedding_length": 0}}, "mamba.embedding_length is 0"),
    "no convolution": ({"fields": {"mamba.ssm.conv_kernel": 1}}, "mamba.ssm.conv_kernel is 1"),
    "huge state": ({"fields": {"mamba.ssm.state_size": 2**32 - 1}}, "mamba.ssm.state_size is"),
    "eps not a number": ({"fields": {"mamba.attention.layer_norm_rms_epsilon": float("nan")}}, "rms_epsilon is nan"),
    "eps negative": ({"fields": {"mamba.attention.layer_norm_rms_epsilon": -1.0}}, "rms_epsilon is -1"),
    "size as text": ({"fields": {"mamba.ssm.inner_size": "forty"}}, "mamba.ssm.inner_size is 'forty'"),
    "size as truth value": ({"fields": {"mamba.ssm.inner_size": True}}, "mamba.ssm.inner_size is True"),
    "norms as number": ({"fields": {"mamba.ssm.dt_b_c_rms": 1}}, "mamba.ssm.dt_b_c_rms is 1"),
    "a part": ({"fields": {"split.count": 3}}, "split.count says .* merge"),
    "alignment": ({"fields": {"general.alignment": 24}}, "general.alignment is 24"),
    "F64 weights": (
        {"tensors": {"output_norm.weight": np.ones(256, np.float64)}, "types": {"output_norm.weight": Type.F64}},
        "tensor output_norm.weight is of ggml type 28",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_cannot_be_is_refused_by_name(case: str, tmp_path: Path) -> None:
    options, text = BAD_FILES[case]
    path = PLAIN.write(tmp_path / "model.gguf", **options)
    with pytest.raises(ModelError, match=f"model.gguf: .*{text}"):
        MambaModel(path)


def test_a_quantised_vector_is_refused(tmp_path: Path) -> None:
    path = PLAIN.write(tmp_path / "model.gguf", types={"attn_norm.weight": Type.Q8_0})
    with pytest.raises(ModelError, match=r"tensor blk.0.attn_norm.weight is Q8_0; it must be F32"):
        MambaModel(path)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"missing\.gguf.*No such file"):
        MambaModel(tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match="directory"):
        MambaModel(tmp_path)
    for name, data, text in (
        ("empty", b"", "not a GGUF"),
        ("short", b"GG", "not a GGUF"),
        ("text", b"once upon a time" * 9, "not a GGUF"),
        ("magic", b"GGUF", "truncated: version"),
        ("old", b"GGUF" + (1).to_bytes(4, "little") + bytes(64), "GGUF version is 1"),
        ("big", b"GGUF" + (3).to_bytes(4, "big") + bytes(64), ".*big-endian"),
    ):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ModelError, match=f"{name}: {text}"):
            MambaModel(path)


def test_a_file_cut_anywhere_is_truncated(tmp_path: Path) -> None:
    tiny = TinyMamba(n_vocab=320, n_layer=1)
    data = tiny.write(tmp_path / "whole.gguf", fields=byte_vocab(320)).read_bytes()
    path = tmp_path / "cut.gguf"
    header = data.index(b"token_embd.weight")
    for size in (*range(8, header + 900, 61), *range(header + 900, len(data), len(data) // 50), len(data) - 32):
        path.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf: truncated: "):
            MambaModel(path)
    path.write_bytes(data)
    MambaModel(path).close()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = PLAIN.write(tmp_path / "model.gguf")

    def cut(fraction: float) -> None:
        os.truncate(path, 3000)

    with pytest.raises(ModelError, match=r"model\.gguf: truncated while tensor"):
        MambaModel(path, progress=cut)


@pytest.mark.parametrize(
    "what, offset, value, text",
    [
        ("no dimension", 0, (0).to_bytes(4, "little"), "has 0 dimensions"),
        ("too many dimensions", 0, (5).to_bytes(4, "little"), "has 5 dimensions"),
        ("no elements", 4, (0).to_bytes(8, "little"), r"has shape \(0, 64\)"),
        ("a part of a block", 4, (40).to_bytes(8, "little"), r"has shape \(40, 64\), which Q8_0 blocks of 32"),
        ("beyond any file", 4, (2**63).to_bytes(8, "little"), "truncated: tensor token_embd.weight"),
        ("unknown type", 20, (99).to_bytes(4, "little"), "of ggml type 99; supported are F32"),
        ("offset beyond the file", 24, (2**40).to_bytes(8, "little"), "truncated: tensor token_embd.weight"),
    ],
)
def test_a_tensor_that_cannot_be(what: str, offset: int, value: bytes, text: str, tmp_path: Path) -> None:
    path = PLAIN.but(matrix_type=Type.Q8_0).write(tmp_path / "model.gguf")
    data = bytearray(path.read_bytes())
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + offset
    data[at : at + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(ModelError, match=f"model.gguf: .*{text}"):
        MambaModel(path)


def test_a_tensor_that_stands_in_the_file_twice(whole: Path) -> None:
    data = whole.read_bytes()
    whole.write_bytes(data.replace(b"blk.1.ssm_out", b"blk.0.ssm_out", 1))
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ssm_out\.weight stands in the file twice"):
        MambaModel(whole)


@pytest.mark.parametrize("count", [2**40, 2**64 - 1])
@pytest.mark.parametrize("at", [8, 16])
def test_counts_beyond_any_file(at: int, count: int, whole: Path) -> None:
    data = bytearray(whole.read_bytes())
    data[at : at + 8] = count.to_bytes(8, "little")
    whole.write_bytes(data)
    with pytest.raises(ModelError, match=f"truncated: (tensor|metadata) count is {count}"):
        MambaModel(whole)


def test_damaged_headers_never_do_worse_than_an_error(tmp_path: Path) -> None:
    tiny = PLAIN.but(n_layer=1)
    data = tiny.write(tmp_path / "whole.gguf", fields=byte_vocab(64)).read_bytes()
    header = data.index(b"blk.0.ssm_out.weight") + 60
    rng = random.Random(5)
    path = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(header)
            damaged[at] = rng.choice((0, 0xFF, 0x80, damaged[at] ^ (1 << rng.randrange(8))))
        path.write_bytes(damaged)
        try:
            MambaModel(path).close()
        except ModelError as error:
            refused += 1
            assert "damaged.gguf" in str(error)
    assert refused > 60
