"""How two runs differ: spec, code, environment, result, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.simulated_run import SimulatedRun

from slurmtrain.cli.compare_commands import _print_difference
from slurmtrain.errors import RunNotFound, UserError
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops.query.diff import RunDifference, diff
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.checkpoint.checkpoint_files import Manifest

Submitted = Callable[..., list[str]]


def printed(difference: RunDifference, capsys: pytest.CaptureFixture[str]) -> list[str]:
    _print_difference(difference)
    return [line for line in capsys.readouterr().out.splitlines() if line]


def saved(run: RunDir, step: int, digest: str, world_size: int = 2) -> None:
    """The manifest of a checkpoint, whose only file has this hash."""
    manifest = Manifest(
        step=step, world_size=world_size, saved_at=1.0, seconds=1.0, stall_s=0.0, plan_hash=None, attempt="8.0",
        why="end", files={"__0_0.distcp": (3, digest)},
    )  # fmt: skip
    place = run.checkpoints / f"step-{step}" / "MANIFEST.json"
    place.parent.mkdir()
    place.write_text(json.dumps(manifest.to_json()))


def test_runs_that_are_the_same_differ_in_nothing(
    workspace: Workspace, submitted: Submitted, capsys: pytest.CaptureFixture[str]
) -> None:
    [first], [second] = submitted(), submitted()
    for run_id in (first, second):
        saved(workspace.root.run(run_id), 5, "aa")
        saved(workspace.root.run(run_id), 10, "ab")
    difference = diff(workspace, first, second)
    assert (difference.spec, difference.code.same, difference.environment) == ({}, True, {})
    lines = printed(difference, capsys)
    assert lines[0] == "SPEC: no difference"
    assert lines[1].startswith("CODE: no difference: snapshot ")
    assert lines[2] == "ENVIRONMENT: no difference"
    assert lines[-1] == "CHECKPOINTS: both of step 10 are equal, bit for bit"
    facts = difference.to_json()
    assert [run["id"] for run in facts["runs"]] == [first, second]
    assert facts["checkpoints"] == {"equal": True, "step": 10, "why": ""}


def test_each_section_says_what_differs(
    workspace: Workspace, project: Path, submitted: Submitted, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "gone.py").write_text("x\n")
    (project / "data.bin").write_bytes(b"\0\1")
    [first] = submitted()
    (project / "gone.py").unlink()
    (project / "train.py").write_text("old\nnew\n")
    (project / "data.bin").write_bytes(b"\0\2")
    [second] = submitted("params.lr=0.2", "resources.nodes=2", seed=2)
    listed = workspace.root.run(second).environment
    listed.write_text(listed.read_text() + "zzz==1.0\n")
    run = SimulatedRun(workspace.root.run(second), job="8", now=2_000_000_000.0)
    run.started(nodes=2).rank("session", step=0, world_size=2, device="cpu")
    difference = diff(workspace, first, second, lines=True)
    assert difference.spec == {
        "params.lr": (0.1, 0.2), "resources.nodes": (1, 2), "seed": (1, 2),
    }  # fmt: skip
    # What specs say is compared as such.
    assert difference.code.files.changed == ["data.bin", "train.py"]
    assert difference.code.files.removed == ["gone.py"]
    assert difference.environment == {"packages": {"zzz": (None, "1.0")}}
    assert difference.result["attempts"] == (1, 1)
    lines = printed(difference, capsys)
    assert "  changed  train.py" in lines
    assert "+new" in lines
    assert "-x" in lines
    assert "data.bin differs: it is not text, or larger than 1 MiB" in lines
    assert "ENVIRONMENT: packages" in " ".join(lines)
    assert lines[-1].startswith("CHECKPOINTS: they have no checkpoint of the same step: ")


def test_metrics_are_compared_step_by_step(
    workspace: Workspace, submitted: Submitted, capsys: pytest.CaptureFixture[str]
) -> None:
    [first], [second] = submitted(), submitted()
    for run_id, later in ((first, 0.5), (second, 0.5 + 1e-9)):
        run = SimulatedRun(workspace.root.run(run_id), job="8", now=2_000_000_000.0)
        run.started().rank("session", step=0, world_size=1, device="cpu")
        for step, loss in enumerate((1.0, 0.75, later), 1):
            run.reached(step, loss=loss, same=float("nan"), **{f"only_{run_id}": 1.0})
    difference = diff(workspace, first, second)
    assert list(difference.metrics) == ["loss", "same"]
    assert difference.to_json()["metrics"]["loss"] == {"steps": 3, "step": 3, "values": [0.5, 0.500000001]}
    lines = printed(difference, capsys)
    [heading] = (number for number, line in enumerate(lines) if line.startswith("FIRST DIFFERENCE"))
    assert lines[heading + 1].split() == ["loss", "3", "0.5", "0.500000001", "3", "steps"]
    assert "METRICS: equal at all steps that both have: same" in lines
    assert next(line.split() for line in lines if line.startswith("loss ")) == ["loss", "0.5", "0.5", "+1e-09"]


def test_checkpoints_are_compared_at_the_newest_step_that_both_have(workspace: Workspace, submitted: Submitted) -> None:
    [first], [second] = submitted(), submitted()
    run, other = workspace.root.run(first), workspace.root.run(second)
    saved(run, 5, "aa")
    saved(run, 10, "ab")
    saved(other, 5, "ff")
    assert diff(workspace, first, second).to_json()["checkpoints"] == {"equal": False, "step": 5, "why": ""}
    saved(other, 10, "ab", world_size=4)
    checkpoints = diff(workspace, first, second).checkpoints
    assert (checkpoints.equal, checkpoints.step) == (None, 10)
    assert "saved by 2 and 4 ranks" in checkpoints.why
    (other.checkpoints / "step-10" / "MANIFEST.json").write_text("{")
    assert diff(workspace, first, second).checkpoints.equal is None


def test_code_without_snapshots_is_compared_by_what_is_known(
    workspace: Workspace, project: Path, submitted: Submitted
) -> None:
    [first], [second], [third] = submitted(code="none"), submitted(code="none"), submitted()
    code = diff(workspace, first, second).code
    assert (code.same, code.why) == (None, "at least one has neither a snapshot nor a revision")
    mixed = diff(workspace, first, third).code
    assert mixed.same is None
    assert mixed.versions[0] == "no snapshot, and no revision"
    assert mixed.versions[1].startswith("snapshot ")
    (project / "train.py").write_text("new\n")
    [fourth] = submitted()
    for place in workspace.root.snapshots.glob("*/manifest.json"):
        place.unlink()
    damaged = diff(workspace, third, fourth).code
    assert damaged.same is False
    assert "how they differ is unknown" in damaged.why


def test_what_cannot_be_compared_is_refused(workspace: Workspace, submitted: Submitted) -> None:
    [first] = submitted()
    with pytest.raises(UserError, match="are the same run"):
        diff(workspace, first, "digits")
    with pytest.raises(RunNotFound, match="there is no run 'nothing'"):
        diff(workspace, first, "nothing")
