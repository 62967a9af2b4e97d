"""What the command line tells of a run's checkpoints: which there are, why they stay, how often it saves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from helpers.simulated_run import ELSEWHERE, SimulatedRun

from slurmtrain.cli import formatting
from slurmtrain.cli.checkpoint_commands import checkpoints_command
from slurmtrain.cli.describe import describe_interval
from slurmtrain.cli.status_commands import show_command, status_command
from slurmtrain.model.run.events.checkpoint_events import CheckpointFound
from slurmtrain.model.run.layout import RunDir, RunsRoot, run_id
from slurmtrain.specfile import load_spec
from slurmtrain.system.files import write_json
from slurmtrain.system.journal import Journal

SPEC = """
command: python train.py
checkpoint: {keep: {last: 2, every_steps: 100, best: {metric: val_loss}}, every: {steps: 50}}
"""
FULL = "no space left on the device"

Write = Callable[..., None]


@pytest.fixture
def builder(tmp_path: Path) -> SimulatedRun:
    """A run of this machine's executor that trains, on another machine, and has a plan."""
    directory = RunsRoot(tmp_path / "runs").run(run_id(1_700_000_000_000, 7))
    run = SimulatedRun(directory, executor="local", job="j1", now=time.time() - 60)
    run.created(name="digits", plan_hash="h", by="me").submitted(process=ELSEWHERE, host="elsewhere")
    run.started(host="elsewhere", process=ELSEWHERE)
    (tmp_path / "exp.yaml").write_text(SPEC)
    [planned] = load_spec(tmp_path / "exp.yaml", cwd=tmp_path, python="/usr/bin/python3").runs
    write_json(directory.plan, planned.plan.to_json())
    return run


@pytest.fixture
def run(builder: SimulatedRun) -> RunDir:
    """Its directory."""
    assert builder.directory is not None
    return builder.directory


@pytest.fixture
def write(builder: SimulatedRun) -> Write:
    """Write an event into rank 0's journal."""

    def write(kind: str, **fields: Any) -> None:
        builder.rank(kind, **fields)

    return write


@pytest.fixture
def saved(builder: SimulatedRun) -> Write:
    """Journal a save."""

    def saved(step: int, **fields: Any) -> None:
        defaults = {"bytes": step << 20, "seconds": 2.134, "stall_s": 0.1, "saved_at": 1_700_000_000.0 + step}
        builder.saved(step, **{**defaults, "why": "steps", **fields})

    return saved


def call(command: click.Command, run: RunDir, *arguments: str) -> Result:
    """Run a command on the runs root of this run."""
    result = CliRunner().invoke(command, [*arguments, "--runs", str(run.path.parent)], standalone_mode=False)
    assert result.exception is None, result.exception
    return result


def listed(run: RunDir, *options: str) -> list[dict[str, Any]]:
    facts = json.loads(call(checkpoints_command, run, "@last", "--json", *options).stdout)
    assert (facts["schema"], facts["run_id"]) == (1, run.id)
    entries: list[dict[str, Any]] = facts["checkpoints"]
    return entries


