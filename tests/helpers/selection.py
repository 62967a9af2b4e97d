"""Which of the collected tests run: options of pytest that ``scripts/test`` sets."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from helpers.everyday import EVERYDAY, asked_for, is_everyday

TESTS = Path(__file__).resolve().parents[1]


def add_options(parser: pytest.Parser) -> None:
    """Declare the options; ``parser``: pytest's."""
    parser.addoption(
        "--everyday", action="store_true", help="of tests on real runs and dear unit tests, those of every day alone"
    )
    parser.addoption(
        "--asked-for-since",
        metavar="COMMIT",
        help="the other real runs and dear unit tests for which the changes since this commit ask, and nothing else",
    )
    parser.addoption("--minutes", type=float, help="skip each test that has not begun after so many minutes")


class Selection:
    """Deselects tests, and skips tests for which there is no time left."""

    def __init__(self, config: pytest.Config) -> None:
        """``config``: pytest's, with the options of :func:`add_options`."""
        self._everyday = bool(config.getoption("--everyday"))
        self._since = config.getoption("--asked-for-since")
        self._minutes = config.getoption("--minutes")
        self._began = time.monotonic()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect tests; ``config``: pytest's, ``items``: all that were collected."""
        names = {item: item.nodeid.removeprefix("tests/") for item in items}
        if self._everyday:
            _check_everyday(list(names.values()))
            chosen = {item for item, name in names.items() if is_everyday(name)}
        elif self._since:
            changed = _changed_since(self._since)
            chosen = {item for item, name in names.items() if not is_everyday(name) and asked_for(name, changed)}
        else:
            return
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]

    def pytest_runtest_setup(self) -> None:
        """Skip a test if the time is up."""
        if self._minutes is not None and time.monotonic() > self._began + self._minutes * 60:
            pytest.skip(f"not begun within {self._minutes:g} minutes; scripts/test --all runs it")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was left out; ``terminalreporter``: where."""
        if self._everyday:
            terminalreporter.line(
                "Left out: most tests on real runs, and dear unit tests of tests/helpers/everyday.py, which "
                "'scripts/test --all' runs, and 'scripts/test --since COMMIT' if their part has changed."
            )


def _check_everyday(collected: list[str]) -> None:
    """Raise UsageError if a test of every day has another name now, so that nobody would miss it."""
    files = {name.partition("::")[0] for name in collected}
    for each in EVERYDAY:
        file = each.partition("::")[0]
        is_there = any(name == each or name.startswith((f"{each}::", f"{each}[")) for name in collected)
        if not (TESTS / file).is_file() or (file in files and not is_there):
            raise pytest.UsageError(f"tests/helpers/everyday.py names {each}, which is no test")


def _changed_since(commit: str) -> list[str]:
    command = ["git", "diff", "--name-only", commit, "--"]
    listed = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True)
    return listed.stdout.split()
