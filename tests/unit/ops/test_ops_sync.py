"""Runs whose agents could not put their jobs back: they are started again once, on other nodes, or given up."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from helpers.fakeslurm import PARTITIONS, SlurmCommands, squeue_line
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.workspaces import build_run, load_run, sync_again

from slurmtrain import local
from slurmtrain.model.run.layout import run_id
from slurmtrain.ops.cancel import cancel
from slurmtrain.ops.shared.next_attempts import run_settings
from slurmtrain.ops.shared.run_details import show_json
from slurmtrain.ops.shared.slurm_jobs import live_jobs
from slurmtrain.ops.shared.views import run_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import sync
from slurmtrain.runtime.environment.node import Turn, read_launch
from slurmtrain.slurm import requeue
from slurmtrain.system.locks import locked
from slurmtrain.system.process import this_process

WHY = "n1: clock: 5 s ahead of n0 (limit 1 s)"
OVER = "7|COMPLETED|0:0|100|200|300|30|n[0-1]|x-0123456789\n"


@pytest.fixture(autouse=True)
def over(slurm: SlurmCommands) -> None:
    """Its last job has ended, and was not put back."""
    slurm.replies("sacct", OVER)


def refused(workspace: Workspace, *, failed: str = "scontrol: no", **spec: Any) -> SimulatedRun:
    """A run of two nodes, one of which failed the preflight, and whose job could not be put back."""
    run = build_run(workspace, **{"resources": {"nodes": 2}, **spec}).submitted().later(time.time() - 200)
    run.started(nodes=2).node("requeue", exclude=["n1"], why=WHY)
    run.ended("preflight", reason=WHY, failed_at=time.time(), cascade=False)
    if failed:
        run.node("requeue_failed", reason=failed)
    return run


# --- a new submission ---------------------------------------------------------------------------------------------


def test_a_run_is_submitted_again_once_without_the_nodes_that_failed(
    workspace: Workspace, slurm: SlurmCommands
) -> None:
    run = refused(workspace, slurm={"exclude": "n3"})
    assert sync_again(workspace).started == [RUN_ID]
    slurm.replies("squeue", squeue_line("8"))
    assert sync_again(workspace).started == []
    assert len(slurm.calls("sbatch")) == 1
    assert "#SBATCH --exclude='n[1,3]'\n" in (run.directory.submission(2).submitit / "8_submission.sh").read_text()
    run_now = load_run(workspace)
    assert (run_now.state, [attempt.job_id for attempt in run_now.attempts]) == ("pending", ["7", "8"])
    assert list(run_now.attempts[1].without) == ["n1"]
    assert run_now.attempts[0].cause == "preflight"


@pytest.mark.parametrize(
    ("rules", "error", "override", "given_up"),
    [
        pytest.param(
            {"resources": {"mem": "4GB"}, "requeue": {"oom": {"mem": "x2", "at_most": "6GB"}}},
            "killed",
            "resources.mem=6144M",
            "it ran out of memory with 6GB, and requeue.oom.at_most is 6GB",
            id="with more memory",
        ),
        pytest.param(
            {"requeue": {"oom": {"accumulation": "x2", "max_accumulation": 2}}},
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
            "resources.accumulation=2",
            "GPU memory with its batch in 2 parts, and requeue.oom.max_accumulation is 2",
            id="with its batch in parts",
        ),
    ],
)
def test_a_run_out_of_memory_is_submitted_again_with_more_until_it_has_all_it_may_have(
    workspace: Workspace, slurm: SlurmCommands, rules: dict[str, Any], error: str, override: str, given_up: str
) -> None:
    run = build_run(workspace, **rules)
    assert run._plan is not None
    run.created(**run_settings(run._plan)).submitted().later(time.time() - 200)
    failed = {"reason": "rank 0 ran out of memory", "failures": [{"rank": 0, "exit_code": 1, "error": error}]}
    run.started().reached(5).ended("oom", **failed)
    assert sync_again(workspace).started == [RUN_ID]
    slurm.replies("squeue", squeue_line("8"))
    assert sync_again(workspace).started == []
    assert list(load_run(workspace).attempts[1].overrides) == [override]
    script = (run.directory.submission(2).submitit / "8_submission.sh").read_text()
    assert ("#SBATCH --mem=6144M\n" in script) == ("mem" in override)
    slurm.replies("squeue", "")
    slurm.replies("sacct", OVER + OVER.replace("7|", "8|"))
    run.job = "8"
    run.started(submission=2).reached(5).ended("oom", **failed)
    assert sync_again(workspace).started == []
    now = load_run(workspace)
    name, _, most = override.removeprefix("resources.").partition("=")
    assert (now.state, str(now.resources[name])) == ("failed", most)
    assert given_up in now.reason


def test_a_run_whose_job_may_be_in_the_queue_is_not_submitted_again_and_says_why_it_waits(
    workspace: Workspace, slurm: SlurmCommands
) -> None:
    refused(workspace, failed="")
    slurm.replies("squeue", squeue_line("7", "BeginTime", restart=1))
    synced = sync_again(workspace)
    assert (synced.started, load_run(workspace).state, slurm.calls("sbatch")) == ([], "requeued", [])
    reason = run_json(workspace, synced.observed.runs[RUN_ID])["reason"]
    assert reason.startswith(f"{WHY}; starts again without n1; it may not start before a given time")


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"resources": {"nodes": 4}}, "n1 cannot be excluded: 4 nodes are needed and 3 would be left"),
        ({"preflight": {"exclude": False}}, "preflight.exclude is false"),
    ],
)
def test_a_run_that_cannot_do_without_its_nodes_is_given_up_and_says_why(
    workspace: Workspace, slurm: SlurmCommands, spec: dict[str, Any], why: str
) -> None:
    refused(workspace, **spec)
    assert sync_again(workspace).started == []
    given_up = load_run(workspace)
    assert (given_up.state, given_up.reason) == ("failed", f"{WHY}; it cannot start again: {why}")
    assert sync_again(workspace).problems == []
    assert slurm.calls("sbatch") == []


def test_a_run_that_sbatch_refuses_is_given_up_with_its_words(workspace: Workspace, slurm: SlurmCommands) -> None:
    refused(workspace)
    slurm.fails("sbatch", "sbatch: error: Batch job submission failed: Invalid qos specification")
    sync_again(workspace)
    assert load_run(workspace).state == "failed"
    assert "it cannot start again: Slurm refused the job: " in load_run(workspace).reason
    sync_again(workspace)
    assert len(slurm.calls("sbatch")) == 1


def test_a_slurm_that_does_not_answer_is_a_problem_and_asked_again_later(
    workspace: Workspace, slurm: SlurmCommands
) -> None:
    refused(workspace)
    slurm.fails("scontrol", "scontrol: error: down")
    [problem] = sync_again(workspace).problems
    assert problem.startswith(f"run {RUN_ID} cannot be started again: Slurm does not answer")
    assert load_run(workspace).state == "requeued"
    slurm.replies("scontrol", PARTITIONS)
    assert sync_again(workspace).started == [RUN_ID]


def test_a_loop_does_not_try_again_at_every_look(workspace: Workspace, slurm: SlurmCommands) -> None:
    refused(workspace)
    slurm.fails("scontrol", "scontrol: error: down")
    object.__setattr__(workspace.config, "slurm_interval", 3600.0)
    watching = workspace.looking_again()
    for _ in range(3):
        sync(watching, track=False)
    assert len(slurm.calls("scontrol")) == 1


def test_a_secret_that_is_missing_here_is_a_problem(workspace: Workspace, slurm: SlurmCommands) -> None:
    refused(workspace, env={"HUB_TOKEN": "<redacted>"})
    [problem] = sync_again(workspace).problems
    assert "HUB_TOKEN" in problem
    assert load_run(workspace).state == "requeued"
    assert slurm.calls("sbatch") == []


def test_a_run_that_another_command_is_at_is_left_alone(workspace: Workspace, slurm: SlurmCommands) -> None:
    run = refused(workspace)
    with locked(run.directory.lock):
        assert sync_again(workspace).started == []
    assert slurm.calls("sbatch") == []
    assert sync_again(workspace).started == [RUN_ID]


@pytest.mark.usefixtures("slurm")
def test_show_tells_the_networks_and_which_was_elected(workspace: Workspace) -> None:
    run = refused(workspace)
    networks = [{"name": "a", "proved": False}, {"name": "b", "proved": True}]
    run.node("election", networks=networks, excluded=[], elected=1, tests=2)
    listed = sync_again(workspace).observed.runs[RUN_ID]
    first, _ = show_json(workspace, listed, load_run(workspace))["attempts"]
    assert first["network"] == {"elected": "b", "networks": networks, "excluded": []}


# --- a job that is held -------------------------------------------------------------------------------------------


class Repairs:
    """What was let go, in place of Slurm's own commands."""

    def __init__(self, returns: bool) -> None:
        self.returns = returns
        self.calls: list[tuple[str, tuple[str, ...], bool]] = []

    def __call__(self, job_id: str, without: Any, *, always: bool) -> bool:
        self.calls.append((job_id, tuple(without), always))
        return self.returns


