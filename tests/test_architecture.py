"""Proves that imports go downwards only, from room to room, and that importing the package has no effects.

``python tests/test_architecture.py`` writes the drawing of the rooms into docs/architecture.md.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path
from types import FrameType

import pytest

import rcache_plugin

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rcache_plugin"
PAGE = ROOT / "docs" / "architecture.md"

# room -> the rooms that it may import, from the bottom to the top; what each is for stands in its own docstring
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "cells": {"errors"},
    "checkpoints": {"errors", "cells"},
    "memory": {"errors", "cells"},
    "states": {"errors", "cells", "checkpoints", "memory"},
    "cache": {"errors", "cells", "checkpoints", "memory", "states"},
    "capi": {"errors", "cells", "memory", "states", "cache"},
    "hosts.mamba": {"errors", "cells", "memory", "cache", "capi"},
    "hosts.llama.adapter": {"errors", "capi"},
    "hosts.llama": {"errors", "cells", "checkpoints", "memory", "cache", "capi", "hosts.llama.adapter"},
    "cli": {"errors", "cells", "memory", "states", "capi", "hosts.mamba", "hosts.llama", "hosts.llama.adapter"},
}
# modules that belong to no room, and where they may be imported
SHARED = {
    "_lazy": set(ROOMS), "_access": {"checkpoints", "cache"}, "_rcache": {"memory", "capi", "cli"}, "__init__": {"cli"},
}
METADATA = {"errors", "cells", "checkpoints", "states"}
FOREIGN_OF_METADATA = {"cffi", "_cffi_backend", "ctypes", "ggml", "llama_cpp", "gguf", "tokenizers", "rich"}
FOREIGN_OF = {
    "ggml": {"hosts.mamba"}, "llama_cpp": {"hosts.llama"}, "gguf": {"hosts.mamba"}, "cffi": {"memory", "hosts.llama"},
}


def modules() -> dict[str, Path]:
    """Dotted name below the package -> file."""
    return {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in sorted(PACKAGE.rglob("*.py"))}


def room_of(module: str) -> str:
    """The room that a module is in; its own name when it is in none."""
    inside = (room for room in ROOMS if module == room or module.startswith(f"{room}."))
    return max(inside, key=len, default=module)


def imports(name: str, path: Path, *, types: bool = False) -> tuple[set[str], set[str]]:
    """(modules of the package, top names of others) that `path` imports; with `types`, for type checking too."""
    own: set[str] = set()
    others: set[str] = set()
    known = {*modules(), "_rcache"}
    folder = name.split(".")[:-1]
    for node in _nodes(ast.parse(path.read_text()), types):
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
                continue
            stem = rest.rpartition(".")[0]
            own.add(next((m for m in (rest, stem, f"{rest}.__init__", f"{stem}.__init__") if m in known), "__init__"))
    return own, others


def _nodes(tree: ast.Module, types: bool) -> list[ast.AST]:
    """All nodes, without those under ``if TYPE_CHECKING:`` unless `types`."""
    found: list[ast.AST] = []
    queue: list[ast.AST] = [tree]
    while queue:
        node = queue.pop()
        found.append(node)
        only_types = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") and not types
        queue.extend(node.orelse if isinstance(node, ast.If) and only_types else ast.iter_child_nodes(node))
    return found


def wrong_imports(name: str, path: Path) -> list[str]:
    """What `path` imports against the direction, each with the rule that it breaks."""
    room = room_of(name)
    own, others = imports(name, path, types=True)
    found = []
    for module in sorted(own):
        target = room_of(module)
        if target == room:
            continue
        if target in SHARED and room in SHARED[target]:
            continue
        if target not in ROOMS[room]:
            allowed = ", ".join(r for r in ROOMS if r in ROOMS[room]) or "no other room"
            found.append(f"{name} imports {module}: the room {room} may import {allowed}, not {target}")
    for foreign in sorted(others & FOREIGN_OF.keys()):
        if room not in FOREIGN_OF[foreign]:
            found.append(f"{name} imports {foreign}: only {', '.join(sorted(FOREIGN_OF[foreign]))} may")
    if room in METADATA:
        found += [f"{name} imports {foreign}: {room} is metadata" for foreign in sorted(others & FOREIGN_OF_METADATA)]
    return found


EDGE = {"__init__", "__main__", "_lazy", "_access", "hosts.__init__"}


@pytest.mark.parametrize("name", sorted(modules().keys() - EDGE))
def test_imports_go_downwards_only(name: str) -> None:
    assert room_of(name) in ROOMS, f"{name} is in no room: {', '.join(ROOMS)}"
    assert wrong_imports(name, modules()[name]) == []


def test_rooms_stand_above_what_they_import() -> None:
    above: set[str] = set()
    for room, below in ROOMS.items():
        assert below <= above, f"{room} stands below {sorted(below - above)}"
        above.add(room)


def test_no_two_modules_import_each_other() -> None:
    """Within a room neither: a circle is two modules that are one. Imports for type checking do not count."""
    graph = {name: imports(name, path)[0] - {name} for name, path in modules().items() if name not in EDGE}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_a_wrong_import_is_seen(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "def f():\n    from ..hosts.mamba import gguf\n    import ggml.utils\n"
        "from .table import CellTable\nimport rcache_plugin.cells.spec as s\nfrom .. import errors\n"
        "if TYPE_CHECKING:\n    from . import slots\n    from ..states import image\nelse:\n    from . import batch\n"
    )
    own = {"hosts.mamba.gguf", "cells.table", "cells.spec", "errors", "cells.batch"}
    assert imports("cells.wrong", wrong) == (own, {"ggml"})
    assert imports("cells.wrong", wrong, types=True) == (own | {"cells.slots", "states.image"}, {"ggml"})
    assert wrong_imports("cells.wrong", wrong) == [
        "cells.wrong imports hosts.mamba.gguf: the room cells may import errors, not hosts.mamba",
        "cells.wrong imports states.image: the room cells may import errors, not states",
        "cells.wrong imports ggml: only hosts.mamba may",
        "cells.wrong imports ggml: cells is metadata",
    ]


def drawing() -> str:
    """The rooms from top to bottom, with what each imports and the first sentence of its docstring."""
    width = max(map(len, ROOMS))
    lines = []
    for room in reversed(ROOMS):
        file = PACKAGE / (room.replace(".", "/") + ".py")
        source = file if file.exists() else PACKAGE / room.replace(".", "/") / "__init__.py"
        purpose = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n\n")[0].replace("\n", " ")
        below = [r for r in reversed(ROOMS) if r in ROOMS[room] and r != "errors"]
        first, *rest = textwrap.wrap(purpose, 100 - width)
        lines.append(f"{room:<{width}}  {first}")
        lines += [f"{'':<{width}}  {line}" for line in rest]
        if below:
            lines.append(f"{'':<{width}}    -> {', '.join(below)}")
    return "\n".join(lines)


BEGIN, END = "<!-- begin: drawing() of tests/test_architecture.py -->\n```\n", "\n```\n<!-- end -->"


def test_the_drawing_is_the_table() -> None:
    """Else run this file."""
    assert BEGIN + drawing() + END in PAGE.read_text()


def test_a_step_enters_each_room_as_told() -> None:
    """The way of one ubatch in docs/architecture.md: the calls that `RecurrentCache.find_slot` makes, in order."""
    from rcache_plugin import CacheSpec, HostVTable, RecurrentCache, TableClient, UBatch

    called: list[str] = []

    def trace(frame: FrameType, event: str, arg: object) -> None:
        name, caller = frame.f_code.co_name, frame.f_back
        here, above = (Path(each.f_code.co_filename) for each in (frame, caller or frame))
        if event == "call" and PACKAGE in here.parents and not name.startswith("__"):
            if name == "find_slot" or (above == PACKAGE / "cache.py" != here) or name == "publish":
                called.append(f"{here.stem}.{name}")

    def calls(client: TableClient, ubatch: UBatch) -> list[str]:
        called.clear()
        sys.setprofile(trace)
        try:
            assert client.find_slot(ubatch) is not None
        finally:
            sys.setprofile(None)
        return called[called.index("cache.find_slot") :]

    begin = ["cache.find_slot", "planner.enter_batch", "rollback.before_step", "planner.plan"]
    end = ["slots.commit", "rollback.after_step", "observers.publish", "vtable.publish"]
    with RecurrentCache(CacheSpec.make([8], [8]), 3, placement="compact", checkpoint_cells=1) as cache:
        table = HostVTable(cache)
        client = TableClient(table.address)
        for pos in (0, 1):
            assert client.find_slot(UBatch([(0,), (1,), (2,)], [pos] * 3, [5, 6, 7])) is not None
        assert calls(client, UBatch([(0,), (1,), (2,)], [2, 2, 2], [5, 6, 7])) == begin + end
        assert cache.seq_rm(1)
        # sequence 1 starts from a row that is cleared for it
        with_rows = ["slots.starts", "slots.starts", "buffers.make_ready"]
        made = calls(client, UBatch.single(1, 0, 1, [5]))
        assert [name for name in made if name != "buffers.on_host"] == begin + with_rows + end
        other = HostVTable(cache)
        told = calls(client, UBatch.single(1, 1, 1, [5]))
        assert told[-3:] == ["observers.publish", "vtable.publish", "vtable.publish"]
        assert other.published[1] is cache.plan


METADATA_MODULES = sorted(name for name in modules() if room_of(name) in METADATA and not name.endswith("__init__"))


@pytest.mark.parametrize("name", METADATA_MODULES)
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


def test_every_exported_name_exists_and_the_list_is_pinned() -> None:
    assert sorted(rcache_plugin.__all__) == EXPORTS
    for name in rcache_plugin.__all__:
        assert getattr(rcache_plugin, name) is not None
    assert set(rcache_plugin.__all__) <= set(dir(rcache_plugin))
    with pytest.raises(AttributeError, match="no_such_name"):
        rcache_plugin.no_such_name  # noqa: B018


if __name__ == "__main__":
    text = PAGE.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(text[:start] + drawing() + text[end:])
    sys.exit(0)
