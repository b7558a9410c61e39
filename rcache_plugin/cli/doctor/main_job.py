"""What `rcache run` needs beside packages and ggml: the compiled part and the bundled model; and whether it runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from ...hosts.llama.adapter.build import abi_version
from . import mend
from .machine import mib
from .packages import said
from .probes import Answer, ask
from .report import Part


def compiled_part(parts: Mapping[str, Part]) -> Part:
    """The C part of the cache."""
    wanted = abi_version()
    facts = {"file": None, "abi_version": None, "header_abi_version": wanted, **Answer().trouble}
    spec = importlib.util.find_spec("rcache_plugin._rcache")
    if spec is None:
        part = Part("missing", ["not there"], facts)
        part.problem("the compiled part rcache_plugin._rcache is missing", mend.package(), needed=True)
        return part
    answer = ask("compiled")
    facts |= {"file": spec.origin, **answer.trouble, **(answer.facts or {})}
    part = Part("ok", [f"C interface, ABI version {facts['abi_version']}", str(spec.origin)], facts)
    if answer.facts is None:
        part.state, part.lines = "broken", [f"cannot be loaded: {answer.error}", str(spec.origin)]
        if not said(parts, answer):
            part.problem(f"the compiled part cannot be loaded: {answer.error}", mend.package(), needed=True)
    elif facts["abi_version"] != wanted:
        part.state = "broken"
        what = f"the compiled part has ABI version {facts['abi_version']}, the package's header {wanted}"
        part.problem(what, mend.package(), needed=True)
    return part


def model_part(parts: Mapping[str, Part]) -> Part:
    """The bundled model's file."""
    answer = ask("model")
    facts = {"file": None, "bytes": None, **(answer.facts or {}), **answer.trouble}
    if answer.facts is not None:
        return Part("ok", [f"{facts['file']}: {mib(facts['bytes'])}"], facts)
    part = Part("missing" if answer.kind == "ModelError" else "unknown", [answer.error], facts)
    if not said(parts, answer):
        part.problem(answer.error, mend.model(), needed=True)
    return part


def run_part(parts: Mapping[str, Part]) -> Part:
    """The main job in small: one token through the bundled model."""
    answer = ask("run")
    facts = {"seconds": None, **(answer.facts or {}), **answer.trouble}
    if answer.facts is not None:
        return Part("ok", [f"one token through the bundled model: {facts['seconds']:.2f} s"], facts)
    part = Part("broken", [f"one token through the bundled model: {answer.error}"], facts)
    if not any(problem.needed for other in parts.values() for problem in other.problems):
        command = mend.model() if answer.kind == "ModelError" else mend.rebuild("ggml-python")
        part.problem(f"the bundled model does not run: {answer.error}", command, needed=True)
    return part
