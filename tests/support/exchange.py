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


class Exchanges:
    """What both sides found, by model; made on first use, two children for each model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[str, dict[str, dict[str, Any]]] = {}

    def files(self, model: str) -> Path:
        """The folder with what both sides have written."""
        self.of(model)
        return self.folder / model

    def of(self, model: str) -> dict[str, dict[str, Any]]:
        """Side -> what it found."""
        if model not in self._found:
            folder = self.folder / model
            folder.mkdir()
            path = llama_models.write(model, folder)
            started = [
                children.start([sys.executable, str(CHILD), side, str(path), str(folder)], env=llama_child.QUIET)
                for side in SIDES
            ]
            ended = [children.finish(child) for child in started]
            assert [status for status, _, _ in ended] == [0, 0], "\n".join(errors for _, _, errors in ended)
            self._found[model] = {side: json.loads((folder / f"{side}.json").read_text()) for side in SIDES}
        return self._found[model]
