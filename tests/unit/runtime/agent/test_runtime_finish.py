"""The end of an attempt: what each node journals, and when node 0 puts the job back into the queue."""

from __future__ import annotations

import errno
import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.simulated_run import SimulatedRun

from slurmtrain.errors import SlurmDown
from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.experiment.sections import OomSpec, RequeueSpec, write_requeue
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.model.interruption.exit_report import AttemptOutcome, ExitReport, report_signal
from slurmtrain.model.interruption.policy import Newest, PriorEnd, with_next_start
from slurmtrain.model.run.events.agent_events import JobRequeue, NodeEnded
from slurmtrain.model.run.events.base import Payload
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.lineage import Upstream
from slurmtrain.model.run.run import Attempt
from slurmtrain.ops.shared.next_attempts import after_oom_overrides
from slurmtrain.runtime.agent.finish import AttemptFinish, ask_policy, state_of_finished_run
from slurmtrain.runtime.agent.job_query import JobQuery
from slurmtrain.runtime.environment.node import Launch, Node
from slurmtrain.runtime.job import lease, run_reader
from slurmtrain.runtime.job.signals import StopFlag
from slurmtrain.runtime.upstreams import write_upstreams
from slurmtrain.system.journal import Journal

RULES = RequeueSpec()
NODE = Node(
    index=0, count=2, host="n0", job_id="7", restart=0, executor="slurm", submission=1, launch=Launch(attempt=1)
)
COMPLETED = ExitReport(cause="completed", reason="")
CRASH = ExitReport(cause="crash", reason="rank 0 exited with code 1", failed_at=5.0)
SIGTERM = report_signal("SIGTERM", at=5.0)
PREFLIGHT = ExitReport(cause="preflight", reason="n1 has no GPU", failed_at=5.0, without=("n1",))
# What Slurm says of a job at the moments that matter; its times are words where they do not.
PREEMPTED = {"JobState": "PREEMPTED"}
RUNS_ON = {"JobState": "RUNNING", "PreemptTime": "None"}
REQUEUED = {"JobState": "COMPLETING", "EndTime": "9999999999"}


@dataclass
class Queue:
    """Slurm, as an agent asks it for its own job. ``log``: what the journal held when it was last asked."""

    journal: Path
    fields: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None
    down: bool = False
    requeued: list[tuple[list[str], float]] = field(default_factory=list)
    after: Sequence[str] = ()
    forbidden: int = 0
    log: list[str] = field(default_factory=list)

    def record(self, job_id: str) -> Mapping[str, str]:
        assert job_id == "7"
        return self.fields

    def exclusion_problem(self, job_id: str, without: Sequence[str]) -> str | None:
        assert (job_id, list(without)) == ("7", ["n1"])
        return self.problem

    def put_back(self, job_id: str, after: Sequence[str], delay_s: float, intent: Path) -> None:
        self.requeue_job(job_id, (), delay_s, intent)
        self.after = after

    def requeue_job(self, job_id: str, without: Sequence[str], delay_s: float, intent: Path) -> None:
        assert (job_id, intent.parent.resolve()) == ("7", self.journal.parent)
        if self.down:
            raise SlurmDown("scontrol: Unable to contact slurm controller")
        self.log = [event["kind"] for event in read(self.journal)]
        self.requeued.append((list(without), delay_s))

    def forbid_requeue(self, job_id: str, intent: Path) -> None:
        assert (job_id, intent.parent.resolve(), intent.name) == ("7", self.journal.parent, "no-requeue")
        if self.down:
            raise SlurmDown("scontrol: Unable to contact slurm controller")
        self.log = [event["kind"] for event in read(self.journal)]
        self.forbidden += 1


def read(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()]


