"""What an agent reads from its environment and its submission: node, job, attempt."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import LaunchError, PathError
from slurmtrain.model.interruption.interval import InterruptionStats
from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.environment.node import (
    Launch,
    Node,
    Turn,
    enter_element,
    read_launch,
    read_plan,
    this_node,
)
from slurmtrain.runtime.environment.variables import local_job
from slurmtrain.system.files import write_json

SLURM = {"SLURM_JOB_ID": "4711", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2"}
LOCAL = {"SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "2", **local_job("local-abc", ["0", "1"])}
HANDED = Launch(attempt=3)


@pytest.fixture(autouse=True)
def _outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SUBMITIT_", "SBATCH_")):
            monkeypatch.delenv(name)


def node(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], launch: Launch = HANDED) -> Node:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with tempfile.TemporaryDirectory() as folder:
        submission = RunDir(Path(folder)).submission(2)
        submission.path.mkdir(parents=True)
        submission.launch.write_text(json.dumps(launch.to_dict()))
        return this_node(submission)


# --- which node of which attempt --------------------------------------------------------------------------------


ARRAY = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "1"}
LOCAL_NODE = {"index": 1, "count": 2, "job_id": "local-abc", "restart": 0, "executor": "local", "partition": ""}
COMPONENTS = {
    "SLURM_HET_SIZE": "2", "SLURM_JOB_PARTITION": "cpu",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "a1", "SLURM_JOB_PARTITION_HET_GROUP_0": "cpu",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "b[1-3]", "SLURM_JOB_PARTITION_HET_GROUP_1": "gpu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SLURM, {"index": 1, "count": 2, "host": socket.gethostname(), "job_id": "4711", "restart": 0, "attempt": 3,
                 "executor": "slurm", "submission": 2, "launch": HANDED}),
        # The step may have fewer nodes than the job.
        ({**SLURM, "SLURM_NNODES": "3"}, {"count": 2}),
        ({"SLURM_JOB_ID": "4711", "SLURM_NODEID": "1", "SLURM_NNODES": "3"}, {"count": 3}),
        ({**SLURM, "SLURM_RESTART_COUNT": "2"}, {"restart": 2, "attempt": 5}),
        ({**SLURM, **ARRAY}, {"job_id": "4700_3", "restart": 1}),
        ({**SLURM, "SLURM_JOB_PARTITION": "spot"}, {"partition": "spot"}),
        # What it waited in, as Slurm 22.05 says.
        ({**SLURM, "SLURM_JOB_PARTITION": "ondemand,spot"}, {"partition": ""}),
        # In a heterogeneous job, the first variable is the first component's.
        ({**SLURM, **COMPONENTS, "SLURMD_NODENAME": "b2"}, {"partition": "gpu"}),
        ({**SLURM, **COMPONENTS, "SLURMD_NODENAME": "a1"}, {"partition": "cpu"}),
        ({**SLURM, **COMPONENTS, "SLURMD_NODENAME": "c1"}, {"partition": ""}),
        (LOCAL, LOCAL_NODE),
        # Within a job of Slurm's.
        ({**SLURM, "SLURM_STEP_NUM_NODES": "9", "SLURM_RESTART_COUNT": "4", **LOCAL}, LOCAL_NODE),
        ({**SLURM, "SLURM_JOB_PARTITION": "spot", **LOCAL}, LOCAL_NODE),
    ],
)  # fmt: skip
def test_a_node_knows_which_it_is(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: dict[str, object]
) -> None:
    agent = node(monkeypatch, environ)
    assert {name: getattr(agent, name) for name in expected} == expected


def test_outside_a_job_there_is_no_node(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="only runs inside a job"):
        this_node(RunDir(tmp_path).submission(1))


def test_a_node_that_does_not_see_the_run_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NODEID", "0")
    with pytest.raises(LaunchError, match="is the run directory visible on this node"):
        this_node(RunDir(tmp_path).submission(1))


# --- what a submission hands over -------------------------------------------------------------------------------

launches = st.builds(
    Launch,
    attempt=st.integers(1, 99),
    turn=st.none() | st.builds(Turn, st.text(), st.integers(1, 99), st.none() | st.text()),
    from_start=st.booleans(),
    since=st.none() | st.floats(0, 2**40),
    history=st.none() | st.builds(InterruptionStats, uptime_s=st.floats(0, 2**40), interruptions=st.integers(0, 99)),
)


@given(launches)
def test_what_a_submission_hands_over_is_what_its_nodes_read(launch: Launch) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert node(monkeypatch, SLURM, launch).launch == launch


def test_what_a_version_handed_over_that_knew_of_no_history_is_read() -> None:
    data = Launch(attempt=2, history=InterruptionStats(interruptions=1)).to_dict()
    del data["history"]
    assert Launch.from_dict(data) == Launch(attempt=2)


def test_only_the_first_start_of_a_job_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(attempt=1, from_start=True)
    assert node(monkeypatch, SLURM, launch).from_start
    assert not node(monkeypatch, {**SLURM, "SLURM_RESTART_COUNT": "1"}, launch).from_start


# --- elements of job arrays -----------------------------------------------------------------------------------------


def test_an_element_of_an_array_finds_its_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submission = RunDir(tmp_path / "r1").submission(1)
    submission.path.mkdir(parents=True)
    launch = Launch(attempt=1, array=("A1", 3), mlflow="http://mlflow:5000")
    submission.launch.write_text(json.dumps(launch.to_dict()))
    elements = tmp_path / "elements"
    elements.mkdir(mode=0o700)
    (elements / "3").symlink_to(submission.path)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert enter_element(elements) == submission
    assert read_launch(submission) == launch
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    with pytest.raises(LaunchError, match="element 4 of a job array has no run"):
        enter_element(elements)


# --- the file of a plan -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [{}, {"schema": 999}])
def test_a_plan_of_another_shape_is_refused_with_its_path(tmp_path: Path, data: dict[str, int]) -> None:
    path = tmp_path / "plan.json"
    write_json(path, data)
    with pytest.raises(PathError, match=rf"the plan at {path} cannot be read"):
        read_plan(path)
