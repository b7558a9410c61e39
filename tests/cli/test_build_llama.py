"""Proves what ``rcache build-llama`` prints, and its exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from llama_kit import VERSION

from rcache_plugin.cli.main import main
from rcache_plugin.hosts.llama.adapter import found
from rcache_plugin.hosts.llama.adapter.found import LlamaInstall


def test_it_builds_and_prints_the_path(build_cache: Path, small_install: LlamaInstall, monkeypatch, capsys) -> None:
    monkeypatch.setattr(found, "find_install", lambda: small_install)
    assert main(["build-llama", "--verbose"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"llama-cpp-python {VERSION} in {small_install.folder}"
    assert re.fullmatch(rf"{build_cache}/.*librcache_llama\.so \(\d+\.\d s\)", out[-1])


@pytest.mark.parametrize("more", [(), ("--verbose",)])
def test_no_compiler(build_cache: Path, small_install: LlamaInstall, monkeypatch, capsys, more) -> None:
    monkeypatch.setattr(found, "find_install", lambda: small_install)
    monkeypatch.setenv("PATH", "")
    assert main(["build-llama", "--force", *more]) == 2
    assert capsys.readouterr().err.startswith("rcache: error: no working C++ compiler")
