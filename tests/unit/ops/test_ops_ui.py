"""Which runs ``ui`` shows, and how a browser gets there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.simulated_run import SimulatedRun

from slurmtrain.errors import NotAvailable, RunNotFound
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.ui import Shown, choose_shown

FIRST, SECOND, OTHER, THIRD, WAITING = "0aaaaaaaaa", "0aaaaaaaab", "0aaaaaaaac", "0aaaaaaaad", "0aaaaaaaae"
SWEEP = "0sweepswee"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, Shown([WAITING, THIRD, OTHER, SECOND, FIRST], "", is_all=True)),
        (FIRST, Shown([FIRST], "")),
        (SWEEP, Shown([OTHER, SECOND], "", SWEEP)),
        ("*", Shown([WAITING, THIRD, OTHER, SECOND, FIRST], "")),
        ("0aaaaaaaa[bc]", Shown([OTHER, SECOND], "", SWEEP)),
        ("digits", Shown([OTHER, SECOND], "", SWEEP)),
        ("words", Shown([THIRD], "")),
    ],
)
def test_what_is_named_is_shown_newest_first_and_a_sweep_as_such(
    workspace: Workspace, name: str | None, expected: Shown
) -> None:
    for run_id, of_run, sweep in (
        (FIRST, "digits", None), (SECOND, "digits", SWEEP), (OTHER, "digits", SWEEP), (THIRD, "words", None)
    ):  # fmt: skip
        add(workspace, run_id, of_run, sweep).started()
    # It may start in a moment.
    add(workspace, WAITING, "late", None)
    assert choose(workspace, name) == replace(expected, store=workspace.root.mlflow_uri)


def test_a_run_that_is_not_to_be_in_mlflow_was_deleted_or_waits_cannot_be_shown(workspace: Workspace) -> None:
    with pytest.raises(RunNotFound, match="there are no runs in "):
        choose(workspace, None)
    add(workspace, FIRST, "digits", None, enabled=False).started()
    add(workspace, SECOND, "digits", None)
    add(workspace, OTHER, "digits", None).started().ended("completed").command("delete", bytes=1, by="ada@login")
    for name in (FIRST, SECOND, OTHER):
        with pytest.raises(NotAvailable, match=f"MLflow has nothing of run {name}: it has not started yet"):
            choose(workspace, name)
    with pytest.raises(NotAvailable, match="MLflow has nothing of any of these 3 runs: "):
        choose(workspace, None)


def add(workspace: Workspace, run_id: str, name: str, sweep: str | None, *, enabled: bool = True) -> SimulatedRun:
    spec = {"name": name, "tracking": {"mlflow": {"enabled": enabled}}}
    run = SimulatedRun(workspace.root.run(run_id), spec=spec, job=run_id)
    return run.created(sweep=sweep).submitted()


def choose(workspace: Workspace, name: str | None) -> Shown:
    return choose_shown(workspace, observe(workspace, ask_slurm=False), name)
