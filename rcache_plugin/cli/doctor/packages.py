"""Packages in Python that this one needs; ggml-python has a part of its own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping

from ...hosts.llama.adapter.folders import ENV_CACHE_DIR
from . import mend
from .probes import Answer
from .report import Part

# distribution -> its modules, and whether `rcache run` needs it (rich: where it runs in a terminal)
PACKAGES = {
    "numpy": (("numpy",), True),
    "cffi": (("cffi", "_cffi_backend"), True),
    "tokenizers": (("tokenizers",), True),
    "rich": (("rich",), True),
    "platformdirs": (("platformdirs",), False),
}


def packages_part() -> Part:
    """All but ggml-python."""
    versions = {name: version(name, *modules) for name, (modules, _) in PACKAGES.items()}
    part = Part("ok", [", ".join(f"{name} {found or 'MISSING'}" for name, found in versions.items())], versions)
    for name, (_, needed) in PACKAGES.items():
        if versions[name] is None and (needed or not os.environ.get(ENV_CACHE_DIR)):
            part.state = "missing"
            part.problem(f"{name} is not installed", mend.install(name), needed=needed)
    return part


def version(distribution: str, *modules: str) -> str | None:
    """The version of an installed distribution, ``unknown`` without metadata; None when a module of it is missing."""
    if any(importlib.util.find_spec(module) is None for module in modules):
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def said(parts: Mapping[str, Part], answer: Answer) -> bool:
    """Whether what a probe lacked is a package that was said to be missing before."""
    lacked = answer.module is not None and answer.module in {m for modules, _ in PACKAGES.values() for m in modules}
    return lacked and parts["packages"].state == "missing"
