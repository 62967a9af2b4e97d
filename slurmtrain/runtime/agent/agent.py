"""The node agent: one process a node, from the start of an attempt to its last word.

submitit runs :func:`run_node` as a task on every node. Nothing of the run's state is in its pickle: the agent reads
its plan from the attempt's directory, and says what happens in a journal of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.interruption.exit_report import (
    AttemptOutcome,
    ExclusionProblem,
    ExitReport,
    amend,
    report_signal,
)
from slurmtrain.model.interruption.policy import Decision, PriorEnd, decide, prior_ends
from slurmtrain.model.run.layout import AttemptDir, SubmissionDir, checkpoint_step
from slurmtrain.model.spec.plan import Plan, fill_command
from slurmtrain.runtime.agent.job_query import JobQuery, cause_of_stop
from slurmtrain.runtime.checkpoint import external
from slurmtrain.runtime.checkpoint.files import newest_published
from slurmtrain.runtime.job import environment, lease, run_reader
from slurmtrain.runtime.job.environment import Node
from slurmtrain.runtime.job.plan_file import read_plan
from slurmtrain.runtime.job.signals import StopFlag
from slurmtrain.runtime.preflight import ports
from slurmtrain.system.files import make_directory
from slurmtrain.system.interpreter import leave_quickly
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import identify, this_process

if TYPE_CHECKING:
    from slurmtrain.runtime.preflight.participant import PreflightOutcome as Checked

_TURN_POLL_S = 0.5
# How long before the time limit ranks are asked to stop: at most this, and a tenth of the limit, but where saves are
# known to take longer, as long as two of them and some, at most a quarter of the limit.
_TIME_LIMIT_LEAD_S = 30.0
_SAVE_MARGIN_S = 10.0
# Ends after which a job has done as it was told: it has not failed.
_ORDERLY = frozenset({"completed", "cancelled", "timeout", "preempted"})


class JobQueue(Protocol):
    """What an agent can ask of the scheduler for its own job."""

    def record(self, job_id: str) -> Mapping[str, str]:
        """What the scheduler knows of the job, field by field. Raises SlurmtrainError."""

    def objection(self, job_id: str, without: Sequence[str]) -> str | None:
        """Why the job could not start again without these hosts, in words; None if it could."""

    def put_back(self, job_id: str, without: Sequence[str], delay_s: float, intent: Path) -> None:
        """Put the job back into the queue, to start again without these hosts, and not before ``delay_s`` is over.

        The scheduler ends what runs of the job meanwhile; this returns when all has been asked for. ``intent``: a file
        that has the batch script do it, where it cannot be done from here. Raises SlurmtrainError.
        """


def run_node(submission_dir: str, queue: JobQueue | None = None) -> None:
    """Run this node's part of an attempt, then exit: with 0 where it did as it was told or starts again, else with 1.

    Elsewhere than on node 0 it is always 0: srun would end node 0's agent on anything else, who may be busy putting the
    job back. ``queue``: the scheduler that can start the job again, if there is one.
    """
    began = time.monotonic()
    leave_quickly()
    flag = StopFlag()
    # SIGUSR1: what a spec may have sbatch send before the time limit, instead of SIGUSR2.
    flag.install(signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    submission = SubmissionDir(Path(submission_dir))
    node = environment.this_node(submission)
    attempt = submission.run.attempt(node.job_id, node.restart)
    make_directory(attempt.path)
    with Journal(attempt.node_journal(node.index)) as journal:
        over = lease.over(attempt.run, node.submission)
        if over is not None:
            journal.write("surplus", why=f"the run is {over} already")
            sys.exit(0)
        agent = _Agent(attempt, node, journal, flag, began, queue)
        try:
            outcome = agent.run()
        except SlurmtrainError as error:
            ending = ExitReport(cause="crash", reason=str(error), failed_at=time.time())
            outcome = AttemptOutcome(ending, ending)
        except Exception as error:
            said = f"the node agent failed: {type(error).__name__}: {error}"
            journal.write("end", cause="crash", reason=said, failed_at=time.time(), failures=[])
            raise
        starts_again = agent.end(outcome)
    orderly = outcome.node.cause in _ORDERLY or starts_again
    sys.exit(0 if orderly or (node.index != 0 and queue is not None) else 1)


class _Agent:
    def __init__(
        self, attempt: AttemptDir, node: Node, journal: Journal, flag: StopFlag, began: float, queue: JobQueue | None
    ) -> None:
        self._attempt = attempt
        self._node = node
        self._journal = journal
        self._flag = flag
        self._began = began
        self._queue = queue
        self._rounds = 0
        self._round_step = 0
        self._plan = _plan_of(attempt.run.submission(node.submission))
        history = node.launch.history
        # One node asks for all.
        ask = queue if node.index == 0 else None
        self._inquiry = JobQuery(
            (lambda: ask.record(node.job_id)) if ask is not None else None, history.grace_s if history else None
        )

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self, outcome: AttemptOutcome) -> bool:
        """Journal the end, and have the job start again where the policy says so; returns whether it will."""
        own, attempt = self._with_stop_cause(outcome.node), self._with_stop_cause(outcome.attempt)
        if self._node.index != 0 or self._queue is None:
            self._say(own)
            self._close(attempt)
            return False
        decision = self._decision(attempt)
        without = attempt.without
        if without:
            objection = self._queue.objection(self._node.job_id, without)
            if objection is not None:
                own, without = amend(own, ExclusionProblem(objection)), ()
        again = decision.again and (attempt.cause != "preflight" or bool(without)) and not attempt.slurm_ends_it
        if again and not lease.claim_next(self._attempt, by="agent"):
            again = False
        if again:
            self._journal.write(
                "requeue", cause=attempt.cause, why=attempt.reason, exclude=list(without), delay_s=decision.delay_s
            )
        self._say(own)
        self._close(attempt)
        return again and self._put_back(without, decision.delay_s)

    def _with_stop_cause(self, report: ExitReport) -> ExitReport:
        """The report with what a signal stood for, as far as this node can tell."""
        executor = self._node.executor
        if report.signal is None or report.sure or not (executor == "local" or self._node.index == 0):
            return report
        view, timed_out = self._inquiry.view(), report.cause == "timeout"
        return amend(report, cause_of_stop(report.signal, view, now=time.time(), executor=executor, deadline=timed_out))

    def _decision(self, report: ExitReport) -> Decision:
        """Whether the run starts again after this end, by all that it has been through."""
        if report.cause in ("completed", "cancelled"):
            return decide([PriorEnd(cause=report.cause, at=time.time())], self._plan.spec.requeue)
        latest = PriorEnd.of_report(
            report,
            at=time.time(),
            began_at_step=self._round_step,
            committed=self._committed(),
            reached=run_reader.last_step(self._attempt),
        )
        return self._ask_policy(latest)

    def _ask_policy(self, latest: PriorEnd) -> Decision:
        """What follows an end that has just happened, by all that the run has been through."""
        run = run_reader.read_run(self._attempt.run)
        ends = prior_ends(run.attempts, run.checkpoints, latest, self._attempt.path.name)
        return decide(ends, self._plan.spec.requeue)

    def _say(self, ending: ExitReport) -> None:
        self._journal.write("end", **ending.to_dict())

    def _close(self, root: ExitReport) -> None:
        """A run that is over starts no more, whoever puts its job back."""
        if self._node.index == 0 and (root.cause == "completed" or (root.cause == "cancelled" and root.sure)):
            lease.close(self._attempt.run, self._node.submission, root.cause)

    def _put_back(self, without: Sequence[str], delay_s: float) -> bool:
        assert self._queue is not None
        try:
            self._queue.put_back(self._node.job_id, without, delay_s, self._attempt.requeue)
        except SlurmtrainError as error:
            self._journal.write("requeue_failed", reason=str(error))
            return False
        return True

    # --- the attempt ------------------------------------------------------------------------------------------------

    def run(self) -> AttemptOutcome:
        """This node's part of the attempt, up to the last word. Raises SlurmtrainError."""
        ending = self._begin()
        if ending is not None:
            return AttemptOutcome(ending, ending)
        return self._train(self._node.count)

    def _begin(self) -> ExitReport | None:
        """Say that this node is here, and wait until it may begin; why it may not, if so."""
        nodes = self._node.count
        self._journal.write(
            "agent",
            node=self._node.index,
            nodes=nodes,
            host=self._node.name(nodes),
            process=this_process().to_dict(),
            executor=self._node.executor,
            submission=self._node.submission,
            attempt=self._node.attempt,
        )
        if not self._may_start():
            return ExitReport(cause="cancelled", reason="a later attempt has taken over", failed_at=time.time())
        self._wait_for_turn()
        return self._stopped_early() if self._flag.raised is not None else None

    def _stopped_early(self) -> ExitReport:
        assert self._flag.name is not None
        return report_signal(self._flag.name, at=time.time(), before_start=True)

    def _may_start(self) -> bool:
        submission = self._node.submission
        if self._node.index == 0:
            return lease.claim(self._attempt, submission)
        return lease.granted_to(self._attempt.run) == submission

    def _wait_for_turn(self) -> None:
        """In a local sweep, wait until the run before this one has ended."""
        after = self._node.launch.after
        if after is None or not after[1].alive():
            return
        self._journal.write("waiting", run=after[0])
        while after[1].alive() and self._flag.raised is None:
            time.sleep(_TURN_POLL_S)
        self._began = time.monotonic()

    def _train(self, nodes: int) -> AttemptOutcome:
        # Here, not above: these import torch, and a run may have to wait for its turn for hours.
        from slurmtrain.runtime.preflight.entry import run_preflight

        checked = run_preflight(self._attempt, self._node, self._plan, self._journal, self._flag)
        if isinstance(checked, ExitReport):
            return AttemptOutcome(checked, checked)
        index = self._node.index
        if checked.problem is not None or checked.master is None:
            refused = self._refused(checked)
            return AttemptOutcome(refused, refused)
        from slurmtrain.runtime.agent.rendezvous import meet
        from slurmtrain.runtime.agent.rounds import Rounds, Setting

        point = meet(checked.master, index, nodes, checked.listener)
        self._journal.write(
            "rendezvous", node=index, master_addr=point.address, master_port=point.port, interface=checked.interface
        )
        lead_s = self._lead()
        limit = self._plan.spec.resources.time
        setting = Setting(
            attempt=self._attempt,
            spec=self._plan.spec,
            journal=self._journal,
            flag=self._flag,
            point=point,
            node=index,
            nodes=nodes,
            hosts=environment.expected_hosts(nodes),
            address=checked.address,
            inquiry=self._inquiry,
            deadline=None if limit is None else self._began + limit - lead_s,
            lead_s=lead_s,
            prepare=lambda attempt, resume_from, board: self._prepare(attempt, resume_from, board, checked),
            resume_from=self._resume_from,
            committed=self._committed,
            ask_policy=self._ask_policy,
            listen=lambda address, number: ports.listen_on_job_port(
                address, f"{self._node.job_id}/{number}", self._node.restart
            ),
            note_workers=self._note_workers,
        )
        outcome = Rounds(setting).run()
        if index == 0:
            self._note_found()
        if outcome is None:
            stopped = self._stopped_early()
            return AttemptOutcome(stopped, stopped)
        return outcome

    def _refused(self, checked: Checked) -> ExitReport:
        """The nodes are not fit to train. Node 0 has the reason; what the others say follows from it."""
        without = checked.blamed if self._node.index == 0 and self._plan.spec.preflight.exclude else ()
        return ExitReport(
            cause="preflight",
            reason=checked.problem or "the nodes found no place to meet",
            failed_at=time.time(),
            cascade=self._node.index != 0,
            without=tuple(without),
        )

    def _prepare(self, attempt: AttemptDir, resume_from: str | None, board: str, checked: Checked) -> list[str]:
        """Set the ranks' environment and directory, and return what they run."""
        environment.set_worker_environment(
            self._plan,
            attempt,
            self._node,
            resume_from=resume_from,
            interface=checked.interface,
            address=checked.address,
            heartbeat=board,
        )
        make_directory(self._attempt.logs)
        try:
            os.chdir(self._plan.workdir)
        except OSError as error:
            raise SlurmtrainError(
                f"cannot enter the working directory {self._plan.workdir}: {error.strerror}"
            ) from error
        facts = environment.facts_for_command(self._attempt.run, self._node.attempt, resume_from)
        return fill_command(self._plan, facts)

    def _resume_from(self) -> str | None:
        """The newest complete checkpoint to go on from: of the script's own kind, or of ours."""
        self._rounds += 1
        if self._node.from_start and self._rounds == 1:
            return None
        if self._plan.spec.checkpoint.glob is None:
            published = newest_published(self._attempt.run.checkpoints)
            self._round_step = self._committed()
            return str(published) if published else None
        found = self._note_found()
        self._round_step = (found.step if found else None) or 0
        return str(found.path) if found else None

    def _committed(self) -> int:
        """The step of the newest checkpoint, as far as its name tells; 0 if there is none."""
        if self._plan.spec.checkpoint.glob is None:
            published = newest_published(self._attempt.run.checkpoints)
            return (checkpoint_step(published.name) if published else None) or 0
        found = self._find()
        return (found.step if found else None) or 0

    def _note_found(self) -> external.ExternalCheckpoint | None:
        """Journal the newest checkpoint of the script's own kind, where the spec says how to find one."""
        found = self._find()
        if found is not None:
            self._journal.write("found", **found.to_dict())
        return found

    def _find(self) -> external.ExternalCheckpoint | None:
        pattern = self._plan.spec.checkpoint.glob
        if pattern is None:
            return None
        path = external.absolute(pattern, self._plan.workdir, self._attempt.run)
        return external.newest(path, self._node.launch.since)

    def _lead(self) -> float:
        """How long before the time limit ranks are asked to stop, in seconds."""
        limit, history = self._plan.spec.resources.time, self._node.launch.history
        if limit is None:
            return 0.0
        save_s = history.save_s if history and history.save_s else 0.0
        needed = min(2 * save_s + _SAVE_MARGIN_S, limit / 4) if save_s else 0.0
        return max(min(_TIME_LIMIT_LEAD_S, limit / 10), needed)

    def _note_workers(self, pids: Mapping[int, int], resume_from: str | None) -> None:
        processes = {str(rank): process.to_dict() for rank, pid in pids.items() if (process := identify(pid))}
        self._journal.write("workers", processes=processes, resume_from=resume_from)


def _plan_of(submission: SubmissionDir) -> Plan:
    """The submission's plan. Raises SlurmtrainError where it is not visible from this node, or cannot be read."""
    plan = read_plan(submission.plan)
    if plan is None:
        raise SlurmtrainError(f"there is no plan at {submission.plan}; is the run directory visible on this node?")
    return plan
