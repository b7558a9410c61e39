"""Proves how shared objects are read, and the checks of adapter and libllama: each refusal with its message."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from llama_kit import Kit, read

from rcache_plugin.hosts.llama.adapter import build
from rcache_plugin.hosts.llama.adapter import symbols as symbols_module
from rcache_plugin.hosts.llama.adapter.errors import LlamaBuildError, NotInterposable, SymbolsDiffer
from rcache_plugin.hosts.llama.adapter.found import LlamaInstall
from rcache_plugin.hosts.llama.adapter.symbols import SharedObject


def test_fakes_are_good(kit: Kit) -> None:
    library, adapter = read(kit.library()), read(kit.object())
    symbols_module.check_interposable(library)
    symbols_module.check_symbols(adapter, library)
    symbols_module.check_loaded(adapter, library, "1.2.3")
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
    build_cache: Path, kit: Kit, small_install: LlamaInstall, flags: list[str], why: str
) -> None:
    other = dataclasses.replace(small_install, libllama=kit.library(*flags))
    lines: list[str] = []
    with pytest.raises(NotInterposable, match=f"would never call the adapter: .*{why} install a build"):
        build.build(other, progress=lines.append)
    assert lines == []  # before the slow steps


def test_protected_visibility_is_refused(kit: Kit) -> None:
    library = read(kit.library())
    name = min(library.members)
    symbols = {**library.defined, name: dataclasses.replace(library.defined[name], visibility=3)}
    with pytest.raises(NotInterposable, match=f"protected visibility \\({name}\\)"):
        symbols_module.check_interposable(dataclasses.replace(library, defined=symbols))


def test_symbols_that_differ_are_listed_both_ways(
    build_cache: Path, kit: Kit, small_install: LlamaInstall, monkeypatch
) -> None:
    library = read(kit.library())
    one_more, get_s_l = "_ZN22llama_memory_recurrent8one_moreEv", "_ZNK30llama_memory_recurrent_context7get_s_lEi"
    with pytest.raises(SymbolsDiffer, match=r"only libllama defines _ZNK.*\n.*should not define _ZN22") as caught:
        symbols_module.check_symbols(read(kit.object("-DONE_LESS", "-DONE_MORE")), library)
    assert (caught.value.missing, caught.value.extra) == ((get_s_l,), (one_more,))
    with pytest.raises(SymbolsDiffer, match="only libllama defines _ZN22"):
        symbols_module.check_symbols(read(kit.object()), read(kit.library("-DONE_MORE")))
    with pytest.raises(SymbolsDiffer, match="the adapter should not define llama_graph"):
        symbols_module.check_symbols(read(kit.object("-DTHEIRS")), library)
    # and through the build: this library is another one than the headers say
    with pytest.raises(SymbolsDiffer, match="was not built from the same source"):
        build.build(dataclasses.replace(small_install, libllama=kit.library("-DONE_MORE")), progress=None)
    assert not list(build_cache.rglob("*.so"))


def test_symbols_of_the_adapter_must_be_visible_and_of_this_machine(kit: Kit) -> None:
    library, adapter = read(kit.library()), read(kit.object())
    with pytest.raises(SymbolsDiffer, match="compiled for another machine"):
        symbols_module.check_symbols(dataclasses.replace(adapter, machine=243), library)
    name = min(adapter.members)
    symbols = {**adapter.defined, name: dataclasses.replace(adapter.defined[name], visibility=3)}
    with pytest.raises(SymbolsDiffer, match="wrong visibility"):
        symbols_module.check_symbols(dataclasses.replace(adapter, defined=symbols), library)


def test_loading_tells_what_the_adapter_lacks(kit: Kit, monkeypatch) -> None:
    library, adapter = read(kit.library()), read(kit.object())
    with pytest.raises(SymbolsDiffer, match="does not export: absent_function; reinstall"):
        symbols_module.check_loaded(read(kit.object("-DNEEDS_FUNCTION")), library)
    with pytest.raises(LlamaBuildError, match=r"cannot be loaded together .*\n.*undefined symbol: absent_data"):
        symbols_module.check_loaded(read(kit.object("-DNEEDS_DATA")), library)
    with pytest.raises(SymbolsDiffer, match=r"runs with ggml 1\.2\.3, but the headers are those of ggml 1\.2\.4"):
        symbols_module.check_loaded(adapter, library, "1.2.4")


def test_loading_at_once_is_explained(kit: Kit, monkeypatch) -> None:
    monkeypatch.setenv("LD_BIND_NOW", "1")
    with pytest.raises(LlamaBuildError, match="unset LD_BIND_NOW"):
        symbols_module.check_loaded(read(kit.object("-DNEEDS_FUNCTION")), read(kit.library()))


def test_a_class_that_stays_libllamas_own_is_seen(kit: Kit, monkeypatch) -> None:
    library, adapter = read(kit.library()), read(kit.object())
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library.path))
        with pytest.raises(NotInterposable, match=r"still uses its own .*is another copy of libllama preloaded"):
            symbols_module.check_loaded(adapter, library)


def test_the_words_that_the_linker_fills_in_are_looked_at(kit: Kit) -> None:
    adapter = read(kit.object())
    destructor, table = "_ZN30llama_memory_recurrent_contextD1Ev", "_ZTV30llama_memory_recurrent_context"

    def load(library: SharedObject) -> None:
        # the class's first virtual function, behind two words of the vtable that are no functions
        words = {destructor: ((library.defined[table].value + 16, 0),)}
        symbols_module.check_loaded(adapter, dataclasses.replace(library, bound_at_load=words))

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
