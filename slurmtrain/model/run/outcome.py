"""Whether, when and why an attempt ended, from what its nodes journaled and what was observed from outside.

What the job journaled outranks what was observed. The scheduler decides if the job wrote nothing, or if all it knows is
that a signal stopped it: a preemption and a cancel look alike from inside.

A command that ends a waiting job because a run before it failed knows why; otherwise, in this order:

1. All nodes journaled ``end: completed``: completed. If the end of some node is missing, Slurm's COMPLETED stands in
   for it, but not if a stop was requested: agents exit with 0 when they obey.
2. Some node ended otherwise: the one with the earliest ``failed_at`` determines the cause, unless a person cancelled
   before that. A rank that failed only because it lost a peer (``cascade``) comes after ranks that failed by
   themselves, even if it failed first.
3. Slurm's final state, seen before a person cancelled: its cause (:mod:`.job_state`).
4. A person cancelled: cancelled.
5. Nothing was journaled, and ``observed: gone`` says that the job no longer exists: lost.

An attempt has ended when all its nodes journaled their ``end``, or when it is gone. With Slurm, an attempt whose job
was started again is over, whatever was journaled about it.

Node 0 journals that it is about to requeue the job (:class:`JobRequeue`), why, and which nodes to exclude. Then it
journals its end, then it requeues. It can be killed anywhere in between, so only Slurm knows what became of the job:
there is a later start of it, or it is over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.run.attempt_facts import AttemptFacts
from slurmtrain.model.run.events import agent_events, command_events
from slurmtrain.model.run.events.base import AnyEvent, Event, select
from slurmtrain.model.run.job_state import CAUSE_OF_STATE, GONE, base, describe_state, is_final
from slurmtrain.model.run.layout import node_of
from slurmtrain.model.run.lineage import UPSTREAM
from slurmtrain.model.run.run import STATE_OF_CAUSE, Attempt, replace

# A job that ends this long before its limit did not time out: Slurm also says TIMEOUT if it exits within its grace.
_LIMIT_MARGIN_S = 60.0
# Causes for which the reason mentions the last step.
_AT_A_STEP = frozenset({"preempted", "timeout", "cancelled"})
# What a shell exits with whose program SIGKILL has ended.
_SHELL_SIGKILL = 137

End = Event[agent_events.NodeEnded]


@dataclass(frozen=True, slots=True)
class _Final:
    """The last observation that an attempt is over."""

    observed: command_events.JobObserved
    seen_at: float

    @property
    def state(self) -> str:
        return self.observed.state or ""

    @property
    def is_gone(self) -> bool:
        """Whether it only says that the job no longer exists."""
        return self.state == GONE

    @property
    def is_cancel(self) -> bool:
        """Whether somebody cancelled the job in Slurm."""
        return CAUSE_OF_STATE.get(base(self.state)) == "cancelled"

    @property
    def ended_at(self) -> float:
        """The best estimate of when the attempt ended, in seconds since 1970."""
        return self.observed.ended_at or self.observed.last_seen or self.seen_at


def with_outcome(attempt: Attempt, events: Sequence[AnyEvent], cancels: Sequence[float]) -> Attempt:
    """The attempt with its end, if it has ended.

    Args:
        attempt: The attempt without its end.
        events: Its own events and events of commands about it, in order.
        cancels: When a person cancelled the run, in seconds since 1970.
    """
    # A node that was lost while the others kept running has no say in how the attempt ended.
    lost = {str(node) for event in select(events, agent_events.RanksRestarted) for node in event.payload.lost}
    ends = [end for end in select(events, agent_events.NodeEnded) if node_of(end.source) not in lost]
    # Slurm may take back its word: a job that it called failed may be requeued.
    final = _last_final(events)
    nodes = max((event.payload.nodes for event in select(events, agent_events.AgentStarted)), default=0)
    # Without any end, as in a damaged journal that calls every node lost, nothing says how the attempt ended.
    all_ended = nodes > 0 and bool(ends) and len({end.source for end in ends}) >= nodes - len(lost)
    upstream = next(reversed(select(events, command_events.UpstreamFailed)), None)
    if upstream is not None and not any(end.payload.cause == "completed" for end in ends):
        return closed(attempt, UPSTREAM, upstream.payload.reason, upstream.time, confirmed=True)
    requeue = requeue_record(events)
    if requeue is not None and requeue.intended:
        # A requeue ends the job's other nodes, some of them before they have journaled their end.
        last_end = max((end.time for end in ends), default=requeue.at)
        return _put_back(attempt, requeue, select(events, agent_events.NodeEnded), final, last_end)
    if not (all_ended or final):
        return attempt
    last_end = max((end.time for end in ends), default=0.0)
    # Whether the last ranks of the attempt were asked to stop.
    restarted_at = max((event.time for event in select(events, agent_events.RanksRestarted)), default=-math.inf)
    was_stopping = any(event.time > restarted_at for event in select(events, agent_events.RanksStopping))
    slurm_completed = final is not None and base(final.state) == "COMPLETED" and not was_stopping
    if ends and all(end.payload.cause == "completed" for end in ends) and (all_ended or slurm_completed):
        return closed(attempt, "completed", "", last_end, confirmed=True)
    cancelled_at = next((time for time in cancels if time >= began_at(attempt)), None)
    if requeue is not None and (cancelled_at is None or requeue.at < cancelled_at):
        return _closed_by(requeue, attempt, last_end or requeue.at)
    root = min((end for end in ends if end.payload.cause != "completed"), key=_blame, default=None)
    if root is not None and (cancelled_at is None or _failed_at(root) < cancelled_at):
        is_of_slurm = any(event.payload.executor == "slurm" for event in select(events, agent_events.AgentStarted))
        if final is None and _stopped_by_signal(root) and is_of_slurm:
            # Preempted, cancelled or requeued? Its nodes cannot know, and Slurm has not said yet.
            return replace(attempt, reason=f"{root.payload.reason}; Slurm has not said why yet")
        return _closed_by_node(attempt, root, final, last_end, is_of_slurm=is_of_slurm)
    # Slurm rounds times to whole seconds, so the cancel is rounded as well.
    if final is not None and not final.is_gone and (cancelled_at is None or final.ended_at < int(cancelled_at)):
        cause, reason = _slurms_reason(attempt, final)
        return closed(attempt, cause, reason + _after_step(attempt), final.ended_at, confirmed=True)
    if cancelled_at is not None:
        at = max(last_end or (final.ended_at if final else 0.0), cancelled_at)
        return closed(attempt, "cancelled", "cancelled" + _after_step(attempt), at, confirmed=True)
    assert final is not None
    reason = (final.observed.reason or "") + _after_step(attempt)
    return closed(attempt, "lost", reason, last_end or final.ended_at, confirmed=True)


def superseded(attempt: Attempt, facts: AttemptFacts) -> Attempt:
    """The attempt, closed: Slurm has started its job again since, which rules out that it was cancelled.

    That alone does not confirm the cause: Slurm may still report one, such as a node failure. ``facts``: the attempt's.
    """
    ends = select(facts.events, agent_events.NodeEnded)
    requeue = requeue_record(facts.events)
    if requeue is not None and attempt.cause != requeue.cause:
        return replace(_closed_by(requeue, attempt, requeue.at), excluded=requeue.excluded)
    if attempt.ended and not (attempt.cause == "cancelled" and ends and all(_stopped_by_signal(end) for end in ends)):
        return attempt
    if any(_stopped_by_signal(end) for end in ends):
        reason = describe_state("PREEMPTED") + _after_step(attempt)
        return closed(attempt, "preempted", reason, facts.last_written, confirmed=attempt.confirmed)
    reason = "it ended without reporting a cause, and Slurm started it again" + _after_step(attempt)
    return closed(attempt, "lost", reason, facts.last_written, confirmed=False)


def closed(attempt: Attempt, cause: str, reason: str, at: float, *, confirmed: bool) -> Attempt:
    """The attempt, ended.

    Args:
        attempt: As it was.
        cause: One of :data:`~slurmtrain.model.run.run.CAUSES`.
        reason: The same in words.
        at: When, in seconds since 1970; 0 if unknown.
        confirmed: Whether the cause is final, whatever the scheduler may still report.
    """
    state = STATE_OF_CAUSE.get(cause, "failed")
    return replace(attempt, state=state, cause=cause, reason=reason, ended_at=at or None, confirmed=confirmed)


def began_at(attempt: Attempt) -> float:
    """When the attempt began, in seconds since 1970: a person's cancel from then on applies to it."""
    return attempt.submitted_at or attempt.started_at or 0.0


