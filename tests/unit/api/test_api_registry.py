"""The registry in Python: finding runs as the command line does, submitting, and what it never does."""

from __future__ import annotations

import os
import threading
import time
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from helpers.queried_runs import write_run
from helpers.simulated_run import SimulatedRun

import slurmtrain
from slurmtrain.errors import (
    PathError,
    QueryError,
    RunNotFound,
    SlurmtrainError,
    SlurmtrainWarning,
    SpecError,
    WaitTimedOut,
)
from slurmtrain.ops import submit as submit_package
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import submission
from slurmtrain.system.inherited import private_umask

# A registry that fails is replaced by one in memory, with a warning and the same answers.
pytestmark = pytest.mark.filterwarnings("error::slurmtrain.errors.SlurmtrainWarning")


def numbers(runs: list[slurmtrain.RunHandle]) -> list[int]:
    return [int(run.id) for run in runs]


def test_it_finds_the_runs_that_the_command_line_finds(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_run(workspace, 1)
    assert slurmtrain.Registry().path == workspace.root.path
    monkeypatch.chdir("/")
    assert slurmtrain.Registry(workspace.root.path).run("cnn").name == "cnn"
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(workspace.root.path))
    assert numbers(slurmtrain.Registry().runs()) == [1]
    assert slurmtrain.Registry(tmp_path / "nothing").runs() == []


def test_runs_are_chosen_by_the_questions_of_the_command_line(registry: slurmtrain.Registry) -> None:
    assert numbers(registry.runs()) == [1, 2, 3, 4, 5, 6]
    assert numbers(registry.runs(where="params.lr < 0.5", sort="-metrics.acc", limit=2)) == [4, 3]
    assert numbers(registry.runs(where=["params.lr < 0.5", "params.seed = 0"])) == [1, 3]
    assert numbers(registry.runs(state="running")) == [6]
    assert numbers(registry.runs(state=("running", "failed"), sweep="0000")) == [6]
    assert numbers(registry.runs(sort=["params.seed", "-params.lr"])) == [5, 3, 1, 6, 4, 2]
    assert numbers(registry.runs("cn*", limit=1)) == [6], "what may still change comes first"
    assert numbers(registry.runs("cnn")) == [1, 2, 3, 4, 5, 6]
    assert numbers(registry.runs(since=datetime.now(UTC) - timedelta(days=2, hours=1))) == [5, 6]
    assert numbers(registry.runs(since="49h")) == [5, 6]


def test_questions_that_mean_nothing_are_errors_of_slurmtrain(registry: slurmtrain.Registry) -> None:
    with pytest.raises(QueryError, match=r"params\.lr"):
        registry.runs(where="params.lrr < 1")
    with pytest.raises(RunNotFound, match="there is no run"):
        registry.runs("dnn")
    with pytest.raises(RunNotFound, match="prefix of"):
        registry.run("000")


def test_a_run_is_named_as_on_the_command_line(registry: slurmtrain.Registry) -> None:
    with pytest.warns(
        SlurmtrainWarning, match=r"cnn: 6 runs of sweep .*, and this takes one of them: 0000000006 \(runn"
    ):
        assert registry.run("cnn").id == registry.run("@last").id == "0000000006"
    assert registry.run("0000000003").params == {"lr": 0.1, "seed": 0, "epochs": 10}


def test_what_should_be_known_is_a_warning_at_the_line_of_the_caller(
    registry: slurmtrain.Registry, workspace: Workspace
) -> None:
    journal = workspace.root.run("0000000006").journals / "odd.jsonl"
    journal.write_text("{no json\n")
    with pytest.warns(SlurmtrainWarning, match="1 unreadable line") as caught:
        registry.runs()
    assert [warning.filename for warning in caught] == [__file__]


