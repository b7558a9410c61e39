"""Proves that an unmodified llama-cpp-python gives the same on our cache: logits, positions, statuses, states."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import children
import llama_child
import llama_models
import llama_scripts
import numpy as np
import pytest
from llama_child import Script, Trace

MODELS = ("mamba", "falcon-mamba", "mamba2", "rwkv6", "rwkv7", "granite-hybrid", "lfm2-swa", "qwen35")
"""The rest of what `llama_models` can write is for ``make test-archs``."""


def _scripts(model: str) -> list[Script]:
    return llama_scripts.parity_scripts(shifts=llama_models.models()[model].shifts)


PAIRS = [(model, script.name) for model in MODELS for script in _scripts(model)]
MANY = llama_scripts.many_sequences().name


class Runs:
    """The traces of stock and ours by (model, script), made on first use: two children for each model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stock: dict[str, Sequence[Trace] | children.StockDied] = {}
        self._ours: dict[str, Sequence[Trace]] = {}

    def of(self, model: str) -> dict[str, tuple[Trace, Trace]]:
        """Script name -> (stock, ours). Raises `children.StockDied`."""
        ours = self.ours(model)
        stock = self._stock[model]
        if isinstance(stock, children.StockDied):
            raise stock
        return {one.name: (one, other) for one, other in zip(stock, ours.values(), strict=True)}

    def ours(self, model: str) -> dict[str, Trace]:
        """Script name -> ours, also where stock has died."""
        if model not in self._ours:
            scripts = _scripts(model) + ([llama_scripts.many_sequences()] if model == "mamba" else [])
            path = llama_models.write(model, self.folder)
            try:
                self._stock[model], self._ours[model] = llama_child.run(
                    llama_child.MODES, path, scripts, self.folder / model
                )
            except children.StockDied as e:
                self._stock[model], self._ours[model] = e, e.survivors["rcache"]
        return {trace.name: trace for trace in self._ours[model]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(("model", "script"), PAIRS)
def test_equals_stock(runs: Runs, model: str, script: str) -> None:
    stock, ours = runs.of(model)[script]
    assert llama_child.differences(ours, stock) == []


def test_256_sequences_equal_stock(runs: Runs) -> None:
    stock, ours = runs.of("mamba")[MANY]
    assert llama_child.differences(ours, stock) == []


@pytest.mark.parametrize("model", MODELS)
def test_our_class_was_in_use_and_its_own_was_not(runs: Runs, model: str) -> None:
    for name, (stock, ours) in runs.of(model).items():
        made = [record["rc"] for record in stock.of("new")]
        assert [record["caches"] for record in stock.of("new")] == [0] * len(made), name
        assert [record["caches"] > 0 for record in ours.of("new")] == made, name


@pytest.mark.parametrize("model", MODELS)
def test_all_caches_are_gone_with_their_contexts(runs: Runs, model: str) -> None:
    assert {name: ours.n_caches for name, ours in runs.ours(model).items() if ours.n_caches} == {}


@pytest.mark.parametrize("model", MODELS)
def test_ours_runs_every_script_to_its_end(runs: Runs, model: str) -> None:
    """Needs no stock, so that ours is still tested where that dies."""
    found = runs.ours(model)
    assert {script.name for script in _scripts(model)} <= found.keys()
    for name, ours in found.items():
        assert ours.all_logits() or name == "refused context", name
        assert all(np.isfinite(values).all() for values in ours.all_logits()), name


# --- are the comparisons worth anything? ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_stock_did_what_the_scripts_are_about(runs: Runs, model: str) -> None:
    stock = {name: pair[0] for name, pair in runs.of(model).items()}
    for name, trace in stock.items():
        assert all(np.isfinite(values).all() for values in trace.all_logits()), name
    whole = ("prefill and decode", "four lengths", "interleaved", "fork", "keep", "removal", "whole state", "unified")
    for name in whole:
        assert [r["rc"] for r in stock[name].of("decode")] == [0] * len(stock[name].of("decode")), name
    removed = [r["rc"] for r in stock["removal"].of("rm")]
    assert removed == [False] * 2 + [True] * (len(removed) - 2)
    assert {r["rc"] for r in stock["rejected batches"].of("decode")} == {0, -1}
    assert all(r["rc"] > 0 for name in stock for r in stock[name].of("load"))
    assert [r["rc"] for r in stock["refused context"].of("new")] == [False]
    assert all(f"{r['number']}.embeddings" in stock["embeddings"].arrays for r in stock["embeddings"].of("decode"))


@pytest.mark.parametrize("model", ["qwen35", "lfm2-swa"])
def test_stock_rolls_back_where_it_can(runs: Runs, model: str) -> None:
    stock, _ = runs.of(model)["rollback"]
    assert stock.of("new")[0]["sizes"][2] == 3
    assert [r["rc"] for r in stock.of("rm") if r["arguments"][1] > 0][:8:2] == [True, True, True, False]


@pytest.mark.parametrize("model", MODELS)
def test_the_state_matters_to_the_logits(runs: Runs, model: str) -> None:
    stock, _ = runs.of(model)["four lengths"]
    after_all = stock.logits(1)
    assert min(np.abs(after_all[i] - after_all[j]).max() for i in range(4) for j in range(i)) > 0.1


def _changed(trace: Trace, what: str) -> Trace:
    other = copy.deepcopy(trace)
    key = next(key for key in other.arrays if key.endswith(what))
    values = other.arrays[key].copy()
    values.view(np.uint8).flat[-1] ^= 1
    other.arrays[key] = values
    return other


def test_one_bit_is_seen(runs: Runs) -> None:
    stock, _ = runs.of("mamba")["whole state"]
    assert llama_child.differences(copy.deepcopy(stock), stock) == []
    for what in ("logits", "state"):
        assert len(llama_child.differences(_changed(stock, what), stock)) == 1
    other = copy.deepcopy(stock)
    other.records[-1]["positions"][0][1] += 1
    assert len(llama_child.differences(other, stock)) == 1
    other = copy.deepcopy(stock)
    other.of("decode")[0]["rc"] = 1
    assert "rc is 1 instead of 0" in llama_child.differences(other, stock)[0]
    del other.arrays[next(iter(other.arrays))], other.records[-1]
    assert len(llama_child.differences(other, stock)) == 3
