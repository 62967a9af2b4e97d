"""Runs of a sweep that share jobs: one element of a job array for each pack."""

from __future__ import annotations

import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.fakeslurm import SlurmCommands, squeue_line
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import submit

from slurmtrain.errors import RequestRefused, SpecError, SubmitFailed
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.model.run.events.command_events import CancelRequested
from slurmtrain.model.run.run import Run
from slurmtrain.ops.cancel import cancel
from slurmtrain.ops.resume import find_failed, resume_failed
from slurmtrain.ops.shared import start as starting
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.shared_jobs import shares_job
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import sync
from slurmtrain.runtime.environment.node import read_launch
from slurmtrain.runtime.job import lease

pytestmark = pytest.mark.usefixtures("slurm")

FIVE = ["params.a=1,2,3,4,5", "pack=2"]


@pytest.fixture
def spec(spec: Path) -> Path:
    """The spec of these tests, of one node."""
    text = re.sub(r"nodes: *2", "nodes: 1", spec.read_text())
    spec.write_text(text)
    return spec


def submit_five(workspace: Workspace, spec: Path, *more: str) -> list[str]:
    return submit(workspace, spec, sweep=[*FIVE, *more], executor="slurm").run_ids


def runs_of(workspace: Workspace) -> list[Run]:
    """All runs, as any command sees them."""
    again = Workspace(workspace.config)
    observe(again)
    loaded = [again.store.load(run_id) for run_id in workspace.run_ids()]
    return [run for run in loaded if run is not None]


def scripts(workspace: Workspace) -> list[str]:
    return [path.read_text() for path in sorted(workspace.root.arrays.glob("*/submitit/8_submission.sh"))]


def scancelled(slurm: SlurmCommands) -> list[list[str]]:
    return [call.args for call in slurm.calls("scancel")]


