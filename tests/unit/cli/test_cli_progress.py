"""Progress of what a command waits for."""

from __future__ import annotations

import io
from typing import Any

import pytest
from helpers.screens import screen

from slurmtrain.cli.watch_commands import _bars, describe_progress


def run(state: str, **facts: Any) -> dict[str, Any]:
    unknown = {"step": None, "total_steps": None, "steps_per_second": None, "eta_seconds": None, "metrics": {}}
    return {"id": "6ak4bkw7h3", "name": "quick", "state": state, "reason": "", **unknown, **facts}


def test_only_what_is_known_is_described() -> None:
    assert describe_progress(run("running")) == ""
    assert describe_progress(run("pending", reason="waits for nodes (Priority)")) == "waits for nodes (Priority)"
    facts = {"step": 5, "total_steps": 60, "steps_per_second": 2.0, "eta_seconds": 27.5, "metrics": {"loss": 0.5}}
    assert describe_progress(run("running", **facts)) == "5/60  2/s  ETA 27s  loss=0.5"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (run("completed"), "6ak4bkw7h3 completed quick"),
        (run("pending", reason="waits for nodes"), "6ak4bkw7h3 pending quick  waits for nodes"),
        (run("completed", step=60, total_steps=60), f"6ak4bkw7h3 completed quick {'━' * 20} 60/60"),
        (run("running"), f"6ak4bkw7h3 running quick {'━' * 20}"),
    ],
    ids=lambda value: value["state"] if isinstance(value, dict) else "",
)
def test_a_bar_moves_only_while_a_run_trains(facts: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with _bars() as update:
        update([facts])
    assert screen(terminal.getvalue(), 80)[-1].split() == line.split()
