"""Building the llama.cpp adapter: every refusal with what it tells, the cache folder, and the real thing.

Most tests use a tiny stand-in for libllama that has the class in small, so that they need neither network nor
llama.cpp.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import children
import pytest

from rcache_plugin import llama_build
from rcache_plugin.errors import RcacheError
from rcache_plugin.llama_build import (
    CacheFolderError,
    CompileFailed,
    Compiler,
    CompilerNotFound,
    Headers,
    HeadersNotFound,
    LlamaBuildError,
    LlamaInstall,
    LlamaNotInstalled,
    NotInterposable,
    PlatformNotSupported,
    SharedObject,
    SymbolsDiffer,
    UnknownLlamaVersion,
)

VERSION = "0.3.36"

CLASS_H = """
#pragma once
class llama_memory_recurrent {
public:
    explicit llama_memory_recurrent(int size);
    virtual ~llama_memory_recurrent() = default;
    virtual bool seq_rm(int seq_id, int p0, int p1);
    unsigned memory_breakdown() const;
    unsigned n_rs_seq = 0;
#ifdef ONE_MORE
    void one_more();
#endif
private:
    int ctxs_bufs = 0;
};
class llama_memory_recurrent_context {
public:
    explicit llama_memory_recurrent_context(llama_memory_recurrent * mem);
    virtual ~llama_memory_recurrent_context();
    int s_copy(int i) const;
    unsigned get_head() const;
    unsigned get_n_rs() const;
    int get_rs_z() const;
    void * get_r_l(int il) const;
    void * get_s_l(int il) const;
};
"""

CLASS_CPP = """
#include "llama-memory-recurrent.h"
llama_memory_recurrent::llama_memory_recurrent(int size) : ctxs_bufs(size) {}
bool llama_memory_recurrent::seq_rm(int, int, int) { return true; }
unsigned llama_memory_recurrent::memory_breakdown() const { return 0; }
llama_memory_recurrent_context::llama_memory_recurrent_context(llama_memory_recurrent *) {}
llama_memory_recurrent_context::~llama_memory_recurrent_context() {}
int llama_memory_recurrent_context::s_copy(int i) const { return i; }
unsigned llama_memory_recurrent_context::get_head() const { return 0; }
unsigned llama_memory_recurrent_context::get_n_rs() const { return 0; }
int llama_memory_recurrent_context::get_rs_z() const { return -1; }
void * llama_memory_recurrent_context::get_r_l(int) const { return nullptr; }
#ifndef ONE_LESS
void * llama_memory_recurrent_context::get_s_l(int) const { return nullptr; }
#endif
#ifdef ONE_MORE
void llama_memory_recurrent::one_more() {}
#endif
#ifdef THEIRS
extern "C" int llama_graph(void) { return 0; }
#endif
#ifdef NEEDS_FUNCTION
extern "C" void absent_function(void);
extern "C" void rcache_needs(void) { absent_function(); }
#endif
#ifdef NEEDS_DATA
extern "C" int absent_data;
extern "C" int * rcache_needs(void) { return &absent_data; }
#endif
"""

GRAPH_CPP = """
#include "llama-memory-recurrent.h"
extern "C" const char * ggml_version(void) { return "1.2.3"; }
extern "C" int llama_graph(void) {
    llama_memory_recurrent mem(4);
    llama_memory_recurrent_context context(&mem);
    return context.s_copy(0) + context.get_head() + context.get_n_rs() + context.get_rs_z() + mem.memory_breakdown()
        + (context.get_r_l(0) == context.get_s_l(0)) + mem.seq_rm(0, 0, 0);
}
"""

PKG_INFO = "Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {}\n\nText.\nVersion: 9.9\n"
GGML_CMAKE = "set(GGML_VERSION_MAJOR 1)\nset(GGML_VERSION_MINOR 2)\nset(GGML_VERSION_PATCH 3)\n"


class Kit:
    """A source distribution, an adapter and libraries in small."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sdist = write_sdist(folder / "sdist")
        self.adapter = folder / "adapter" / "llama_adapter.cpp"
        self.adapter.parent.mkdir()
        self.adapter.write_text(CLASS_CPP)
        (folder / "graph.cpp").write_text(GRAPH_CPP)
        self._made: dict[tuple[str, ...], Path] = {}

    def library(self, *flags: str) -> Path:
        """A libllama.so."""
        return self._make("libllama.so", ["graph.cpp"], flags)

    def object(self, *flags: str) -> Path:
        """An adapter, compiled as the package does it."""
        return self._make("librcache_llama.so", [], [*llama_build._COMPILE_FLAGS, *flags])

    def _make(self, name: str, more: Sequence[str], flags: Sequence[str]) -> Path:
        key = (name, *flags)
        if key not in self._made:
            target = self.folder / str(len(self._made)) / name
            target.parent.mkdir()
            sources = [str(self.adapter), *(str(self.folder / source) for source in more)]
            include = f"-I{self.sdist}/vendor/llama.cpp/src"
            command = ["c++", "-O1", "-fPIC", "-shared", include, *flags, *sources, "-o", str(target)]
            subprocess.run(command, check=True)
            self._made[key] = target
        return self._made[key]


