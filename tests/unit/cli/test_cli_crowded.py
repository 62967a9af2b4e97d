"""A sweep of 200 runs beside 15 single ones on terminals of any width: nothing is missing without a word."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from helpers.crowded_root import FAILED, RUNNING, SINGLE, SWEEP, SWEPT, WAITING, crowd, delete, fail
from helpers.queried_runs import write_run
from helpers.rare import rare
from helpers.terminal import on_terminal
from helpers.workspaces import make_workspace
from rich.cells import cell_len

from slurmtrain.cli.status_commands import status_command
from slurmtrain.model.run.run import RUN_STATES

# The narrowest that people use, what terminals open with, and wide ones.
WIDTHS = (40, 80, pytest.param(140, marks=rare), pytest.param(300, marks=rare))
ALSO_WIDTHS = (pytest.param(40, marks=rare), *WIDTHS[1:])
GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "crowded"
NO_RESTART = {"spec": {"requeue": {"enabled": False}}}
COUNTS = f"{FAILED} failed, {RUNNING} running, {WAITING} pending, 155 completed"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = make_workspace(tmp_path_factory.mktemp("crowded") / "runs")
    crowd(workspace)
    return workspace.root.path


@pytest.fixture(scope="module")
def long_params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with 30 parameters whose names are long, and few runs."""
    workspace = make_workspace(tmp_path_factory.mktemp("params") / "runs")
    crowd(workspace, swept=4, params=30)
    return workspace.root.path


def shown(root: Path, width: int, *arguments: str) -> list[str]:
    """The screen after a command has ended."""
    with on_terminal("--runs", str(root), *arguments, columns=width, lines=60) as terminal:
        assert terminal.wait_for_end() == 0, terminal.text
        return terminal.text.rstrip().splitlines()


def same_as_golden(lines: Sequence[str], name: str) -> bool:
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text("".join(f"{line}\n" for line in lines))
    return [*lines] == golden.read_text().splitlines()


def rows_of(lines: Sequence[str]) -> dict[str, list[str]]:
    """The words of each line of a single run, by its id."""
    return {line[:10]: line.split() for line in lines if re.match(r"00000[0-9]{5}  ", line)}


def columns_of(lines: Sequence[str]) -> set[str]:
    """The columns that are there, and those that are named as left out."""
    together = " ".join(" ".join(lines).split())
    named = re.search(r"no room in \d+ columns for ([A-Z, ]+)(?= and| '|$)", together)
    return {*lines[0].split(), *(named[1].split(", ") if named else ())}


@pytest.mark.parametrize("width", WIDTHS)
def test_status_shows_each_run_and_sweep_at_any_width(root: Path, width: int) -> None:
    lines = shown(root, width, "status")
    together = " ".join(" ".join(lines).split())
    rows = rows_of(lines)
    # Of the 20 entries the sweep is one.
    assert len(rows) == 20 - 1
    assert all(words[2] in RUN_STATES for words in rows.values())
    assert max(map(cell_len, lines)) <= width
    assert columns_of(lines) == {"ID", "NAME", "STATE", "PARAMS", "STEP", "AGE", "METRICS", "REASON"}
    for fact in (
        SWEEP,
        COUNTS,
        "lr 0.01..0.3, bs 32|64",
        "best 0000001199 val_acc=0.199",
        "3 times ValueError: the loss",
    ):
        assert fact in together, fact
    assert (
        "and 6 more: 6 completed; 'slurmtrain status --all' lists all, 'slurmtrain status NAME' the runs of that name"
        in together
    )
    assert f"'slurmtrain status {SWEEP}' lists the runs of the sweep" in together
    assert "gone" not in together
    # Names that begin alike stay different.
    names = {words[1] for words in rows.values() if words[1][0] in "r…"}
    assert len(names) == 3
    assert width != 80 or same_as_golden(lines, "status")


def test_what_was_deleted_is_listed_where_it_is_asked_for(root: Path) -> None:
    def status(*arguments: str) -> str:
        return CliRunner().invoke(status_command, ["--runs", str(root), *arguments]).stdout

    assert "gone" in status("--all")
    assert "its files were deleted" in status("gone")
    for arguments in ((), ("--where", "params.lr = 0.1"), ("--json",), ("--no-fold",)):
        assert "gone" not in status(*arguments), arguments


@pytest.mark.parametrize("width", ALSO_WIDTHS)
def test_30_parameters_with_long_names_leave_room_for_the_rest(long_params: Path, width: int) -> None:
    lines = shown(long_params, width, "status")
    rows = rows_of(lines)
    assert max(map(cell_len, lines)) <= width
    assert all(words[2] in RUN_STATES for words in rows.values())
    if "PARAMS" in lines[0]:
        place = lines[0].index("PARAMS")
        cells = [line[place:].split("  ")[0] for line in lines if line.startswith("00000500")]
        assert len(set(cells)) == SINGLE
        assert all(re.search(r"\w=\S+( …\+\d+|…)$", cell) for cell in cells)
    together = " ".join(" ".join(shown(long_params, width, "status", SWEEP)).split())
    assert re.search(r"the same in all: epochs=10 .*…\+\d+", together)


