"""Proves how the llama.cpp adapter is built: the compiler, the cache folder, several processes, and the real thing."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import children
import pytest
from llama_kit import VERSION, Kit, read

from rcache_plugin.errors import RcacheError
from rcache_plugin.hosts.llama.adapter import build, folders, found, symbols
from rcache_plugin.hosts.llama.adapter import errors as errors_module
from rcache_plugin.hosts.llama.adapter.build import Compiler
from rcache_plugin.hosts.llama.adapter.errors import (
    CacheFolderError,
    CompileFailed,
    CompilerNotFound,
    LlamaBuildError,
    LlamaNotInstalled,
    NotInterposable,
    UnknownLlamaVersion,
)
from rcache_plugin.hosts.llama.adapter.found import LlamaInstall
from rcache_plugin.hosts.llama.adapter.headers import Headers


def test_a_library_that_disappears(build_cache: Path, small_install: LlamaInstall) -> None:
    small_install.libllama.unlink()
    with pytest.raises(LlamaBuildError, match=r"cannot read .*libllama\.so"):
        build.build(small_install, progress=None)
    with pytest.raises(LlamaNotInstalled, match="reinstall"):
        small_install.identity()


def test_build_refuses_an_unknown_version(build_cache: Path, small_install: LlamaInstall) -> None:
    with pytest.raises(UnknownLlamaVersion):
        build.build(dataclasses.replace(small_install, version="0.3.99"), progress=None)
    assert not build_cache.exists()


def test_all_errors_are_of_one_family() -> None:
    errors = [e for e in vars(errors_module).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(errors) == 11
    assert all(e is RcacheError or issubclass(e, LlamaBuildError) for e in errors)


def test_import_needs_no_unix_and_loads_nothing(child) -> None:
    out = child(
        """
        import sys
        sys.modules["fcntl"] = None  # as on Windows
        import rcache_plugin.hosts.llama.adapter.build
        print(sorted({"llama_cpp", "ggml", "cffi", "ctypes", "numpy", "platformdirs"} & set(sys.modules)))
        """
    )
    assert out.strip() == "[]"


# --------------------------------------------------------------------------------------------------------- the compiler


def test_no_compiler(build_cache: Path, small_install: LlamaInstall, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompilerNotFound, match=r"looked for c\+\+, g\+\+ and clang\+\+ on PATH\); install one"):
        build.build(small_install, progress=None)


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


# ------------------------------------------------------------------------------------------------------------- building


def test_build_and_the_cache_folder(build_cache: Path, small_install: LlamaInstall) -> None:
    lines: list[str] = []
    path = build.build(small_install, progress=lines.append)
    assert path.is_relative_to(build_cache) and path.name == "librcache_llama.so"
    assert [line.split()[0] for line in lines] == ["taking", "compiling", "checking", "the"]
    assert {p.name.split("-")[0] for p in build_cache.iterdir()} == {"llama", "headers"}  # nothing temporary is left
    about = json.loads((path.parent / "build.json").read_text())
    assert (about["llama_cpp_python"], about["ggml"]) == (VERSION, "1.2.3")

    inode = path.stat().st_ino
    lines.clear()
    assert build.build(small_install, progress=lines.append) == path
    assert (lines, path.stat().st_ino) == ([], inode)
    assert build.build(small_install, progress=lines.append, force=True) == path
    assert path.stat().st_ino != inode


def test_another_libllama_is_checked_anew(build_cache: Path, kit: Kit, small_install: LlamaInstall) -> None:
    smoked: list[Path] = []

    def smoke(path: Path, of: LlamaInstall) -> None:
        assert of == small_install
        smoked.append(path)

    path = build.build(small_install, progress=None)
    for _ in range(2):
        assert build.build(small_install, progress=None, smoke=smoke) == path
    assert smoked == [path]  # also when the rest was checked before
    first = small_install.libllama.stat().st_mtime_ns
    os.utime(small_install.libllama, ns=(1, 1))
    lines: list[str] = []
    assert build.build(small_install, progress=lines.append, smoke=smoke) == path
    assert smoked[1:] == [path]
    assert lines == [f"checking the llama.cpp adapter for {small_install.libllama}"]
    build.build(small_install, progress=None, force=True)
    os.utime(small_install.libllama, ns=(first, first))  # that check was of the old object
    build.build(small_install, progress=lines.append)
    assert len(lines) == 2
    shutil.copy(kit.library("-Wl,-Bsymbolic"), small_install.libllama)
    with pytest.raises(NotInterposable):
        build.build(small_install, progress=None, smoke=smoke)


def test_a_failed_smoke_run_leaves_no_object(build_cache: Path, small_install: LlamaInstall) -> None:
    def smoke(path: Path, of: LlamaInstall) -> None:
        raise LlamaBuildError("smoke")

    with pytest.raises(LlamaBuildError, match="smoke"):
        build.build(small_install, progress=None, smoke=smoke)
    assert not list(build_cache.rglob("*.so"))
    path = build.build(small_install, progress=None)
    before = path.read_bytes(), path.stat().st_ino
    with pytest.raises(LlamaBuildError, match="smoke"):
        build.build(small_install, progress=None, smoke=smoke, force=True)
    assert (path.read_bytes(), path.stat().st_ino) == before


def test_without_compiler_a_built_adapter_is_used(build_cache: Path, small_install: LlamaInstall, monkeypatch) -> None:
    path = build.build(small_install, progress=None)
    monkeypatch.setenv("PATH", "")
    assert build.build(small_install, progress=None) == path
    with pytest.raises(CompilerNotFound):
        build.build(small_install, progress=None, force=True)


def test_a_compile_error_is_shown(build_cache: Path, small_install: LlamaInstall, tmp_path: Path, monkeypatch) -> None:
    adapter = tmp_path / "adapter" / "llama_adapter.cpp"
    adapter.parent.mkdir()
    adapter.write_text('#include "llama-memory-recurrent.h"\nint f() { return no_such_name; }\n#warning mine\n')
    monkeypatch.setattr(build, "ADAPTER", adapter)
    with pytest.raises(CompileFailed, match=r"could not compile llama_adapter\.cpp .*\n.*error: .*no_such") as caught:
        build.build(small_install, progress=None)
    assert "mine" not in str(caught.value) and "mine" in caught.value.output
    assert not list(build_cache.rglob("*.so"))


def test_key_changes_with_all_that_matters(
    build_cache: Path, small_install: LlamaInstall, tmp_path: Path, monkeypatch
) -> None:
    adapter = tmp_path / "adapter" / "llama_adapter.cpp"
    include = tmp_path / "include"
    adapter.parent.mkdir()
    shutil.copytree(build.INCLUDE, include)
    adapter.write_text("int one;")
    monkeypatch.setattr(build, "ADAPTER", adapter)
    monkeypatch.setattr(build, "INCLUDE", include)
    compiler = Compiler(("/usr/bin/c++",), "12.2.0", "x86_64-linux-gnu")
    paths = []

    def note(compiler: Compiler = compiler, install: LlamaInstall = small_install) -> None:
        paths.append(build.object_path(install, compiler))

    note()
    note(compiler=dataclasses.replace(compiler, command=("/usr/bin/c++", "-m64")))
    note(compiler=dataclasses.replace(compiler, version="12.2.1"))
    note(compiler=dataclasses.replace(compiler, machine="aarch64-linux-gnu"))
    note(install=dataclasses.replace(small_install, version="0.3.35"))
    adapter.write_text("int two;")
    note()
    (adapter.parent / "part.h").write_text("int three;")
    note()
    (adapter.parent / "part.cpp").write_text("int four;")
    note()
    header = include / "rcache_plugin.h"
    header.write_text(re.sub(r"(#define RCACHE_ABI_VERSION) \d+", r"\1 77", header.read_text()))
    note()
    assert paths[-1].parent.name.startswith("abi77-")
    (include / "rcache_decl.h").write_text("// changed")
    note()
    monkeypatch.setattr(build, "_COMPILE_FLAGS", (*build._COMPILE_FLAGS, "-g"))
    note()
    assert len(set(paths)) == len(paths) == 11
    monkeypatch.setattr(sys, "version_info", (3, 99))
    note(install=dataclasses.replace(small_install, folder=tmp_path))
    assert paths[-1] == paths[-2]


TWO_BUILDS = """
    import sys
    from pathlib import Path
    from rcache_plugin.hosts.llama.adapter import build, found
    build.ADAPTER = Path({adapter!r})
    install = found.LlamaInstall({version!r}, Path({folder!r}), Path({library!r}))
    print(build.build(install, progress=lambda line: print(line, flush=True)))
