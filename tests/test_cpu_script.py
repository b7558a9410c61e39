"""Proves that `make test-cpu` checks first what an instruction set needs, and finds a build that differs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from children import ROOT

from rcache_plugin.memory.processor import FEATURES

X86 = "fpu sse sse2"
AVX2 = f"{X86} pni ssse3 sse4_1 sse4_2 popcnt avx avx2 f16c fma bmi2"
AVX512 = f"{AVX2} avx512f avx512cd avx512vl avx512dq avx512bw"
ARM = "fp asimd asimddp"
USES_AVX2 = frozenset("sse3 ssse3 avx avx2 f16c fma bmi2".split())


@pytest.fixture(scope="module")
def sets() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cpu_sets", ROOT / "scripts" / "cpu_sets.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.fixture
def cpuinfo(tmp_path: Path):
    def write(flags: str) -> Path:
        path = tmp_path / "cpuinfo"
        name = "Features" if flags == ARM else "flags"
        path.write_text(f"processor\t: 0\n{name}\t\t: {flags}\nbugs\t\t: none\n" * 2 if flags else "processor: 0\n")
        return path

    return write


@pytest.mark.parametrize(
    ("cpu", "machine", "flags", "words"),
    [
        ("avx512", "x86_64", AVX2, "no avx512f, avx512cd, avx512vl, avx512dq, avx512bw: CPU=avx512 cannot run here"),
        ("avx512", "x86_64", AVX512.replace(" avx512bw", ""), "this processor has no avx512bw: CPU=avx512 cannot run"),
        ("avx2", "x86_64", AVX2.replace(" f16c", ""), "this processor has no f16c: CPU=avx2 cannot run here"),
        ("avx2", "aarch64", ARM, "CPU=avx2 is for x86_64 and this is aarch64: choose from baseline, native"),
        ("avx512", "aarch64", ARM, "CPU=avx512 is for x86_64"),
        ("sse2", "x86_64", AVX2, "there is no CPU=sse2: choose from baseline, avx2, avx512, native"),
        ("baseline", "riscv64", "", "knows x86_64 and aarch64 and not riscv64"),
        ("baseline", "x86_64", "", "does not tell what its processor has"),
    ],
)
def test_what_the_processor_lacks_is_refused(sets, cpuinfo, capsys, cpu, machine, flags, words) -> None:
    assert sets.main(["flags", cpu, "--machine", machine, "--cpuinfo", str(cpuinfo(flags))]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err


@pytest.mark.parametrize(
    ("cpu", "machine", "flags", "on", "off"),
    [
        ("baseline", "x86_64", X86, [], ["NATIVE", "SSE42", "AVX", "AVX2", "F16C", "FMA", "BMI2", "AVX512"]),
        ("avx2", "x86_64", AVX512, ["SSE42", "AVX", "AVX2", "F16C", "FMA", "BMI2"], ["NATIVE", "AVX512"]),
        ("avx512", "x86_64", AVX512, ["SSE42", "AVX", "AVX2", "F16C", "FMA", "BMI2", "AVX512"], ["NATIVE"]),
        (
            "avx512",
            "x86_64",
            f"{AVX512} avx512_bf16 avx512vbmi amx_int8",
            ["SSE42", "AVX", "AVX2", "F16C", "FMA", "BMI2", "AVX512", "AVX512_VBMI", "AVX512_BF16"],
            ["NATIVE"],
        ),
        ("native", "x86_64", X86, ["NATIVE"], []),
        ("baseline", "aarch64", ARM, [], ["NATIVE"]),
        ("native", "arm64", ARM, ["NATIVE"], []),
    ],
)
def test_switches_of_a_set(sets, cpuinfo, capsys, cpu, machine, flags, on, off) -> None:
    assert sets.main(["flags", cpu, "--machine", machine, "--cpuinfo", str(cpuinfo(flags))]) == 0
    args = capsys.readouterr().out.split()
    assert sorted(args) == sorted([f"-DGGML_{name}=ON" for name in on] + [f"-DGGML_{name}=OFF" for name in off])


@pytest.mark.parametrize(
    ("cpu", "machine", "flags", "uses", "words"),
    [
        ("baseline", "x86_64", AVX2, "", ""),
        ("baseline", "x86_64", AVX2, "avx avx2", "uses avx avx2"),
        ("avx2", "x86_64", AVX512, " ".join(USES_AVX2), ""),
        ("avx2", "x86_64", AVX512, " ".join(USES_AVX2 - {"fma"} | {"avx512f"}), "uses avx512f and does not use fma"),
        ("avx512", "x86_64", AVX512, " ".join(USES_AVX2), "does not use avx512f"),
        ("avx512", "x86_64", f"{AVX512} avx512_vnni", " ".join(USES_AVX2 | {"avx512f"}), "does not use avx512_vnni"),
        ("native", "x86_64", AVX2, " ".join(USES_AVX2), ""),
        ("native", "x86_64", AVX2, "", "does not use avx avx2 bmi2 f16c fma sse3 ssse3"),
        ("native", "x86_64", f"{AVX2} avx_vnni", " ".join(USES_AVX2), ""),
        ("native", "x86_64", AVX2, " ".join(USES_AVX2 | {"avx_vnni"}), "uses avx_vnni"),
        ("baseline", "aarch64", ARM, "neon", ""),
        ("baseline", "aarch64", ARM, "neon dotprod", "uses dotprod"),
        ("native", "aarch64", ARM, "neon", "does not use dotprod"),
    ],
)
def test_a_build_that_is_not_what_was_asked_is_found(sets, cpu, machine, flags, uses, words) -> None:
    has = frozenset(flags.split())
    told = frozenset(feature.name for feature in FEATURES if has.intersection(feature.flags))
    assert sets.difference(cpu, machine, has, told, frozenset(uses.split())) == words


def test_words_are_those_of_the_package(sets) -> None:
    switches = [*sets.AVX2, sets.AVX512, *sets.AVX512_PARTS]
    known = {feature.name for feature in FEATURES if feature.function}
    assert known >= sets.AGE_OF_COMPILER.union(*sets.BASELINE.values(), *(s.gives for s in switches))


def test_the_run_is_refused_before_anything_is_built(cpuinfo, tmp_path: Path) -> None:
    scripts = tmp_path / "checkout" / "scripts"
    scripts.mkdir(parents=True)
    for name in ("test_cpu.sh", "cpu_sets.py", "own_venv.sh"):
        (scripts / name).write_text((ROOT / "scripts" / name).read_text())
    env = os.environ | {"CPUINFO": str(cpuinfo(X86))}
    cpu = "avx512" if os.uname().machine == "x86_64" else "avx2"
    done = subprocess.run(["sh", scripts / "test_cpu.sh", cpu], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and f"CPU={cpu}" in done.stderr and done.stdout == ""
    assert sorted(path.name for path in scripts.parent.iterdir()) == ["scripts"]
