"""A registry that is rebuilt knows of trackers what the one before knew, and nothing is sent again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers.fakeslurm import SlurmCommands
from helpers.rare import rare
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.cli.status_commands import show_command, status_command
from slurmtrain.model.run.layout import run_id
from slurmtrain.ops.registries import rebuild
from slurmtrain.ops.shared.current_plan import run_settings
from slurmtrain.ops.shared.mirroring import MirrorOutcome, mirror_runs
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace

TRACKERS = {"csv", "jsonl", "tensorboard"}
TRACKING = {
    "mlflow": {"enabled": False},
    **{name: {"enabled": True} for name in ("csv", "tensorboard")},
    "plugins": {"jsonl": {}},
}
TRACKING_OF = {
    "refused": {"csv": {"enabled": True, "dir": "/proc/csv"}},
    # These take a second a run and more.
    "rolled back": {"mlflow": {"enabled": True}, "wandb": {"enabled": True}},
    "running": {"mlflow": {"enabled": True}},
    "swept 1": {"mlflow": {"enabled": True}},
}
SWEEP = run_id(1_699_000_000_000, 0)
STATES = (
    "completed", "failed", "cancelled", "queued", "pending", "running", "rolled back", "resumed", "forked", "repeated",
    "swept 1", "swept 2", "deleted", "archived", "refused",
)  # fmt: skip
IDS = {state: run_id(1_700_000_000_000 + number, number) for number, state in enumerate(STATES)}
# Nothing is sent of runs that have not begun.
UNSENT = {IDS["queued"], IDS["pending"]}


def make_run(workspace: Workspace, state: str) -> None:
    """A run in this state, which trained 4 steps unless it never began."""
    varies = {"params.lr": int(state[-1])} if "swept" in state else {}
    tracking = {**TRACKING, **TRACKING_OF.get(state, {})}
    spec = {"requeue": {"max_failures": 0}, "tracking": tracking, "params": {"lr": int(state[-1])} if varies else {}}
    run = SimulatedRun(workspace.root.run(IDS[state]), spec=spec, job=str(100 + STATES.index(state)), now=99.0)
    assert run._plan is not None
    of_another = {"forked": "checkpoint", "repeated": "rerun"}
    more: dict[str, Any] = {"sweep": SWEEP, "varies": varies} if varies else {}
    if kind := of_another.get(state):
        more["parents"] = [{"run": IDS["completed"], "kind": kind, "step": 3 if kind == "checkpoint" else None}]
    run.created(**{**run_settings(run._plan), **more})
    if state == "queued":
        return
    run.submitted()
    if state == "pending":
        return
    run.started()
    for step in (1, 2, 3, 4):
        run.later(1).reached(step, loss=step / 4)
    run.saved(3)
    if state == "running":
        return
    if state == "rolled back":
        run.stopped().started(1).rank("workers", 0, 1)
        run.reached(4, 1, loss=100.0)
    elif state == "failed":
        run.crashed()
    elif state == "cancelled":
        run.cancel().stopped()
    elif state == "resumed":
        run.crashed().submitted(2).started(1, submission=2).rank("workers", 0, 1)
        run.reached(5, 1, loss=100.0).ended("completed", 0, 1)
    else:
        run.ended("completed")
    if state == "archived":
        run.command("archived").command("tags", add=["a"]).command("note", text="b")
    if state == "deleted":
        run.command("delete").command("deleted")


def whole(workspace: Workspace) -> dict[str, Any]:
    """All that ``status --json`` and ``show --json`` print, less the time at which they were asked."""

    def answer(command: Any, *words: str) -> Any:
        arguments = ["--runs", str(workspace.root.path), *words, "--json"]
        printed = CliRunner().invoke(command, arguments, standalone_mode=False, catch_exceptions=False)
        return {key: value for key, value in json.loads(printed.stdout).items() if key != "as_of"}

    return {"status": answer(status_command, "--all"), **{each: answer(show_command, each) for each in IDS.values()}}


def send(workspace: Workspace) -> MirrorOutcome:
    return mirror_runs(workspace, observe(workspace, ask_slurm=False).runs.fetch(list(IDS.values())))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sqlite", pytest.param("postgresql", marks=rare)])
def test_status_and_show_are_the_same_after_a_rebuild_whatever_state_runs_are_in(
    engine: str,
    tmp_path: Path,
    slurm: SlurmCommands,
    install_jsonl: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("time.time", lambda: 5_000.0)
    install_jsonl()
    workspace = make_workspace(tmp_path / "runs")
    if engine == "postgresql":
        server = request.getfixturevalue("postgres")
        monkeypatch.setenv("SLURMTRAIN_REGISTRY", server.url())
        workspace = make_workspace(tmp_path / "runs", registry=server.registry(tmp_path / "runs"))
    for state in STATES:
        make_run(workspace, state)
    outcome = send(workspace)
    assert set(outcome.mirrored) == set(IDS.values()) - UNSENT

    before = whole(workspace)
    listed = {run["id"]: run for run in before["status"]["runs"]}
    assert {run["state"] for run in listed.values()} >= {"completed", "failed", "cancelled", "pending", "running"}
    for each in set(IDS.values()) - UNSENT:
        sent = {tracker["tracker"] for tracker in listed[each]["trackers"]}
        assert sent - {"mlflow", "wandb"} == TRACKERS, each
    for state, more in TRACKING_OF.items():
        assert {tracker["tracker"] for tracker in listed[IDS[state]]["trackers"]} >= more.keys()
    assert listed[IDS["completed"]]["mirrored"] is True
    [refused] = [each for each in listed[IDS["refused"]]["trackers"] if each["tracker"] == "csv"]
    assert "/proc/csv" in refused["problem"]

    rebuild(workspace)
    assert whole(workspace) == before
    # Others may change, and a tracker that took nothing is asked again.
    assert set(send(workspace).mirrored) <= {IDS["running"], IDS["rolled back"], IDS["refused"]}
