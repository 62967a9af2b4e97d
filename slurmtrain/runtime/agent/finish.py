"""The end of an attempt on a node: its ``end`` event and, on node 0, requeuing the job or keeping it from a requeue.

Any process may be killed between two steps, so the order matters.

* The run starts again: claim, journal ``requeue``, journal ``end``, ask Slurm. After a kill between the claim and
  ``requeue``, the next ``sync`` finds that the job is over, and restarts the run under its own claim; after a later
  kill the cause is known too. An ``end`` always comes before Slurm ends the agent.
* The run goes on with another job, which requests more memory or, of a pack, leaves out nodes: close the lease,
  journal ``requeue`` (which names the nodes) and ``replaced``, journal ``end``, forbid Slurm to start the job again.
  The lease comes first: once ``end`` is journaled, commands give it to another job. After an earlier kill nothing of
  this job trains again, and commands start the run once Slurm says that the job is over, or once a later start of the
  job has said that it is surplus.
* The end is final: journal ``end``, close the lease, forbid Slurm to start the job again. Slurm 24.05 and later may do
  that by themselves: a preemption whose job was requeued within its grace is remembered, and the job's next normal
  end is taken for the end of the grace (seen on 24.11 and 26.05). After a kill before the lease is closed, the agents
  of such a start find the final ``end`` in the journal of the start before (:func:`state_of_finished_run`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.experiment.sections import RequeueSpec
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.interruption.exit_report import AttemptOutcome, ExitReport, amend
from slurmtrain.model.interruption.policy import (
    BatchMemory,
    Decision,
    Newest,
    PriorEnd,
    decide,
    describe_kept,
    kept_s,
    prior_ends,
    shares_memory,
)
from slurmtrain.model.run.events.agent_events import JobRequeue, NodeEnded, NodesKept, RequeueFailed
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.run.lineage import EARLY
from slurmtrain.model.run.run import STATE_OF_CAUSE
from slurmtrain.runtime.agent.job_query import JobQuery, cause_of_stop
from slurmtrain.runtime.environment.node import Node
from slurmtrain.runtime.job import lease, run_reader
from slurmtrain.runtime.job.signals import StopFlag
from slurmtrain.runtime.upstreams import read_upstreams
from slurmtrain.system.directories import FollowedDirectory
from slurmtrain.system.files import FULL, describe_os_error
from slurmtrain.system.journal import Journal

# How often an agent that keeps its nodes looks whether it still should.
_LOOK_S = 0.5
# Final causes: nothing follows them, so the rest of the run's history need not be read.
_FINAL = frozenset({"completed", "cancelled"})


class JobQueue(Protocol):
    """What an agent can ask the scheduler about its own job."""

    def record(self, job_id: str) -> Mapping[str, str]:
        """What the scheduler knows about the job, field by field. Raises SlurmtrainError."""

    def exclusion_problem(self, job_id: str, without: Sequence[str]) -> str | None:
        """Why the job ``job_id`` could not restart without the hosts ``without``, as a phrase; None if it could."""

    def requeue_job(self, job_id: str, without: Sequence[str], delay_s: float, intent: Path) -> None:
        """Requeue the job. Returns once the scheduler has accepted the request. Raises SlurmtrainError.

        The scheduler ends the job's running processes meanwhile.

        ``job_id``: the job. ``without``: hosts that it must not start on. ``delay_s``: the least number of seconds
        until it starts. ``intent``: a file that makes the batch script requeue the job if that cannot be done from
        here.
        """

    def put_back(self, job_id: str, after: Sequence[str], delay_s: float, intent: Path) -> None:
        """Requeue a job that started before its turn, also one that may not be requeued. Raises SlurmtrainError.

        ``job_id``: the job. ``after``: jobs that it starts after, if the scheduler has any of them. ``delay_s``: else,
        the least number of seconds until it starts. ``intent``: as for :meth:`requeue_job`.
        """

    def forbid_requeue(self, job_id: str, intent: Path) -> None:
        """Keep the scheduler from ever starting the job again by itself. Raises SlurmtrainError.

        ``job_id``: the job. ``intent``: a file that makes the batch script do it if that cannot be done from here.
        """


def state_of_finished_run(attempt: AttemptDir, node: Node) -> str | None:
    """The final state of the run, if it was over before this ``attempt`` was started; None if it may train.

    Every node of the attempt comes to the same conclusion. ``node``: this one; node 0 also closes the lease if the
    agent that ended the run was killed before it could.
    """
    state = lease.ended_as(attempt.run, node.submission)
    if state is not None or node.restart == 0:
        return state
    from slurmtrain.model.run.outcome import final_state

    before = attempt.run.attempt(node.job_id, node.restart - 1).node_journal(0)
    state = final_state(run_reader.read_events(before))
    if state is not None and node.index == 0:
        lease.close(attempt.run, node.submission, state)
    return state


def forbid_requeue(queue: JobQueue, attempt: AttemptDir, node: Node) -> None:
    """Have the scheduler never start the job of this ``attempt`` again by itself.

    ``queue``: the scheduler. ``node``: this node, which is node 0.

    Nothing is lost if it does not answer: the agents of another start would end at once, and try this again.
    """
    with contextlib.suppress(SlurmtrainError):
        queue.forbid_requeue(node.job_id, attempt.no_requeue)


def ask_policy(attempt: AttemptDir, latest: PriorEnd, requeue: RequeueSpec) -> Decision:
    """What to do after an end that has just happened, given the run's history according to its files.

    ``attempt``: the attempt that has ended, or whose ranks have. ``latest``: that end. ``requeue``: the spec's rules.
    """
    if latest.cause in _FINAL:
        return decide(prior_ends([], [], latest), requeue)
    run = run_reader.read_run(attempt.run)
    history = prior_ends(run.attempts, run.checkpoints, latest, attempt.path.name)
    return decide(history, requeue, BatchMemory.of_attempt(run.executor, run.resources))


class AttemptFinish:
    """What the agent of one node does at the end of an attempt."""

    def __init__(
        self, attempt: AttemptDir, node: Node, journal: Journal, queue: JobQueue | None, query: JobQuery
    ) -> None:
        """For the end of ``attempt`` on ``node``, which is written to ``journal``. Raises OSError.

        ``queue``: the scheduler that can restart the job, if there is one. ``query``: asks it about the job when a
        signal arrives.
        """
        self._run = attempt.run
        # A person may have renamed the runs root by then.
        self._directory = FollowedDirectory(attempt.run.path)
        self._attempt = AttemptDir(RunDir(self._directory.alias).attempts / attempt.path.name, attempt.round)
        self._node = node
        self._journal = journal
        self._queue = queue
        self._query = query

    def displacement(self) -> str:
        """What has happened to the run's directory meanwhile, as a sentence without a full stop; mostly empty."""
        return self._directory.displacement()

    def keep_nodes(self, report: ExitReport, spec: Spec, began: float, flag: StopFlag) -> None:
        """Keep the nodes after a failure, as long as the spec says, so that a person can look at them.

        Slurm lets them go once node 0's agent exits. A signal ends the wait, whatever it was sent for: what follows is
        decided as if it had come right after the failure. So does another attempt, or a command, that has the lease.

        ``report``: how the attempt ended. ``spec``: the run's. ``began``: when the job began, by the monotonic clock.
        ``flag``: the signals to this process.
        """
        limit_s = spec.resources.time
        left_s = None if limit_s is None else began + limit_s - time.monotonic()
        wait_s = kept_s(report, spec.requeue.keep_nodes, left_s)
        if self._queue is None or self._node.index != 0 or wait_s == 0 or flag.raised is not None:
            return
        until = time.time() + wait_s
        why = describe_kept(report, self._node.job_id, until)
        self._journal.write(NodesKept(until=until, cause=report.cause, why=why))
        end = time.monotonic() + wait_s
        while (left := end - time.monotonic()) > 0 and flag.raised is None and self._is_mine():
            time.sleep(min(_LOOK_S, left))

    def finish(
        self, outcome: AttemptOutcome, requeue: RequeueSpec, began: Newest, find_newest: Callable[[], Newest]
    ) -> bool:
        """Journal the end, and requeue the job if the policy says so; returns whether it restarts.

        ``outcome``: how the attempt ended. ``requeue``: the spec's rules. ``began``: the checkpoint that the last ranks
        started from. ``find_newest``: finds the newest one.
        """
        displacement = self.displacement()
        node_report = self._with_stop_cause(outcome.node_report).adding(displacement)
        attempt_report = self._with_stop_cause(outcome.attempt_report).adding(displacement)
        # Commands restart local runs: no process of a local job is left that could.
        if self._node.index != 0 or self._queue is None:
            self._end(node_report, attempt_report)
            return False
        latest = PriorEnd.of_report(
            attempt_report,
            at=time.time(),
            began=began,
            left=Newest() if attempt_report.cause in _FINAL else find_newest(),
            reached=run_reader.last_step(self._attempt),
        )
        if (pack := self._node.launch.pack) is not None:
            shared = shares_memory(pack.runs, share_gpu=pack.share_gpu, of_gpu=latest.of_gpu)
            latest = replace(latest, shared=shared)
        decision = ask_policy(self._attempt, latest, requeue)
        if decision.again and displacement:
            # Commands submit it anew: the job's own files are where the run was.
            self._journal_end(node_report)
            return False
        is_apart = pack is not None and (attempt_report.cause == "oom" or bool(attempt_report.without))
        if decision.again and (is_apart or decision.memory is not None):
            # The job, as it is, is none for the run: it gives too little memory, or others stay in it.
            self._leave_job(self._queue, node_report, attempt_report, decision)
            return False
        # Slurm can exclude nodes from a job only while it is pending, so check now whether it would refuse.
        without = attempt_report.without if decision.again else ()
        problem = self._queue.exclusion_problem(self._node.job_id, without) if without else None
        if problem is not None:
            node_report, without = replace(node_report.adding(problem), without=()), ()
        # On the same nodes the preflight would fail again.
        again = decision.again and not (attempt_report.cause == "preflight" and not without)
        if not again:
            if self._end(node_report, attempt_report):
                forbid_requeue(self._queue, self._attempt, self._node)
            return False
        # Last, since the holder of the claim must restart the run.
        starts_again = not attempt_report.slurm_ends_it and lease.claim_restart(self._attempt, by="agent")
        if starts_again:
            self._journal.write(self._requeue_event(attempt_report, decision, without))
        # Before the requeue, after which Slurm leaves this process only KillWait to live.
        self._journal_end(node_report)
        if not starts_again:
            return False
        if attempt_report.cause == EARLY:
            return self._put_back(self._queue)
        queue, intent = self._queue, self._attempt.requeue
        return self._ask(lambda: queue.requeue_job(self._node.job_id, without, decision.delay_s, intent))

    def _is_mine(self) -> bool:
        """Whether the run is still this attempt's: no other one has begun, and no command has closed it."""
        return lease.holds(self._attempt) and lease.ended_as(self._run, self._node.submission) is None

    def _leave_job(
        self, queue: JobQueue, node_report: ExitReport, attempt_report: ExitReport, decision: Decision
    ) -> None:
        """Journal the end, and have commands submit the run anew, whatever becomes of this job."""
        # The agent of a lost node may outlive its attempt: a later start of the job may be training by now.
        if not lease.holds(self._attempt):
            self._journal_end(node_report)
            return
        lease.close(self._attempt.run, self._node.submission, lease.REPLACED)
        if attempt_report.without:
            self._journal.write(self._requeue_event(attempt_report, decision, attempt_report.without))
        more = decision.memory
        why = "other runs stay in its job" if more is None else f"its next job runs with {more}"
        from slurmtrain.model.run.events.command_events import JobReplaced

        self._journal.write(JobReplaced(job_id=self._node.job_id, restart=self._node.restart, why=why))
        self._journal_end(node_report)
        forbid_requeue(queue, self._attempt, self._node)

    @staticmethod
    def _requeue_event(report: ExitReport, decision: Decision, without: Sequence[str]) -> JobRequeue:
        return JobRequeue(cause=report.cause, why=report.reason, exclude=list(without), delay_s=decision.delay_s)

    def _with_stop_cause(self, report: ExitReport) -> ExitReport:
        """The report with what the signal meant, as far as this node can tell: under Slurm only node 0 asks."""
        executor = self._node.executor
        if report.signal is None or report.sure or not (executor == "local" or self._node.index == 0):
            return report
        view, timed_out = self._query.view(), report.cause == "timeout"
        return amend(report, cause_of_stop(report.signal, view, now=time.time(), executor=executor, deadline=timed_out))

    def _journal_end(self, report: ExitReport, over: str | None = None) -> None:
        """Journal the end on this node; ``over``: the final state of the run, if it has one.

        A disk that is full mostly has room for a short line, at the end of a block that the journal has begun.
        """
        end = NodeEnded(
            cause=report.cause,
            reason=report.reason,
            failed_at=report.failed_at,
            cascade=report.cascade,
            signal=report.signal,
            sure=report.sure,
            failures=list(report.failures),
            evidence=dict(report.evidence),
            over=over,
        )
        try:
            self._journal.write(end)
        except OSError as error:
            if error.errno not in FULL:
                raise
            place = self._attempt.run.path.resolve()
            print(f"slurmtrain: the disk of {place} is full ({describe_os_error(error)})", file=sys.stderr, flush=True)
            reason = f"the disk of {place} is full" if report.cause != "completed" else ""
            self._journal.write(replace(end, reason=reason, failures=(), evidence={}))

    def _end(self, node_report: ExitReport, attempt_report: ExitReport) -> bool:
        """Journal the end on this node, and close a run that is over, so that requeuing its job restarts nothing.

        Returns whether it is over, as far as this node can tell, given that the policy does not start it again.
        """
        over = STATE_OF_CAUSE.get(attempt_report.cause, "failed") if self._is_final(attempt_report) else None
        self._journal_end(node_report, over)
        if over is not None:
            lease.close(self._attempt.run, self._node.submission, over)
        return over is not None

    def _is_final(self, report: ExitReport) -> bool:
        # The agent of a lost node may outlive its attempt: a later start of the job may be training by now.
        if self._node.index != 0 or not lease.holds(self._attempt):
            return False
        if report.cause in _FINAL:
            return report.cause == "completed" or report.sure
        # Commands start local runs again. A job that Slurm is ending may be one that it starts again, rightly.
        return self._queue is not None and not report.slurm_ends_it

    def _put_back(self, queue: JobQueue) -> bool:
        """Put the job back into the queue, behind the jobs of its upstreams.

        If they have none, because a command must submit it first, it looks again later, and that command moves it.
        """
        from slurmtrain.runtime.upstreams import look_again_s, unfinished_jobs

        upstreams = read_upstreams(self._run)
        after, delay_s = unfinished_jobs(self._run, upstreams), look_again_s(self._run, upstreams)
        return self._ask(lambda: queue.put_back(self._node.job_id, after, delay_s, self._attempt.requeue))

    def _ask(self, requeue: Callable[[], None]) -> bool:
        """Have the scheduler requeue the job; returns whether it will."""
        try:
            requeue()
        except SlurmtrainError as error:
            self._journal.write(RequeueFailed(reason=str(error)))
            return False
        return True
