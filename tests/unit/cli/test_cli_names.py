"""The name of a sweep, in every command that takes a RUN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.queried_runs import write_run
from helpers.workspaces import make_workspace

import slurmtrain
from slurmtrain.cli import cli, main

SWEEP = "00000000sw"
OLD, COMPLETED, FAILED, OPEN = "0000000001", "0000000002", "0000000003", "0000000004"
ALL = [COMPLETED, FAILED, OPEN]
# What a command does where a name means the three runs of a sweep: which it takes, and how it is called.
TAKES = {
    "status": (ALL, "status cnn --json"),
    "compare": (ALL, "compare cnn --json"),
    "best": ([COMPLETED, FAILED], "best cnn --by acc --top 9 --json"),
    "plot": (ALL, "plot cnn acc --json"),
    "scale": (ALL, "scale cnn --json"),
    "cost": (ALL, "cost cnn --json"),
    "show": ([OPEN], "show cnn --json"),
    "doctor": ([FAILED], "doctor cnn --json"),
    "why": ([FAILED], "why cnn --json"),
    "diff": ([OPEN], "diff cnn 0000000001 --json"),
    "checkpoints": ([OPEN], "checkpoints cnn --json"),
    "verify": ([OPEN], "verify cnn --json"),
    "prune": ([OPEN], "prune cnn --dry-run --json"),
    "logs": ([OPEN], "logs cnn --paths"),
    "export": ([OPEN], "export cnn --to x.pt"),
    "checkpoint": ([OPEN], "checkpoint cnn --no-wait"),
    "resume": ([FAILED], "resume cnn --failed --dry-run --json"),
    "note": ([OPEN], "note cnn hello --json"),
    "tag": (ALL, "tag cnn good --json"),
    "archive": (ALL, "archive cnn --json"),
    "cancel": ([OPEN], "cancel cnn --json"),
    "wait": (ALL, "wait cnn --json"),
    "delete": (ALL, "delete cnn --yes --json"),
}
# With tests of their own: they submit, start a server, or write a page.
ELSEWHERE = {"rerun", "ui", "report"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = make_workspace(tmp_path_factory.mktemp("names") / "runs")
    write_run(workspace, 1, metrics={"acc": 0.99}, params={"lr": 1})
    for run_id, state in ((COMPLETED, "completed"), (FAILED, "failed"), (OPEN, "created")):
        metrics = {} if state == "created" else {"acc": 0.5 + int(run_id) / 100}
        write_run(workspace, int(run_id), state=state, sweep=SWEEP, params={"lr": int(run_id)}, metrics=metrics)
    return workspace.root.path


def test_each_command_that_takes_a_run_has_its_line_here() -> None:
    takes_run = set()
    for name in cli.places:
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        words = [each.metavar or "" for each in getattr(command, "params", ()) if not each.opts[0].startswith("-")]
        if any("RUN" in word or word in ("A", "B") for word in words):
            takes_run.add(name)
    assert takes_run <= TAKES.keys() | ELSEWHERE, "docs/reference/cli.md has a table of them, too"


def test_the_name_of_a_sweep_means_all_its_runs_or_it_is_said_which_was_taken(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (expected, words) in TAKES.items():
        if name not in cli.places:
            continue
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(["--runs", str(root), *words.split()])
        printed = capsys.readouterr()
        says = f"cnn: 3 runs of sweep {SWEEP}, and this takes one of them: {expected[0]} ("
        is_for_one = name in ("show", "doctor", "why", "diff", "checkpoints", "verify", "prune", "logs", "export",
                              "checkpoint", "note")  # fmt: skip
        assert (says in printed.err) == is_for_one, (name, printed.err)
        if printed.out.startswith("{") and not is_for_one:
            assert sorted(ids_in(json.loads(printed.out))) == expected, name
        assert OLD not in printed.out or name == "diff", name


def ids_in(answer: dict[str, Any]) -> list[str]:
    return [run["id"] for run in answer["runs"]]


def test_a_name_whose_newest_run_was_submitted_alone_is_compared_with_its_namesakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = make_workspace(tmp_path / "runs")
    for number in (1, 2, 3):
        write_run(workspace, number, metrics={"acc": number / 10}, params={"lr": number})
    for command in ("compare", "best"):
        with pytest.raises(SystemExit):
            main(["--runs", str(workspace.root.path), command, "cnn", "--by", "acc", "--json"])
        printed = capsys.readouterr()
        assert "cnn: the newest was submitted alone; these are all 3 runs of this name" in printed.err
        assert json.loads(printed.out)["runs"][0]["id"] == "0000000003"
    registry = slurmtrain.Registry(workspace.root.path)
    assert [run.id for run in registry.runs("cnn")] == ["0000000003"]
    assert len(registry.runs(where="name = cnn")) == 3