def test_nothing_is_printed_and_new_files_keep_the_users_modes(
    registry: slurmtrain.Registry, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        registry.run("@last").tag("good")
        (tmp_path / "own").touch()
    finally:
        os.umask(before)
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o640
    assert capfd.readouterr() == ("", "")


def test_the_users_umask_returns_in_whatever_order_threads_leave() -> None:
    before = os.umask(0o022)
    first, second = private_umask(), private_umask()
    try:
        for context in (first, second):
            context.__enter__()
        first.__exit__(None, None, None)
        os.umask(inside := os.umask(0))
        second.__exit__(None, None, None)
        assert (inside, os.umask(before)) == (0o077, 0o022)
    finally:
        os.umask(before)


def test_threads_may_use_it_at_the_same_time(registry: slurmtrain.Registry) -> None:
    counts: list[int] = []
    run = registry.run("0000000001")

    def use() -> None:
        run.tag("shared").refresh()
        counts.append(len(registry.runs(where="state = completed")))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [5] * 4
    assert run.refresh().tags == ["shared"]


def test_a_root_that_cannot_be_used_is_an_error_of_slurmtrain(workspace: Workspace) -> None:
    workspace.root.path.parent.joinpath("file").write_text("")
    with pytest.raises(PathError, match="file"):
        slurmtrain.Registry(workspace.root.path.parent / "file").runs()


def test_mistakes_in_a_spec_are_all_named_and_nothing_is_created(registry: slurmtrain.Registry) -> None:
    spec = {"name": "x", "comand": "python x.py", "resources": {"nodes": "two"}, "params": {"net": object()}}
    with pytest.raises(SpecError, match=r"params\.net: a value of type object"):
        registry.submit(spec)
    del spec["params"]
    with pytest.raises(SpecError) as caught:
        registry.submit(spec, {"resources.nods": 1})
    assert [mistake.key or mistake.where for mistake in caught.value.mistakes] == [
        "comand",
        "resources.nodes",
        "the call (resources.nods=1)",
    ]
    assert {mistake.where for mistake in caught.value.mistakes[:2]} == {"spec"}
    with pytest.raises(SpecError, match="needs a 'name'"):
        registry.submit({"command": "python x.py"})
    assert len(registry.runs()) == 6


def test_what_is_submitted_is_what_was_given(
    registry: slurmtrain.Registry, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[tuple[submission.SpecFile, str, str | None]] = []

    def submit_specs(
        _: Workspace, specs: list[submission.SpecFile], *, executor: str, key: str | None
    ) -> submission.Submission:
        submitted.extend((spec, executor, key) for spec in specs)
        return submission.Submission(["0000000002", "0000000001"], ["a note"], "s")

    monkeypatch.setattr(submit_package, "submit_specs", submit_specs)
    spec = {"name": "x", "command": "python x.py", "params": {"lr": 1e-5, "word": "1e-3", "empty": None}}
    overrides = {"params.word": "2e-3", "+params.new": (1, "a")}
    with pytest.warns(SlurmtrainWarning, match="a note"):
        runs = registry.submit(spec, overrides, sweep={"params.lr": [0.1, 1e-6]}, executor="local", key="k")
    assert numbers(runs) == [2, 1]
    [(loaded, executor, key)] = submitted
    assert (executor, key) == ("local", "k")
    plans = [planned.plan.spec.params for planned in loaded.runs]
    assert plans == [{"lr": lr, "word": "2e-3", "empty": None, "new": [1, "a"]} for lr in (0.1, 1e-6)]
    assert "word: '1e-3'" in loaded.text
    with pytest.warns(SlurmtrainWarning, match="a note"):
        registry.submit([spec, {**spec, "name": "y", "after": "x"}], after=[runs[0], "afterany:z"], executor="local")
    afters = [[loaded.runs[0].plan.spec.name, *loaded.runs[0].plan.spec.after] for loaded, *_ in submitted[1:]]
    assert afters == [["x", runs[0].id, "afterany:z"], ["y", "x", runs[0].id, "afterany:z"]]


def test_waiting_ends_at_the_limit_and_names_what_has_not_ended(registry: slurmtrain.Registry) -> None:
    runs = registry.runs()
    assert registry.wait(runs[:5], timeout=60.0) == runs[:5]
    with pytest.raises(WaitTimedOut, match=r"after 0\.01 s: 0000000006 \(running\)") as caught:
        registry.wait(runs, timeout=0.01)
    assert isinstance(caught.value, SlurmtrainError)
    assert isinstance(caught.value, TimeoutError)
    assert registry.wait([]) == []


def test_a_wait_takes_no_longer_than_its_run(registry: slurmtrain.Registry, workspace: Workspace) -> None:
    running = registry.run("0000000006")

    def end() -> None:
        time.sleep(0.3)
        sim = SimulatedRun(workspace.root.run(running.id), executor="local", job="local-6", now=time.time())
        sim.ended("completed")

    thread = threading.Thread(target=end)
    thread.start()
    assert running.wait(60.0).state == "completed"
    thread.join()


def test_a_sync_says_what_it_did(registry: slurmtrain.Registry) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome = registry.sync()
    assert (outcome.started, outcome.cancelled, outcome.problems) == ((), (), ())
