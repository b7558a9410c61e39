"""Proves how llama.cpp's internal headers are fetched: downloads, archives with wrong content, the cache folder."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tarfile
from pathlib import Path

import pytest
from llama_kit import CLASS_H, PKG_INFO, VERSION, Kit, pack, write_sdist

from rcache_plugin.hosts.llama.adapter import build
from rcache_plugin.hosts.llama.adapter import headers as headers_module
from rcache_plugin.hosts.llama.adapter.errors import HeadersNotFound, UnknownLlamaVersion
from rcache_plugin.hosts.llama.adapter.found import LlamaInstall
from rcache_plugin.hosts.llama.adapter.headers import Headers

CLOSED_PORT = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_RETRIES": "0",
}


def test_no_network(build_cache: Path, small_install: LlamaInstall, monkeypatch) -> None:
    monkeypatch.delenv(headers_module.ENV_SDIST)
    for name, value in CLOSED_PORT.items():
        monkeypatch.setenv(name, value)
    lines: list[str] = []
    with pytest.raises(HeadersNotFound) as caught:
        build.build(small_install, progress=lines.append)
    text = str(caught.value)
    assert re.search(r"pip could not download llama-cpp-python 0\.3\.36; check the network .* RCACHE_LLAMA_SDIST", text)
    assert "No matching distribution found" in text.splitlines()[-1]
    assert lines == ["downloading the source of llama-cpp-python 0.3.36 (50 to 80 MB) for llama.cpp's internal headers"]
    assert sorted(p.name for p in build_cache.iterdir()) == [f"llama-{VERSION}.lock"]


def test_a_download_is_used(build_cache: Path, kit: Kit, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv(headers_module.ENV_SDIST)
    packed = pack(kit.sdist, tmp_path / "packed.tar.gz")
    pip = tmp_path / "pip"
    pip.write_text(
        '#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\n'
        f'mkdir -p "$2" && cp {packed} "$2/llama_cpp_python-{VERSION}.tar.gz"\n'
    )
    pip.chmod(0o755)
    monkeypatch.setattr(headers_module, "_pip", lambda scratch: [str(pip)])
    headers = headers_module.get_headers(VERSION, progress=None)
    assert (headers.folder / "src" / "llama-memory-recurrent.h").read_text() == CLASS_H
    pip.write_text("#!/bin/sh\nexit 1\n")
    assert headers_module.get_headers(VERSION, progress=None) == headers  # from the cache folder
    (headers.folder / "src" / "llama-memory-recurrent.h").write_text("damaged")
    with pytest.raises(HeadersNotFound, match="pip could not download"):
        headers_module.get_headers(VERSION, progress=None)


def test_neither_pip_nor_venv(build_cache: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv(headers_module.ENV_SDIST)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho ensurepip is not available\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(headers_module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(HeadersNotFound, match=r"has none .*; install pip, or name .*\nensurepip is not available"):
        headers_module.get_headers(VERSION, progress=None)


@pytest.mark.parametrize("packed", [True, False])
def test_only_headers_are_kept(build_cache: Path, kit: Kit, tmp_path: Path, packed: bool, monkeypatch) -> None:
    if packed:
        monkeypatch.setenv(headers_module.ENV_SDIST, str(pack(kit.sdist, tmp_path / "a.tar.gz")))
    folder = headers_module.get_headers(VERSION, progress=None).folder
    assert folder == build_cache / f"headers-{VERSION}"
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()) == [
        *("LICENSE", "ggml/CMakeLists.txt", "ggml/src/ggml-impl.h", "manifest.json", "src/llama-memory-recurrent.h"),
    ]


def test_damaged_headers_are_replaced(build_cache: Path) -> None:
    header = headers_module.get_headers(VERSION, progress=None).folder / "src" / "llama-memory-recurrent.h"
    before = header.stat().st_ino
    headers_module.get_headers(VERSION, progress=None)
    assert header.stat().st_ino == before  # nothing is moved under the feet of another compiler
    header.write_text("damaged")
    headers_module.get_headers(VERSION, progress=None)
    assert header.read_text() == CLASS_H
    (header.parent.parent / "manifest.json").write_text("[]")
    headers_module.get_headers(VERSION, progress=None)
    assert json.loads((header.parent.parent / "manifest.json").read_text())["version"] == VERSION


def test_a_named_source_wins_over_the_cache_folder(build_cache: Path, tmp_path: Path, monkeypatch) -> None:
    headers_module.get_headers(VERSION, progress=None)
    monkeypatch.setenv(headers_module.ENV_SDIST, str(write_sdist(tmp_path / "changed", header=CLASS_H + "// changed")))
    headers = headers_module.get_headers(VERSION, progress=None)
    assert (headers.folder / "src" / "llama-memory-recurrent.h").read_text().endswith("// changed")


def test_a_source_of_another_version(build_cache: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(headers_module.ENV_SDIST, str(write_sdist(tmp_path / "older", "0.3.35")))
    with pytest.raises(HeadersNotFound, match=r"is version 0\.3\.35 of llama-cpp-python, but 0\.3\.36 is installed"):
        headers_module.get_headers(VERSION, progress=None)
    assert not (build_cache / f"headers-{VERSION}").exists()


def test_what_is_no_source(build_cache: Path, kit: Kit, tmp_path: Path, monkeypatch) -> None:
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
        monkeypatch.setenv(headers_module.ENV_SDIST, str(path))
        with pytest.raises(HeadersNotFound, match=why):
            headers_module.get_headers(VERSION, progress=None)


def test_names_in_an_archive_cannot_lead_out_of_the_folder(
    build_cache: Path, kit: Kit, tmp_path: Path, monkeypatch
) -> None:
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
        add(f"{top}/src/evil-large.h", b"\0" * (headers_module._LARGEST_FILE + 1))
    monkeypatch.setenv(headers_module.ENV_SDIST, str(packed))
    headers_module.get_headers(VERSION, progress=None)
    assert not [p for p in tmp_path.rglob("*") if "evil" in p.name and p != packed]
    assert not Path("/x").exists()
    assert (
        len([p for p in build_cache.rglob("*") if p.is_file()]) == 6
    )  # as in test_only_headers_are_kept, and the lock


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
    build_cache: Path, small_install: LlamaInstall, tmp_path: Path, monkeypatch, old: str, new: str, why: str
) -> None:
    sdist = write_sdist(tmp_path / "sdist", header=CLASS_H.replace(old, new))
    monkeypatch.setenv(headers_module.ENV_SDIST, str(sdist))
    with pytest.raises(UnknownLlamaVersion, match=rf"declare llama_memory_recurrent in a way .*{why}.*; install"):
        build.build(small_install, progress=None)


def test_headers_that_do_not_tell_the_version_of_ggml(tmp_path: Path) -> None:
    assert Headers(VERSION, tmp_path).ggml_version is None
    assert Headers(VERSION, tmp_path).features == set()
