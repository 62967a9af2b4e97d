"""A run as an object: its attributes, its curves, its logs, and what can be done with it."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC
from pathlib import Path

import pytest
from helpers.simulated_run import RUN_ID, SimulatedRun

import slurmtrain
from slurmtrain.cli import main
from slurmtrain.errors import NoCheckpoint, NotAvailable, QueryError, RunBusy, RunNotFound, UserError
from slurmtrain.ops.shared.workspace import Workspace

# A registry that fails is replaced by one in memory, with a warning and the same answers.
pytestmark = pytest.mark.filterwarnings("error::slurmtrain.errors.SlurmtrainWarning")


@pytest.fixture
def run(workspace: Workspace) -> slurmtrain.RunHandle:
    """A run that was preempted after step 4, and went on from its checkpoint of step 2."""
    sim = SimulatedRun(workspace.root.run(RUN_ID), executor="local", spec={"name": "cnn", "params": {"lr": 0.1}})
    sim.created(name="cnn", params={"lr": 0.1}, command="python x.py", resources={"nodes": 1})
    sim.submitted().started().rank("session", step=0, world_size=1, device="cpu")
    for step in (1, 2):
        sim.reached(step, loss=1.0 / step)
    sim.saved(2).reached(3, loss=50.0).reached(4, loss=60.0, acc=0.1)
    sim.ended("preempted", requeued=True)
    sim.started(restart=1).rank("session", 0, 1, step=2, world_size=1, device="cpu")
    sim.reached(3, 1, loss=0.3).reached(4, 1, loss=0.2, acc=0.9).ended("completed", 0, 1)
    logs = workspace.root.run(RUN_ID).attempt(sim.job, 1).logs
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_bytes(b"begin\nacc 0.9\nodd \xff byte\n")
    return slurmtrain.Registry().run("cnn")


def test_attributes_are_those_of_the_registry_as_pythons_types(run: slurmtrain.RunHandle, workspace: Workspace) -> None:
    assert (run.id, run.name, run.state, run.ended, run.cause) == (RUN_ID, "cnn", "completed", True, "completed")
    assert (run.attempt, run.step, run.params, run.latest) == (2, 4, {"lr": 0.1}, {"loss": 0.2, "acc": 0.9})
    assert (run.command, run.resources, run.tags, run.note, run.sweep) == ("python x.py", {"nodes": 1}, [], "", None)
    assert run.directory == workspace.root.run(RUN_ID).path
    assert run.submitted_at.tzinfo is UTC
    assert run.ended_at is not None
    assert run.started_at is not None
    assert run.submitted_at <= run.started_at < run.ended_at
    assert repr(run) == f"<run {RUN_ID} cnn: completed, step 4>"
    assert run.to_dict()["metrics"] == run.latest


def test_why_says_what_the_command_says(run: slurmtrain.RunHandle) -> None:
    answer = run.why()
    assert answer.headline.startswith("it completed 4 steps in ")
    assert answer.headline.endswith(", 2 attempts (1 preempted), 2 steps trained twice")
    assert str(answer).splitlines()[0] == answer.headline == answer.to_dict()["headline"]
    assert run.why(attempt=1).to_dict()["attempt"] == 1
    with pytest.raises(RunNotFound, match="has no attempt 3"):
        run.why(attempt=3)


def test_cost_is_what_show_says(run: slurmtrain.RunHandle, capsys: pytest.CaptureFixture[str]) -> None:
    cost = run.cost()
    with pytest.raises(SystemExit):
        main(["--runs", str(run.directory.parent), "show", run.id, "--json"])
    assert cost == json.loads(capsys.readouterr().out)["run"]["cost"]
    assert (cost["unit"], cost["interruptions_by_cause"]) == ("node-hours", {"preempted": 1})


def test_attempts_and_checkpoints_are_read_when_they_are_asked_for(
    run: slurmtrain.RunHandle, workspace: Workspace
) -> None:
    first, second = run.attempts
    assert (first.number, first.cause, first.last_step, first.lost_steps) == (1, "preempted", 4, 2)
    assert (second.number, second.cause, second.restart, second.nodes) == (2, "completed", 1, ("n0",))
    assert run.lost_steps == 2
    assert second.seconds.keys() >= {"queue", "train", "lost"}
    [checkpoint] = run.checkpoints
    assert run.checkpoint == checkpoint
    assert (checkpoint.step, checkpoint.complete) == (2, True)
    assert checkpoint.path.is_relative_to(workspace.root.run(RUN_ID).path)


def test_curves_are_as_if_the_run_had_never_been_interrupted(run: slurmtrain.RunHandle) -> None:
    loss = run.curves("loss")["loss"]
    assert (list(loss.kept.steps), list(loss.kept.values)) == ([1, 2, 3, 4], [1.0, 0.5, 0.3, 0.2])
    assert len(loss.superseded) == 0
    assert list(run.curves(superseded=True)["loss"].superseded.values) == [50.0, 60.0]
    with pytest.raises(UserError, match="no metric 'los'; did you mean 'loss'"):
        run.curves(["acc", "los"])


def test_metrics_are_a_dataframe_with_a_row_for_each_point(run: slurmtrain.RunHandle) -> None:
    pytest.importorskip("pandas", reason="the extra pandas is not installed")
    frame = run.metrics()
    assert list(frame.columns) == ["metric", "step", "attempt", "time", "value", "superseded"]
    wide = frame.pivot(index="step", columns="metric", values="value")
    assert wide["loss"].to_dict() == {1: 1.0, 2: 0.5, 3: 0.3, 4: 0.2}
    assert wide["acc"].dropna().to_dict() == {4: 0.9}
    assert list(frame["attempt"][frame["metric"] == "loss"]) == [1, 1, 2, 2]
    assert str(frame["time"].dt.tz) == "UTC"
    both = run.metrics("loss", superseded=True)
    assert list(both["value"][both["superseded"]]) == [50.0, 60.0]


def test_a_run_without_metrics_has_an_empty_dataframe(workspace: Workspace) -> None:
    pytest.importorskip("pandas", reason="the extra pandas is not installed")
    SimulatedRun(workspace.root.run(RUN_ID), executor="local").submitted().started().ended("completed")
    frame = slurmtrain.Registry().run(RUN_ID).metrics()
    assert (len(frame), list(frame.columns)[:2]) == (0, ["metric", "step"])


def test_without_pandas_the_error_names_what_to_install(
    run: slurmtrain.RunHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(NotAvailable, match=r"pip install 'slurmtrain\[pandas\]'"):
        run.metrics()
    assert run.curves()


def test_logs_can_be_printed_whatever_is_in_them(run: slurmtrain.RunHandle) -> None:
    assert [line.text for line in run.logs()] == ["begin", "acc 0.9", "odd \N{REPLACEMENT CHARACTER} byte"]
    assert [(line.attempt, line.origin, line.text) for line in run.logs(grep="acc")] == [(2, "rank 0", "acc 0.9")]
    assert len(run.logs(lines=1)) == len(list(run.follow_logs(lines=1))) == 1
    with pytest.raises(UserError, match="not a regular expression"):
        run.logs(grep="(")
    with pytest.raises(RunNotFound, match="no attempt 7"):
        run.logs(attempt=7)


def test_tags_are_those_of_the_command_line(run: slurmtrain.RunHandle) -> None:
    assert run.tag("good", "final").tags == ["final", "good"]
    assert run.untag("final").tags == ["good"]
    with pytest.raises(UserError, match="none of these"):
        run.untag("bad")


def test_a_request_that_the_runs_state_does_not_allow_is_refused(run: slurmtrain.RunHandle) -> None:
    with pytest.raises(RunBusy, match="has completed"):
        run.resume()
    with pytest.raises(NoCheckpoint):
        run.resume({"params.lr": 0.2})
    assert run.cancel().state == "completed", "a run that has ended stays as it is"


def test_a_handle_is_what_it_was_until_it_is_refreshed(run: slurmtrain.RunHandle, workspace: Workspace) -> None:
    slurmtrain.Registry().run("cnn").tag("late")
    assert run.tags == []
    assert run.refresh().tags == ["late"]
    for path in sorted(workspace.root.run(RUN_ID).path.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    workspace.root.run(RUN_ID).path.rmdir()
    assert "directory was deleted" in run.refresh().reason
    assert slurmtrain.Registry().runs() == []
    with pytest.raises(RunNotFound, match="deleted"):
        run.refresh()
    assert run.name == "cnn"


def test_archived_runs_are_listed_only_if_a_condition_asks_for_them(
    run: slurmtrain.RunHandle, workspace: Workspace
) -> None:
    SimulatedRun(workspace.root.run(RUN_ID)).command("archived", archived=True)
    registry = slurmtrain.Registry()
    assert registry.runs() == []
    assert [each.id for each in registry.runs(where="archived = true")] == [RUN_ID]
    with pytest.raises(QueryError):
        registry.runs(where="archived <")


def test_importing_the_package_costs_no_database(tmp_path: Path) -> None:
    program = "import sys, slurmtrain; assert 'sqlalchemy' not in sys.modules; slurmtrain.Registry(); "
    program += "assert not {'torch', 'mlflow', 'pandas', 'click', 'rich'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