def rows(result: Result) -> list[list[str]]:
    """Lines as cells, which two blanks part."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in result.stdout.splitlines()]


def test_checkpoints_are_listed_with_the_reason_for_which_each_is_kept(run: RunDir, saved: Write) -> None:
    saved(50, metrics={"val_loss": 0.305})
    saved(100, metrics={"val_loss": 0.5})
    saved(150, metrics={"val_loss": None})
    saved(200)
    saved(210)
    assert {checkpoint["step"]: checkpoint["kept"] for checkpoint in listed(run)} == {
        50: "best val_loss (0.305)",
        100: "every 100 steps",
        150: None,
        200: "one of the last 2, every 100 steps",
        210: "newest",
    }


def test_a_checkpoint_in_json_has_all_that_is_known_of_it(run: RunDir, saved: Write) -> None:
    saved(50, why="asked", metrics={"val_loss": 0.5, "lr": float("nan")})
    [checkpoint] = listed(run)
    assert checkpoint == {
        "step": 50,
        "step_from": None,
        "path": str(run.checkpoints / "step-50"),
        "bytes": 50 << 20,
        "complete": True,
        "verified": False,
        "saved_at": "2023-11-14T22:14:10.000Z",
        "seconds": 2.134,
        "stall_s": 0.1,
        "why": "asked",
        "metrics": {"val_loss": 0.5, "lr": None},
        "attempt": 1,
        "format": None,
        "pruned_at": None,
        "kept": "newest, best val_loss (0.5)",
        "problem": None,
        "forks": [],
    }


def test_pruned_checkpoints_are_listed_on_demand_and_damaged_ones_are_kept_for_no_reason(
    run: RunDir, saved: Write, write: Write
) -> None:
    for step in (50, 60, 70, 80):
        saved(step)
    write("pruned", step=50, path="checkpoints/step-50", why="not kept")
    write("rejected", step=80, path="checkpoints/step-80", reason="hash", aside="checkpoints/damaged-step-80")
    shown = [(checkpoint["step"], checkpoint["complete"], checkpoint["kept"]) for checkpoint in listed(run)]
    assert shown == [(60, True, "one of the last 2"), (70, True, "newest"), (80, False, None)]
    first, *others = listed(run, "--all")
    assert (first["step"], first["kept"], first["pruned_at"] is not None) == (50, None, True)
    assert [checkpoint["pruned_at"] for checkpoint in others] == [None] * 3


def test_checkpoints_are_a_table(run: RunDir, saved: Write, write: Write) -> None:
    saved(50)
    saved(60, stall_s=None, why="")
    saved(70)
    write("pruned", step=50, path="checkpoints/step-50", why="not kept")
    write("rejected", step=70, path="checkpoints/step-70", reason="hash", aside=None)
    assert rows(call(checkpoints_command, run, "@last", "--all")) == [
        ["STEP", "SIZE", "SAVED", "SECONDS", "STALL", "WHY", "FILES", "KEPT"],
        ["50", "50.0 MiB", "2023-11-14 22:14", "2.134", "0.1", "steps", "pruned", "-"],
        ["60", "60.0 MiB", "2023-11-14 22:14", "2.134", "-", "-", "complete", "newest"],
        ["70", "70.0 MiB", "2023-11-14 22:14", "2.134", "0.1", "steps", "damaged", "-"],
    ]


def test_a_run_without_checkpoints_says_so(run: RunDir) -> None:
    result = call(checkpoints_command, run, run.id)
    assert (result.stdout, result.stderr) == ("", f"run {run.id} has no checkpoint on disk\n")


def test_files_of_a_users_script_are_listed_and_no_policy_looks_at_them(run: RunDir) -> None:
    with Journal(run.attempts / "j1.0" / "node-0.jsonl") as journal:
        journal.write(CheckpointFound(path="/out/ckpt-3.pt", step=3, bytes=9, saved_at=1_700_000_000.0))
    [checkpoint] = listed(run)
    assert (checkpoint["path"], checkpoint["why"]) == ("/out/ckpt-3.pt", "found")
    assert (checkpoint["seconds"], checkpoint["kept"]) == (None, None)


def test_without_a_plan_checkpoints_are_listed_and_nobody_knows_which_stay(run: RunDir, saved: Write) -> None:
    saved(50)
    run.plan.unlink()
    assert [(checkpoint["step"], checkpoint["kept"]) for checkpoint in listed(run)] == [(50, None)]


def test_show_lists_what_is_on_disk_and_says_how_often_the_run_saves(run: RunDir, saved: Write, write: Write) -> None:
    write("interval", seconds=30.0, why="no save was measured yet")
    saved(50)
    saved(60)
    write("pruned", step=50, path="checkpoints/step-50", why="not kept")
    write("interval", seconds=312.4, optimum_s=312.4, stall_s=0.8, why="optimum 312 s for a stall of 0.8 s")
    facts = json.loads(call(show_command, run, "@last", "--json").stdout)["run"]
    assert [checkpoint["step"] for checkpoint in facts["checkpoints"]] == [60]
    assert facts["attempts"][0]["interval"]["stall_s"] == 0.8
    lines = rows(call(show_command, run, "@last"))
    assert ["saves", "every 312 s: optimum 312 s for a stall of 0.8 s"] in lines
    assert ["60", "60.0 MiB", "2023-11-14 22:14", "complete", "checkpoints/step-60"] in lines


def test_show_says_by_what_mixed_ranks_communicate_and_in_which_precision_they_compute(
    run: RunDir, saved: Write, write: Write
) -> None:
    saved(50)
    assert json.loads(call(show_command, run, "@last", "--json").stdout)["run"]["attempts"][0]["hardware"] is None
    names, precisions = ["NVIDIA A100", "NVIDIA A100", "Tesla V100"], ["bf16", "bf16", "fp16"]
    write("hardware", names=names, precisions=precisions, backend="nccl", backend_why="all processes have NCCL 2.27.5")
    [attempt] = json.loads(call(show_command, run, "@last", "--json").stdout)["run"]["attempts"]
    assert attempt["hardware"]["precisions"] == precisions
    shown = call(show_command, run, "@last")
    assert ["backend", "nccl: all processes have NCCL 2.27.5"] in rows(shown)
    assert "  precision bf16 on 2 x NVIDIA A100, fp16 on 1 x Tesla V100\n" in shown.stdout


def test_a_run_that_cannot_save_says_so_until_it_can(run: RunDir, saved: Write, write: Write) -> None:
    saved(400)
    write("save_failed", step=500, reason=FULL, why="interval")
    problem = f"the checkpoint of step 500 failed: {FULL}"
    [checkpoint] = json.loads(call(status_command, run, "--json").stdout)["runs"]
    assert (checkpoint["state"], checkpoint["reason"], checkpoint["checkpoint"]["step"]) == ("running", problem, 400)
    assert rows(call(status_command, run))[1][-1] == problem
    assert ["unsaved", problem] in rows(call(show_command, run, "@last"))
    saved(510)
    [checkpoint] = json.loads(call(status_command, run, "--json").stdout)["runs"]
    assert checkpoint["reason"] == ""
    assert "unsaved" not in call(show_command, run, "@last").stdout


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (None, ""),
        ({}, ""),
        ({"seconds": 3600.0, "why": ""}, "every 3600 s"),
        ({"seconds": 29.6, "why": "it is bounded by the grace"}, "every 30 s: it is bounded by the grace"),
    ],
)
def test_an_interval_is_shown_with_its_reason(event: dict[str, Any] | None, shown: str) -> None:
    assert describe_interval(event) == shown


@pytest.mark.parametrize(
    ("facts", "shown"),
    [
        ({"pruned_at": "2023-11-14T22:14:10.000Z", "complete": True, "verified": True}, "pruned"),
        ({"pruned_at": None, "complete": False, "verified": False}, "damaged"),
        ({"pruned_at": None, "complete": True, "verified": True}, "verified"),
        ({"pruned_at": None, "complete": True, "verified": False}, "complete"),
    ],
)
def test_the_state_of_a_checkpoints_files_is_one_word(facts: dict[str, Any], shown: str) -> None:
    assert formatting.checkpoint_state(facts) == shown
