"""The commands that mend what is missing, for this Python and this copy of the package."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from ... import __file__ as _init
from ... import __version__

PACKAGE = Path(_init).resolve().parent
"""The package's folder."""
DISTRIBUTION = "rcache-plugin"

_COMPILERS = (
    ("apt-get", "apt-get install g++"),
    ("dnf", "dnf install gcc-c++"),
    ("zypper", "zypper install gcc-c++"),
    ("pacman", "pacman -S gcc"),
    ("apk", "apk add g++"),
)


def checkout() -> Path | None:
    """The source tree that the package runs from; None when it was installed."""
    return PACKAGE.parent if (PACKAGE.parent / "native" / "build_ffi.py").is_file() else None


def python() -> str:
    """This Python, as a shell takes it."""
    return shlex.quote(sys.executable or "python3")


def install(distribution: str) -> str:
    """Installs a dependency in the version that the package wants."""
    return f"{python()} -m pip install {shlex.quote(requirement(distribution))}"


def rebuild(distribution: str) -> str:
    """Builds a dependency anew, for the processor of this machine: pip's own cache may have it for another one."""
    options = f"--force-reinstall --no-deps --no-cache-dir --no-binary {distribution}"
    return f"{python()} -m pip install {options} {shlex.quote(requirement(distribution))}"


def requirement(distribution: str) -> str:
    """What the package's metadata ask for: ``ggml-python==0.0.45``; the name alone where they are silent."""
    try:
        wanted = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    for line in wanted:
        match = re.match(rf"{re.escape(distribution)}\s*([<>=!~][^;]*)?(?:;|$)", line)
        if match is not None:
            return distribution + (match[1] or "").strip()
    return distribution


def package() -> str:
    """Builds and installs this package anew."""
    tree = checkout()
    if tree is None:
        return f"{python()} -m pip install --force-reinstall --no-deps {DISTRIBUTION}=={__version__}"
    # A damaged library that is newer than its sources would be taken for built.
    old = f"{shlex.quote(str(PACKAGE))}/_rcache*.so"
    return f"rm -f {old} && {python()} -m pip install --no-deps -e {shlex.quote(str(tree))}"


def model() -> str:
    """Brings the bundled model back."""
    tree = checkout()
    if tree is None or not (tree / ".git").exists():
        return package()
    return f"git -C {shlex.quote(str(tree))} checkout -- rcache_plugin/hosts/mamba/models"


def compiler() -> str | None:
    """Installs a C++ compiler with this system's package manager, or drops a CXX that is none."""
    if os.environ.get("CXX"):
        return "unset CXX"
    places = os.pathsep.join([os.environ.get("PATH", ""), os.defpath, "/usr/sbin", "/sbin"])
    return next((command for name, command in _COMPILERS if shutil.which(name, path=places)), None)
