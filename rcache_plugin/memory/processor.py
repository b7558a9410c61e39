"""What the processor can do, and which of it a build of ggml uses. Needs the standard library only."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import NamedTuple

_CPUINFO = Path("/proc/cpuinfo")


class Feature(NamedTuple):
    """An extension of the instruction set that ggml has kernels for."""

    name: str
    flags: tuple[str, ...]
    """What /proc/cpuinfo calls it; any of them."""
    function: str
    """The end of ``ggml_cpu_has_...``; empty where ggml has none."""


FEATURES = (
    Feature("sse3", ("pni",), "sse3"),
    Feature("ssse3", ("ssse3",), "ssse3"),
    Feature("avx", ("avx",), "avx"),
    Feature("avx2", ("avx2",), "avx2"),
    Feature("f16c", ("f16c",), "f16c"),
    Feature("fma", ("fma",), "fma"),
    Feature("bmi2", ("bmi2",), "bmi2"),
    Feature("avx_vnni", ("avx_vnni",), "avx_vnni"),
    Feature("avx512f", ("avx512f",), "avx512"),
    Feature("avx512_vbmi", ("avx512vbmi",), "avx512_vbmi"),
    Feature("avx512_vnni", ("avx512_vnni",), "avx512_vnni"),
    Feature("avx512_bf16", ("avx512_bf16",), "avx512_bf16"),
    Feature("amx_tile", ("amx_tile",), ""),
    Feature("amx_int8", ("amx_int8",), "amx_int8"),
    Feature("neon", ("asimd", "neon"), "neon"),
    Feature("fp16", ("asimdhp",), "fp16_va"),
    Feature("dotprod", ("asimddp",), "dotprod"),
    Feature("i8mm", ("i8mm",), "matmul_int8"),
    Feature("sve", ("sve",), "sve"),
    Feature("sme", ("sme",), "sme"),
)
"""From the oldest to the newest, x86 and then ARM."""


def processor_name() -> str:
    """What the system calls the processor."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def processor_features() -> tuple[str, ...] | None:
    """Names out of `FEATURES` that this processor has; None where the system does not tell."""
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return tuple(feature.name for feature in FEATURES if flags.intersection(feature.flags)) if flags else None


def ggml_features(base: str | os.PathLike[str]) -> tuple[str, ...] | None:
    """Names out of `FEATURES` that the ggml of the file `base` (``libggml-base``) uses; None when it does not tell.

    Opens the library that is beside it, in this process.
    """
    path = Path(base)
    library = path.with_name(path.name.replace("ggml-base", "ggml-cpu"))
    if not library.is_file():  # a build whose CPU backends are plugins, one for each kind of processor
        return None
    cpu = ctypes.CDLL(str(library))
    known = (f for f in FEATURES if f.function and hasattr(cpu, f"ggml_cpu_has_{f.function}"))
    return tuple(f.name for f in known if getattr(cpu, f"ggml_cpu_has_{f.function}")())


def _cpuinfo(key: str) -> str:
    """The first value of `key` in /proc/cpuinfo, or an empty text."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == key), "")
