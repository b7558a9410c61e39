"""Proves that tests are counted apart where stock llama.cpp dies of itself, and that a death of ours still fails.

pytest runs in a child on tests with fake children that kill themselves, as a kernel that writes past its memory does.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import children
import exchange
import llama_child
import outcomes
import pytest
from children import ChildFailed, StockDied

CONFTEST = """
import outcomes
def pytest_configure(config):
    config.pluginmanager.register(outcomes)
"""

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"

TESTS = f"""
import children, pytest

@pytest.fixture(scope="module")
def stock():
    children.run_code({DIES!r}, stock=True)

def test_in_a_fixture(stock):
    pass

def test_again(stock):
    pass

def test_in_the_test():
    children.run_code({DIES!r}, stock=True)

def test_good():
    children.run_code("pass", stock=True)

@pytest.mark.skip(reason="as usual")
def test_skipped():
    pass
"""

OURS = f"""
def test_ours():
    children.run_code({DIES!r})

def test_a_stock_that_is_ours():
    children.run_code("import rcache_plugin", stock=True)

def test_a_stock_that_only_raises():
    children.run_code("raise SystemExit(3)", stock=True)
"""


def run_pytest(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -ra\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder), f"--junitxml={folder / 'x.xml'}"]
    return children.run(command, expect=None, cwd=folder)


def test_a_death_of_stock_is_counted_apart(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, TESTS)
    assert done.returncode == 0, done.stdout
    assert re.search(r"=+ 1 passed, 1 skipped, 3 stock died in [\d.]+s =+$", done.stdout.strip())
    for name in ("test_in_a_fixture", "test_again", "test_in_the_test"):
        assert f"STOCK DIED test_it.py::{name}: stock itself died of SIGSEGV on this processor" in done.stdout
    assert "test_it.py DDD.s" in done.stdout
    assert 'tests="5"' in (tmp_path / "x.xml").read_text() and 'skipped="4"' in (tmp_path / "x.xml").read_text()


def test_a_death_of_ours_fails_beside_it(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, TESTS + OURS)
    assert done.returncode == 1
    assert re.search(r"=+ 3 failed, 1 passed, 1 skipped, 3 stock died in [\d.]+s =+$", done.stdout.strip())
    for name in re.findall(r"def (test_\w+)", OURS):
        assert f"FAILED test_it.py::{name}" in done.stdout


@pytest.mark.parametrize(
    ("code", "printed", "errors", "died"),
    [
        (-11, "", "", "SIGSEGV"),
        (-4, "", "", "SIGILL"),
        (-6, "", "double free or corruption (!prev)", "SIGABRT"),
        (-6, "", "ops.cpp:123: GGML_ASSERT(n > 0) failed", None),
        (-6, "", "terminate called after throwing an instance of 'std::bad_alloc'", None),
        (-9, "", "", None),
        (-15, "", "", None),
        (1, "", "Segmentation fault", None),
        (0, "", "", None),
    ],
)
def test_what_counts_as_a_death_of_its_own(code: int, printed: str, errors: str, died: str | None) -> None:
    found = children.stock_died(code, printed, errors)
    assert (found and found.reason) == (died and f"stock itself died of {died} on this processor")


# --- pairs -----------------------------------------------------------------------------------------------------------

LIVES = "import sys; sys.path.insert(0, {support!r}); import llama_child, pathlib; "
LIVES += "llama_child.write(pathlib.Path({out!r}), [llama_child.Trace('a script')])"


def pair(monkeypatch: pytest.MonkeyPatch, folder: Path, **ends: bool) -> list[list[llama_child.Trace]]:
    """Runs a fake stock and a fake rcache, of which some die."""

    def command(mode: str, model: Path, scripts: Path, out: Path) -> list[str]:
        good = LIVES.format(support=str(children.ROOT / "tests" / "support"), out=str(out))
        return [sys.executable, "-c", good if ends[mode] else DIES]

    monkeypatch.setattr(llama_child, "_command", command)
    return llama_child.run(llama_child.MODES, folder / "model", [], folder / "run")


def test_ours_continues_where_stock_dies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(StockDied, match="stock itself died of SIGSEGV") as caught:
        pair(monkeypatch, tmp_path, stock=False, rcache=True)
    assert [trace.name for trace in caught.value.survivors["rcache"]] == ["a script"]


@pytest.mark.parametrize("stock", [True, False])
def test_a_crash_of_ours_is_never_hidden(stock: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor where stock dies of the same."""
    with pytest.raises(ChildFailed, match="rcache: exit status -11") as caught:
        pair(monkeypatch, tmp_path, stock=stock, rcache=False)
    assert not isinstance(caught.value, StockDied)


def test_both_live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert len(pair(monkeypatch, tmp_path, stock=True, rcache=True)) == 2


@pytest.mark.parametrize("ours_dies", [False, True])
def test_an_exchange_with_a_dead_stock(ours_dies: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ours exchanges with itself then, at once, instead of waiting for files of stock."""
    real = exchange.command

    def command(side: str, model: Path, folder: Path) -> list[str]:
        if side == "stock" or ours_dies:
            return [sys.executable, "-c", DIES]
        return real(side, model, folder)

    monkeypatch.setattr(exchange, "command", command)
    exchanges = exchange.Exchanges(tmp_path)
    if ours_dies:
        with pytest.raises(AssertionError) as caught:
            exchanges.of("mamba")
        assert not isinstance(caught.value, StockDied)
        return
    found = exchanges.of("mamba")["rcache"]
    assert found["rcache data"]["same logits"] is True
    assert (exchanges.files("mamba", "rcache") / "rcache.data").exists()
    for ask in (lambda: found["stock data"], lambda: exchanges.of("mamba")["stock"], lambda: exchanges.files("mamba")):
        with pytest.raises(StockDied):
            ask()
    with pytest.raises(KeyError):
        found["else"]
    json.dumps(found)  # still a plain dict to all others


def test_the_hooks_are_in_force_here(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.pluginmanager.is_registered(outcomes)
