"""Proves how the installed llama-cpp-python is found: every refusal with its message, and the known versions."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from llama_kit import PKG_INFO, VERSION

from rcache_plugin.hosts.llama.adapter import build, found
from rcache_plugin.hosts.llama.adapter.errors import LlamaNotInstalled, PlatformNotSupported, UnknownLlamaVersion
from rcache_plugin.hosts.llama.adapter.found import LlamaInstall


def fake_package(folder: Path, version: str, *, library: bool = True, metadata: bool = True) -> Path:
    package = folder / "llama_cpp"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text(f'raise RuntimeError("imported")\n__version__ = "{version}"\n')
    if library:
        (package / "lib" / "libllama.so").write_bytes(b"")
    if metadata:
        info = folder / f"llama_cpp_python-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(PKG_INFO.format(version))
    return package


@pytest.fixture
def only_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of ``sys.path``."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.delenv(found.ENV_LIB_PATH, raising=False)
    return folder


@pytest.mark.parametrize("metadata", [True, False])
def test_install_is_found_without_importing_it(only_path: Path, metadata: bool) -> None:
    package = fake_package(only_path, "0.3.34", metadata=metadata)
    install = found.find_install()
    assert install == LlamaInstall("0.3.34", package, package / "lib" / "libllama.so", False)
    assert "llama_cpp" not in sys.modules


def test_a_package_that_is_loaded_already_is_the_one(only_path: Path, tmp_path: Path, monkeypatch) -> None:
    package = fake_package(tmp_path / "elsewhere", "0.3.35", metadata=False)
    module = type(sys)("llama_cpp")
    module.__file__ = str(package / "__init__.py")
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    assert found.find_install().folder == package


def test_the_library_path_of_llama_cpp_is_honoured(only_path: Path, tmp_path: Path, monkeypatch) -> None:
    fake_package(only_path, VERSION, library=False)
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(found.ENV_LIB_PATH, "other")
    with pytest.raises(LlamaNotInstalled, match=r"LLAMA_CPP_LIB_PATH=other has no libllama\.so; unset"):
        found.find_install()
    (other / "libllama.so").write_bytes(b"")
    install = found.find_install()
    assert (install.libllama, install.overridden) == (other / "libllama.so", True)


def test_nothing_installed(only_path: Path) -> None:
    with pytest.raises(LlamaNotInstalled, match=r"is not installed for .*pip install 'llama-cpp-python==0\.3\.36'"):
        found.find_install()
    (only_path / "llama_cpp").mkdir()  # what an uninstall leaves behind
    with pytest.raises(LlamaNotInstalled, match="is not installed"):
        found.find_install()


def test_an_install_without_library_or_version(only_path: Path) -> None:
    package = fake_package(only_path, VERSION, library=False)
    with pytest.raises(LlamaNotInstalled, match=r"has no lib/libllama\.so; reinstall"):
        found.find_install()
    (package / "lib" / "libllama.so").write_bytes(b"")
    (package / "__init__.py").write_text("")
    shutil.rmtree(only_path / f"llama_cpp_python-{VERSION}.dist-info")
    with pytest.raises(LlamaNotInstalled, match="does not tell its version"):
        found.find_install()


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_told_honestly(platform: str, small_install: LlamaInstall, monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    for call in (found.find_install, lambda: build.build(small_install)):
        with pytest.raises(PlatformNotSupported, match=f"not supported on {platform} yet"):
            call()


@pytest.mark.parametrize("version", ["0.3.32", "0.3.36", "0.3.36+cu124"])
def test_known_versions(version: str) -> None:
    found.check_version(version)


@pytest.mark.parametrize(
    ("version", "advice"),
    [("0.3.31", "; install"), ("0.2.90", "; install"), ("0.3.37", "; update"), ("1.0", "; update"), ("main", "")],
)
def test_unknown_versions(version: str, advice: str, monkeypatch) -> None:
    monkeypatch.delenv(found.ENV_ANY_VERSION, raising=False)
    text = rf"{re.escape(version)} is installed, .* knows 0\.3\.32 to 0\.3\.36{advice}.*RCACHE_LLAMA_ANY_VERSION=1"
    with pytest.raises(UnknownLlamaVersion, match=text):
        found.check_version(version)
    monkeypatch.setenv(found.ENV_ANY_VERSION, "0")
    with pytest.raises(UnknownLlamaVersion):
        found.check_version(version)
    monkeypatch.setenv(found.ENV_ANY_VERSION, "1")
    found.check_version(version)
