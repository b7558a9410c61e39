"""Set-up that all tests share; the helper for child processes stands in children.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import outcomes
import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Tests whose stock llama.cpp dies of itself are counted apart."""
    config.pluginmanager.register(outcomes)


@pytest.fixture
def child() -> Callable[..., str]:
    """``child(code, timeout=60, env=None, expect=0)``: runs Python code in a process of its own, returns its stdout."""
    return children.run_code


@pytest.fixture(scope="session")
def exchanges(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """States that stock and ours have written and read: an `exchange.Exchanges`."""
    from exchange import Exchanges

    return Exchanges(tmp_path_factory.mktemp("exchange"))


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A llama-cpp-python in small: a `llama_kit.Kit`."""
    from llama_kit import Kit

    return Kit(tmp_path_factory.mktemp("kit"))


@pytest.fixture
def build_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kit: Any) -> Path:
    """A cache folder of the test's own, the small adapter, and the small source distribution."""
    from rcache_plugin.hosts.llama.adapter import build, folders, found, headers

    for name in ("CXX", found.ENV_ANY_VERSION, found.ENV_LIB_PATH, "LD_BIND_NOW"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "cache"
    monkeypatch.setenv(folders.ENV_CACHE_DIR, str(folder))
    monkeypatch.setenv(headers.ENV_SDIST, str(kit.sdist))
    monkeypatch.setattr(build, "ADAPTER", kit.adapter)
    return folder


@pytest.fixture
def small_install(kit: Any, tmp_path: Path) -> Any:
    """The kit's install, with a libllama of the test's own: a `LlamaInstall`."""
    return kit.install(tmp_path)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line with the examples that the state machines of the cell table ran, as test_slots_stress counts them."""
    stress = sys.modules.get("test_slots_stress")
    if stress is not None and sum(stress.EXAMPLES.values()):
        terminalreporter.write_line(f"state machines of the cell table: {sum(stress.EXAMPLES.values())} examples")
    fuzz = sys.modules.get("test_state_fuzz")
    if fuzz is not None and fuzz.COUNTS:
        terminalreporter.write_line("damaged states: " + ", ".join(f"{n} {what}" for what, n in fuzz.COUNTS.items()))
