"""llama-cpp-python, and whether it can be hosted: looked at without importing it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ...hosts.llama.adapter.build import Compiler, cached_object
from ...hosts.llama.adapter.errors import (
    CacheFolderError,
    CompilerNotFound,
    LlamaBuildError,
    LlamaNotInstalled,
    NotInterposable,
    PlatformNotSupported,
    UnknownLlamaVersion,
)
from ...hosts.llama.adapter.folders import using_cache
from ...hosts.llama.adapter.found import (
    DISTRIBUTION,
    ENV_LIB_PATH,
    SUPPORTED,
    LlamaInstall,
    check_version,
    find_install,
)
from ...hosts.llama.adapter.symbols import SharedObject, check_interposable
from . import mend
from .ggml import ggml_facts, ggml_lines, lacking
from .probes import ask
from .report import Part

_PINNED = f"{DISTRIBUTION}=={SUPPORTED[-1]}"


def llama_part(parts: Mapping[str, Part]) -> Part:
    """The installed llama-cpp-python, what hosting it needs, and the adapter."""
    names = ("version", "known", "folder", "library", "interposable", "ggml", "compiler", "adapter")
    facts: dict[str, Any] = {**dict.fromkeys(names), "hostable": False}
    part = Part("ok", [], facts)
    try:
        install = find_install()
    except PlatformNotSupported as e:
        part.state, part.lines = "missing", [str(e)]
        return part
    except LlamaNotInstalled as e:
        _not_installed(part, e)
        return part
    facts |= {"version": install.version, "folder": str(install.folder), "library": str(install.libllama)}
    part.lines += [f"{DISTRIBUTION} {install.version}", str(install.libllama)]
    _version(part, install)
    _library(part, install, parts)
    _adapter(part, install)
    for name in ("compiled", "packages"):
        if any(problem.needed for problem in parts[name].problems):
            part.state = "broken"
    facts["hostable"] = part.state == "ok"
    part.lines.append("can be hosted" if facts["hostable"] else "cannot be hosted until what is told below is mended")
    return part


def _not_installed(part: Part, error: LlamaNotInstalled) -> None:
    what, _, advice = str(error).partition("; ")
    part.state, part.lines = "missing", [what]
    if ENV_LIB_PATH in what:
        part.problem(what, f"unset {ENV_LIB_PATH}")
    else:
        anew = "--force-reinstall --no-deps " if advice.startswith("reinstall") else ""
        part.problem(what, f"{mend.python()} -m pip install {anew}{shlex.quote(_PINNED)}")


def _version(part: Part, install: LlamaInstall) -> None:
    part.facts["known"] = install.release in SUPPORTED
    try:
        check_version(install.version)
    except UnknownLlamaVersion:
        part.state = "broken"
        what = f"{DISTRIBUTION} {install.version} is not one of {SUPPORTED[0]} to {SUPPORTED[-1]}, which rcache knows"
        part.problem(what, f"{mend.python()} -m pip install {shlex.quote(_PINNED)}")


def _library(part: Part, install: LlamaInstall, parts: Mapping[str, Part]) -> None:
    """Whether libllama calls its class through the linker; its ggml, loaded in a child process."""
    wanted = shlex.quote(f"{DISTRIBUTION}=={install.version if part.facts['known'] else SUPPORTED[-1]}")
    options = f"--force-reinstall --no-deps --no-cache-dir --no-binary {DISTRIBUTION}"
    anew = f"{mend.python()} -m pip install {options} {wanted}"
    try:
        check_interposable(SharedObject.read(install.libllama))
        part.facts["interposable"] = True
    except LlamaBuildError as e:
        part.state, part.facts["interposable"] = "broken", False
        part.problem(str(e).partition(";" if isinstance(e, NotInterposable) else "\n")[0], anew)
    answer = ask("ggml", str(install.libllama.parent))
    part.facts["ggml"] = ggml_facts(answer)
    part.lines += ggml_lines(part.facts["ggml"])
    if answer.facts is None and not answer.module:
        part.state = "broken"
        part.problem(f"the ggml of {DISTRIBUTION} cannot be used: {answer.error}", anew)
    lacks = lacking(part.facts["ggml"], parts)
    if lacks:
        part.problem(f"{DISTRIBUTION} was built for {' '.join(lacks)}, which this processor has not", anew)


def _adapter(part: Part, install: LlamaInstall) -> None:
    """The adapter; while it is not built, what builds it."""
    trouble = ""
    try:
        part.facts["compiler"] = str(Compiler.find())
    except CompilerNotFound as e:
        trouble = str(e).partition(";")[0]
    try:
        with using_cache():
            adapter = cached_object(install)
    except CacheFolderError as e:
        part.state = "broken"
        part.lines.append(f"adapter: {e}")
        return
    part.lines.append(f"compiler: {part.facts['compiler'] or 'none'}")
    part.lines.append(f"adapter: {adapter or 'not built'}")
    part.facts["adapter"] = None if adapter is None else str(adapter)
    if adapter is not None:
        return
    if trouble:
        part.state = "broken"
        part.problem(f"{trouble}, and the adapter for {DISTRIBUTION} is not built", mend.compiler())
    elif part.state == "ok":
        what = f"the adapter for {DISTRIBUTION} is not built yet; its first use does that"
        part.problem(what, f"{mend.python()} -m rcache_plugin build-llama")
