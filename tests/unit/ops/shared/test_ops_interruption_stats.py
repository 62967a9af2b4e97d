"""What a submission tells its job of interruptions, and a person of a grace that is too short."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.fakeslurm import SlurmCommands
from helpers.simulated_run import SimulatedRun, make_test_plan
from helpers.workspaces import make_workspace, submit

from slurmtrain.model.interruption.interval import InterruptionStats
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.urls import DatabaseUrl
from slurmtrain.ops.shared.next_attempts import outlook
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.slurm.parse import Job

PARTITIONS = (
    "PartitionName=spot Default=YES MaxTime=1:00:00 TotalNodes=4 GraceTime=60 PreemptMode=REQUEUE\n"
    "PartitionName=paid Default=NO MaxTime=1:00:00 TotalNodes=4 GraceTime=0 PreemptMode=OFF\n"
)
SPEC = "name: x\ncommand: python -c pass\nresources: {nodes: 2}\ntracking: {mlflow: {enabled: false}}\n"
DAY = 86400.0


@pytest.fixture
def slurm(slurm: SlurmCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    monkeypatch.chdir(tmp_path)
    slurm.replies("scontrol", PARTITIONS)
    return slurm


@pytest.fixture
def workspace(tmp_path: Path, registry_address: Path | DatabaseUrl) -> Workspace:
    return make_workspace(tmp_path / "runs", registry=registry_address)


class Lives:
    """Runs as their journals have them, each a day long on two nodes unless something else is said."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.count = 0

    def add(
        self,
        cause: str | None,
        *,
        name: str = "x",
        partition: str | None = "spot",
        executor: str = "slurm",
        ago: float = DAY,
        lasted: float = DAY,
        saves: tuple[tuple[float, float], ...] = (),
        metrics_at: float | None = None,
        **end: Any,
    ) -> RunDir:
        self.count += 1
        directory = self.workspace.root.run(f"{self.count:010d}")
        at = time.time() - ago - lasted
        where = {"partition": partition} if partition else {}
        run = SimulatedRun(directory, executor=executor, job=str(100 + self.count), now=at - 10)
        run.created(name=name).submitted(**where).later(6).started(nodes=2)
        for step, (stall_s, seconds) in enumerate(saves, 1):
            run.saved(step, at=at + 1 + step, saved_at=at + 1 + step, stall_s=stall_s, seconds=seconds)
        if metrics_at is not None:
            run.reached(1, at=at + metrics_at, loss=1.0)
        if cause in ("crash", "completed", "hang"):
            for node in range(2):
                run.ended(cause, node, at=at + lasted, failed_at=at + lasted, **end)
        if cause in ("node_fail", "preempted", "timeout", "oom"):
            state = {"node_fail": "NODE_FAIL", "oom": "OUT_OF_MEMORY"}.get(cause, cause.upper())
            ended = Job(id=run.job, name="", state=state, starts_at=at, ends_at=at + lasted)
            run.observed(ended, at=at + lasted + 1)
        observe(self.workspace, [directory.id], ask_slurm=False)
        return directory


@pytest.fixture
def lives(workspace: Workspace, slurm: SlurmCommands) -> Lives:
    return Lives(workspace)


def stats_of(
    workspace: Workspace, executor: str = "slurm", run_id: str = "9999999999", **keys: Any
) -> InterruptionStats:
    return outlook(workspace, run_id, make_test_plan(**keys), executor).history


# --- what was seen --------------------------------------------------------------------------------------------------


def test_an_empty_registry_tells_nothing_and_is_not_made_for_it(workspace: Workspace, slurm: SlurmCommands) -> None:
    assert stats_of(workspace) == InterruptionStats(grace_s=60.0)
    assert stats_of(workspace, "local") == InterruptionStats()
    assert not workspace.has_registry


def test_attempts_count_by_the_node_seconds_that_they_lived_and_what_ended_them(
    workspace: Workspace, lives: Lives
) -> None:
    for cause in ("node_fail", "preempted", "timeout", "completed", "oom", "hang"):
        lives.add(cause, lasted=1000.0)
    lives.add("crash", lasted=500.0, failures=[{"rank": 0, "error": "ValueError: x"}])
    lives.add("crash", lasted=500.0, failures=[{"rank": 1, "signal": "SIGKILL"}])
    stats = stats_of(workspace)
    assert stats.uptime_s == pytest.approx(2 * 7000.0)
    assert (stats.interruptions, stats.announced) == (3, 2)


