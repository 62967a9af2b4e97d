"""The end of an attempt on a node: its ``end`` event, and, from node 0, putting the job back into the queue.

Any process may be killed between two steps, so the order matters: claim, journal ``requeue``, journal ``end``, ask
Slurm. After a kill between the claim and ``requeue``, the next ``sync`` finds that the job is over, and starts the run
with a claim of its own; later the cause is known as well. An ``end`` always comes before Slurm ends the agent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.interruption.exit_report import AttemptOutcome, ExclusionProblem, ExitReport, amend
from slurmtrain.model.interruption.policy import Decision, PriorEnd, decide, prior_ends
from slurmtrain.model.run.events.agent import JobRequeue, NodeEnded, RequeueFailed
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.model.spec.spec import RequeueSpec
from slurmtrain.runtime.agent.job_query import JobQuery, cause_of_stop
from slurmtrain.runtime.job import lease, run_reader
from slurmtrain.runtime.job.environment import Node
from slurmtrain.system.journal import Journal

# Nothing follows these: nobody needs to read what else the run has been through.
_FINAL = frozenset({"completed", "cancelled"})


class JobQueue(Protocol):
    """What an agent can ask of the scheduler for its own job."""

    def record(self, job_id: str) -> Mapping[str, str]:
        """What the scheduler knows of the job, field by field. Raises SlurmtrainError."""

    def exclusion_problem(self, job_id: str, without: Sequence[str]) -> str | None:
        """Why the job could not start again without these hosts, as a phrase; None if it could."""

    def requeue_job(self, job_id: str, without: Sequence[str], delay_s: float, intent: Path) -> None:
        """Put the job back into the queue. Returns when all has been asked for. Raises SlurmtrainError.

        The scheduler ends what runs of the job meanwhile.

        ``job_id``: the job. ``without``: hosts that it is not to start on. ``delay_s``: seconds before which it is not
        to start. ``intent``: a file that has the batch script do it, where it cannot be done from here.
        """


def ask_policy(attempt: AttemptDir, latest: PriorEnd, requeue: RequeueSpec) -> Decision:
    """What follows an end that has just happened, by all that the files of the run tell of the time before it.

    ``attempt``: the attempt that has ended, or whose ranks have. ``latest``: that end. ``requeue``: the spec's rules.
    """
    if latest.cause in _FINAL:
        return decide(prior_ends([], [], latest), requeue)
    run = run_reader.read_run(attempt.run)
    return decide(prior_ends(run.attempts, run.checkpoints, latest, attempt.path.name), requeue)


class AttemptFinish:
    """What the agent of one node does at the end of an attempt."""

    def __init__(
        self, attempt: AttemptDir, node: Node, journal: Journal, queue: JobQueue | None, query: JobQuery
    ) -> None:
        """The end of ``attempt`` on ``node``, which goes into ``journal``.

        ``queue``: the scheduler that can start the job again, if there is one. ``query``: what it says of the job when
        a signal comes.
        """
        self._attempt = attempt
        self._node = node
        self._journal = journal
        self._queue = queue
        self._query = query

    def finish(
        self, outcome: AttemptOutcome, requeue: RequeueSpec, began_at_step: int, committed_step: Callable[[], int]
    ) -> bool:
        """Journal the end, and put the job back where the policy wants that; returns whether it starts again.

        ``outcome``: how the attempt ended. ``requeue``: the spec's rules. ``began_at_step``: the step that the last
        ranks started from. ``committed_step``: finds the step of the newest checkpoint, 0 for none.
        """
        node_report = self._with_stop_cause(outcome.node_report)
        attempt_report = self._with_stop_cause(outcome.attempt_report)
        # Local runs are started again by commands: nothing of a local job is left that could.
        if self._node.index != 0 or self._queue is None:
            self._close(node_report, attempt_report)
            return False
        latest = PriorEnd.of_report(
            attempt_report,
            at=time.time(),
            began_at_step=began_at_step,
            committed=0 if attempt_report.cause in _FINAL else committed_step(),
            reached=run_reader.last_step(self._attempt),
        )
        decision = ask_policy(self._attempt, latest, requeue)
        # Slurm can change the nodes of a job only while it waits, so what it would refuse is found out before.
        without = attempt_report.without
        problem = self._queue.exclusion_problem(self._node.job_id, without) if without else None
        if problem is not None:
            node_report, without = amend(node_report, ExclusionProblem(problem)), ()
        starts_again = self._claim_restart(attempt_report, decision, without)
        # Before the requeue: Slurm ends this process then, with nothing but KillWait left to it.
        self._close(node_report, attempt_report)
        return starts_again and self._requeue_job(self._queue, without, decision.delay_s)

    def _claim_restart(self, report: ExitReport, decision: Decision, without: Sequence[str]) -> bool:
        """Claim and journal that the job is about to be put back; False where it is not to be, or not by this agent."""
        # On the same nodes a preflight would fail again.
        hopeless = report.cause == "preflight" and not without
        if not decision.again or hopeless or report.slurm_ends_it:
            return False
        # Last, since whoever has the claim has to start the run.
        if not lease.claim_restart(self._attempt, by="agent"):
            return False
        self._journal.write(
            JobRequeue(cause=report.cause, why=report.reason, exclude=list(without), delay_s=decision.delay_s)
        )
        return True

    def _with_stop_cause(self, report: ExitReport) -> ExitReport:
        """The report with what a signal stood for, as far as this node can tell: on Slurm node 0 alone asks."""
        executor = self._node.executor
        if report.signal is None or report.sure or not (executor == "local" or self._node.index == 0):
            return report
        view, timed_out = self._query.view(), report.cause == "timeout"
        return amend(report, cause_of_stop(report.signal, view, now=time.time(), executor=executor, deadline=timed_out))

    def _close(self, node_report: ExitReport, attempt_report: ExitReport) -> None:
        """Journal the end of this node; a run that is over starts no more, whoever puts its job back."""
        self._journal.write(
            NodeEnded(
                cause=node_report.cause,
                reason=node_report.reason,
                failed_at=node_report.failed_at,
                cascade=node_report.cascade,
                signal=node_report.signal,
                sure=node_report.sure,
                failures=list(node_report.failures),
                evidence=dict(node_report.evidence),
            )
        )
        over = attempt_report.cause == "completed" or (attempt_report.cause == "cancelled" and attempt_report.sure)
        if self._node.index == 0 and over:
            lease.close(self._attempt.run, self._node.submission, attempt_report.cause)

    def _requeue_job(self, queue: JobQueue, without: Sequence[str], delay_s: float) -> bool:
        try:
            queue.requeue_job(self._node.job_id, without, delay_s, self._attempt.requeue)
        except SlurmtrainError as error:
            self._journal.write(RequeueFailed(reason=str(error)))
            return False
        return True
