"""A sweep on Slurm is one job array: one sbatch, and an element for each run."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fakeslurm import SlurmCommands, squeue_line
from helpers.workspaces import submit
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import PathError, RequestRefused, SubmitFailed
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.model.run.events.command_events import CancelRequested
from slurmtrain.ops.shared import start as starting
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.shared_jobs import describe_excess, share_limit
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import sync
from slurmtrain.runtime.environment.node import read_launch
from slurmtrain.runtime.job import lease
from slurmtrain.snapshots import snapshot_store

SWEEP = ["params.a=1,2,3"]


def job_ids(workspace: Workspace) -> list[str | None]:
    """The job of each run's newest attempt, oldest run first, as any command sees it."""
    again = Workspace(workspace.config)
    observe(again)
    runs = [again.store.load(run_id) for run_id in workspace.run_ids()]
    return [run.newest.job_id if run and run.newest else None for run in runs]


def queue(slurm: SlurmCommands, array_id: str, count: int = 3) -> None:
    """Let squeue know the elements of an array, whose job is 8."""
    slurm.replies("squeue", "".join(squeue_line(f"8_{i}", run_id=array_id) for i in range(count)))


def array_id(workspace: Workspace) -> str:
    [path] = workspace.root.arrays.iterdir()
    return path.name


def arrays_of(workspace: Workspace) -> list[str]:
    """The --array of each job array, in the order of the sweep."""
    texts = [path.read_text() for path in sorted(workspace.root.arrays.glob("*/submitit/8_submission.sh"))]
    return [line.partition("=")[2] for text in texts for line in text.splitlines() if "--array=" in line]