def _put_back(
    attempt: Attempt, requeue: RequeueRecord, ends: Sequence[End], final: _Final | None, last_end: float
) -> Attempt:
    """The attempt whose job was to be requeued, with the nodes that its agent excluded.

    Our own cancel does not close it: until Slurm says that the job is over, it may be in the queue. A cancel in Slurm
    itself does.
    """
    if final is not None and final.is_cancel:
        cause, reason = _slurms_reason(attempt, final)
        return closed(attempt, cause, f"{reason}; before that, {requeue.reason}", final.ended_at, confirmed=True)
    failures = next((end.payload.failures for end in sorted(ends, key=_blame) if end.payload.failures), ())
    return replace(
        _closed_by(requeue, attempt, last_end),
        failures=tuple(failures),
        excluded=requeue.excluded,
        restarted_by=requeue.restarted_by,
        requeue_problem=requeue.problem,
    )


def _closed_by(requeue: RequeueRecord, attempt: Attempt, at: float) -> Attempt:
    reason = "; ".join(filter(None, (requeue.reason, requeue.given_up if requeue.cause == PREFLIGHT else "")))
    at_step = _after_step(attempt) if requeue.cause in _AT_A_STEP else ""
    return closed(attempt, requeue.cause, reason + at_step, at, confirmed=True)


