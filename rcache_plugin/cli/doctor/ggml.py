"""ggml: the library that the cache finds, its devices, and what of the processor it uses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from . import mend
from .machine import mib
from .packages import said, version
from .probes import Answer, ask
from .report import Part

_ENV_GGML = "RCACHE_GGML"  # memory.libraries has it, and cannot be imported without cffi


def ggml_part(parts: Mapping[str, Part]) -> Part:
    """ggml-python, the library that the cache finds, and its devices."""
    installed = version("ggml-python", "ggml")
    answer = ask("ggml")
    facts = {"package_version": installed, **ggml_facts(answer)}
    part = Part("ok", [f"ggml-python {installed or 'MISSING'}", *ggml_lines(facts)], facts)
    if installed is None:
        part.state = "missing"
        part.problem("ggml-python is not installed", mend.install("ggml-python"), needed=True)
    elif answer.facts is None:
        part.state = "broken"
        if not said(parts, answer):
            command = f"unset {_ENV_GGML}" if os.environ.get(_ENV_GGML) else mend.rebuild("ggml-python")
            part.problem(f"ggml cannot be used: {answer.error}", command, needed=True)
    lacks = lacking(facts, parts)
    if lacks:
        what = f"ggml was built for {' '.join(lacks)}, which this processor has not"
        part.problem(what, mend.rebuild("ggml-python"))
    return part


def ggml_facts(answer: Answer) -> dict[str, Any]:
    """What the probe of a ggml has found, or the same keys without it."""
    nothing: dict[str, Any] = {"library": None, "version": None, "commit": None, "devices": [], "uses": None}
    return {**nothing, **(answer.facts or {}), **answer.trouble}


def ggml_lines(facts: Mapping[str, Any]) -> list[str]:
    """The facts of a ggml for a reader."""
    if facts["library"] is None:
        return [f"no ggml: {facts['error']}"]
    lines = [f"ggml {facts['version'] or 'of unknown version'}: {facts['library']}"]
    for device in facts["devices"]:
        memory = f"{mib(device['memory_free'])} of {mib(device['memory_total'])} free"
        lines.append(f"device {device['name']}: {device['kind']}, {device['description']}, {memory}")
    lines += [] if facts["devices"] else ["no devices"]
    uses = facts["uses"]
    return [*lines, "built to use: " + ("can't be told" if uses is None else " ".join(uses) or "nothing special")]


def lacking(facts: Mapping[str, Any], parts: Mapping[str, Part]) -> list[str]:
    """What a ggml was built to use and the processor has not; empty when one of the two is not known."""
    has: Sequence[str] | None = parts["processor"].facts.get("features")
    return [] if has is None else [name for name in facts["uses"] or () if name not in has]
