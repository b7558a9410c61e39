"""Set-up that all tests share; the helper for child processes stands in children.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import children
import pytest


@pytest.fixture
def child() -> Callable[..., str]:
    """``child(code, timeout=60, env=None, expect=0)``: runs Python code in a process of its own, returns its stdout."""
    return children.run_code


@pytest.fixture(scope="session")
def exchanges(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """States that stock and ours have written and read: an `exchange.Exchanges`."""
    from exchange import Exchanges

    return Exchanges(tmp_path_factory.mktemp("exchange"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line with the examples that the state machines of the cell table ran, as test_slots_stress counts them."""
    stress = sys.modules.get("test_slots_stress")
    if stress is not None and sum(stress.EXAMPLES.values()):
        terminalreporter.write_line(f"state machines of the cell table: {sum(stress.EXAMPLES.values())} examples")
    fuzz = sys.modules.get("test_state_fuzz")
    if fuzz is not None and fuzz.COUNTS:
        terminalreporter.write_line("damaged states: " + ", ".join(f"{n} {what}" for what, n in fuzz.COUNTS.items()))
