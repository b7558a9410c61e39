"""A pytest plugin: tests that need stock llama.cpp, where stock itself died, are an outcome of their own.

They have not passed and nothing of ours has failed, so neither word is right. They are counted as ``stock died`` in the
closing line, letter ``D``, and named with the reason before it. Only `children.StockDied` makes one.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest
from children import StockDied

OUTCOME = "stock died"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Not failed: an outcome that pytest does not count as passed either."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, StockDied):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), (item.location[1] or 0) + 1, call.excinfo.value.reason)
        report.user_properties.append((OUTCOME, call.excinfo.value.reason))
    return report


def reason(report: object) -> str | None:
    """Why it is one of these; None if it is not."""
    return dict(getattr(report, "user_properties", ())).get(OUTCOME)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    """Category, letter and word."""
    if report.outcome == "skipped" and reason(report):
        return OUTCOME, "D", (OUTCOME.upper(), {"yellow": True})
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each; the closing line has their number."""
    for report in terminalreporter.getreports(OUTCOME):
        terminalreporter.write_line(f"{OUTCOME.upper()} {report.nodeid}: {reason(report)}", yellow=True)