@pytest.mark.parametrize("reason", ["JobHeldUser", "job requeued in held state"])
@pytest.mark.parametrize("failed", ["scontrol: no", ""])
def test_a_job_that_its_agent_left_held_is_let_go(
    workspace: Workspace, slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch, reason: str, failed: str
) -> None:
    repairs = Repairs(returns=True)
    monkeypatch.setattr(requeue, "release_held", repairs)
    refused(workspace, failed=failed)
    slurm.replies("squeue", squeue_line("7", reason, restart=1))
    assert sync_again(workspace).released == [RUN_ID]
    assert repairs.calls == [("7", ("n1",), bool(failed))]
    assert load_run(workspace).attempts[0].requeue_problem == ""
    assert load_run(workspace).reason == f"{WHY}; starts again without n1"
    sync_again(workspace)
    assert repairs.calls[1:] == [("7", ("n1",), False)]


@pytest.mark.parametrize("reason", ["Priority", "BeginTime", "JobHeldAdmin", "JobHeldUser"])
def test_a_job_that_its_agent_did_not_leave_held_costs_no_question_more(
    workspace: Workspace, slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    repairs = Repairs(returns=False)
    monkeypatch.setattr(requeue, "release_held", repairs)
    run = refused(workspace)
    if reason == "JobHeldUser":
        # Another start has begun since, and was preempted.
        run.started(1, host="n2")
    slurm.replies("squeue", squeue_line("7", reason, restart=2 if reason == "JobHeldUser" else 1))
    assert sync_again(workspace).released == []
    assert repairs.calls == []


def test_what_failed_is_tried_again_only_after_a_while(slurm: SlurmCommands) -> None:
    from slurmtrain.slurm.scheduler import Scheduler

    assert [Scheduler(math.inf, None).should_retry("x") for _ in range(2)] == [True, True]
    scheduler = Scheduler(math.inf, None)
    assert [scheduler.should_retry(key) for key in ("x", "x", "y")] == [True, False, True]
    assert [Scheduler(0.0, None).should_retry("x") for _ in range(2)] == [True, True]
    assert slurm.calls("squeue") == []


RESOURCES = {"nodes": {"min": 1, "max": 2}, "grow": True}


def grows(workspace: Workspace) -> SimulatedRun:
    """A run on one of two nodes."""
    run = build_run(workspace, resources=RESOURCES)
    assert run._plan is not None
    run.created(**run_settings(run._plan))
    return run.submitted().later(time.time() - 200).started()


def queue(*jobs: str) -> str:
    """What squeue prints: the second job 8, and these."""
    return "".join(map(squeue_line, jobs)) + squeue_line("8", run_id=f"{RUN_ID}-more")


def test_a_second_job_stays_while_its_run_trains(workspace: Workspace, slurm: SlurmCommands) -> None:
    run = grows(workspace)
    run.node("nodes_requested", job_id="8", nodes=1)
    slurm.replies("squeue", queue("7").replace("PENDING", "RUNNING", 1))
    synced = sync_again(workspace)
    assert (slurm.calls("scancel"), synced.notes) == ([], [])


def test_sync_cancels_a_second_job_whose_run_waits_again(workspace: Workspace, slurm: SlurmCommands) -> None:
    run = grows(workspace)
    run.ended("preempted", reason="stopped by SIGTERM")
    slurm.replies("scancel")
    slurm.replies("scontrol")
    slurm.replies("squeue", squeue_line("7", restart=1) + queue())
    synced = sync_again(workspace)
    assert [call.args for call in slurm.calls("scancel")] == [["8"]]
    assert synced.notes == [f"run {RUN_ID}: cancelled job 8, which waited for more nodes for it"]


def test_the_end_of_a_run_by_hand_is_that_of_its_second_job(workspace: Workspace, slurm: SlurmCommands) -> None:
    run = grows(workspace)
    slurm.replies("scontrol")
    slurm.replies("scancel")
    slurm.replies("squeue", queue("7"))
    assert sorted(live_jobs(workspace, RUN_ID, None)) == ["7", "8"]
    slurm.replies("squeue", "")
    slurm.replies("sacct", f"7|CANCELLED by 0|0:0|100|200|{int(time.time())}|30|n0|x-{RUN_ID}\n")
    run.later(time.time())
    cancel(workspace, [RUN_ID], force=True)
    assert [call.args for call in slurm.calls("scancel")][-1] == ["--me", f"--name=x-{RUN_ID}-more"]


RUNS = [run_id(1_700_000_000_000 + number, 0) for number in range(5)]
SWEEPS = ("first", None, "second", "first", "second")


def test_a_run_that_sync_starts_waits_for_the_one_before_it_in_its_own_sweep(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "launch_here", lambda *_: this_process())
    for name, sweep in zip(RUNS, SWEEPS, strict=True):
        fields: dict[str, Any] = {} if sweep is None else {"sweep": sweep, "parallel": 2}
        SimulatedRun(workspace.root.run(name), spec={"name": "n"}, executor="local").created(**fields)
    assert sync_again(workspace).started == RUNS
    launches = [read_launch(workspace.root.run(name).submission(1)) for name in RUNS]
    assert [launch.turn for launch in launches if launch] == [
        Turn("first", 2),
        None,
        Turn("second", 2),
        Turn("first", 2, behind=RUNS[0]),
        Turn("second", 2, behind=RUNS[2]),
    ]
