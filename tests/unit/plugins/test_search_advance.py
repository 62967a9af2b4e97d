"""Searches that go on: what is asked for, what is pruned, and when it is over."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from helpers.fakeslurm import SlurmCommands
from helpers.simulated_run import SimulatedRun

from slurmtrain.cli.compare_commands import best_command
from slurmtrain.cli.status_commands import status_command
from slurmtrain.errors import UserError
from slurmtrain.model.run.events.command_events import RunCreated
from slurmtrain.ops.query.trials import read_trials
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import load, submit_spec
from slurmtrain.plugins import search as advancing
from slurmtrain.plugins.search import Advance, advance_all, read, store, under_way
from slurmtrain.runtime.upstreams import read_upstreams

Begin = Callable[..., Any]
SEARCH = {"metric": "loss", "mode": "min", "trials": 6, "parallel": 2}


@pytest.fixture
def begin(workspace: Workspace, slurm: SlurmCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Submits a search with these keys to a pretended Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("slurmtrain.ops.submit.entrances.which_python", lambda: sys.executable)

    def begin_now(key: str | None = None, after: str | None = None, **keys: Any) -> Any:
        spec = {
            **({"after": [after]} if after else {}),
            "name": "s", "command": "python -c pass", "params": {"lr": 0.1}, "tracking": {"mlflow": {"enabled": False}},
            "sweep": {"params.lr": "loguniform(1e-5, 1e-1)", "search": {**SEARCH, **keys}},
        }  # fmt: skip
        Path("s.yaml").write_text(yaml.safe_dump(spec))
        return submit_spec(workspace, load(Path("s.yaml"), (), ()), executor="slurm", key=key)

    return begin_now


def simulated(workspace: Workspace, run_id: str) -> SimulatedRun:
    """What goes on in a run that was submitted as job 8."""
    observe(workspace, ask_slurm=False)
    created = workspace.store.events(run_id, RunCreated)[0]
    sim = SimulatedRun(workspace.root.run(run_id), job=run_id, now=created.time)
    return sim.write("journal/more.jsonl", "submitting", submission=1, attempt=1, executor="slurm", host="login").write(
        "journal/more.jsonl", "submitted", submission=1, job_id=run_id
    )


def end(workspace: Workspace, run_id: str, cause: str = "completed", **metrics: float) -> None:
    sim = simulated(workspace, run_id).started()
    if metrics:
        sim.reached(5, **metrics)
    sim.ended(cause)


def trials(workspace: Workspace) -> dict[str, Any]:
    """The number of the trial of each run."""
    observe(workspace, ask_slurm=False)
    created = workspace.store.events_of(workspace.store.ids(), RunCreated)
    return {run_id: events[0].payload.trial for run_id, events in sorted(created.items())}


def test_the_first_runs_are_submitted_with_numbers_and_values(workspace: Workspace, begin: Begin) -> None:
    submission = begin()
    assert list(trials(workspace).values()) == [0, 1]
    assert under_way(workspace) == [submission.sweep]
    values = [workspace.store.events(run_id, RunCreated)[0].payload for run_id in submission.run_ids]
    assert all(each.params["lr"] == each.varies["params.lr"] for each in values)
    assert values[0].params != values[1].params


def test_as_many_are_asked_for_as_have_ended_until_there_are_all(workspace: Workspace, begin: Begin) -> None:
    begin()
    assert not advance_all(workspace).created
    for round_ in range(5):
        newest = [run_id for run_id, number in trials(workspace).items() if number == round_]
        end(workspace, newest[0], loss=1.0 / (round_ + 1))
        assert len(advance_all(workspace).created) == (1 if round_ < 4 else 0)
    assert sorted(trials(workspace).values()) == list(range(6))
    end(workspace, next(run_id for run_id, number in trials(workspace).items() if number == 5), loss=0.1)
    assert not advance_all(workspace).created
    assert list(workspace.root.searches.iterdir()) == []


def test_later_runs_start_after_the_same_run_as_the_first_whatever_has_got_its_name(
    workspace: Workspace, begin: Begin
) -> None:
    Path("a.yaml").write_text("name: a\ncommand: python -c pass\ntracking: {mlflow: {enabled: false}}\n")
    before = [submit_spec(workspace, load(Path("a.yaml"), (), ()), executor="slurm").run_ids[0]]
    first, _ = begin(after="a").run_ids
    before += submit_spec(workspace, load(Path("a.yaml"), (), ()), executor="slurm").run_ids
    end(workspace, first, loss=1.0)
    [created] = advance_all(workspace).created
    assert [each.run for each in read_upstreams(workspace.root.run(created))] == before[:1]


def test_a_command_that_dies_while_it_asks_leaves_no_trial_twice_and_loses_none(
    workspace: Workspace, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    submission = begin(trials=4)
    for run_id in submission.run_ids:
        end(workspace, run_id, loss=1.0)
    rename, renamed = Path.rename, []

    def second_fails(self: Path, target: Any) -> Path:
        renamed.append(self)
        if len(renamed) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    expected = read(workspace, submission.sweep)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", second_fails)
        patched.setattr("slurmtrain.ops.submit.creation.remove_runs", lambda *_: [])
        with pytest.raises(KeyboardInterrupt):
            advance_all(workspace)
    assert list(trials(workspace).values()) == [0, 1, 2]
    assert len(advance_all(workspace).created) == 1
    assert list(trials(workspace).values()) == [0, 1, 2, 3]
    assert read(workspace, submission.sweep) == expected


def test_only_one_command_at_a_time_takes_a_search_further(workspace: Workspace, begin: Begin) -> None:
    submission = begin()
    end(workspace, submission.run_ids[0], loss=1.0)
    with advancing.locked_search(workspace, submission.sweep, wait=True):
        assert advance_all(workspace) == Advance()
    assert len(advance_all(workspace).created) == 1


def test_a_run_that_the_pruner_would_end_is_cancelled_with_the_reason(
    workspace: Workspace, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    submission = begin(pruner={"median": {"n_startup_trials": 1}})
    first, second = submission.run_ids
    end(workspace, first, loss=1.0)
    sim = simulated(workspace, second).started().reached(5, loss=9.0)
    monkeypatch.setattr(advancing, "finish_cancel", lambda *_: {})
    assert advance_all(workspace).ending == [second]
    sim.later(60).ended("cancelled")
    observe(workspace, ask_slurm=False)
    run = workspace.store.load(second)
    assert (run.state, run.reason) == ("cancelled", "pruned by the median pruner at step 5")
    assert advance_all(workspace).pruned == [second]


def test_a_pruned_run_that_a_person_has_resumed_is_not_pruned_again(
    workspace: Workspace, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    submission = begin(pruner={"median": {"n_startup_trials": 1}})
    first, second = submission.run_ids
    end(workspace, first, loss=1.0)
    sim = simulated(workspace, second).started().reached(5, loss=9.0)
    monkeypatch.setattr(advancing, "finish_cancel", lambda *_: {})
    assert advance_all(workspace).ending == [second]
    sim.later(60).ended("cancelled")
    sim.later(60).write("journal/again.jsonl", "submitting", submission=2, attempt=2, executor="slurm", host="login")
    sim.write("journal/again.jsonl", "submitted", submission=2, job_id="9")
    sim.job = "9"
    sim.started(submission=2).reached(6, loss=9.0)
    observe(workspace, ask_slurm=False)
    run = workspace.store.load(second)
    assert (run.state, run.cancelled) == ("running", False)
    assert advance_all(workspace).ending == []
    sim.ended("completed")
    advance_all(workspace)
    assert [each.trial.state for each in read_trials(workspace, str(submission.sweep))][:2] == ["complete"] * 2


def test_a_search_whose_runs_are_all_deleted_for_good_is_over(workspace: Workspace, begin: Begin) -> None:
    submission = begin()
    for run_id in submission.run_ids:
        shutil.rmtree(workspace.root.run(run_id).path)
    assert advance_all(workspace) == Advance()
    assert trials(workspace) == {}
    assert list(workspace.root.searches.iterdir()) == []


def test_a_search_of_local_runs_goes_on_on_its_own_machine_only(workspace: Workspace, begin: Begin) -> None:
    submission = begin()
    record = read(workspace, str(submission.sweep))
    assert record.host is None
    store(workspace, replace(record, host="elsewhere"))
    end(workspace, submission.run_ids[0], loss=1.0)
    advanced = advance_all(workspace)
    assert not advanced.created
    assert advanced.notes == [
        f"search {submission.sweep} runs on elsewhere: call 'slurmtrain sync' there to continue it"
    ]
    store(workspace, replace(record, host=socket.gethostname()))
    assert len(advance_all(workspace).created) == 1


def test_a_metric_that_no_run_logs_ends_the_search_and_is_named(workspace: Workspace, begin: Begin) -> None:
    begin(trials=20, parallel=5)
    for run_id in trials(workspace):
        end(workspace, run_id, los=1.0)
    advanced = advance_all(workspace)
    assert not advanced.created
    assert (
        "none of the 5 runs that ended completed with a value of 'loss'; they have logged los" in advanced.problems[0]
    )


def test_a_value_that_is_no_number_counts_as_none(workspace: Workspace, begin: Begin) -> None:
    submission = begin()
    end(workspace, submission.run_ids[0], loss=float("nan"))
    end(workspace, submission.run_ids[1], "oom", loss=0.1)
    assert len(advance_all(workspace).created) == 2


def test_nothing_is_asked_for_once_a_person_has_cancelled_all_that_ran(workspace: Workspace, begin: Begin) -> None:
    submission = begin()
    for run_id in submission.run_ids:
        simulated(workspace, run_id).started().cancel().later(5).ended("cancelled")
    advanced = advance_all(workspace)
    assert not advanced.created
    assert advanced.problems == []
    assert "all that ran were cancelled" in advanced.notes[0]


def test_a_search_has_no_idempotency_key(begin: Begin, workspace: Workspace) -> None:
    with pytest.raises(UserError, match="cannot be submitted with --idempotency-key"):
        begin(key="k")
    assert under_way(workspace) == []


def test_without_a_job_nothing_is_left(workspace: Workspace, begin: Begin, slurm: SlurmCommands) -> None:
    slurm.replies("sbatch", "", code=1)
    with pytest.raises(Exception, match=r"sbatch|nothing was created"):
        begin()
    assert not trials(workspace)
    assert under_way(workspace) == []


def test_status_and_best_say_what_a_search_has_reached(
    workspace: Workspace, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    submission = begin(metric="score", mode="max", pruner={"median": {"n_startup_trials": 1}})
    first, second = submission.run_ids
    end(workspace, first, score=0.25, loss=3.0)
    sim = simulated(workspace, second).started().reached(5, score=0.1)
    monkeypatch.setattr(advancing, "finish_cancel", lambda *_: {})
    assert advance_all(workspace).ending == [second]
    sim.later(60).ended("cancelled")
    runs = ["--runs", str(workspace.root.path)]
    shown = CliRunner().invoke(status_command, [str(submission.sweep), *runs])
    lr = workspace.store.events(first, RunCreated)[0].payload.varies["params.lr"]
    line = (
        f"search {submission.sweep}: 3 of 6 trials: 1 complete, 1 running, 1 pruned; "
        f"best score 0.25 of run {first} with params.lr={lr}"
    )
    assert line in shown.stderr.replace("\n  ", " ")
    best = CliRunner().invoke(best_command, [str(submission.sweep), *runs])
    assert line in best.stderr.replace("\n  ", " ")
    assert first in best.stdout
    expected = {
        "sweep": submission.sweep, "metric": "score", "mode": "max", "trials": 6,
        "states": {"complete": 1, "running": 1, "pruned": 1},
        "best": {"run": first, "value": 0.25, "varies": {"params.lr": lr}},
    }  # fmt: skip
    for command in (status_command, best_command):
        answer = json.loads(CliRunner().invoke(command, [str(submission.sweep), "--json", *runs]).stdout)
        assert answer["searches"] == [expected]
    # It is all in the runs.
    workspace.close()
    (workspace.root.path / "registry.db").unlink()
    again = CliRunner().invoke(status_command, [str(submission.sweep), "--json", *runs])
    assert json.loads(again.stdout)["searches"] == [expected]
