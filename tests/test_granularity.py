"""Proves that every model that tests, examples and benchmarks write has the sizes of real ones.

That holds whatever this processor would take. An odd size is refused where the model is written, so a test that needs
one fails on every machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

import children
import granularity
import llama_models
import pytest
from granularity import OddSize
from llama_models import Model
from tiny_mamba import TinyMamba, Type

sys.path.append(str(children.ROOT / "examples"))

from make_random_gguf import PRESETS
from mamba_gguf import MATRIX_TYPES, MambaShape

MODELS = llama_models.models()


@pytest.mark.parametrize("name", MODELS)
def test_models_for_llama_cpp(name: str, tmp_path: Path) -> None:
    assert granularity.problems_of(llama_models.write(name, tmp_path)) == []


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_models_for_the_reference_host(kind: str, tmp_path: Path) -> None:
    assert granularity.problems_of(TinyMamba(matrix_type=Type[kind]).write(tmp_path / "model.gguf")) == []


@pytest.mark.parametrize("kind", MATRIX_TYPES)
def test_the_model_of_the_example(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make = str(children.ROOT / "examples" / "make_random_gguf.py")
    children.run([sys.executable, make, "--preset", "tiny", "--type", kind, "-o", str(path)])
    assert granularity.problems_of(path) == []


def mamba_problems(shape: MambaShape) -> list[str]:
    shapes = {name: dims[::-1] for name, dims in shape.tensor_shapes().items()}
    return granularity.problems("mamba", {"ssm.state_size": shape.d_state}, shapes)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_of_the_example_and_the_benchmarks(preset: str) -> None:
    assert mamba_problems(PRESETS[preset]) == []


def test_the_bundled_model() -> None:
    from rcache_plugin.hosts.mamba import bundled_model

    assert granularity.problems_of(Path(bundled_model())) == []


def test_nobody_else_writes_models() -> None:
    """What writes files of its own has to be checked here as well."""
    folders = ("tests", "examples", "benchmarks", "scripts", "rcache_plugin")
    sources = (path for folder in folders for path in (children.ROOT / folder).rglob("*.py"))
    writers = {path.name for path in sources if "GGUFWriter(" in path.read_text(encoding="utf-8")}
    assert writers == {"llama_models.py", "tiny_mamba.py", "mamba_gguf.py", Path(__file__).name}


# --- and odd ones are refused ----------------------------------------------------------------------------------------


def changed(name: str, fields: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> Model:
    model = MODELS[name]
    return Model(name, model.architecture, model.kind, {**model.fields, **fields}, {**model.shapes, **shapes})


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (changed("rwkv7", {"wkv.head_size": 32}, {}), "wkv.head_size: 32 is no multiple of 64"),
        (changed("arwkv7", {"wkv.head_size": 96}, {}), "wkv.head_size: 96 is no multiple of 64"),
        (changed("rwkv6", {}, {"blk.0.channel_mix_key.weight": (256, 500)}), "rows: 500 is no multiple of 32"),
        (changed("rwkv6", {}, {"blk.0.channel_mix_value.weight": (480, 256)}), "rows: 480 is no multiple of 256"),
        (changed("rwkv7", {}, {"blk.1.time_mix_w2.weight": (8, 256)}), "time_mix_w2.weight: rows: 8 is no"),
        (changed("jamba", {"attention.head_count": 8}, {}), "head of attention: 32 is no multiple of 64"),
        (changed("qwen35", {"attention.key_length": 16}, {}), "attention.key_length: 16 is no multiple of 64"),
        (changed("qwen35", {"ssm.state_size": 16}, {}), "ssm.state_size: 16 is no multiple of 64"),
        (changed("mamba2", {"ssm.time_step_rank": 16}, {}), "head of Mamba-2: 32 is no multiple of 64"),
        (changed("mamba", {"ssm.state_size": 8}, {}), "ssm.state_size: 8 is no multiple of 16"),
        (changed("mamba", {}, {"blk.0.ssm_in.weight": (64, 1024)}), "ssm_in.weight: rows: 64 is no multiple of 256"),
        (changed("lfm2-swa", {}, {"token_embd.weight": (256, 272 + 1)}), "token_embd.weight: number of rows: 273"),
        (TinyMamba(n_embd=64), "ssm_in.weight: rows: 64 is no multiple of 256"),
        (TinyMamba(d_inner=320), "ssm_out.weight: rows: 320 is no multiple of 256"),
        (TinyMamba(dt_rank=5), "ssm_dt.weight: rows: 5 is no multiple of 16"),
    ],
)
def test_an_odd_size_is_not_written(model: Model | TinyMamba, told: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    with pytest.raises(OddSize, match=told):
        model.write(path)
    assert not path.exists()


def test_an_odd_size_in_a_file_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(granularity, "check", lambda *_: None)
        path = changed("rwkv7", {"wkv.head_size": 32}, {}).write(tmp_path / "odd.gguf")
    assert granularity.problems_of(path) == ["wkv.head_size: 32 is no multiple of 64"]


def test_the_sizes_that_crashed_are_odd() -> None:
    """The preset ``tiny`` as it was: stock llama.cpp died of its Q8_0 on a processor with AMX."""
    assert any("is no multiple of 256" in line for line in mamba_problems(MambaShape(260, 64, 4)))