class End:
    """The end of the first start of a job."""

    def __init__(
        self,
        path: Path,
        *,
        node: Node = NODE,
        resources: Mapping[str, Any] | None = None,
        rules: RequeueSpec = RULES,
        pack: Pack | None = None,
        **queue: Any,
    ) -> None:
        self.run = SimulatedRun(RunDir(path), spec={}).created(resources=resources or {})
        self.run.submitted(requeue=write_requeue(rules), pack=pack.to_dict() if pack else None)
        self.directory = RunDir(path)
        self.attempt = self.directory.attempt("7", 0)
        self.attempt.path.mkdir(parents=True)
        assert lease.acquire(self.attempt, node.submission)
        self.node = node
        self.path = self.attempt.node_journal(node.index)
        self.queue = Queue(self.path, **queue)

    def finish(self, own: ExitReport, attempt: ExitReport | None = None, **more: Any) -> bool:
        """Whether the job starts again after these reports."""
        queue = self.queue if self.node.executor == "slurm" else None
        query = JobQuery((lambda: self.queue.record("7")) if queue and self.node.index == 0 else None, None)
        settings = {"requeue": RULES, "began": Newest(), "find_newest": lambda: Newest(20), **more}
        with Journal(self.path) as journal:
            finish = AttemptFinish(self.attempt, self.node, journal, queue, query)
            return finish.finish(AttemptOutcome(own, own if attempt is None else attempt), **settings)

    @property
    def events(self) -> list[dict[str, Any]]:
        return read(self.path)

    @property
    def end(self) -> dict[str, Any]:
        """The event that every node writes last."""
        assert self.events[-1]["kind"] == "end"
        return self.events[-1]


def next_start(end: End, index: int = 0) -> str | None:
    """What an agent of the job's next start finds: the state of the run, if that is over."""
    return state_of_finished_run(end.directory.attempt("7", 1), replace(NODE, index=index, restart=1))


# --- putting the job back -------------------------------------------------------------------------------------------


def test_a_preempted_job_is_claimed_journaled_and_only_then_put_back(tmp_path: Path) -> None:
    end = End(tmp_path, fields=PREEMPTED)
    assert end.finish(SIGTERM)
    assert lease.read_claim(end.attempt, by="agent") is not None
    assert end.queue.log == ["requeue", "end"]
    assert end.queue.requeued == [([], 0.0)]
    assert (end.end["cause"], end.end["reason"]) == ("preempted", "preempted by a job of higher priority")
    assert (end.end["sure"], end.end["evidence"]["slurm"]["state"]) == (True, "PREEMPTED")
    # The run stays open.
    assert (lease.ended_as(end.directory, 1), end.queue.forbidden) == (None, 0)


MISSING = report_signal("SIGTERM", at=5.0, missing=["n1"])


@pytest.mark.parametrize(
    ("report", "options", "rules", "put_back"),
    [
        pytest.param(CRASH, {}, replace(RULES, backoff_s=30.0), ([], 30.0), id="with the delay of the policy"),
        pytest.param(PREFLIGHT, {}, RULES, (["n1"], 0.0), id="without nodes that failed the preflight"),
        pytest.param(MISSING, {"fields": RUNS_ON}, RULES, (["n1"], 0.0), id="without a node that is missing"),
        pytest.param(
            replace(CRASH, cause="node_fail", without=("n1",)), {"problem": "no node is left"}, RULES, ([], 0.0),
            id="with a lost node that cannot be left out",
        ),
    ],
)  # fmt: skip
def test_a_job_is_put_back_when_and_where_the_policy_says(
    tmp_path: Path, report: ExitReport, options: dict[str, Any], rules: RequeueSpec, put_back: tuple[list[str], float]
) -> None:
    end = End(tmp_path, **options)
    assert end.finish(report, requeue=rules)
    assert end.queue.requeued == [put_back]
    assert end.events[0]["exclude"] == put_back[0]
    assert end.end["cause"] == ("node_fail" if report is MISSING else report.cause)


def test_the_report_of_the_attempt_decides_and_not_that_of_node_0(tmp_path: Path) -> None:
    end = End(tmp_path, fields=PREEMPTED)
    assert end.finish(COMPLETED, SIGTERM)
    assert end.end["cause"] == "completed"
    [requeue, _] = end.events
    assert (requeue["kind"], requeue["cause"]) == ("requeue", "preempted")


def test_an_attempt_that_somebody_else_has_claimed_is_not_put_back(tmp_path: Path) -> None:
    end = End(tmp_path)
    assert lease.claim_restart(end.attempt, by="agent")
    assert not end.finish(CRASH)
    assert [event["kind"] for event in end.events] == ["end"]


