"""The end of an attempt whose run leaves its job for another one, or whose job keeps its nodes."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.ending_attempts import COMPLETED, CRASH, NODE, PREFLIGHT, RULES, SIGTERM, End, next_start, read

from slurmtrain.model.interruption.exit_report import ExitReport
from slurmtrain.model.interruption.next_start import with_next_start
from slurmtrain.model.run.events.base import Payload
from slurmtrain.model.run.run import Attempt
from slurmtrain.model.spec.resources import ResourcesSpec
from slurmtrain.model.spec.restarts import OomSpec, RequeueSpec
from slurmtrain.model.spec.spec import Spec
from slurmtrain.model.spec.sweep import Pack
from slurmtrain.ops.shared.current_plan import after_oom_overrides
from slurmtrain.runtime.agent.finish import AttemptFinish
from slurmtrain.runtime.agent.job_query import JobQuery
from slurmtrain.runtime.environment.node import Launch, Node
from slurmtrain.runtime.job import lease, run_reader
from slurmtrain.runtime.job.signals import StopFlag
from slurmtrain.system.journal import Journal

# --- a run that goes on with another job ----------------------------------------------------------------------------

PACKED = replace(NODE, count=1, launch=Launch(attempt=1, array=("A", 0), pack=Pack(2)))
MORE = replace(RULES, oom=OomSpec(at_most=8192))
OOM = replace(CRASH, cause="oom")


def kinds(end: End) -> list[str]:
    return [event["kind"] for event in end.events]


def start_of(end: End) -> Attempt:
    """The attempt, as commands see it."""
    run = with_next_start(run_reader.read_run(end.directory))
    assert (run.state, len(run.attempts)) == ("requeued", 1)
    return run.attempts[0]


@pytest.mark.parametrize("node", [NODE, PACKED], ids=["alone", "packed"])
def test_a_run_that_needs_more_memory_leaves_its_job_for_good_and_commands_start_it_at_once(
    tmp_path: Path, node: Node
) -> None:
    end = End(tmp_path, node=node, resources={"mem": "4096M"}, rules=MORE)
    end.run.node("agent", node=0, nodes=1, host="n0", executor="slurm", submission=1)
    assert not end.finish(OOM, requeue=MORE)
    assert (kinds(end), end.end["cause"], end.end.get("over")) == (["agent", "replaced", "end"], "oom", None)
    assert (end.queue.requeued, end.queue.forbidden, end.queue.log[1:]) == ([], 1, ["replaced", "end"])
    assert next_start(end) == lease.REPLACED
    assert start_of(end).restarted_by == "sync"


def test_a_run_of_a_pack_that_must_not_start_on_a_node_leaves_the_job_to_the_others(tmp_path: Path) -> None:
    end = End(tmp_path, node=PACKED)
    end.run.node("agent", node=0, nodes=1, host="n0", executor="slurm", submission=1)
    assert not end.finish(PREFLIGHT)
    assert kinds(end) == ["agent", "requeue", "replaced", "end"]
    assert (end.queue.requeued, next_start(end)) == ([], lease.REPLACED)
    attempt = start_of(end)
    assert (attempt.restarted_by, attempt.excluded, attempt.requeue_problem) == ("sync", ("n1",), "")


GPU_OOM = replace(OOM, failures=[{"rank": 0, "last_lines": ["torch.OutOfMemoryError: CUDA out of memory"]}])


@pytest.mark.parametrize(
    ("report", "share_gpu", "again"), [(OOM, False, True), (GPU_OOM, False, False), (GPU_OOM, True, True)]
)
def test_a_run_that_shared_the_memory_that_it_ran_out_of_has_another_chance_in_a_job_of_its_own(
    tmp_path: Path, report: ExitReport, share_gpu: bool, again: bool
) -> None:
    pack = Pack(2, share_gpu=share_gpu)
    end = End(tmp_path, node=replace(PACKED, launch=replace(PACKED.launch, pack=pack)), pack=pack)
    end.run.node("agent", node=0, nodes=1, host="n0", executor="slurm", submission=1)
    assert not end.finish(report)
    assert next_start(end) == (lease.REPLACED if again else "failed")
    run = with_next_start(run_reader.read_run(end.directory))
    assert (run.attempts[0].restarted_by, run.state) == (("sync", "requeued") if again else (None, "failed"))
    assert after_oom_overrides(run) == []


def test_a_pack_whose_run_crashed_is_put_back_and_the_run_stays_in_it(tmp_path: Path) -> None:
    end = End(tmp_path, node=PACKED)
    assert end.finish(CRASH)
    assert (next_start(end), len(end.queue.requeued)) == (None, 1)


@pytest.mark.parametrize("written", range(3))
def test_an_agent_that_is_killed_while_its_run_leaves_the_job_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """After each of its events; before the first one, the lease alone is closed."""
    end = End(tmp_path, node=PACKED)
    writes = Journal.write

    def die(journal: Journal, payload: Payload) -> None:
        if len(read(end.path) if end.path.exists() else ()) == written:
            raise KeyboardInterrupt
        writes(journal, payload)

    monkeypatch.setattr(Journal, "write", die)
    with pytest.raises(KeyboardInterrupt):
        end.finish(PREFLIGHT)
    monkeypatch.undo()
    # Another run of the pack has the job started again.
    assert next_start(end) == lease.REPLACED
    end.run.node("agent", node=0, nodes=1, host="n0", executor="slurm", submission=1)
    end.run.node("surplus", 0, 1, why="the run goes on with another job")
    end.run.look(end.run.queue(), end.run.accounting(end.run.slurm("REQUEUED"), end.run.slurm("COMPLETED")))
    attempt = start_of(end)
    assert attempt.restarted_by == "sync"


def test_an_agent_that_outlived_its_attempt_leaves_the_lease_to_the_later_one(tmp_path: Path) -> None:
    end = End(tmp_path, resources={"mem": "4096M"})
    assert lease.acquire(end.directory.attempt("7", 1), 1)
    assert not end.finish(OOM, requeue=MORE)
    assert (kinds(end), lease.final_state(end.directory, 1)) == (["end"], None)


# --- nodes that are kept --------------------------------------------------------------------------------------------

KEPT = Spec(name="x", command="true", requeue=RequeueSpec(keep_nodes=600))


def keep(end: End, report: ExitReport, spec: Spec = KEPT, *, signalled: bool = False) -> StopFlag:
    """Keep the nodes after this report; a look at whether that is still right brings a signal."""
    flag = StopFlag()
    flag.raised = signal.SIGTERM if signalled else None
    queue = end.queue if end.node.executor == "slurm" else None

    def look(_s: float) -> None:
        assert end.events[-1]["kind"] == "kept"
        flag.raised = signal.SIGUSR2

    with Journal(end.path) as journal, pytest.MonkeyPatch.context() as patch:
        patch.setattr("slurmtrain.runtime.agent.finish.time.sleep", look)
        AttemptFinish(end.attempt, end.node, journal, queue, JobQuery(None, None)).keep_nodes(
            report, spec, time.monotonic(), flag
        )
    return flag


def test_a_job_keeps_its_nodes_after_a_failure_until_a_signal_and_says_how_to_get_there(tmp_path: Path) -> None:
    end = End(tmp_path)
    end.run.node("agent", node=0, nodes=1, host="n0", executor="slurm", submission=1)
    assert keep(end, CRASH).raised == signal.SIGUSR2
    [kept] = [event for event in end.events if event["kind"] == "kept"]
    assert (kept["cause"], 590 < kept["until"] - kept["t"] <= 600) == ("crash", True)
    run = with_next_start(run_reader.read_run(end.directory))
    assert run.state == "running"
    assert "its nodes are kept until" in run.attempts[0].reason
    assert "'srun --jobid=7 --overlap --pty bash' enters" in run.attempts[0].reason
    end.finish(CRASH)
    assert "kept" not in with_next_start(run_reader.read_run(end.directory)).attempts[0].reason


@pytest.mark.parametrize(
    ("node", "report", "spec", "signalled"),
    [
        pytest.param(NODE, CRASH, replace(KEPT, requeue=RequeueSpec()), False, id="not asked for"),
        pytest.param(NODE, CRASH, replace(KEPT, resources=ResourcesSpec(time=20)), False, id="near the time limit"),
        pytest.param(NODE, CRASH, KEPT, True, id="asked to stop"),
        pytest.param(NODE, COMPLETED, KEPT, False, id="completed"),
        pytest.param(NODE, SIGTERM, KEPT, False, id="preempted"),
        pytest.param(replace(NODE, index=1), CRASH, KEPT, False, id="another node"),
        pytest.param(replace(NODE, executor="local"), CRASH, KEPT, False, id="on this machine"),
    ],
)
def test_otherwise_no_nodes_are_kept(
    tmp_path: Path, node: Node, report: ExitReport, spec: Spec, signalled: bool
) -> None:
    end = End(tmp_path, node=node)
    keep(end, report, spec, signalled=signalled)
    assert not end.path.exists() or end.events == []


def test_nodes_are_let_go_when_a_command_has_given_the_run_away(tmp_path: Path) -> None:
    end = End(tmp_path)
    lease.close(end.directory, 1, "cancelled")
    assert keep(end, CRASH).raised is None
