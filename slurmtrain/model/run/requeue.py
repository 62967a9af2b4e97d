"""A start of a run whose agent requeues its job, or whose preflight failed: pure.

Node 0 journals that it is about to requeue the job (:class:`JobRequeue`), why, and which nodes to exclude. Then it
journals its end, then it requeues. It can be killed anywhere in between, so only Slurm knows what became of the job:
there is a later start of it, or it is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurmtrain.model.run.events.agent import JobRequeue, NodeEnded, RequeueFailed
from slurmtrain.model.run.events.base import AnyEvent, Event, select
from slurmtrain.model.run.events.command import JobObserved, JobReplaced
from slurmtrain.model.run.job_state import base, is_final

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
    requeues = select(events, JobRequeue)
    refusals = [event for event in select(events, NodeEnded) if event.payload.cause == PREFLIGHT]
    first = requeues[0] if requeues else None
    root = next((end for end in refusals if not end.payload.cascade), refusals[0] if first and refusals else None)
    if first is None and root is None:
        return None
    cause = (first.payload.cause or PREFLIGHT) if first is not None else PREFLIGHT
    end = root if cause == PREFLIGHT else None
    was_repaired = any(_is_of_command(event) for event in requeues)
    failures = [event for event in select(events, RequeueFailed) if not _is_of_command(event)]
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
    return next((end.payload.over for end in reversed(select(events, NodeEnded))), None)


def reason_given_up(events: Iterable[AnyEvent]) -> str:
    """Why no command starts the run again after this start; empty if one may."""
    return _last_reason([event for event in select(events, RequeueFailed) if _is_of_command(event)])


def is_over(events: Iterable[AnyEvent]) -> bool:
    """Whether Slurm said that the job ended without being requeued, or a command ended it to submit another."""
    return any(isinstance(event.payload, JobReplaced) or _is_final(event) for event in events)


def describe_wait(reason: str, excluded: Sequence[str], restarted_by: str, problem: str = "", after: str = "") -> str:
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
    if not isinstance(event.payload, JobObserved) or event.payload.state is None:
        return False
    return is_final(event.payload.state) and base(event.payload.state) != "REQUEUED"


def _last_reason(failures: Sequence[Event[RequeueFailed]]) -> str:
    return failures[-1].payload.reason if failures else ""