def test_a_requeue_that_fails_is_journaled(tmp_path: Path) -> None:
    end = End(tmp_path, down=True)
    assert not end.finish(CRASH)
    assert [event["kind"] for event in end.events] == ["requeue", "end", "requeue_failed"]
    assert "Unable to contact" in end.events[-1]["reason"]


# --- an end for good ------------------------------------------------------------------------------------------------


UPSTREAM = ExitReport(cause="upstream", reason="run a (pretrain) failed: out of memory", failed_at=5.0)


@pytest.mark.parametrize(
    ("report", "options", "rules", "state"),
    [
        pytest.param(COMPLETED, {}, RULES, "completed", id="completed"),
        pytest.param(replace(CRASH, cause="oom"), {}, RULES, "failed", id="oom"),
        pytest.param(replace(PREFLIGHT, without=()), {}, RULES, "failed", id="preflight on the same nodes"),
        pytest.param(SIGTERM, {"fields": PREEMPTED}, replace(RULES, enabled=False), "failed", id="not to start again"),
        pytest.param(UPSTREAM, {}, RULES, "failed", id="upstream"),
    ],
)
def test_a_final_end_is_journaled_closes_the_run_and_only_then_keeps_slurm_from_starting_the_job_again(
    tmp_path: Path, report: ExitReport, options: dict[str, Any], rules: RequeueSpec, state: str
) -> None:
    end = End(tmp_path, **options)
    assert not end.finish(report, requeue=rules)
    assert lease.ended_as(end.directory, 1) == state
    assert lease.read_claim(end.attempt, by="agent") is None
    assert (end.queue.forbidden, end.queue.log, end.queue.requeued) == (1, ["end"], [])
    # A start after it is surplus, on every node.
    assert [next_start(end, index) for index in range(2)] == [state, state]


@pytest.mark.parametrize("rules", [RULES, replace(RULES, enabled=False)])
def test_a_job_that_slurm_itself_puts_back_is_left_to_slurm(tmp_path: Path, rules: RequeueSpec) -> None:
    end = End(tmp_path, fields=REQUEUED)
    assert not end.finish(SIGTERM, requeue=rules)
    assert (end.end["cause"], end.end["sure"], end.queue.requeued) == ("preempted", False, [])
    assert (lease.ended_as(end.directory, 1), end.queue.forbidden) == (None, 0)


@pytest.mark.parametrize("outlived", [False, True], ids=["Slurm is down", "there is a later attempt"])
def test_a_final_end_is_final_though_slurm_does_not_answer_but_not_where_a_later_attempt_runs(
    tmp_path: Path, outlived: bool
) -> None:
    end = End(tmp_path, down=not outlived)
    if outlived:
        assert lease.acquire(end.directory.attempt("7", 1), 1)
    assert not end.finish(COMPLETED)
    assert end.end["cause"] == "completed"
    assert lease.ended_as(end.directory, 1) == (None if outlived else "completed")
    assert not (outlived and end.queue.forbidden)


# --- a start of a run that is over ------------------------------------------------------------------------------------


def test_a_start_is_surplus_though_the_agent_was_killed_before_it_closed_the_run(tmp_path: Path) -> None:
    end = End(tmp_path)
    with Journal(end.path) as journal:
        journal.write(NodeEnded(cause="crash", reason="rank 0 exited with code 1", over="failed"))
    assert next_start(end, 1) == "failed"
    assert lease.ended_as(end.directory, 1) is None
    assert next_start(end) == "failed"
    assert lease.ended_as(end.directory, 1) == "failed"


@pytest.mark.parametrize(
    "events",
    [[], [JobRequeue(cause="crash"), NodeEnded(cause="crash")], [NodeEnded(cause="completed")]],
    ids=["killed", "requeued", "ended by Slurm"],
)
def test_a_start_after_an_end_that_is_not_final_may_train(tmp_path: Path, events: Sequence[Any]) -> None:
    end = End(tmp_path)
    with Journal(end.path) as journal:
        for event in events:
            journal.write(event)
    assert next_start(end) is None


