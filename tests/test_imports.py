"""What may import what, and that importing the package has no effects."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from children import ROOT

import rcache_plugin

PACKAGE = ROOT / "rcache_plugin"

# module -> the modules of this package that it may import. What is not listed here may import nothing of the package.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "ubatch": {"errors"},
    "batch": {"errors", "ubatch"},
    "spec": {"errors"},
    "cells": {"errors", "ubatch"},
    "slots": {"errors", "ubatch", "cells"},
    "tree": {"errors"},
    "state_io": {"errors", "ubatch", "spec", "cells"},
    "state_file": {"errors", "ubatch", "spec", "cells", "state_io"},
    "state_inspect": {"errors", "ubatch", "spec", "state_io", "state_file"},
    "_ffi": {"errors"},
    "ggml_lib": {"errors", "_ffi"},
    "buffers": {"errors", "spec", "_ffi", "ggml_lib", "_rcache"},
    "_process": set(),
    "llama_errors": {"errors"},
    "llama_install": {"llama_errors"},
    "llama_cache": {"llama_errors"},
    "llama_headers": {"_process", "llama_errors", "llama_install", "llama_cache"},
    "_llama_smoke": set(),
    "llama_symbols": {"_process", "llama_errors", "llama_install"},
    "llama_build": {
        "_process", "llama_errors", "llama_install", "llama_cache", "llama_headers", "llama_symbols",
    },
    "history": {"errors", "ubatch"},
    "checkpoint": {"errors", "ubatch", "cells", "history", "tree"},
    "rewind": {"errors", "ubatch", "cells", "checkpoint"},
    "restore": {"errors", "ubatch", "cells", "slots", "state_io"},
    "cache": {
        "errors", "ubatch", "spec", "cells", "slots", "history", "checkpoint", "rewind", "restore", "state_io",
        "state_file", "ggml_lib", "buffers",
    },
    "vtable": {"errors", "ubatch", "spec", "slots", "state_io", "ggml_lib", "cache", "_rcache"},
    "table_client": {"errors", "ubatch", "vtable", "_rcache"},
}
METADATA = {
    "errors", "ubatch", "batch", "spec", "cells", "slots", "history", "tree", "checkpoint", "rewind", "restore",
    "state_io", "state_file", "state_inspect",
}
EDGE = {"__init__", "__main__", "cli"}
FOREIGN_OF_METADATA = {"cffi", "_cffi_backend", "ctypes", "ggml", "llama_cpp", "gguf", "tokenizers", "rich"}


def modules() -> dict[str, Path]:
    """Dotted name below the package -> file."""
    return {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in sorted(PACKAGE.rglob("*.py"))}


def imports(name: str, path: Path) -> tuple[set[str], set[str]]:
    """(modules of the package, top names of others) that `path` imports anywhere, type checking apart."""
    own: set[str] = set()
    others: set[str] = set()
    known = {*modules(), "_rcache"}
    folder = name.split(".")[:-1]
    for node in _nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) + 1 - node.level] if node.level else []
            stem = ".".join(["rcache_plugin" if node.level else "", *base, node.module or ""]).strip(".")
            targets = [f"{stem}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            head, _, rest = target.partition(".")
            if head != "rcache_plugin":
                others.add(head)
            else:
                own.add(next((m for m in (rest, rest.rpartition(".")[0]) if m in known), "__init__"))
    return own, others


def _nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING:``."""
    found: list[ast.AST] = []
    queue: list[ast.AST] = [tree]
    while queue:
        node = queue.pop()
        found.append(node)
        only_types = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        queue.extend(node.orelse if isinstance(node, ast.If) and only_types else ast.iter_child_nodes(node))
    return found


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_downwards_only(name: str) -> None:
    own, others = imports(name, modules()[name])
    at_edge = name in EDGE or name.startswith("hosts")
    if name in MAY_IMPORT:
        assert own <= MAY_IMPORT[name], f"{name} imports {sorted(own - MAY_IMPORT[name])}"
    else:
        assert at_edge, f"{name} is new: give it a place in this table"
    if name in METADATA:
        assert not others & FOREIGN_OF_METADATA
    host = name.rpartition("hosts.")[2].lstrip("_") if at_edge else ""
    assert "ggml" not in others or host.startswith("mamba")
    assert "llama_cpp" not in others or host.startswith("llama")


def test_the_table_of_imports_would_see_a_wrong_one(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "def f():\n    from .hosts import _gguf\n    import ggml.utils\n"
        "from .cells import CellTable\nimport rcache_plugin.spec as s\n"
        "if TYPE_CHECKING:\n    from . import slots\nelse:\n    from . import errors\n"
    )
    assert imports("wrong", wrong) == ({"hosts._gguf", "cells", "spec", "errors"}, {"ggml"})


@pytest.mark.parametrize("name", sorted(METADATA & set(modules())))
def test_metadata_modules_load_neither_ggml_nor_cffi(name: str, child) -> None:
    out = child(
        f"""
        import sys
        import rcache_plugin.{name}
        print(sorted({FOREIGN_OF_METADATA - {"ctypes"}} & set(sys.modules)))
        """
    )
    assert out.strip() == "[]"  # NumPy itself imports ctypes


def test_import_loads_no_foreign_library(child) -> None:
    out = child(
        """
        import pathlib, sys, threading
        before = threading.active_count()
        import rcache_plugin
        rcache_plugin.__doc__, dir(rcache_plugin)
        names = ("cffi", "_cffi_backend", "ggml", "llama_cpp", "gguf", "tokenizers", "rich", "rcache_plugin._rcache")
        print([n for n in names if n in sys.modules])
        maps = pathlib.Path("/proc/self/maps")
        print([s for s in ("libggml", "libllama", "_rcache") if maps.exists() and s in maps.read_text()])
        print(threading.active_count() - before)
        """
    )
    assert out.split("\n")[:3] == ["[]", "[]", "0"]


EXPORTS = """
    Batch CacheSpec CellTable GgmlLib HostVTable RcacheError RecurrentCache SlotPlan StateBuffers TableClient UBatch
    __version__ factory_address plan_slots split_equal split_seq
""".split()


def test_every_exported_name_is_there_and_the_list_is_pinned() -> None:
    assert sorted(rcache_plugin.__all__) == EXPORTS
    for name in rcache_plugin.__all__:
        assert getattr(rcache_plugin, name) is not None
    assert set(rcache_plugin.__all__) <= set(dir(rcache_plugin))
    with pytest.raises(AttributeError, match="no_such_name"):
        rcache_plugin.no_such_name  # noqa: B018