@pytest.mark.parametrize("width", ALSO_WIDTHS)
def test_top_has_a_row_for_the_sweep_which_enter_opens(root: Path, width: int) -> None:
    with on_terminal("--runs", str(root), "top", columns=width, lines=40) as terminal:
        # What is selected stands below all rows.
        terminal.wait_for("state      running")
        header, row = terminal.line_with("ID "), terminal.line_with(SWEEP)
        assert f"{FAILED}F {RUNNING}R {WAITING}PD 155CD" in row
        assert {"ID", "NAME", "STATE"} <= {*header.split()}
        assert all(words[2] in RUN_STATES for words in rows_of(terminal.lines).values())
        assert "gone" not in terminal.text
        named = re.search(r"no room for ([A-Z, \n]+)$", terminal.text, re.M)
        left_out = named[1].replace(",", "").split() if named else []
        assert {*header.split(), *left_out} == {
            "ID", "NAME", "STATE", "PARAMS", "STEP", "PROGRESS", "AGE", "METRICS", "REASON"
        }  # fmt: skip
        assert width != 80 or same_as_golden(terminal.lines[1:22], "top")
        for _ in range(5):
            terminal.press("j")
        terminal.wait_for("runs       200: 3 failed")
        terminal.press("enter")
        terminal.wait_for("0000001044")
        assert all(words[2] in RUN_STATES for words in rows_of(terminal.lines).values())
        terminal.press("x")
        terminal.wait_for(lambda text: "0000001044" not in text)
        terminal.press("q")
        assert terminal.wait_for_end() == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_waiting_shows_what_goes_on_first_and_counts_the_rest(root: Path, width: int) -> None:
    with on_terminal("--runs", str(root), "wait", SWEEP, columns=width, lines=24) as terminal:
        terminal.wait_for("more:")
        lines = [line for line in terminal.text.rstrip().splitlines() if line]
        rows = rows_of(lines)
        assert all(words[1:3] in (["cnn", "running"], ["cnn", "pending"]) for words in rows.values())
        assert [words[2] for words in rows.values()][: RUNNING + 1] == ["running"] * RUNNING + ["pending"]
        assert max(map(cell_len, lines)) <= width
        assert f"{SWEPT} runs: {COUNTS}" in " ".join(lines[:2])
        assert all(re.search(r"lr=0\.\d+ bs=\d\d", " ".join(words)) for words in rows.values())
        assert width != 80 or same_as_golden(lines, "wait")
        terminal.press("ctrl+c")
        assert terminal.wait_for_end() == 130


def test_many_runs_that_have_ended_are_summed_up_with_those_that_did_not_complete(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "runs")
    for number in range(30):
        facts = {"params": {"lr": number / 10}, "metrics": {"acc": number / 100}, "sweep": SWEEP, "days_ago": 1.01}
        run = write_run(workspace, number, "cnn", state="running" if number < 3 else "completed", **facts, **NO_RESTART)
        if number < 3:
            fail(run, "KeyError: 'x'") if number else delete(run.ended("completed"))
    with on_terminal("--runs", str(workspace.root.path), "wait", SWEEP, columns=80, lines=24) as terminal:
        assert terminal.wait_for_end() == 1
        lines = terminal.text.rstrip().splitlines()
    together = " ".join(" ".join(lines).split())
    assert (
        f"{SWEEP} cnn 2 failed, 27 completed, 1d00h old; lr 0.1..2.9; best 0000000029 acc=0.29; 2 times KeyError: 'x'"
        in together
    )
    assert [words[2] for words in rows_of(lines).values()] == ["failed", "failed"]
    assert lines[-1] == "'slurmtrain status SWEEP' lists the runs of a sweep"


@rare
def test_a_sweep_of_10000_runs_takes_few_statements_more_than_a_small_one(tmp_path: Path) -> None:
    counts = []
    for size in (200, 10_000):
        workspace = make_workspace(tmp_path / str(size) / "runs")
        crowd(workspace, swept=size)
        statements: list[str] = []
        runner, call = CliRunner(), ["--runs", str(workspace.root.path)]
        for _ in range(2):
            assert runner.invoke(status_command, call).exit_code == 0

        def count(
            _connection: object, _cursor: object, statement: str, *_: object, into: list[str] = statements
        ) -> None:
            into.append(statement)

        sa.event.listen(sa.Engine, "before_cursor_execute", count)
        try:
            printed = runner.invoke(status_command, call).stdout.splitlines()
        finally:
            sa.event.remove(sa.Engine, "before_cursor_execute", count)
        counts.append(len(statements))
        assert len(printed) == 1 + 20
        assert any(f"{size - FAILED - RUNNING - WAITING} completed" in line for line in printed)
    # Runs that have not settled, as those here, are looked at a thousand at a time; listing adds nothing to that.
    assert counts[1] - counts[0] <= 8 * 10