# --- nodes to blame -------------------------------------------------------------------------------------------------


def test_a_node_that_cannot_be_left_out_ends_the_run_after_a_preflight_and_the_reason_says_so(tmp_path: Path) -> None:
    end = End(tmp_path, problem="n1 cannot be left out: 2 nodes are needed and 1 would be left")
    assert not end.finish(PREFLIGHT)
    assert end.end["reason"] == "n1 has no GPU; n1 cannot be left out: 2 nodes are needed and 1 would be left"


# --- other nodes, local runs ----------------------------------------------------------------------------------------


def test_other_nodes_only_journal_their_end_and_ask_slurm_nothing(tmp_path: Path) -> None:
    end = End(tmp_path, node=replace(NODE, index=1), fields=PREEMPTED)
    assert not end.finish(SIGTERM)
    assert [event["kind"] for event in end.events] == ["end"]
    assert (end.end["reason"], end.end["sure"], end.end["evidence"]) == ("stopped by SIGTERM", False, {})


# --- the policy -----------------------------------------------------------------------------------------------------


def test_the_policy_weighs_what_the_files_of_the_run_tell_of_earlier_starts(tmp_path: Path) -> None:
    run = SimulatedRun(RunDir(tmp_path), spec={}).submitted().started().reached(5).crashed(error="KeyError")
    run.started(restart=1)
    latest = PriorEnd(cause="crash", at=run.now, reached=9, where="another")
    attempt = RunDir(tmp_path).attempt("7", 1)
    assert ask_policy(attempt, latest, replace(RULES, max_failures=2)).again
    stop = ask_policy(attempt, latest, replace(RULES, max_failures=1))
    assert stop.why == "it failed twice, and requeue.max_failures is 1"


def test_ends_that_other_nodes_have_journaled_already_do_not_count_twice(tmp_path: Path) -> None:
    run = SimulatedRun(RunDir(tmp_path), spec={}).submitted().started().reached(5).crashed()
    latest = PriorEnd(cause="crash", at=run.now, reached=5, where="# ValueError")
    assert ask_policy(RunDir(tmp_path).attempt("7", 0), latest, RULES).again


def test_a_job_that_started_before_its_turn_goes_back_behind_that_of_its_upstream(tmp_path: Path) -> None:
    upstream = SimulatedRun(RunDir(tmp_path / "0123456788"), spec={}, job="6").submitted().started()
    end = End(tmp_path / "0123456789")
    write_upstreams(end.directory, [Upstream(upstream.directory.id, "pretrain")])
    early = ExitReport(cause="early", reason="after pretrain (has not ended)", failed_at=5.0)
    assert end.finish(early, requeue=RequeueSpec(enabled=False))
    assert (end.queue.requeued, end.queue.after) == ([([], 120.0)], ["6"])
    assert [event["kind"] for event in end.events] == ["requeue", "end"]


def test_on_a_full_disk_the_last_line_is_a_short_one_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Journal.write

    def fill(self: Journal, event: Any) -> float:
        if len(str(event)) > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, event)

    monkeypatch.setattr(Journal, "write", fill)
    end = End(tmp_path)
    end.finish(replace(CRASH, failures=[{"rank": 0, "last_lines": ["x" * 1000]}]))
    assert (end.end["cause"], end.end["failures"]) == ("crash", [])
    assert end.end["reason"] == f"the disk of {tmp_path.resolve()} is full"


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
    end.run.node("surplus", 0, 1, why="the run continues with another job")
    end.run.look(end.run.queue(), end.run.accounting(end.run.slurm("REQUEUED"), end.run.slurm("COMPLETED")))
    attempt = start_of(end)
    assert attempt.restarted_by == "sync"


def test_an_agent_that_outlived_its_attempt_leaves_the_lease_to_the_later_one(tmp_path: Path) -> None:
    end = End(tmp_path, resources={"mem": "4096M"})
    assert lease.acquire(end.directory.attempt("7", 1), 1)
    assert not end.finish(OOM, requeue=MORE)
    assert (kinds(end), lease.ended_as(end.directory, 1)) == (["end"], None)


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
