"""``rcache doctor`` where something is missing or broken: a machine in a folder, that child processes see as theirs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from children import RCACHE, ROOT, run

ENVIRONMENT = ("RCACHE_GGML", "RCACHE_LLAMA_ANY_VERSION", "LLAMA_CPP_LIB_PATH", "CXX")
"""Variables that change what is found; empty unless a test sets them."""

ABORTING = "#include <stdlib.h>\n__attribute__((constructor)) static void begin(void) { abort(); }\n"


class Machine:
    """The machine that the tests run on, with changes; a cache folder of its own, empty at first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = folder / "site"
        """Ahead of all other places that Python imports from."""
        self.site.mkdir()
        self.cache = folder / "cache"
        self.env = {**dict.fromkeys(ENVIRONMENT, ""), "PYTHONPATH": str(self.site), "RCACHE_CACHE_DIR": str(self.cache)}
        del self.env["LLAMA_CPP_LIB_PATH"]
        self._start: list[str] = ["import sys"]

    def at_start(self, *lines: str) -> None:
        """Code that each Python runs first."""
        self._start += lines
        (self.site / "sitecustomize.py").write_text("\n".join(self._start) + "\n")

    def without(self, *modules: str) -> None:
        """Imports of these fail, and nothing finds them."""
        self.at_start(*(f"sys.modules[{name!r}] = None" for name in modules))

    def package(self) -> Path:
        """A copy of this package, to be damaged; its folder."""
        target = self.site / "rcache_plugin"
        shutil.copytree(ROOT / "rcache_plugin", target, ignore=shutil.ignore_patterns("__pycache__"))
        # An editable install finds in the checkout what is missing here.
        self.at_start("sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in getattr(f, '__name__', '')]")
        return target

    def compiled(self) -> Path:
        """The compiled part of such a copy."""
        (file,) = self.package().glob("_rcache*.so")
        return file

    def doctor(self, expect: int) -> dict[str, Any]:
        """``rcache doctor --json``."""
        return json.loads(self.run("--json", expect=expect))

    def run(self, *words: str, expect: int) -> str:
        """``rcache doctor``; what it prints. It says nothing on stderr, whatever it meets."""
        done = run([*RCACHE, "doctor", *words], env=self.env, expect=expect, cwd=self.folder)
        assert done.stderr == ""
        return done.stdout


def needed(report: dict[str, Any]) -> list[tuple[str, str, str | None]]:
    """(part, what, mend) of what keeps the main job from running."""
    return [(p["part"], p["what"], p["mend"]) for p in report["problems"] if p["needed"]]


def others(report: dict[str, Any], part: str) -> list[tuple[str, str | None]]:
    """(what, mend) of the other problems of a part."""
    return [(p["what"], p["mend"]) for p in report["problems"] if not p["needed"] and p["part"] == part]


def library(path: Path, source: str) -> Path:
    """Compiles a shared object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path
