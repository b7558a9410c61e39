"""Finds the llama-cpp-python that is installed, without importing it, and tells whether the adapter knows it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import LlamaNotInstalled, PlatformNotSupported, UnknownLlamaVersion

DISTRIBUTION = "llama-cpp-python"
"""Its name on the package index."""
ENV_ANY_VERSION = "RCACHE_LLAMA_ANY_VERSION"
"""Environment variable: ``1`` tries versions of llama-cpp-python that this package does not know."""
ENV_LIB_PATH = "LLAMA_CPP_LIB_PATH"
"""Environment variable of llama-cpp-python: folder of its libraries."""

SUPPORTED = tuple(f"0.3.{patch}" for patch in range(32, 37))
"""Versions of llama-cpp-python whose class the adapter knows."""


@dataclass(frozen=True)
class LlamaInstall:
    """An installed llama-cpp-python."""

    version: str
    """As its metadata say: ``0.3.36``; a wheel may add a local part (``0.3.36+cu124``)."""
    folder: Path
    """The package folder, ``.../site-packages/llama_cpp``."""
    libllama: Path
    """The library that ``import llama_cpp`` will load."""
    overridden: bool = False
    """Whether `LLAMA_CPP_LIB_PATH` names the library's folder: it need not be the build of this package."""

    @property
    def release(self) -> str:
        """The version without its local part: the one that has a source distribution."""
        return self.version.partition("+")[0]

    def identity(self) -> str:
        """Changes when another file takes the library's place. Raises `LlamaNotInstalled` when it is gone."""
        try:
            stat = self.libllama.stat()
        except OSError as e:
            raise LlamaNotInstalled(f"cannot read {self.libllama}: {e.strerror}; reinstall {DISTRIBUTION}") from e
        return f"{self.libllama.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def find_install() -> LlamaInstall:
    """The llama-cpp-python that ``import llama_cpp`` would import, found without importing it.

    Raises `PlatformNotSupported`, `LlamaNotInstalled`.
    """
    check_platform()
    folder = _package_folder()
    if folder is None:
        raise LlamaNotInstalled(
            f"{DISTRIBUTION} is not installed for {sys.executable}; install it: "
            f"pip install '{DISTRIBUTION}=={SUPPORTED[-1]}' (it takes some minutes to build)"
        )
    # Not resolved, and relative to the current folder if it is relative: that is what llama_cpp does with it.
    override = os.environ.get(ENV_LIB_PATH)
    libllama = (folder / "lib" if override is None else Path(override).absolute()) / "libllama.so"
    if not libllama.is_file():
        place = f"{ENV_LIB_PATH}={override} has" if override is not None else f"{folder} has"
        raise LlamaNotInstalled(
            f"{place} no {'libllama.so' if override is not None else 'lib/libllama.so'}; "
            + (f"unset {ENV_LIB_PATH} or correct it" if override is not None else f"reinstall {DISTRIBUTION}")
        )
    return LlamaInstall(_installed_version(folder), folder, libllama, override is not None)


def check_platform() -> None:
    """Raises `PlatformNotSupported` anywhere but on Linux."""
    if sys.platform != "linux":
        raise PlatformNotSupported(
            f"the llama.cpp adapter is not supported on {sys.platform} yet: it replaces a class of libllama through "
            "the dynamic linker, and only Linux's does that. The reference host (rcache_plugin.hosts.mamba) runs here."
        )


def _package_folder() -> Path | None:
    loaded = sys.modules.get("llama_cpp")
    if loaded is not None and loaded.__file__:
        return Path(loaded.__file__).absolute().parent
    spec = importlib.util.find_spec("llama_cpp")
    return Path(spec.origin).absolute().parent if spec is not None and spec.origin else None


def _installed_version(folder: Path) -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        # A package folder that was put on the path by hand has no metadata.
        init = (folder / "__init__.py").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"""^__version__\s*=\s*["']([^"']+)["']""", init, re.MULTILINE)
        if found is None:
            raise LlamaNotInstalled(f"{folder} does not tell its version; reinstall {DISTRIBUTION}") from None
        return found[1]


def check_version(version: str) -> None:
    """Refuses versions that the adapter was not written for. Raises `UnknownLlamaVersion`."""
    if version.partition("+")[0] in SUPPORTED or os.environ.get(ENV_ANY_VERSION, "0") not in ("", "0"):
        return
    numbers = _numbers(version)
    newer = numbers > _numbers(SUPPORTED[-1])
    raise UnknownLlamaVersion(
        f"{DISTRIBUTION} {version} is installed, and this version of rcache knows {SUPPORTED[0]} to {SUPPORTED[-1]}; "
        + ("update rcache-plugin, or install" if newer else "install")
        + f" one that it knows: pip install '{DISTRIBUTION}=={SUPPORTED[-1]}'. "
        f"{ENV_ANY_VERSION}=1 tries this one all the same: the checks of the build apply, but nobody has tested it."
    )


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
