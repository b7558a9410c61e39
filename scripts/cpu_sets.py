"""The instruction sets of ``make test-cpu``: what each needs, how ggml is built for it, whether a build is of its set.

``flags SET`` prints CMAKE_ARGS for a build of ggml, or says what this processor lacks and ends with status 2.
``check SET``, run by a Python that has the builds and this package, asks both copies of ggml what they use.
``machine`` prints the processor and its features, for a table. Reads /proc/cpuinfo, so it is for Linux.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

SETS = ("baseline", "avx2", "avx512", "native")
PACKAGES = ("ggml", "llama_cpp")
"""The modules that bring a ggml of their own."""
NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


class Switch(NamedTuple):
    """A switch of ggml's build for x86-64."""

    name: str
    """What follows ``GGML_``."""
    needs: tuple[str, ...]
    """What /proc/cpuinfo calls the extensions that the compiler may use then."""
    gives: tuple[str, ...]
    """What ggml says it uses then, in the words of rcache_plugin.memory.processor."""


AVX2 = (
    Switch("SSE42", ("pni", "ssse3", "sse4_1", "sse4_2", "popcnt"), ("sse3", "ssse3")),
    Switch("AVX", ("avx",), ("avx",)),
    Switch("AVX2", ("avx2",), ("avx2",)),
    Switch("F16C", ("f16c",), ("f16c",)),
    Switch("FMA", ("fma",), ("fma",)),
    Switch("BMI2", ("bmi2",), ("bmi2",)),
)
AVX512 = Switch("AVX512", ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"), ("avx512f",))
AVX512_PARTS = (
    Switch("AVX512_VBMI", ("avx512vbmi",), ("avx512_vbmi",)),
    Switch("AVX512_VNNI", ("avx512_vnni",), ("avx512_vnni",)),
    Switch("AVX512_BF16", ("avx512_bf16",), ("avx512_bf16",)),
)
"""Part of avx512 where the processor has them; off by default, as AVX-VNNI and AMX are, which only native has."""

BASELINE = {"x86_64": frozenset[str](), "aarch64": frozenset({"neon"})}
"""What every processor of a kind has of the features that ggml tells."""
AGE_OF_COMPILER = frozenset({"avx_vnni", "avx512_bf16", "amx_int8", "i8mm", "sve", "sme"})
"""Features that an older compiler leaves out of a native build."""


class Refused(Exception):
    """This set cannot be built or run here; the message says why."""


def switches(cpu: str, machine: str, has: frozenset[str]) -> list[Switch]:
    """The switches that are on, for `cpu` out of `SETS`. Raises `Refused` for what the processor lacks."""
    kind = NAMES.get(machine.lower(), machine.lower())
    if cpu not in SETS:
        raise Refused(f"there is no CPU={cpu}: choose from {', '.join(SETS)}")
    if kind not in BASELINE:
        raise Refused(f"make test-cpu knows x86_64 and aarch64 and not {machine}")
    if not has:
        raise Refused("this system does not tell what its processor has (no flags in /proc/cpuinfo)")
    if cpu in ("baseline", "native"):
        return []
    if kind != "x86_64":
        raise Refused(f"CPU={cpu} is for x86_64 and this is {machine}: choose from baseline, native")
    needed = [*AVX2, AVX512] if cpu == "avx512" else list(AVX2)
    missing = [flag for switch in needed for flag in switch.needs if flag not in has]
    if missing:
        raise Refused(f"this processor has no {', '.join(missing)}: CPU={cpu} cannot run here")
    return needed + ([part for part in AVX512_PARTS if has.issuperset(part.needs)] if cpu == "avx512" else [])


def cmake_args(cpu: str, machine: str, has: frozenset[str]) -> str:
    """What CMAKE_ARGS is for `cpu`. Raises `Refused`."""
    on = switches(cpu, machine, has)
    if cpu == "native":
        return "-DGGML_NATIVE=ON"
    args = ["-DGGML_NATIVE=OFF"]
    if NAMES.get(machine.lower(), machine.lower()) == "x86_64":
        args += [f"-DGGML_{s.name}={'ON' if s in on else 'OFF'}" for s in (*AVX2, AVX512)]
        args += [f"-DGGML_{s.name}=ON" for s in AVX512_PARTS if s in on]
    return " ".join(args)


def difference(cpu: str, machine: str, has: frozenset[str], told: frozenset[str], uses: frozenset[str]) -> str:
    """What is wrong with a build that uses `uses`, in words; empty when it is what was asked.

    `told` has the features of this processor in the words of `uses`, `has` in those of /proc/cpuinfo.
    """
    on = switches(cpu, machine, has)
    kind = NAMES.get(machine.lower(), machine.lower())
    if cpu == "native":
        wanted = told - AGE_OF_COMPILER
        extra, missing = uses - told, wanted - uses
    else:
        wanted = BASELINE[kind].union(*(switch.gives for switch in on))
        extra, missing = uses - wanted, wanted - uses
    words = [f"uses {' '.join(sorted(extra))}"] if extra else []
    words += [f"does not use {' '.join(sorted(missing))}"] if missing else []
    return " and ".join(words)


def cpuinfo_flags(cpuinfo: Path) -> frozenset[str]:
    """The extensions that the file names for the first processor; none when it cannot be read."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)[ \t]*:(.*)$", text, re.M)
    return frozenset(found[1].split()) if found else frozenset()


FIND = """
import importlib.util, json, pathlib, sys

folder = pathlib.Path(importlib.util.find_spec(sys.argv[1]).origin).parent
print(json.dumps(sorted({str(path.resolve()) for path in folder.glob("lib*/libggml-base.*")})))
"""
"""A wheel has no links: what is one file with two more names elsewhere is three files there."""

ASK = """
import json, sys
from rcache_plugin.memory.processor import FEATURES, ggml_features, processor_features

told = {feature.name for feature in FEATURES if feature.function}.intersection(processor_features() or ())
print(json.dumps([ggml_features(sys.argv[1]), sorted(told)]))
"""
"""Run in a process for each file, since a process should load one libggml-base."""


def check(cpu: str, machine: str, has: frozenset[str]) -> int:
    """Prints what each copy of ggml uses; 1 if one of them is not what `cpu` says, or none is there."""
    status = 0
    for package in PACKAGES:
        bases = _child(FIND, package)
        if not bases:
            print(f"rcache: {package} has no libggml-base", file=sys.stderr)
            status = 1
        for base in bases:
            uses, told = _child(ASK, base)
            if uses is None:
                print(f"rcache: there is no libggml-cpu beside {base}", file=sys.stderr)
                status = 1
                continue
            print(f"rcache: the ggml of {package} ({Path(base).name}) uses {' '.join(uses) or 'no extension'}")
            wrong = difference(cpu, machine, has, frozenset(told), frozenset(uses))
            if wrong:
                print(f"rcache: {base} is not built for CPU={cpu}: it {wrong}", file=sys.stderr)
                status = 1
    return status


def _child(code: str, argument: str) -> Any:
    """What Python code prints as JSON. Ends this program when it fails, after its own words."""
    done = subprocess.run([sys.executable, "-c", code, argument], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"rcache: {argument} could not be asked (see above)")
    return json.loads(done.stdout)


def machine_line() -> str:
    """The processor and those of its features that ggml has kernels for."""
    from rcache_plugin.memory.processor import processor_features, processor_name

    return f"{processor_name()}: {' '.join(processor_features() or ())}"


def main(argv: list[str] | None = None) -> int:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("flags", "check", "machine"))
    parser.add_argument("cpu", nargs="?", default="native", help=", ".join(SETS))
    parser.add_argument("--cpuinfo", type=Path, default=Path("/proc/cpuinfo"), help="another file, for tests")
    parser.add_argument("--machine", default=platform.machine(), help="another kind of processor, for tests")
    args = parser.parse_args(argv)
    has = cpuinfo_flags(args.cpuinfo)
    try:
        if args.command == "machine":
            print(machine_line())
        elif args.command == "check":
            return check(args.cpu, args.machine, has)
        else:
            print(cmake_args(args.cpu, args.machine, has))
    except Refused as e:
        print(f"rcache: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
