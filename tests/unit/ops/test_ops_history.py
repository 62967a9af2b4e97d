"""Reading the histories of a run's metrics."""

from __future__ import annotations

import json
import math

from slurmtrain.history import read_history
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.ops.shared.workspace import Workspace

A = ("1", 0)


def make_run(*attempts: Attempt) -> Run:
    return Run(id="r", name="r", state="running", reason="", executor="slurm", attempts=attempts)


def make_directory(workspace: Workspace, lines: dict[tuple[str, int], str]) -> RunDir:
    directory = workspace.root.run("r")
    for key, text in lines.items():
        path = directory.attempt(*key).metrics
        path.parent.mkdir(parents=True, mode=0o700)
        path.write_text(text)
        path.chmod(0o600)
    return directory


def line(step: int, **metrics: float) -> str:
    return json.dumps({"t": 1000.0 + step, "step": step, "metrics": metrics}) + "\n"


def test_garbage_a_torn_end_and_values_that_are_not_finite_do_no_harm(workspace: Workspace) -> None:
    text = line(1, loss=1.0) + "garbage\n" + '{"t": 5, "step": "x"}\n' + line(2, loss=math.nan) + line(3, loss=3.0)
    directory = make_directory(workspace, {A: text + '{"t": 9, "st'})
    history = read_history(make_run(Attempt(number=1, job_id="1", restart=0)), directory)
    assert list(history.curves["loss"].kept.steps) == [1, 2, 3]
    assert math.isnan(history.curves["loss"].kept.values[1])


def test_a_file_longer_than_what_is_read_at_once_is_read_to_its_end(workspace: Workspace) -> None:
    count = 40_000
    directory = make_directory(workspace, {A: "".join(line(step, loss=step) for step in range(1, count + 1))})
    history = read_history(make_run(Attempt(number=1, job_id="1", restart=0)), directory, ["loss"])
    assert len(history.curves["loss"].kept) == count


def test_a_run_without_metrics_has_no_curves(workspace: Workspace) -> None:
    assert read_history(make_run(), workspace.root.run("r")).curves == {}
