"""Where the time of a run of tests goes: wall and processor time of each test, summed up by folder and by file.

Processor time is that of the test's own process and of its children that have been waited for: unlike wall time it
says little about what else the machine did.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from typing import cast

import pytest

_CPU, _MOST_FILES = "cpu_s", 30


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class WhereTimeGoes:
    """Adds up the time of tests, in the process that reports them."""

    def __init__(self) -> None:
        """Nothing has run."""
        self._times: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._began = 0.0

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure one test, where it runs; ``item``: the test."""
        self._began = _cpu_s()
        yield

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Hand the figure on with the test's last report; ``item``: the test."""
        item.user_properties.append((_CPU, _cpu_s() - self._began))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the time of one phase of a test; ``report``: what pytest says about it."""
        times = self._times[report.nodeid.partition("::")[0]]
        times["wall"] += report.duration
        if report.when == "teardown":
            times["tests"] += 1
            times["cpu"] += cast("float", dict(report.user_properties).get(_CPU, 0.0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print both tables; ``terminalreporter``: where."""
        folders: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for path, times in self._times.items():
            parts = path.split("/")
            for kind, value in times.items():
                folders["/".join(parts[: 3 if parts[1] == "unit" else 2])][kind] += value
        for title, rows in (("folder", folders), ("file", self._times)):
            terminalreporter.section(f"time by {title}: wall s, processor s, tests")
            for name, times in sorted(rows.items(), key=lambda row: -row[1]["cpu"])[:_MOST_FILES]:
                terminalreporter.line(f"{times['wall']:8.1f} {times['cpu']:8.1f} {times['tests']:6.0f}  {name}")