def _closed_by_node(
    attempt: Attempt, root: End, final: _Final | None, last_end: float, *, is_of_slurm: bool
) -> Attempt:
    """Closed with the reason of the node that failed first, unless that only followed something Slurm knows about."""
    end = root.payload
    # A person who cancels a job while it is being preempted wants it ended.
    overruled = final is not None and final.is_cancel and end.cause in _AT_A_STEP
    follows = _stopped_by_signal(root) or end.cascade or overruled
    failed = replace(attempt, failures=tuple(end.failures))
    if follows and final is not None and not final.is_gone:
        cause, reason = _slurms_reason(attempt, final)
        if cause in ("crash", "lost") and end.signal == "SIGTERM":
            # Slurm ended it, and not by a cancel, which it would report: the job exited within a preemption's grace.
            cause, reason = "preempted", describe_state("PREEMPTED")
        if cause not in ("crash", "lost"):  # exit codes, which the node itself knows better
            return closed(failed, cause, reason + _after_step(attempt), last_end, confirmed=True)
    if end.cause == "crash" and final is not None and _was_killed(end.failures):
        # The kernel of a node without a count of such kills tells Slurm alone.
        cause, reason = _slurms_reason(attempt, final)
        if cause == "oom":
            return closed(failed, cause, f"{reason}; {end.reason}", last_end, confirmed=True)
    reason = end.reason + (_after_step(attempt) if end.sure else "")
    # Slurm may know of memory what the node does not.
    awaits = follows or (is_of_slurm and end.cause == "crash" and _was_killed(end.failures))
    return closed(failed, end.cause, reason, last_end, confirmed=final is not None or not awaits)


def _slurms_reason(attempt: Attempt, final: _Final) -> tuple[str, str]:
    """Cause and reason according to Slurm, for an attempt that did not journal more itself."""
    observed, state = final.observed, base(final.state)
    if state == "OUT_OF_MEMORY" and attempt.pack > 1:
        # Its agent would have journaled that a process of this run was killed, unless that was the agent itself.
        return "lost", "one of the runs of its job used more memory than the job had requested"
    if state == "TIMEOUT" and None not in (observed.time_limit_s, observed.started_at, observed.ended_at):
        took = (observed.ended_at or 0.0) - (observed.started_at or 0.0)
        if took + _LIMIT_MARGIN_S < (observed.time_limit_s or 0.0):
            return "preempted", describe_state("PREEMPTED")
    description = describe_state(state)
    if state == "FAILED":
        status = f"signal {observed.signal}" if observed.signal else f"exit code {observed.exit_code}"
        description = f"Slurm says FAILED with {status}"
    elif state == "COMPLETED":
        description = "Slurm says that the job completed, but the job did not record that"
    elif state == "NODE_FAIL" and observed.nodes:
        description = f"a node failed ({observed.nodes})"
    return CAUSE_OF_STATE[state], ": ".join(filter(None, (description, observed.reason)))


def _last_final(events: Sequence[AnyEvent]) -> _Final | None:
    """The last observation that the attempt is over; the scheduler's outrank the observation that it is gone."""
    finals = [
        _Final(event.payload, event.time)
        for event in select(events, command_events.JobObserved)
        if is_final(event.payload.state or "")
    ]
    # A command that found nothing may have asked before Slurm had written its accounting.
    slurms = [final for final in finals if not final.is_gone]
    return next(reversed(slurms or finals), None)


def _was_killed(failures: Sequence[Mapping[str, Any]]) -> bool:
    """Whether SIGKILL has ended the first of the ranks with these ``failures``, or the program of its shell."""
    first = failures[0] if failures else {}
    return first.get("signal") == "SIGKILL" or first.get("exit_code") == _SHELL_SIGKILL


def _stopped_by_signal(end: End) -> bool:
    """Whether this node ended because of a signal, and does not know why."""
    return end.payload.signal is not None and not end.payload.sure


def _blame(end: End) -> tuple[bool, bool, float]:
    """The first failure sorts first, then failures that followed from another one or do not know their cause."""
    return (end.payload.cascade, _stopped_by_signal(end), _failed_at(end))


