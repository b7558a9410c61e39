"""Runs both sides of `exchange_child` on several models, once for all tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import children
import llama_child
import llama_models

MODELS = ("mamba", "rwkv7", "granite-hybrid", "qwen35")
PURE = ("mamba", "rwkv7")
SIDES = ("stock", "rcache")
CHILD = Path(__file__).with_name("exchange_child.py")


class Lacking(dict[str, Any]):
    """What was found, without what stock would have done had it lived: to ask for that is a `children.StockDied`."""

    def __init__(self, found: dict[str, Any], died: children.StockDied) -> None:
        super().__init__(found)
        self.died = died

    def __missing__(self, key: str) -> Any:
        if key.startswith("stock"):
            raise self.died
        raise KeyError(key)


class Exchanges:
    """What both sides found, by model; made on first use, two children for each model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[str, dict[str, dict[str, Any]]] = {}

    def files(self, model: str, *sides: str) -> Path:
        """The folder with what these sides, both by default, have written. Raises `children.StockDied`."""
        found = self.of(model)
        for side in sides or SIDES:
            found[side]
        return self.folder / model

    def of(self, model: str) -> dict[str, dict[str, Any]]:
        """Side -> what it found. Where stock has died, ours has exchanged with itself."""
        if model not in self._found:
            folder = self.folder / model
            folder.mkdir()
            path = llama_models.write(model, folder)
            self._found[model] = run(path, folder)
        return self._found[model]


def run(model: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Both sides at once. Raises `children.ChildFailed` unless both end well, or only stock dies of itself."""
    started = {side: children.start(command(side, model, folder), env=llama_child.QUIET) for side in SIDES}
    ended = {"stock": children.finish(started["stock"])}
    died = children.stock_died(*ended["stock"])
    if died is not None:
        (folder / "stock.died").touch()  # the other side waits for no files of it then
    ended["rcache"] = children.finish(started["rcache"])
    ended_well = {side: status == 0 for side, (status, _, _) in ended.items()}
    assert ended_well["rcache"] and (ended_well["stock"] or died), "\n".join(errors for _, _, errors in ended.values())
    found = {side: json.loads((folder / f"{side}.json").read_text()) for side in SIDES if ended_well[side]}
    return found if died is None else Lacking({"rcache": Lacking(found["rcache"], died)}, died)


def command(side: str, model: Path, folder: Path) -> list[str]:
    """The command line of one side."""
    return [sys.executable, "-X", "faulthandler", str(CHILD), side, str(model), str(folder)]
