"""Proves that the wheel works away from the checkout, and that the sdist has all that it takes to build one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from children import ROOT, run

import rcache_plugin

# A little of each layer: a cache without buffers, reached through the C table of the compiled part.
TINY_USE = """
import rcache_plugin
from rcache_plugin import _rcache
from rcache_plugin.cache import RecurrentCache
from rcache_plugin.cells.spec import CacheSpec
from rcache_plugin.capi.client import TableClient
from rcache_plugin.cells.ubatch import UBatch
from rcache_plugin.capi.vtable import HostVTable

with RecurrentCache(CacheSpec.mamba(2, 8, 4, 4), 4, allocate=False) as cache:
    table = HostVTable(cache)
    client = TableClient(table.address)
    slot = client.find_slot(UBatch.single(0, 0, 3))
    client.seq_cp(0, 1)
    cell = cache.table.cell(slot.head)
    print(rcache_plugin.__file__)
    print(_rcache.__file__)
    print(cell.pos, cell.seq_ids, client.info().used, client.seq_pos_max(1))
    table.close()
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git would hand out, so that no build writes into the checkout."""
    folder = tmp_path_factory.mktemp("source") / "checkout"
    names = [p for p in sorted(ROOT.rglob("*")) if p.is_file() and _is_source(p.relative_to(ROOT))]
    for path in names:
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return folder


def _is_source(path: Path) -> bool:
    skipped = {"build", "dist", "__pycache__"}
    parts = set(path.parts)
    return (
        not parts & skipped
        and not any(p.startswith(".") or p.endswith(".egg-info") for p in path.parts)
        and path.suffix not in (".so", ".o", ".pyc")
        and path.name != "_rcache.c"
    )


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("installed"))


def build_wheel(folder: Path, out: Path) -> Path:
    pip("wheel", "--no-build-isolation", "--no-deps", "-w", str(out), str(folder))
    (built,) = out.glob("*.whl")
    return built


def install(wheel: Path, folder: Path) -> Path:
    pip("install", "--no-deps", "--target", str(folder), str(wheel))
    return folder


def pip(*args: str) -> None:
    run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *args], timeout=600)


def python(installed: Path, *args: str, cwd: Path) -> str:
    """Python that sees `installed` ahead of the checkout's editable install."""
    return run([sys.executable, *args], env={"PYTHONPATH": str(installed)}, cwd=cwd).stdout


def test_wheel_has_headers_types_and_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "rcache_plugin/capi/include/rcache_decl.h",
        "rcache_plugin/capi/include/rcache_plugin.h",
        "rcache_plugin/py.typed",
        "rcache_plugin-0.1.0.dist-info/licenses/LICENSE",
    } <= names
    assert any(re.fullmatch(r"rcache_plugin/_rcache\..*(so|pyd)", name) for name in names)
    assert any(name.startswith("rcache_plugin/hosts/mamba/models/") and name.endswith(".gguf") for name in names)
    assert all(name.startswith(("rcache_plugin/", "rcache_plugin-0.1.0.dist-info/")) for name in names)


def test_wheel_has_every_file_of_the_package(source: Path, wheel: Path) -> None:
    files = {p.relative_to(source).as_posix() for p in (source / "rcache_plugin").rglob("*") if p.is_file()}
    assert files - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_wheel_needs_numpy_and_cffi_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as z:
        metadata = z.read("rcache_plugin-0.1.0.dist-info/METADATA").decode()
    needs = re.findall(r"^Requires-Dist: ([A-Za-z0-9-]+)[^;\n]*$", metadata, re.M)
    assert sorted(needs) == ["cffi", "numpy"]
    assert re.search(r"^Requires-Python: >=3\.10$", metadata, re.M)
    extras = set(re.findall(r"^Provides-Extra: (\S+)$", metadata, re.M))
    assert extras == {"bench", "lint", "llama", "mamba", "test", "train"}


def test_wheel_works_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    assert python(installed, "-m", "rcache_plugin", "--version", cwd=tmp_path) == "rcache 0.1.0\n"
    package, compiled, use = python(installed, "-c", TINY_USE, cwd=tmp_path).splitlines()
    assert Path(package).is_relative_to(installed)
    assert Path(compiled).is_relative_to(installed)
    assert use == "2 (0, 1) 1 2"


def test_c_host_compiles_against_the_wheels_headers(installed: Path, tmp_path: Path) -> None:
    folder = python(installed, "-m", "rcache_plugin", "include-dir", cwd=tmp_path).strip()
    assert Path(folder).is_relative_to(installed)
    host = '#include <rcache_plugin.h>\nint main(void) { return RCACHE_STATUS_OK + (RCACHE_ABI_VERSION != %d); }\n'
    for compiler, ending, standard in (("CC", "c", "-std=c11"), ("CXX", "cpp", "-std=c++11")):
        program = tmp_path / f"host.{ending}"
        program.write_text(host % 2)
        tool = os.environ.get(compiler, {"CC": "cc", "CXX": "c++"}[compiler]).split()
        run([*tool, standard, "-Wall", "-Werror", f"-I{folder}", str(program), "-o", str(tmp_path / ending)])
        run([str(tmp_path / ending)])


def test_sdist_has_what_a_build_needs_and_builds(source: Path, tmp_path: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    top = "rcache_plugin-0.1.0"
    with tarfile.open(sdist) as tar:
        names = {name.removeprefix(f"{top}/") for name in tar.getnames()}
        tar.extractall(tmp_path, filter="data") if hasattr(tarfile, "data_filter") else tar.extractall(tmp_path)
    native = {p.relative_to(ROOT).as_posix() for p in (ROOT / "native").rglob("*") if p.suffix in (".c", ".h", ".py")}
    assert native | {"rcache_plugin/capi/include/rcache_decl.h", "rcache_plugin/capi/include/rcache_plugin.h"} <= names
    assert {"Makefile", "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "setup.py"} <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc")) or name.endswith("_rcache.c")]
    # pip would keep a wheel of a folder whose name has a version in it.
    unpacked = (tmp_path / top).rename(tmp_path / "unpacked")
    wheel = build_wheel(unpacked, tmp_path / "wheel")
    target = install(wheel, tmp_path / "target")
    assert python(target, "-c", TINY_USE, cwd=tmp_path).splitlines()[-1] == "2 (0, 1) 1 2"


def test_one_version_everywhere(source: Path) -> None:
    assert version("rcache-plugin") == rcache_plugin.__version__ == "0.1.0"
    assert (source / "CHANGELOG.md").read_text().count("## [0.1.0]") == 1
