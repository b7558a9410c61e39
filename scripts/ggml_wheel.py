"""Builds ggml-python with the RPC backend, or llama-cpp-python, once a machine, and prints the path of the wheel.

pip keeps a wheel that it built under the name of its source, whatever CMAKE_ARGS was at the time; asking it for
ggml-python after an ordinary install therefore yields a build without RPC, and no word of it. So the wheel is built
from source with a pip cache of its own, kept under a name that says how it was built, and looked into before use.

CMAKE_ARGS of the caller is kept: ``CMAKE_ARGS=-DGGML_CUDA=ON make demo`` builds with CUDA and RPC, and
``make test-cpu`` builds both for the instruction set that it names.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple


class Package(NamedTuple):
    """A distribution that has a ggml in it."""

    flags: str
    """CMAKE_ARGS that it is always built with."""
    library: str
    """Start of the name, inside the wheel, of the library that must be there; the ending is the system's."""
    suffix: str
    """What the name of its folder says of the flags."""


PACKAGES = {
    "ggml-python": Package("-DGGML_RPC=ON", "ggml/lib/libggml-rpc.", "-rpc"),
    "llama-cpp-python": Package("", "llama_cpp/lib/libllama.", ""),
}


def main() -> int:
    """Prints the wheel's path on stdout, everything else on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pins", type=Path, help="requirements file with a line NAME==VERSION of the package")
    parser.add_argument("--package", choices=PACKAGES, default="ggml-python")
    parser.add_argument("--group", default="", help="keep the wheel in a folder of this name among the others")
    args = parser.parse_args()
    package = PACKAGES[args.package]
    requirement = _requirement(args.pins, args.package)
    flags = " ".join([*os.environ.get("CMAKE_ARGS", "").split(), *package.flags.split()])
    name = f"{requirement.replace('==', '-')}{package.suffix}-{_build_key(flags)}"
    folder = _cache_root() / "wheels" / args.group / name
    wheel = _good_wheel(folder, package)
    if wheel is None:
        wheel = _build(requirement, package, flags, folder)
    print(wheel)
    return 0


def _requirement(pins: Path, name: str) -> str:
    lines = [line.split("#")[0].strip() for line in pins.read_text().splitlines()]
    (requirement,) = (line for line in lines if line.startswith(f"{name}=="))
    return requirement


def _cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rcache"


def _build_key(flags: str) -> str:
    """What the binaries depend on: flags, Python's platform and, as ggml compiles for the CPU at hand, its features."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        cpu = next((s for s in cpuinfo.read_text().splitlines() if s.startswith(("flags", "Features"))), cpu)
    libc = " ".join(platform.libc_ver())
    return hashlib.sha256("\n".join([flags, sysconfig.get_platform(), libc, cpu]).encode()).hexdigest()[:12]


def _good_wheel(folder: Path, package: Package) -> Path | None:
    """The wheel in `folder` if it is whole and has the library that it is built for."""
    for wheel in sorted(folder.glob("*.whl")):
        if zipfile.is_zipfile(wheel):
            with zipfile.ZipFile(wheel) as z:
                if any(name.startswith(package.library) for name in z.namelist()):
                    return wheel
    return None


def _build(requirement: str, package: Package, flags: str, folder: Path) -> Path:
    name = requirement.split("==")[0]
    env = os.environ | {"CMAKE_ARGS": flags}
    env.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    folder.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".build-") as scratch:
        out = Path(scratch, "out")
        command = [sys.executable, "-m", "pip", "--cache-dir", f"{scratch}/pip", "wheel", "-q", "--no-deps"]
        command += ["--no-binary", name, "-w", str(out), requirement]
        done = subprocess.run(command, env=env, stdout=sys.stderr)
        if done.returncode:
            sys.exit(f"building {requirement} with CMAKE_ARGS='{flags}' failed (pip's messages stand above)")
        wheel = _good_wheel(out, package)
        if wheel is None:
            sys.exit(f"{requirement} was built with CMAKE_ARGS='{flags}', but the wheel has no {package.library}*")
        if _good_wheel(folder, package) is None:  # else another build of the same was faster
            shutil.rmtree(folder, ignore_errors=True)
            out.rename(folder)
    print(f"built {requirement} in {time.monotonic() - started:.0f} s, kept in {folder}", file=sys.stderr)
    kept = _good_wheel(folder, package)
    if kept is None:
        sys.exit(f"{folder} was removed while the wheel was being built; try again")
    return kept


if __name__ == "__main__":
    sys.exit(main())