"""


@pytest.mark.parametrize("text", [None, "", "[]", "{}"])
def test_an_object_whose_description_is_lost_is_built_again(
    build_cache: Path, small_install: LlamaInstall, text: str | None
) -> None:
    path = build.build(small_install, progress=None)
    about, whole = path.parent / "build.json", (path.parent / "build.json").read_text()
    about.unlink() if text is None else about.write_text(text)
    os.utime(small_install.libllama, ns=(1, 1))
    assert build.build(small_install, progress=None) == path
    assert about.read_text() == whole


def test_two_processes_build_once(build_cache: Path, kit: Kit, small_install: LlamaInstall, tmp_path: Path) -> None:
    log, gate = tmp_path / "compiled", tmp_path / "gate"
    compiler = tmp_path / "slow-c++"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *-shared*) echo >> {log}; while [ ! -e {gate} ]; do sleep 0.05; done;; esac\n'
        'exec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    code = children.textwrap.dedent(TWO_BUILDS).format(
        adapter=str(kit.adapter), version=VERSION, folder=str(small_install.folder), library=str(small_install.libllama)
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


def test_what_a_killed_build_left_is_removed(build_cache: Path, small_install: LlamaInstall) -> None:
    left, other = build_cache / f".tmp-{VERSION}-abc", build_cache / ".tmp-0.3.35-abc"
    for folder in (left, other):
        folder.mkdir(parents=True)
        (folder / "big").write_text("")
    build.build(small_install, progress=None)
    assert (left.exists(), other.exists()) == (False, True)  # the other version may be in the making


def test_a_cache_folder_that_cannot_be_used(
    small_install: LlamaInstall, build_cache: Path, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(folders.ENV_CACHE_DIR, str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheFolderError, match=r"cannot use the folder .*file/cache: .* set RCACHE_CACHE_DIR"):
        build.build(small_install, progress=None)


def test_the_cache_folder_is_the_users_or_the_one_named(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv(folders.ENV_CACHE_DIR, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folders.cache_dir() == tmp_path / "rcache"
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(CacheFolderError, match="platformdirs is missing"):
        folders.cache_dir()
    monkeypatch.setenv(folders.ENV_CACHE_DIR, "~/here")
    assert folders.cache_dir() == Path.home() / "here"


def test_an_unwritable_stamp_is_no_error(build_cache: Path, small_install: LlamaInstall, monkeypatch) -> None:
    path = build.build(small_install, progress=None)
    os.utime(small_install.libllama, ns=(1, 1))

    def touch(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", touch)
    lines: list[str] = []
    assert build.build(small_install, progress=lines.append) == path
    assert "it will be, each time" in lines[-1]


# ------------------------------------------------------------------------------------------------------- the real thing


@pytest.fixture(scope="module")
def real() -> tuple[LlamaInstall, Path]:
    """The installed llama-cpp-python, and the adapter compiled for it now. The first time, headers are downloaded."""
    install = found.find_install()
    return install, build.build(install, force=True)


def test_real_adapter_takes_the_place_of_the_real_class(real: tuple[LlamaInstall, Path]) -> None:
    install, path = real
    library, adapter = read(install.libllama), read(path)
    symbols.check_interposable(library)
    symbols.check_symbols(adapter, library)
    symbols.check_loaded(adapter, library, json.loads((path.parent / "build.json").read_text())["ggml"])
    assert len(library.members) >= 47 + 6  # COMPAT: 47 to 50 functions; two of each of vtable, type and its name


def test_real_adapter_compiles_without_warnings(real: tuple[LlamaInstall, Path], tmp_path: Path) -> None:
    headers = Headers(real[0].release, folders.cache_dir() / f"headers-{real[0].release}")
    flags = ["-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    parts = sorted(build.ADAPTER.parent.glob("*.cpp"))
    assert build.ADAPTER in parts and len(parts) == 6
    for part in parts:  # the whole, and each by itself
        build.compile_object(Compiler.find(), headers, part, tmp_path / "adapter.so", flags)


def test_real_adapter_exports_nothing_else_of_its_own(real: tuple[LlamaInstall, Path]) -> None:
    """An exported name may take the place of libllama's; templates of the standard library are weak, and left out."""
    library, adapter = read(real[0].libllama), read(real[1])
    ours = {n for n, s in adapter.defined.items() if s.binding == symbols._STB_GLOBAL} - library.defined.keys()
    assert {n for n in ours if not n.startswith("rcache_llama_")} == set()
    assert len(ours) == 4
    assert not [name for name in adapter.defined if "6rcache" in name]


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