def write_sdist(folder: Path, version: str = VERSION, header: str = CLASS_H) -> Path:
    llama = folder / "vendor" / "llama.cpp"
    for part in llama_build._HEADER_FOLDERS:
        (llama / part).mkdir(parents=True)
    (folder / "PKG-INFO").write_text(PKG_INFO.format(version))
    (llama / "LICENSE").write_text("a licence")
    (llama / "ggml" / "CMakeLists.txt").write_text(GGML_CMAKE)
    (llama / "src" / "llama-memory-recurrent.h").write_text(header)
    (llama / "src" / "llama-memory-recurrent.cpp").write_text("not a header")
    (llama / "ggml" / "src" / "ggml-impl.h").write_text("// ggml\n")
    return folder


def pack(folder: Path, target: Path) -> Path:
    with tarfile.open(target, "w:gz") as tar:
        tar.add(folder, arcname=f"llama_cpp_python-{VERSION}")
    return target


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit(tmp_path_factory.mktemp("kit"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kit: Kit) -> Path:
    """A cache folder of the test's own, the small adapter, and the small source distribution."""
    for name in ("CXX", llama_build.ENV_ANY_VERSION, llama_build.ENV_LIB_PATH, "LD_BIND_NOW"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "cache"
    monkeypatch.setenv(llama_build.ENV_CACHE_DIR, str(folder))
    monkeypatch.setenv(llama_build.ENV_SDIST, str(kit.sdist))
    monkeypatch.setattr(llama_build, "ADAPTER", kit.adapter)
    return folder


@pytest.fixture
def install(kit: Kit, tmp_path: Path) -> LlamaInstall:
    """An install with a libllama of its own, so that a test may replace it."""
    lib = tmp_path / "llama_cpp" / "lib"
    lib.mkdir(parents=True)
    return LlamaInstall(VERSION, lib.parent, Path(shutil.copy(kit.library(), lib)))


def read(path: Path) -> SharedObject:
    return SharedObject.read(path)


# ------------------------------------------------------------------------------------------------- finding the install


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
    monkeypatch.delenv(llama_build.ENV_LIB_PATH, raising=False)
    return folder


@pytest.mark.parametrize("metadata", [True, False])
def test_install_is_found_without_importing_it(only_path: Path, metadata: bool) -> None:
    package = fake_package(only_path, "0.3.34", metadata=metadata)
    found = llama_build.find_install()
    assert found == LlamaInstall("0.3.34", package, package / "lib" / "libllama.so", False)
    assert "llama_cpp" not in sys.modules


def test_a_package_that_is_loaded_already_is_the_one(only_path: Path, tmp_path: Path, monkeypatch) -> None:
    package = fake_package(tmp_path / "elsewhere", "0.3.35", metadata=False)
    module = type(sys)("llama_cpp")
    module.__file__ = str(package / "__init__.py")
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    assert llama_build.find_install().folder == package


def test_the_library_path_of_llama_cpp_is_honoured(only_path: Path, tmp_path: Path, monkeypatch) -> None:
    fake_package(only_path, VERSION, library=False)
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(llama_build.ENV_LIB_PATH, "other")
    with pytest.raises(LlamaNotInstalled, match=r"LLAMA_CPP_LIB_PATH=other has no libllama\.so; unset"):
        llama_build.find_install()
    (other / "libllama.so").write_bytes(b"")
    found = llama_build.find_install()
    assert (found.libllama, found.overridden) == (other / "libllama.so", True)


def test_nothing_installed(only_path: Path) -> None:
    with pytest.raises(LlamaNotInstalled, match=r"is not installed for .*pip install 'llama-cpp-python==0\.3\.36'"):
        llama_build.find_install()
    (only_path / "llama_cpp").mkdir()  # what an uninstall leaves behind
    with pytest.raises(LlamaNotInstalled, match="is not installed"):
        llama_build.find_install()


def test_an_install_without_library_or_version(only_path: Path) -> None:
    package = fake_package(only_path, VERSION, library=False)
    with pytest.raises(LlamaNotInstalled, match=r"has no lib/libllama\.so; reinstall"):
        llama_build.find_install()
    (package / "lib" / "libllama.so").write_bytes(b"")
    (package / "__init__.py").write_text("")
    shutil.rmtree(only_path / f"llama_cpp_python-{VERSION}.dist-info")
    with pytest.raises(LlamaNotInstalled, match="does not tell its version"):
        llama_build.find_install()


def test_a_library_that_disappears(cache: Path, install: LlamaInstall) -> None:
    install.libllama.unlink()
    with pytest.raises(LlamaBuildError, match=r"cannot read .*libllama\.so"):
        llama_build.build(install, progress=None)
    with pytest.raises(LlamaNotInstalled, match="reinstall"):
        install.identity()


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_told_honestly(platform: str, install: LlamaInstall, monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    for call in (llama_build.find_install, lambda: llama_build.build(install)):
        with pytest.raises(PlatformNotSupported, match=f"not supported on {platform} yet"):
            call()


@pytest.mark.parametrize("version", ["0.3.24", "0.3.36", "0.3.36+cu124"])
def test_known_versions(version: str) -> None:
    llama_build.check_version(version)


@pytest.mark.parametrize(
    ("version", "advice"),
    [("0.3.23", "; install"), ("0.2.90", "; install"), ("0.3.37", "; update"), ("1.0", "; update"), ("main", "")],
)
def test_unknown_versions(version: str, advice: str, monkeypatch) -> None:
    monkeypatch.delenv(llama_build.ENV_ANY_VERSION, raising=False)
    text = rf"{re.escape(version)} is installed, .* knows 0\.3\.24 to 0\.3\.36{advice}.*RCACHE_LLAMA_ANY_VERSION=1"
    with pytest.raises(UnknownLlamaVersion, match=text):
        llama_build.check_version(version)
    monkeypatch.setenv(llama_build.ENV_ANY_VERSION, "0")
    with pytest.raises(UnknownLlamaVersion):
        llama_build.check_version(version)
    monkeypatch.setenv(llama_build.ENV_ANY_VERSION, "1")
    llama_build.check_version(version)


def test_build_refuses_an_unknown_version(cache: Path, install: LlamaInstall) -> None:
    with pytest.raises(UnknownLlamaVersion):
        llama_build.build(dataclasses.replace(install, version="0.3.99"), progress=None)
    assert not cache.exists()


def test_all_errors_are_of_one_family() -> None:
    errors = [e for e in vars(llama_build).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(errors) == 11
    assert all(e is RcacheError or issubclass(e, LlamaBuildError) for e in errors)


def test_import_needs_no_unix_and_loads_nothing(child) -> None:
    out = child(
        """
        import sys
        sys.modules["fcntl"] = None  # as on Windows
        import rcache_plugin.llama_build
        print(sorted({"llama_cpp", "ggml", "cffi", "ctypes", "numpy", "platformdirs"} & set(sys.modules)))
        """
    )
    assert out.strip() == "[]"


# -------------------------------------------------------------------------------------------------------- the compiler


def test_no_compiler(cache: Path, install: LlamaInstall, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompilerNotFound, match=r"looked for c\+\+, g\+\+ and clang\+\+ on PATH\); install one"):
        llama_build.build(install, progress=None)


@pytest.mark.parametrize("words", ["no-such-compiler -m64", "false"])
def test_a_named_compiler_that_does_not_work(words: str, monkeypatch) -> None:
    monkeypatch.setenv("CXX", words)
    with pytest.raises(CompilerNotFound, match=f"CXX={words}"):
        Compiler.find()


def test_the_words_of_a_named_compiler_are_kept(tmp_path: Path, monkeypatch) -> None:
    wrapper = tmp_path / "my c++"
    wrapper.write_text('#!/bin/sh\nexec "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{wrapper}' c++")
    found = Compiler.find()
    assert found.command == (str(wrapper), "c++")
    assert re.match(r"\d+\.\d+", found.version)
    assert "-" in found.machine


def test_a_compiler_without_the_full_version_gives_the_short_one(tmp_path: Path, monkeypatch) -> None:
    script = tmp_path / "clang++"
    script.write_text(
        "#!/bin/sh\ncase $1 in -dumpversion) echo 17.0.6;; -dumpmachine) echo a-b;; *) echo what; exit 1;; esac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert Compiler.find() == Compiler((str(script),), "17.0.6", "a-b")


# --------------------------------------------------------------------------------------------------------- the headers

CLOSED_PORT = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_RETRIES": "0",
}


def test_no_network(cache: Path, install: LlamaInstall, monkeypatch) -> None:
    monkeypatch.delenv(llama_build.ENV_SDIST)
    for name, value in CLOSED_PORT.items():
        monkeypatch.setenv(name, value)
    lines: list[str] = []
    with pytest.raises(HeadersNotFound) as caught:
        llama_build.build(install, progress=lines.append)
    text = str(caught.value)
    assert re.search(r"pip could not download llama-cpp-python 0\.3\.36; check the network .* RCACHE_LLAMA_SDIST", text)
    assert "No matching distribution found" in text.splitlines()[-1]
    assert lines == ["downloading the source of llama-cpp-python 0.3.36 (50 to 80 MB) for llama.cpp's internal headers"]
    assert sorted(p.name for p in cache.iterdir()) == [f"llama-{VERSION}.lock"]


def test_a_download_is_used(cache: Path, kit: Kit, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv(llama_build.ENV_SDIST)
    packed = pack(kit.sdist, tmp_path / "packed.tar.gz")
    pip = tmp_path / "pip"
    pip.write_text(
        '#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\n'
        f'mkdir -p "$2" && cp {packed} "$2/llama_cpp_python-{VERSION}.tar.gz"\n'
    )
    pip.chmod(0o755)
    monkeypatch.setattr(llama_build, "_pip", lambda scratch: [str(pip)])
    headers = llama_build.get_headers(VERSION, progress=None)
    assert (headers.folder / "src" / "llama-memory-recurrent.h").read_text() == CLASS_H
    pip.write_text("#!/bin/sh\nexit 1\n")
    assert llama_build.get_headers(VERSION, progress=None) == headers  # from the cache folder
    (headers.folder / "src" / "llama-memory-recurrent.h").write_text("damaged")
    with pytest.raises(HeadersNotFound, match="pip could not download"):
        llama_build.get_headers(VERSION, progress=None)


def test_neither_pip_nor_venv(cache: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv(llama_build.ENV_SDIST)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho ensurepip is not available\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(llama_build.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(HeadersNotFound, match=r"has none .*; install pip, or name .*\nensurepip is not available"):
        llama_build.get_headers(VERSION, progress=None)


@pytest.mark.parametrize("packed", [True, False])
def test_only_headers_are_kept(cache: Path, kit: Kit, tmp_path: Path, packed: bool, monkeypatch) -> None:
    if packed:
        monkeypatch.setenv(llama_build.ENV_SDIST, str(pack(kit.sdist, tmp_path / "a.tar.gz")))
    folder = llama_build.get_headers(VERSION, progress=None).folder
    assert folder == cache / f"headers-{VERSION}"
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()) == [
        *("LICENSE", "ggml/CMakeLists.txt", "ggml/src/ggml-impl.h", "manifest.json", "src/llama-memory-recurrent.h"),
    ]


def test_damaged_headers_are_replaced(cache: Path) -> None:
    header = llama_build.get_headers(VERSION, progress=None).folder / "src" / "llama-memory-recurrent.h"
    before = header.stat().st_ino
    llama_build.get_headers(VERSION, progress=None)
    assert header.stat().st_ino == before  # nothing is moved under the feet of another compiler
    header.write_text("damaged")
    llama_build.get_headers(VERSION, progress=None)
    assert header.read_text() == CLASS_H
    (header.parent.parent / "manifest.json").write_text("[]")
    llama_build.get_headers(VERSION, progress=None)
    assert json.loads((header.parent.parent / "manifest.json").read_text())["version"] == VERSION


def test_a_named_source_wins_over_the_cache_folder(cache: Path, tmp_path: Path, monkeypatch) -> None:
    llama_build.get_headers(VERSION, progress=None)
    monkeypatch.setenv(llama_build.ENV_SDIST, str(write_sdist(tmp_path / "changed", header=CLASS_H + "// changed")))
    headers = llama_build.get_headers(VERSION, progress=None)
    assert (headers.folder / "src" / "llama-memory-recurrent.h").read_text().endswith("// changed")


def test_a_source_of_another_version(cache: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(llama_build.ENV_SDIST, str(write_sdist(tmp_path / "older", "0.3.35")))
    with pytest.raises(HeadersNotFound, match=r"is version 0\.3\.35 of llama-cpp-python, but 0\.3\.36 is installed"):
        llama_build.get_headers(VERSION, progress=None)
    assert not (cache / f"headers-{VERSION}").exists()


def test_what_is_no_source(cache: Path, kit: Kit, tmp_path: Path, monkeypatch) -> None:
    torn = tmp_path / "torn.tar.gz"
    torn.write_bytes(pack(kit.sdist, tmp_path / "whole.tar.gz").read_bytes()[:300])
    text = tmp_path / "text.tar.gz"
    text.write_text("no archive")
    other = write_sdist(tmp_path / "other")
    (other / "PKG-INFO").write_text(PKG_INFO.format(VERSION).replace("llama_cpp_python", "other"))
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, why in [
        (torn, "cannot read"),
        (text, "cannot read"),
        (tmp_path / "absent", "cannot read"),
        (other, "is no source distribution"),
        (empty, "is no source distribution"),
        (kit.sdist / "vendor" / "llama.cpp", "is no source distribution"),
    ]:
        monkeypatch.setenv(llama_build.ENV_SDIST, str(path))
        with pytest.raises(HeadersNotFound, match=why):
            llama_build.get_headers(VERSION, progress=None)


def test_names_in_an_archive_cannot_lead_out_of_the_folder(cache: Path, kit: Kit, tmp_path: Path, monkeypatch) -> None:
    packed = tmp_path / "evil.tar"
    top = "x/vendor/llama.cpp"
    with tarfile.open(packed, "w") as tar:
        tar.add(kit.sdist, arcname="x")

        def add(name: str, data: bytes = b"evil", **attributes: object) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            for key, value in attributes.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(data))

        for name in (
            f"{top}/src/../../../../../evil.h",
            "../evil.h",
            f"../{top}/src/evil.h",
            f"{tmp_path}/evil.h",
            f"/{top}/src/evil.h",
            f"{top}/src/..\\evil.h",
            f"{top}/src/sub/evil.h",
            f"{top}/src/evil.h\n",
            f"{top}/src/evil.so",
        ):
            add(name)
        add(f"{top}/src/evil-link.h", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(f"{top}/src/evil-hard.h", b"", type=tarfile.LNKTYPE, linkname=f"{top}/src/llama-memory-recurrent.cpp")
        add(f"{top}/src/evil-fifo.h", b"", type=tarfile.FIFOTYPE)
        add(f"{top}/src/evil-large.h", b"\0" * (llama_build._LARGEST_FILE + 1))
    monkeypatch.setenv(llama_build.ENV_SDIST, str(packed))
    llama_build.get_headers(VERSION, progress=None)
    assert not [p for p in tmp_path.rglob("*") if "evil" in p.name and p != packed]
    assert not Path("/x").exists()
    assert len([p for p in cache.rglob("*") if p.is_file()]) == 6  # as in test_only_headers_are_kept, and the lock


@pytest.mark.parametrize(
    ("text", "macro"),
    [
        ("std::vector<ggml_tensor *> p_l;", "HAS_PLE"),
        ("void state_clear(llama_seq_id seq_id);", "HAS_STATE_CLEAR"),
    ],
)
def test_what_a_version_has_is_read_from_its_header(tmp_path: Path, text: str, macro: str) -> None:
    plain = Headers(VERSION, write_sdist(tmp_path / "plain") / "vendor" / "llama.cpp")
    more = Headers(VERSION, write_sdist(tmp_path / "more", header=CLASS_H + text) / "vendor" / "llama.cpp")
    assert more.features - plain.features == {f"RCACHE_LLAMA_{macro}"}
    assert f"-DRCACHE_LLAMA_{macro}=1" in more.flags
    assert f"-isystem{more.folder}/src" in more.flags
    assert more.ggml_version == "1.2.3"
    more.check()


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("n_rs_seq", "n_other", "HAS_N_RS_SEQ"),
        ("ctxs_bufs", "bufs", "HAS_CTXS_BUFS"),
        ("memory_breakdown", "breakdown", "HAS_MEMORY_BREAKDOWN"),
        ("int size", "layer_filter_cb && filter", "CTOR_FILTER_FIRST"),
    ],
)
def test_a_class_that_is_not_known(
    cache: Path, install: LlamaInstall, tmp_path: Path, monkeypatch, old: str, new: str, why: str
) -> None:
    sdist = write_sdist(tmp_path / "sdist", header=CLASS_H.replace(old, new))
    monkeypatch.setenv(llama_build.ENV_SDIST, str(sdist))
    with pytest.raises(UnknownLlamaVersion, match=rf"declare llama_memory_recurrent in a way .*{why}.*; install"):
        llama_build.build(install, progress=None)


def test_headers_that_do_not_tell_the_version_of_ggml(tmp_path: Path) -> None:
    assert Headers(VERSION, tmp_path).ggml_version is None
    assert Headers(VERSION, tmp_path).features == set()


# ---------------------------------------------------------------------------------------------------------- the checks


def test_fakes_are_good(kit: Kit) -> None:
    library, adapter = read(kit.library()), read(kit.object())
    llama_build.check_interposable(library)
    llama_build.check_symbols(adapter, library)
    llama_build.check_loaded(adapter, library, "1.2.3")
    assert len(library.members) == 4 + 11 + 2 * 3  # functions with their variants; vtable, type and its name


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["-Wl,-Bsymbolic"], "linked with -Bsymbolic;"),
        (["-Wl,-Bsymbolic-functions"], "7 of the 7 functions that matter are called directly .*-Bsymbolic-functions;"),
        (["-fvisibility=hidden"], "does not export the class .*link-time optimisation or with hidden visibility;"),
    ],
)
def test_a_libllama_that_calls_itself_is_refused(
    cache: Path, kit: Kit, install: LlamaInstall, flags: list[str], why: str
) -> None:
    other = dataclasses.replace(install, libllama=kit.library(*flags))
    lines: list[str] = []
    with pytest.raises(NotInterposable, match=f"would never call the adapter: .*{why} install a build"):
        llama_build.build(other, progress=lines.append)
    assert lines == []  # before the slow steps


def test_protected_visibility_is_refused(kit: Kit) -> None:
    library = read(kit.library())
    name = min(library.members)
    symbols = {**library.defined, name: dataclasses.replace(library.defined[name], visibility=3)}
    with pytest.raises(NotInterposable, match=f"protected visibility \\({name}\\)"):
        llama_build.check_interposable(dataclasses.replace(library, defined=symbols))


def test_symbols_that_differ_are_listed_both_ways(cache: Path, kit: Kit, install: LlamaInstall, monkeypatch) -> None:
    library = read(kit.library())
    one_more, get_s_l = "_ZN22llama_memory_recurrent8one_moreEv", "_ZNK30llama_memory_recurrent_context7get_s_lEi"
    with pytest.raises(SymbolsDiffer, match=r"only libllama defines _ZNK.*\n.*should not define _ZN22") as caught:
        llama_build.check_symbols(read(kit.object("-DONE_LESS", "-DONE_MORE")), library)
    assert (caught.value.missing, caught.value.extra) == ((get_s_l,), (one_more,))
    with pytest.raises(SymbolsDiffer, match="only libllama defines _ZN22"):
        llama_build.check_symbols(read(kit.object()), read(kit.library("-DONE_MORE")))
    with pytest.raises(SymbolsDiffer, match="the adapter should not define llama_graph"):
        llama_build.check_symbols(read(kit.object("-DTHEIRS")), library)
    # and through the build: this library is another one than the headers say
    with pytest.raises(SymbolsDiffer, match="was not built from the same source"):
        llama_build.build(dataclasses.replace(install, libllama=kit.library("-DONE_MORE")), progress=None)
    assert not list(cache.rglob("*.so"))


def test_symbols_of_the_adapter_must_be_visible_and_of_this_machine(kit: Kit) -> None:
    library, adapter = read(kit.library()), read(kit.object())
    with pytest.raises(SymbolsDiffer, match="compiled for another machine"):
        llama_build.check_symbols(dataclasses.replace(adapter, machine=243), library)
    name = min(adapter.members)
    symbols = {**adapter.defined, name: dataclasses.replace(adapter.defined[name], visibility=3)}
    with pytest.raises(SymbolsDiffer, match="wrong visibility"):
        llama_build.check_symbols(dataclasses.replace(adapter, defined=symbols), library)


def test_loading_tells_what_the_adapter_lacks(kit: Kit, monkeypatch) -> None:
    library, adapter = read(kit.library()), read(kit.object())
    with pytest.raises(SymbolsDiffer, match="does not export: absent_function; reinstall"):
        llama_build.check_loaded(read(kit.object("-DNEEDS_FUNCTION")), library)
    with pytest.raises(LlamaBuildError, match=r"cannot be loaded together .*\n.*undefined symbol: absent_data"):
        llama_build.check_loaded(read(kit.object("-DNEEDS_DATA")), library)
    with pytest.raises(SymbolsDiffer, match=r"runs with ggml 1\.2\.3, but the headers are those of ggml 1\.2\.4"):
        llama_build.check_loaded(adapter, library, "1.2.4")


def test_loading_at_once_is_explained(kit: Kit, monkeypatch) -> None:
    monkeypatch.setenv("LD_BIND_NOW", "1")
    with pytest.raises(LlamaBuildError, match="unset LD_BIND_NOW"):
        llama_build.check_loaded(read(kit.object("-DNEEDS_FUNCTION")), read(kit.library()))


def test_a_class_that_stays_libllamas_own_is_seen(kit: Kit, monkeypatch) -> None:
    library, adapter = read(kit.library()), read(kit.object())
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library.path))
        with pytest.raises(NotInterposable, match=r"still uses its own .*is another copy of libllama preloaded"):
            llama_build.check_loaded(adapter, library)


def test_the_words_that_the_linker_fills_in_are_looked_at(kit: Kit) -> None:
    adapter = read(kit.object())
    destructor, table = "_ZN30llama_memory_recurrent_contextD1Ev", "_ZTV30llama_memory_recurrent_context"

    def load(library: SharedObject) -> None:
        # the class's first virtual function, behind two words of the vtable that are no functions
        words = {destructor: ((library.defined[table].value + 16, 0),)}
        llama_build.check_loaded(adapter, dataclasses.replace(library, bound_at_load=words))

    load(read(kit.library()))
    with pytest.raises(NotInterposable, match=f"still uses its own {destructor}"):
        load(read(kit.library("-Wl,-Bsymbolic")))


def test_files_that_are_no_libraries(tmp_path: Path, kit: Kit) -> None:
    path = tmp_path / "libllama.so"
    for data, why in [(b"", "no 64-bit ELF"), (b"\x7fELF\x01" + b"\0" * 60, "no 64-bit ELF"), (None, "damaged")]:
        path.write_bytes(kit.library().read_bytes()[:3000] if data is None else data)
        with pytest.raises(LlamaBuildError, match=why):
            read(path)
    with pytest.raises(LlamaBuildError, match="cannot read"):
        read(tmp_path / "absent.so")


# ------------------------------------------------------------------------------------------------------------ building


def test_build_and_the_cache_folder(cache: Path, install: LlamaInstall) -> None:
    lines: list[str] = []
    path = llama_build.build(install, progress=lines.append)
    assert path.is_relative_to(cache) and path.name == "librcache_llama.so"
    assert [line.split()[0] for line in lines] == ["taking", "compiling", "checking", "the"]
    assert {p.name.split("-")[0] for p in cache.iterdir()} == {"llama", "headers"}  # nothing temporary is left
    about = json.loads((path.parent / "build.json").read_text())
    assert (about["llama_cpp_python"], about["ggml"]) == (VERSION, "1.2.3")

    inode = path.stat().st_ino
    lines.clear()
    assert llama_build.build(install, progress=lines.append) == path
    assert (lines, path.stat().st_ino) == ([], inode)
    assert llama_build.build(install, progress=lines.append, force=True) == path
    assert path.stat().st_ino != inode


def test_another_libllama_is_checked_anew(cache: Path, kit: Kit, install: LlamaInstall) -> None:
    smoked: list[Path] = []

    def smoke(path: Path, of: LlamaInstall) -> None:
        assert of == install
        smoked.append(path)

    path = llama_build.build(install, progress=None)
    for _ in range(2):
        assert llama_build.build(install, progress=None, smoke=smoke) == path
    assert smoked == [path]  # also when the rest was checked before
    first = install.libllama.stat().st_mtime_ns
    os.utime(install.libllama, ns=(1, 1))
    lines: list[str] = []
    assert llama_build.build(install, progress=lines.append, smoke=smoke) == path
    assert smoked[1:] == [path]
    assert lines == [f"checking the llama.cpp adapter for {install.libllama}"]
    llama_build.build(install, progress=None, force=True)
    os.utime(install.libllama, ns=(first, first))  # that check was of the old object
    llama_build.build(install, progress=lines.append)
    assert len(lines) == 2
    shutil.copy(kit.library("-Wl,-Bsymbolic"), install.libllama)
    with pytest.raises(NotInterposable):
        llama_build.build(install, progress=None, smoke=smoke)


def test_a_failed_smoke_run_leaves_no_object(cache: Path, install: LlamaInstall) -> None:
    def smoke(path: Path, of: LlamaInstall) -> None:
        raise LlamaBuildError("smoke")

    with pytest.raises(LlamaBuildError, match="smoke"):
        llama_build.build(install, progress=None, smoke=smoke)
    assert not list(cache.rglob("*.so"))
    path = llama_build.build(install, progress=None)
    before = path.read_bytes(), path.stat().st_ino
    with pytest.raises(LlamaBuildError, match="smoke"):
        llama_build.build(install, progress=None, smoke=smoke, force=True)
    assert (path.read_bytes(), path.stat().st_ino) == before


def test_without_compiler_what_is_there_is_used(cache: Path, install: LlamaInstall, monkeypatch) -> None:
    path = llama_build.build(install, progress=None)
    monkeypatch.setenv("PATH", "")
    assert llama_build.build(install, progress=None) == path
    with pytest.raises(CompilerNotFound):
        llama_build.build(install, progress=None, force=True)


def test_a_compile_error_is_shown(cache: Path, install: LlamaInstall, tmp_path: Path, monkeypatch) -> None:
    adapter = tmp_path / "adapter" / "llama_adapter.cpp"
    adapter.parent.mkdir()
    adapter.write_text('#include "llama-memory-recurrent.h"\nint f() { return no_such_name; }\n#warning mine\n')
    monkeypatch.setattr(llama_build, "ADAPTER", adapter)
    with pytest.raises(CompileFailed, match=r"could not compile llama_adapter\.cpp .*\n.*error: .*no_such") as caught:
        llama_build.build(install, progress=None)
    assert "mine" not in str(caught.value) and "mine" in caught.value.output
    assert not list(cache.rglob("*.so"))


def test_key_changes_with_all_that_matters(cache: Path, install: LlamaInstall, tmp_path: Path, monkeypatch) -> None:
    adapter = tmp_path / "adapter" / "llama_adapter.cpp"
    include = tmp_path / "include"
    adapter.parent.mkdir()
    shutil.copytree(llama_build.INCLUDE, include)
    adapter.write_text("int one;")
    monkeypatch.setattr(llama_build, "ADAPTER", adapter)
    monkeypatch.setattr(llama_build, "INCLUDE", include)
    compiler = Compiler(("/usr/bin/c++",), "12.2.0", "x86_64-linux-gnu")
    paths = []

    def note(compiler: Compiler = compiler, install: LlamaInstall = install) -> None:
        paths.append(llama_build.object_path(install, compiler))

    note()
    note(compiler=dataclasses.replace(compiler, command=("/usr/bin/c++", "-m64")))
    note(compiler=dataclasses.replace(compiler, version="12.2.1"))
    note(compiler=dataclasses.replace(compiler, machine="aarch64-linux-gnu"))
    note(install=dataclasses.replace(install, version="0.3.35"))
    adapter.write_text("int two;")
    note()
    (adapter.parent / "part.h").write_text("int three;")
    note()
    header = include / "rcache_plugin.h"
    header.write_text(re.sub(r"(#define RCACHE_ABI_VERSION) \d+", r"\1 77", header.read_text()))
    note()
    assert paths[-1].parent.name.startswith("abi77-")
    (include / "rcache_decl.h").write_text("// changed")
    note()
    monkeypatch.setattr(llama_build, "_COMPILE_FLAGS", (*llama_build._COMPILE_FLAGS, "-g"))
    note()
    assert len(set(paths)) == len(paths) == 10
    monkeypatch.setattr(sys, "version_info", (3, 99))
    note(install=dataclasses.replace(install, folder=tmp_path))
    assert paths[-1] == paths[-2]


TWO_BUILDS = """
    import sys
    from pathlib import Path
    from rcache_plugin import llama_build
    llama_build.ADAPTER = Path({adapter!r})
    install = llama_build.LlamaInstall({version!r}, Path({folder!r}), Path({library!r}))
    print(llama_build.build(install, progress=lambda line: print(line, flush=True)))
"""


@pytest.mark.parametrize("text", [None, "", "[]", "{}"])
def test_an_object_whose_description_is_lost_is_built_again(
    cache: Path, install: LlamaInstall, text: str | None
) -> None:
    path = llama_build.build(install, progress=None)
    about, whole = path.parent / "build.json", (path.parent / "build.json").read_text()
    about.unlink() if text is None else about.write_text(text)
    os.utime(install.libllama, ns=(1, 1))
    assert llama_build.build(install, progress=None) == path
    assert about.read_text() == whole


def test_two_processes_build_once(cache: Path, kit: Kit, install: LlamaInstall, tmp_path: Path) -> None:
    log, gate = tmp_path / "compiled", tmp_path / "gate"
    compiler = tmp_path / "slow-c++"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *-shared*) echo >> {log}; while [ ! -e {gate} ]; do sleep 0.05; done;; esac\n'
        'exec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    code = children.textwrap.dedent(TWO_BUILDS).format(
        adapter=str(kit.adapter), version=VERSION, folder=str(install.folder), library=str(install.libllama)
    )
    command, env = [sys.executable, "-c", code], {"CXX": str(compiler)}
    with children.start(command, env=env) as first:
        children.wait_until(log.exists, what="first process compiles")
        with children.start(command, env=env) as second:
            assert second.stdout is not None
            assert "another process is building" in second.stdout.readline()
            gate.touch()
            results = [children.finish(child) for child in (first, second)]
    assert [code for code, _, _ in results] == [0, 0], results
    paths = {out.splitlines()[-1] for _, out, _ in results}
    assert len(paths) == 1 and Path(paths.pop()).is_file()
    assert log.read_text() == "\n"


