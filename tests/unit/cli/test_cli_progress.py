"""Progress of what a command waits for."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from helpers.screens import screen

from slurmtrain.cli.watch_commands import _Lines, _table, describe_progress


def run(state: str, **facts: Any) -> dict[str, Any]:
    unknown = {
        "step": None,
        "total_steps": None,
        "steps_per_second": None,
        "eta_seconds": None,
        "metrics": {},
        "params": {},
    }
    return {"id": "6ak4bkw7h3", "name": "quick", "state": state, "reason": "", **unknown, **facts}


def test_only_what_is_known_is_described() -> None:
    assert describe_progress(run("running")) == ""
    assert describe_progress(run("pending", reason="waits for nodes (Priority)")) == "waits for nodes (Priority)"
    facts = {"step": 5, "total_steps": 60, "steps_per_second": 2.0, "eta_seconds": 27.5, "metrics": {"loss": 0.5}}
    assert describe_progress(run("running", **facts)) == "5/60  2/s  ETA 27s  loss=0.5"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error, of 80 columns and 20 lines."""
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "20")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (run("completed"), "6ak4bkw7h3 quick completed"),
        (run("pending", reason="waits for nodes"), "6ak4bkw7h3 quick pending waits for nodes"),
        (run("running", step=30, total_steps=60), "6ak4bkw7h3 quick running ████···· 30/60"),
    ],
    ids=lambda value: value["state"] if isinstance(value, dict) else "",
)
def test_a_run_is_shown_as_far_as_it_is_known(
    facts: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = make_terminal(monkeypatch)
    with _table() as update:
        update([facts])
    assert screen(terminal.getvalue().replace("\n", "\r\n"), 80)[-1].split() == line.split()


def sweep(size: int = 200) -> list[dict[str, Any]]:
    states = ["completed"] * (size - 8) + ["running"] * 5 + ["failed"] * 3
    return [
        run(state, params={"lr": number / 10, "epochs": 7}) | {"id": f"{number:010d}"}
        for number, state in enumerate(states)
    ]


def test_of_a_sweep_those_that_go_on_come_first_with_what_they_try_and_all_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = make_terminal(monkeypatch)
    with _table() as update:
        update(sweep())
        update(sweep())
    shown = screen(terminal.getvalue().replace("\n", "\r\n"), 80, 20)
    assert shown[0] == "200 runs: 3 failed, 5 running, 192 completed"
    assert shown[1].split() == ["ID", "NAME", "STATE", "PARAMS"]
    assert [line.split()[1:] for line in shown[2:7]] == [
        ["quick", "running", f"lr={19.2 + n / 10:.4g}"] for n in range(5)
    ]
    assert [line.split()[2] for line in shown[7:10]] == ["failed"] * 3
    assert len(shown) <= 20
    assert re.fullmatch(r"and \d+ more: \d+ completed", shown[-1])


def test_without_a_terminal_changes_are_printed_with_what_runs_try_and_progress_of_many_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = _Lines()
    lines.print(sweep())
    first = capsys.readouterr().err.splitlines()
    assert len(first) == 200 + 1
    assert first[-1].endswith(" 200 runs: 3 failed, 5 running, 192 completed")
    assert first[3].endswith(" quick 0000000003 completed lr=0.3")
    lines.print(sweep())
    assert capsys.readouterr().err == ""