def test_a_run_of_a_sweep_costs_few_files_of_its_own_and_no_fsync(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    # Whether the hashes of code are kept depends on how long ago this test wrote its files.
    monkeypatch.setattr(snapshot_store, "_TICK_NS", 1 << 62)

    def submit_many(count: int) -> list[Path]:
        synced.clear()
        run_ids, *_ = submit(workspace, spec, sweep=[f"params.a=range({count})"], executor="slurm")
        return [path for run_id in run_ids for path in (workspace.root.run(run_id).path, *entries_of(run_id))]

    def entries_of(run_id: str) -> list[Path]:
        return list(workspace.root.run(run_id).path.rglob("*"))

    few, fsyncs = submit_many(2), len(synced)
    more = submit_many(5)
    assert len(synced) == fsyncs
    assert len(few) / 2 == len(more) / 5
    assert sum(path.is_dir() for path in more) / 5 == 7
    inodes = {path.stat().st_ino: path.name for path in more if path.is_file()}
    # Each its lock, spec with the override, plan, start, lease and two journals; what they come from is the same.
    assert len(inodes) == 5 * 7 + 1
    run = workspace.root.run(more[0].name)
    assert run.plan.samefile(run.submission(1).plan)


def test_where_there_are_no_links_each_run_has_files_of_its_own(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    runs = [workspace.root.run(run_id) for run_id in submit(workspace, spec, sweep=SWEEP, executor="slurm").run_ids]
    assert len({run.environment.read_bytes() for run in runs}) == 1
    assert [run.plan.read_bytes() for run in runs] == [run.submission(1).plan.read_bytes() for run in runs]
    assert {run.environment.stat().st_nlink for run in runs} == {1}


def test_runs_that_request_the_same_are_elements_of_one_array(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    run_ids, *_ = submit(workspace, spec, sweep=SWEEP, executor="slurm")
    assert run_ids == workspace.run_ids()
    assert len(slurm.calls("sbatch")) == 1
    assert arrays_of(workspace) == ["0-2"]
    array = workspace.root.array(array_id(workspace))
    for index, run_id in enumerate(run_ids):
        submission = workspace.root.run(run_id).submission(1)
        assert array.element(index).readlink() == submission.path
        launch = read_launch(submission)
        assert launch is not None
        assert launch.array == (array.id, index)
        assert lease.granted_to(submission.run) == 1
    queue(slurm, array.id)
    assert job_ids(workspace) == ["8_0", "8_1", "8_2"]


def test_only_runs_that_request_the_same_share_an_array(workspace: Workspace, slurm: SlurmCommands, spec: Path) -> None:
    sweep = ["params.a=1,2", "resources.cpus_per_proc=1,2"]
    run_ids, *_ = submit(workspace, spec, sweep=sweep, executor="slurm")
    assert run_ids == workspace.run_ids()
    assert arrays_of(workspace) == ["0-1", "0-1"]
    assert len(slurm.calls("sbatch")) == 2


@pytest.mark.parametrize(("setting", "sizes", "calls"), [("MaxArraySize = 2", ["0-1"], 2), ("MaxArraySize = 0", [], 3)])
def test_a_sweep_that_is_longer_than_arrays_may_be_is_several(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, setting: str, sizes: list[str], calls: int
) -> None:
    slurm.replies("scontrol", f"PartitionName=spot Default=YES MaxTime=1:00:00 TotalNodes=4\n{setting}\n")
    submit(workspace, spec, sweep=SWEEP, executor="slurm")
    assert arrays_of(workspace) == sizes
    assert len(slurm.calls("sbatch")) == calls


def test_a_limit_on_runs_at_once_is_that_of_the_array_also_of_one_that_is_submitted_again(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    slurm.replies("sbatch", code=-signal.SIGKILL)
    with pytest.raises(SubmitFailed):
        submit(workspace, spec, sweep=[*SWEEP, "parallel=2"], executor="slurm")
    slurm.replies("sbatch", "Submitted batch job 8\n")
    sync(Workspace(workspace.config), track=False)
    assert arrays_of(workspace) == ["0-2%2"]
    submit(workspace, spec, sweep=["params.a=4,5", "parallel=2"], executor="slurm")
    assert arrays_of(workspace) == ["0-2%2", "0-1"]


def test_several_arrays_share_a_limit_on_runs_at_once(workspace: Workspace, slurm: SlurmCommands, spec: Path) -> None:
    sweep = ["params.a=1,2,3,4", "resources.cpus_per_proc=1,2"]
    _, notes, _ = submit(workspace, spec, sweep=[*sweep, "parallel=4"], executor="slurm")
    assert arrays_of(workspace) == ["0-3%2", "0-3%2"]
    assert not [note for note in notes if "at once" in note]
    _, notes, _ = submit(workspace, spec, sweep=[*sweep, "parallel=1"], executor="slurm")
    assert arrays_of(workspace)[2:] == ["0-3%1", "0-3%1"]
    assert [note for note in notes if note.startswith("up to 2 runs may run at once instead of 1")]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6),
    st.none() | st.integers(1, 200),
    st.none() | st.integers(2, 5).map(Pack),
)
def test_the_limits_of_arrays_add_up_to_that_of_the_sweep(
    sizes: list[int], limit: int | None, pack: Pack | None
) -> None:
    # As groups are: they fill all of their jobs, or are fewer than fill one.
    sizes = [size if pack is None or size < pack.runs else size // pack.runs * pack.runs for size in sizes]
    of_a_job = [1 if pack is None else min(pack.runs, size) for size in sizes]
    jobs = [size // each for size, each in zip(sizes, of_a_job, strict=True)]
    shares = share_limit(limit, sizes, pack)
    running = [count if share is None else share for share, count in zip(shares, jobs, strict=True)]
    assert all(1 <= at_once <= count for at_once, count in zip(running, jobs, strict=True))
    runs = sum(at_once * each for at_once, each in zip(running, of_a_job, strict=True))
    if limit is None or sum(sizes) <= limit:
        assert runs == sum(sizes)
    else:
        assert runs <= max(limit, sum(of_a_job))
        # No further job would have fitted.
        waiting = [each for each, at_once, count in zip(of_a_job, running, jobs, strict=True) if at_once < count]
        assert runs + min(waiting, default=limit) > limit
    assert bool(describe_excess(limit, sizes, pack)) == (limit is not None and limit < sum(of_a_job))


def test_an_array_whose_runs_cannot_be_prepared_is_not_submitted_and_leaves_nothing(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchers: list[subprocess.Popen[str]] = []

    def launch(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        launchers.append(subprocess.Popen(*arguments, **options))
        return launchers[-1]

    def fail(*_: object) -> None:
        assert launchers[-1].poll() is None  # it waits for its order
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("slurmtrain.slurm.slurm_launch.subprocess", SimpleNamespace(Popen=launch, PIPE=subprocess.PIPE))
    monkeypatch.setattr(starting, "_claim", fail)
    with pytest.raises(PathError, match="no space left"):
        submit(workspace, spec, sweep=SWEEP, executor="slurm")
    assert launchers[-1].poll() is not None
    assert slurm.calls("sbatch") == []
    assert workspace.run_ids() == []
    assert list(workspace.root.arrays.iterdir()) == []


def test_elements_of_an_array_that_never_came_to_be_are_submitted_again_as_one_array(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    slurm.fails("sbatch", "sbatch: error: Batch job submission failed: Invalid account")
    with pytest.raises(RequestRefused, match=r"nothing was created$"):
        submit(workspace, spec, sweep=SWEEP, executor="slurm")
    assert (workspace.run_ids(), list(workspace.root.arrays.iterdir())) == ([], [])
    slurm.replies("sbatch", code=-signal.SIGKILL)
    with pytest.raises(SubmitFailed, match="'slurmtrain sync' finds out") as raised:
        submit(workspace, spec, sweep=SWEEP, executor="slurm")
    assert raised.value.run_ids == tuple(workspace.run_ids())
    lost = array_id(workspace)
    slurm.replies("sbatch", "Submitted batch job 8\n")
    synced = sync(Workspace(workspace.config), track=False)
    assert sorted(synced.started) == workspace.run_ids()
    assert len(slurm.calls("sbatch")) == 3
    [array] = {path.name for path in workspace.root.arrays.iterdir()} - {lost}
    queue(slurm, array)
    assert job_ids(workspace) == ["8_0", "8_1", "8_2"]
    sync(Workspace(workspace.config), track=False)
    assert len(slurm.calls("sbatch")) == 3


def test_a_run_that_is_cancelled_while_its_array_is_submitted_loses_its_element_alone(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_job = starting._Group.submit

    def cancel_meanwhile(*arguments: Any) -> Any:
        with workspace.journal(workspace.root.run(workspace.run_ids()[1]), "cancel") as journal:
            journal.write(CancelRequested())
        return submit_job(*arguments)

    monkeypatch.setattr(starting._Group, "submit", cancel_meanwhile)
    run_ids, notes, _ = submit(workspace, spec, sweep=SWEEP, executor="slurm")
    assert [call.args for call in slurm.calls("scancel")] == [["8_1"]]
    assert [note for note in notes if run_ids[1] in note]
    assert lease.ended_as(workspace.root.run(run_ids[1]), 1) == "cancelled"
    assert lease.ended_as(workspace.root.run(run_ids[0]), 1) is None