def test_what_a_killed_build_left_is_removed(cache: Path, install: LlamaInstall) -> None:
    left, other = cache / f".tmp-{VERSION}-abc", cache / ".tmp-0.3.35-abc"
    for folder in (left, other):
        folder.mkdir(parents=True)
        (folder / "big").write_text("")
    llama_build.build(install, progress=None)
    assert (left.exists(), other.exists()) == (False, True)  # the other version may be in the making


def test_a_cache_folder_that_cannot_be_used(install: LlamaInstall, cache: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(llama_build.ENV_CACHE_DIR, str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheFolderError, match=r"cannot use the folder .*file/cache: .* set RCACHE_CACHE_DIR"):
        llama_build.build(install, progress=None)


def test_the_cache_folder_is_the_users_or_the_one_named(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv(llama_build.ENV_CACHE_DIR, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert llama_build.cache_dir() == tmp_path / "rcache"
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(CacheFolderError, match="platformdirs is missing"):
        llama_build.cache_dir()
    monkeypatch.setenv(llama_build.ENV_CACHE_DIR, "~/here")
    assert llama_build.cache_dir() == Path.home() / "here"


def test_a_stamp_that_cannot_be_kept_is_no_error(cache: Path, install: LlamaInstall, monkeypatch) -> None:
    path = llama_build.build(install, progress=None)
    os.utime(install.libllama, ns=(1, 1))

    def touch(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", touch)
    lines: list[str] = []
    assert llama_build.build(install, progress=lines.append) == path
    assert "it will be, each time" in lines[-1]


def test_command(cache: Path, install: LlamaInstall, monkeypatch, capsys) -> None:
    monkeypatch.setattr(llama_build, "find_install", lambda: install)
    assert llama_build.build_command(force=False, verbose=True) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"llama-cpp-python {VERSION} in {install.folder}"
    assert re.fullmatch(rf"{cache}/.*librcache_llama\.so \(\d+\.\d s\)", out[-1])
    monkeypatch.setenv("PATH", "")
    for force, verbose in itertools.product([True], [False, True]):
        assert llama_build.build_command(force, verbose) == 2
        assert capsys.readouterr().err.startswith("rcache: error: no working C++ compiler")


# ------------------------------------------------------------------------------------------------------ the real thing


@pytest.fixture(scope="module")
def real() -> tuple[LlamaInstall, Path]:
    """The installed llama-cpp-python, and the adapter compiled for it now. The first time, headers are downloaded."""
    install = llama_build.find_install()
    return install, llama_build.build(install, force=True)


def test_real_adapter_takes_the_place_of_the_real_class(real: tuple[LlamaInstall, Path]) -> None:
    install, path = real
    library, adapter = read(install.libllama), read(path)
    llama_build.check_interposable(library)
    llama_build.check_symbols(adapter, library)
    llama_build.check_loaded(adapter, library, json.loads((path.parent / "build.json").read_text())["ggml"])
    assert len(library.members) >= 47 + 6  # COMPAT: 47 to 50 functions; two of each of vtable, type and its name


def test_real_adapter_compiles_without_warnings(real: tuple[LlamaInstall, Path], tmp_path: Path) -> None:
    headers = Headers(real[0].release, llama_build.cache_dir() / f"headers-{real[0].release}")
    flags = ["-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    llama_build.compile_object(Compiler.find(), headers, llama_build.ADAPTER, tmp_path / "adapter.so", flags)


def test_libraries_are_read_as_nm_reads_them(real: tuple[LlamaInstall, Path]) -> None:
    for path in (real[0].libllama, real[1]):
        known = {False: set(), True: set()}
        lines = subprocess.run(["nm", "-D", str(path)], check=True, capture_output=True, text=True).stdout.splitlines()
        for line in lines:
            kind, name = line[16:].split()
            if kind != "w":
                known[kind == "U"].add(name.partition("@")[0])
        found = read(path)
        assert (set(found.defined), set(found.undefined)) == (known[False], known[True])
