"""Proves that the processor's features, and those that a ggml was built for, are told in the same words."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_kit import library
from ggml_kit import child, ggml_folder

from rcache_plugin.memory import processor
from rcache_plugin.memory.processor import FEATURES, ggml_features, processor_features, processor_name

XEON = "processor\t: 0\nmodel name\t: A Xeon\n"
XEON += "flags\t\t: fpu pni avx avx2 avx512f avx512vbmi avx512_vnni amx_tile amx_int8\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd asimdhp asimddp i8mm sve\n"


@pytest.mark.parametrize(
    ("text", "features"),
    [
        (XEON * 2, ("sse3", "avx", "avx2", "avx512f", "avx512_vbmi", "avx512_vnni", "amx_tile", "amx_int8")),
        (ARM, ("neon", "fp16", "dotprod", "i8mm", "sve")),
        ("processor: 0\n", None),
    ],
)
def test_features_of_a_processor(monkeypatch, tmp_path: Path, text: str, features: tuple[str, ...] | None) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "cpuinfo")
    assert processor_features() == features
    assert (processor_name() == "A Xeon") == text.startswith(XEON)


def test_a_system_without_cpuinfo(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "nowhere")
    assert processor_features() is None
    assert isinstance(processor_name(), str)


def test_features_that_a_ggml_was_built_for(tmp_path: Path) -> None:
    base = tmp_path / "libggml-base.so.0"
    assert ggml_features(base) is None
    functions = (("avx2", 1), ("avx512", 1), ("avx512_vnni", 0), ("matmul_int8", 1))
    source = "".join(f"int ggml_cpu_has_{name}(void) {{ return {value}; }}\n" for name, value in functions)
    library(tmp_path / "libggml-cpu.so.0", source)
    assert ggml_features(base) == ("avx2", "avx512f", "i8mm")


def test_the_installed_ggml_uses_what_this_processor_has() -> None:
    code = """
        import sys
        from rcache_plugin.memory.processor import ggml_features
        print(*ggml_features(sys.argv[1]))
    """
    base = next(ggml_folder().glob("libggml-base.*"))
    uses = set(child(code, base).split())
    has = processor_features()
    assert has is None or uses <= set(has)


def test_the_names_are_known_once() -> None:
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)
