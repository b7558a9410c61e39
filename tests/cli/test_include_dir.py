"""Proves that ``rcache include-dir`` prints the folder of the C header."""

from __future__ import annotations

from pathlib import Path

from children import ROOT, rcache


def test_include_dir_has_the_header() -> None:
    assert Path(rcache("include-dir").stdout.strip(), "rcache_plugin.h").samefile(
        ROOT / "rcache_plugin" / "capi" / "include" / "rcache_plugin.h"
    )