def test_only_the_same_partition_of_late_counts_and_of_what_still_runs_the_time_that_its_metrics_tell(
    workspace: Workspace, lives: Lives
) -> None:
    lives.add("node_fail")
    lives.add("node_fail", partition="paid", lasted=100.0)
    lives.add("node_fail", partition=None)
    lives.add("node_fail", partition=None, executor="local", lasted=50.0)
    lives.add("node_fail", ago=91 * DAY)
    lives.add("node_fail", ago=80 * DAY)
    lives.add(None, metrics_at=300.0)
    lives.add(None)
    assert stats_of(workspace).interruptions == 2
    assert stats_of(workspace).uptime_s == pytest.approx(4 * DAY + 600.0)
    assert stats_of(workspace, slurm={"partition": "paid"}).uptime_s == pytest.approx(200.0)
    assert stats_of(workspace, "local").uptime_s == pytest.approx(100.0)


# --- what saving has cost -------------------------------------------------------------------------------------------


def test_a_runs_own_last_save_tells_its_stall_and_its_duration(workspace: Workspace, lives: Lives) -> None:
    run = lives.add("completed", saves=((0.5, 30.0), (0.25, 20.0)))
    lives.add("completed", saves=((9.0, 90.0),))
    stats = stats_of(workspace, run_id=run.id)
    assert (stats.stall_s, stats.save_s) == (0.25, 20.0)


def test_a_new_run_knows_only_how_long_saving_took_the_newest_run_of_its_name(
    workspace: Workspace, lives: Lives
) -> None:
    lives.add("completed", saves=((0.5, 30.0),), ago=2 * DAY)
    lives.add("completed", saves=((0.5, 40.0), (0.5, 50.0)))
    lives.add("completed", name="y", saves=((0.5, 99.0),))
    lives.add("completed", executor="local", partition=None, saves=((0.5, 1.0),))
    stats = stats_of(workspace)
    assert (stats.stall_s, stats.save_s) == (None, 50.0)
    assert stats_of(workspace, name="z").save_s is None


# --- submitting -----------------------------------------------------------------------------------------------------


def submitted(workspace: Workspace, tmp_path: Path, *overrides: str) -> tuple[RunDir, list[str]]:
    spec = tmp_path / "x.yaml"
    spec.write_text(SPEC)
    [run_id], notes, _ = submit(workspace, spec, overrides, executor="slurm")
    return workspace.root.run(run_id), [note for note in notes if "GraceTime" in note]


def test_a_job_is_told_what_its_partition_has_seen_and_asking_costs_nothing_more(
    workspace: Workspace, lives: Lives, slurm: SlurmCommands, tmp_path: Path
) -> None:
    lives.add("node_fail", lasted=1000.0, saves=((0.5, 30.0),))
    run, notes = submitted(workspace, tmp_path)
    history = json.loads(run.submission(1).launch.read_text())["history"]
    assert InterruptionStats.from_dict(history) == InterruptionStats(
        uptime_s=pytest.approx(2000.0), interruptions=1, grace_s=60.0, save_s=30.0
    )
    assert notes == []
    assert len(slurm.calls("scontrol")) == 1
    [journal] = run.journals.glob("submit-*.jsonl")
    assert '"partition":"spot"' in journal.read_text()


def test_what_it_then_goes_through_counts_for_the_next_one(
    workspace: Workspace, slurm: SlurmCommands, tmp_path: Path
) -> None:
    run, _ = submitted(workspace, tmp_path)
    at = time.time()
    SimulatedRun(run, job="8", now=at - 1).started().ended("hang", at=at + 50, failed_at=at + 50)
    observe(workspace, [run.id], ask_slurm=False)
    assert stats_of(workspace) == InterruptionStats(uptime_s=pytest.approx(50.0), interruptions=1, grace_s=60.0)


def test_a_save_that_would_not_fit_the_grace_is_told_at_submission(
    workspace: Workspace, lives: Lives, tmp_path: Path
) -> None:
    lives.add("completed", saves=((0.5, 95.0),))
    _, notes = submitted(workspace, tmp_path)
    assert len(notes) == 1
    assert notes[0].startswith(
        "a job that is preempted in partition spot has 60 s to save, but the last save took 95.0"
    )
    _, notes = submitted(workspace, tmp_path, "slurm.partition=paid")
    assert notes == []