def _failed_at(end: End) -> float:
    return end.payload.failed_at or end.time


def _after_step(attempt: Attempt) -> str:
    return f" after step {attempt.last_step}" if attempt.last_step is not None else ""


PREFLIGHT = "preflight"
# Where commands journal. They examine a start only after its agents have stopped writing.
_COMMANDS = "journal/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueRecord:
    """A start that was requeued, or was to be, or whose preflight failed.

    ``intended``: whether it was, or was to be, requeued. ``excluded``: nodes that the next start excludes.
    ``problem``: why the requeue failed, unless a command has requeued it since. ``given_up``: why no command will.
    Times are seconds since 1970.
    """

    cause: str
    reason: str
    at: float
    intended: bool
    excluded: Sequence[str] = ()
    problem: str = ""
    given_up: str = ""
    over: bool = False
    """Whether Slurm says that the job ended without being requeued."""

    @property
    def restarted_by(self) -> str | None:
        """What is to start the run again: ``slurm``, whose queue may hold the job, or ``sync``; None: nothing."""
        if not self.intended or self.given_up:
            return None
        return "sync" if self.over else "slurm"


def requeue_record(events: Sequence[AnyEvent]) -> RequeueRecord | None:
    """The requeue or failed preflight of a start, according to its events; None if there was neither.

    If node 0 died right after journaling its intention, the start still counts as one that was to be requeued.
    """
    requeues = select(events, agent_events.JobRequeue)
    refusals = [event for event in select(events, agent_events.NodeEnded) if event.payload.cause == PREFLIGHT]
    first = requeues[0] if requeues else None
    root = next((end for end in refusals if not end.payload.cascade), refusals[0] if first and refusals else None)
    if first is None and root is None:
        return None
    # Versions that requeued for nothing else did not note the cause.
    cause = (first.payload.cause or PREFLIGHT) if first is not None else PREFLIGHT
    end = root if cause == PREFLIGHT else None
    was_repaired = any(_is_of_command(event) for event in requeues)
    failures = [event for event in select(events, agent_events.RequeueFailed) if not _is_of_command(event)]
    return RequeueRecord(
        cause=cause,
        reason=end.payload.reason if end else first.payload.why if first else "",
        at=(end.payload.failed_at or end.time) if end else first.time if first else 0.0,
        intended=bool(requeues),
        excluded=tuple(dict.fromkeys(host for event in requeues for host in event.payload.exclude)),
        problem="" if was_repaired else _last_reason(failures),
        given_up=reason_given_up(events),
        over=is_over(events),
    )


def final_state(events: Sequence[AnyEvent]) -> str | None:
    """The final state of the run, if node 0 journaled one at the end of a start; ``events``: node 0's."""
    return next((end.payload.over for end in reversed(select(events, agent_events.NodeEnded))), None)


def reason_given_up(events: Iterable[AnyEvent]) -> str:
    """Why no command starts the run again after this start; empty if one may."""
    return _last_reason([event for event in select(events, agent_events.RequeueFailed) if _is_of_command(event)])


def is_over(events: Iterable[AnyEvent]) -> bool:
    """Whether Slurm said that the job ended without being requeued, or a command ended it to submit another."""
    return any(isinstance(event.payload, command_events.JobReplaced) or _is_final(event) for event in events)


def describe_next_start(
    reason: str, excluded: Sequence[str], restarted_by: str, problem: str = "", after: str = ""
) -> str:
    """Describe why an interrupted run waits, and what starts it again.

    Args:
        reason: Why it was interrupted.
        excluded: The nodes that are excluded from now on.
        restarted_by: ``slurm`` or ``sync``.
        problem: Why its job could not be requeued; empty if it could.
        after: The earliest time at which it may start, in words.
    """
    without = f" without {', '.join(excluded)}" if excluded else ""
    if restarted_by == "sync":
        return f"{reason}; 'slurmtrain sync' or 'watch' starts it again{without}{after}"
    if problem:
        return f"{reason}; its job could not be requeued ({problem}): 'slurmtrain sync' starts it again"
    return f"{reason}; starts again{without}{after}"


def _is_of_command(event: AnyEvent) -> bool:
    return event.source.startswith(_COMMANDS)


def _is_final(event: AnyEvent) -> bool:
    if not isinstance(event.payload, command_events.JobObserved) or event.payload.state is None:
        return False
    # REQUEUED is the end of a start, and not of the job.
    return is_final(event.payload.state) and base(event.payload.state) != "REQUEUED"


def _last_reason(failures: Sequence[Event[agent_events.RequeueFailed]]) -> str:
    return failures[-1].payload.reason if failures else ""