def test_runs_that_fill_jobs_share_an_array_and_a_run_that_is_left_over_has_its_own_job(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    run_ids = submit_five(workspace, spec)
    assert len(slurm.calls("sbatch")) == 2
    [script] = scripts(workspace)
    assert "#SBATCH --array=0-1\n" in script
    assert "#SBATCH --ntasks-per-node=2\n" in script
    [array] = workspace.root.arrays.iterdir()
    for number, run_id in enumerate(run_ids[:4]):
        submission = workspace.root.run(run_id).submission(1)
        assert (array / "elements" / f"{number // 2}.{number % 2}").readlink() == submission.path
        launch = read_launch(submission)
        assert (launch.array, launch.pack, launch.slot) == ((array.name, number // 2), Pack(2), number % 2)
    runs = runs_of(workspace)
    assert [run.newest and (run.newest.job_id, run.newest.pack) for run in runs] == [
        *[("8_0", 2)] * 2, *[("8_1", 2)] * 2, ("8", 1),
    ]  # fmt: skip


def test_fewer_runs_than_fill_a_job_are_a_smaller_pack(workspace: Workspace, spec: Path) -> None:
    submit(workspace, spec, sweep=["params.a=1,2,3,4,5", "pack=3"], executor="slurm")
    assert sorted(line for text in scripts(workspace) for line in text.splitlines() if "ntasks-per-node" in line) == [
        "#SBATCH --ntasks-per-node=2",
        "#SBATCH --ntasks-per-node=3",
    ]


def test_a_limit_is_of_runs_and_what_is_left_over_has_its_part(workspace: Workspace, spec: Path) -> None:
    sweep = ["params.a=range(10)", "pack=4", "parallel=8"]
    assert not [note for note in submit(workspace, spec, sweep=sweep, executor="slurm").notes if "at once" in note]
    arrays = sorted(line for text in scripts(workspace) for line in text.splitlines() if "--array" in line)
    # 4 runs of the 8 that fill jobs, and both that are left over: a second job of 4 would be too many.
    assert arrays == ["#SBATCH --array=0-0", "#SBATCH --array=0-1%1"]
    notes = submit(workspace, spec, sweep=[*sweep[:2], "parallel=4"], executor="slurm").notes
    assert [note for note in notes if note.startswith("up to 6 runs may run at once instead of 4")]


def test_a_preview_counts_the_node_of_the_pack_that_is_left_over(spec: Path) -> None:
    from slurmtrain.ops.submit import load
    from slurmtrain.ops.submit.previews import cost_of_runs

    resources = ["resources.time=01:00:00", "resources.gpus_per_node=1"]
    costs = [
        cost_of_runs(load(spec, resources, ["params.a=range(10)", f"pack={{runs: 4, share_gpu: {shares}}}"]))
        for shares in ("false", "true")
    ]
    assert [(cost.runs, cost.node_hours, cost.gpu_hours) for cost in costs] == [(10, 3.0, 10.0), (10, 3.0, 3.0)]


def test_a_pack_requests_what_all_of_its_runs_need(workspace: Workspace, spec: Path) -> None:
    resources = ["resources.gpus_per_node=1", "resources.mem=1GB", "resources.cpus_per_proc=3"]
    for shares, gpus in (("false", 2), ("true", 1)):
        sweep = ["params.a=1,2", f"pack={{runs: 2, share_gpu: {shares}}}"]
        submit(workspace, spec, resources, sweep=sweep, executor="slurm")
        script = scripts(workspace)[-1]
        options = dict(line[10:].partition("=")[::2] for line in script.splitlines() if line.startswith("#SBATCH --"))
        assert (options["gpus-per-node"], options["mem"], options["cpus-per-task"]) == (str(gpus), "2048M", "3")


@pytest.mark.parametrize(
    ("overrides", "sweep", "message"),
    [
        (["resources.nodes=2"], "pack=2", "resources.nodes"),
        ([], "pack=6", "the sweep has only 5"),
        ([], "pack=0", "of at least 2"),
    ],
)
def test_a_pack_that_cannot_be_is_refused_and_nothing_is_created(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, overrides: list[str], sweep: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        submit(workspace, spec, overrides, sweep=["params.a=1,2,3,4,5", sweep], executor="slurm")
    assert not slurm.calls("sbatch")


def test_a_pack_that_fits_on_no_node_is_refused(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slurmtrain.slurm.parse import NodeInfo
    from slurmtrain.slurm.scheduler import Scheduler

    slurm.replies("scontrol", "PartitionName=spot Default=YES MaxTime=1:00:00 TotalNodes=4\nMaxArraySize = 1001\n")
    node = NodeInfo(name="n1", partition="spot", state="idle", cpus=3, memory=None, gpus=0, features=frozenset())
    monkeypatch.setattr(Scheduler, "nodes", lambda _: [node])
    with pytest.raises(RequestRefused, match="partition spot has; at most 3 fit on one"):
        submit(workspace, spec, sweep=["params.a=1,2,3,4,5", "pack=4"], executor="slurm")


def test_a_cancel_of_one_run_leaves_the_job_to_the_other_and_the_last_one_ends_it(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    first, second, *_ = submit_five(workspace, spec)
    assert cancel(workspace, [first])[first].state == "cancelled"
    assert scancelled(slurm) == []
    assert lease.ended_as(workspace.root.run(first), 1) == "cancelled"
    slurm.replies("squeue", squeue_line("8_0", run_id=next(workspace.root.arrays.iterdir()).name))
    states = {run.id: run.state for run in runs_of(workspace)}
    assert (states[first], states[second]) == ("cancelled", "pending")
    array = next(workspace.root.arrays.iterdir()).name
    slurm.replies("squeue", squeue_line("8_0", run_id=array).replace("PENDING  ", "CANCELLED"))
    cancel(Workspace(workspace.config), [second], force=True)
    assert ["8_0"] in scancelled(slurm)


def test_the_cancel_of_a_sweep_looks_at_the_links_of_each_pack_and_at_no_others(
    workspace: Workspace, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ids = submit_five(workspace, spec)
    read: list[str] = []
    readlink = Path.readlink
    monkeypatch.setattr(Path, "readlink", lambda path: (read.append(path.name), readlink(path))[1])
    monkeypatch.setattr(Path, "glob", lambda *_: pytest.fail("all links of the array are listed"))
    for run_id in run_ids:
        submission = workspace.root.run(run_id).submission(1)
        assert shares_job(workspace, submission) == (run_id != run_ids[4])
    assert read == ["0.0", "0.1", "0.0", "0.1", "1.0", "1.1", "1.0", "1.1"]


def test_a_run_whose_directory_was_deleted_takes_no_job_from_others(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    first, *_ = submit_five(workspace, spec)
    runs_of(workspace)
    shutil.rmtree(workspace.root.run(first).path)
    cancel(Workspace(workspace.config), [first])
    assert scancelled(slurm) == []


def test_a_cancel_while_a_pack_is_submitted_leaves_the_job_to_the_other(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_job = starting._Group.submit

    def cancel_meanwhile(*arguments: Any) -> Any:
        with workspace.journal(workspace.root.run(workspace.run_ids()[1]), "cancel") as journal:
            journal.write(CancelRequested())
        return submit_job(*arguments)

    monkeypatch.setattr(starting._Group, "submit", cancel_meanwhile)
    run_ids = submit_five(workspace, spec)
    assert scancelled(slurm) == []
    assert [lease.ended_as(workspace.root.run(run_id), 1) for run_id in run_ids[:2]] == [None, "cancelled"]
    assert runs_of(workspace)[1].state == "cancelled"


def test_packs_that_never_came_to_be_are_submitted_again_as_packs(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    slurm.replies("sbatch", code=-signal.SIGKILL)
    with pytest.raises(SubmitFailed):
        submit(workspace, spec, sweep=["params.a=1,2,3,4", "pack=2"], executor="slurm")
    slurm.replies("sbatch", "Submitted batch job 8\n")
    synced = sync(Workspace(workspace.config), track=False)
    assert sorted(synced.started) == workspace.run_ids()
    assert [run.newest and run.newest.job_id for run in runs_of(workspace)] == ["8_0", "8_0", "8_1", "8_1"]


def test_a_pack_that_may_exist_is_found_by_the_next_command(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    slurm.replies("sbatch", code=-signal.SIGKILL)
    with pytest.raises(SubmitFailed):
        submit(workspace, spec, sweep=["params.a=1,2,3,4", "pack=2"], executor="slurm")
    [array] = workspace.root.arrays.iterdir()
    slurm.replies("squeue", "".join(squeue_line(f"8_{i}", run_id=array.name) for i in range(2)))
    assert [run.newest and run.newest.job_id for run in runs_of(workspace)] == ["8_0", "8_0", "8_1", "8_1"]


def test_a_local_sweep_says_that_its_runs_share_no_gpus(workspace: Workspace, spec: Path) -> None:
    from slurmtrain.ops.submit import load
    from slurmtrain.ops.submit.previews import preview

    sweep = ["params.a=1,2", "pack={runs: 2, share_gpu: true}"]
    notes = [
        preview(workspace, load(spec, ["resources.gpus_per_node=1"], sweep), executor).notes
        for executor in ("local", "slurm")
    ]
    assert [any("share_gpu" in note for note in each) for each in notes] == [True, False]


@pytest.mark.parametrize(("overrides", "together"), [([], True), (["resources.nodes=2"], False)])
def test_failed_runs_share_a_job_again_unless_an_override_makes_them_too_large(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, overrides: list[str], together: bool
) -> None:
    run_ids = submit(workspace, spec, sweep=["params.a=1,2", "pack=2"], executor="slurm").run_ids
    for run_id in run_ids:
        SimulatedRun(workspace.root.run(run_id), job="8_0", now=time.time()).started().crashed()
    slurm.replies("sbatch", "Submitted batch job 9\n")
    assert resume_failed(workspace, find_failed(workspace, run_ids), overrides).run_ids == run_ids
    launches = [read_launch(workspace.root.run(run_id).submission(2)) for run_id in run_ids]
    assert [launch and launch.pack for launch in launches] == [Pack(2) if together else None] * 2


def test_what_the_batch_script_of_a_pack_printed_explains_runs_whose_agents_never_started(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    run_ids = submit(workspace, spec, sweep=["params.a=1,2", "pack=2"], executor="slurm").run_ids
    [array] = workspace.root.arrays.iterdir()
    (array / "submitit" / "8_0_0_log.out").write_text("module: error: no such module\n")
    failed = squeue_line("8_0", run_id=array.name).replace("PENDING", "FAILED ")
    slurm.replies("squeue", failed)
    runs = runs_of(workspace)
    assert [run.id for run in runs] == run_ids
    for run in runs:
        assert run.state == "failed"
        assert "no such module" in run.reason
