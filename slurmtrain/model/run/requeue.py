"""A start of a run that its agent puts back into the queue, or whose nodes were not fit to train: pure.

Node 0 says that it is about to put the job back into the queue (``requeue``), without which nodes and why, then ends,
then does it. It can be killed anywhere, so what became of the job is for Slurm to say: there is a later start of it, or
it is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.job_state import base, is_final

PREFLIGHT = "preflight"
# Where the word of commands is kept, which comes after all that the agents have said.
_COMMANDS = "journal/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueRecord:
    """What is known of it.

    ``asked``: whether it is, or was, to be put back into the queue. ``excluded``: nodes that the next start goes
    without. ``problem``: why it could not be put back, as long as nobody has done so since. ``given_up``: why no
    command will. Times are seconds since 1970.
    """

    cause: str
    reason: str
    at: float
    asked: bool
    excluded: Sequence[str] = ()
    problem: str = ""
    given_up: str = ""
    over: bool = False
    """Whether Slurm says that the job has ended without being put back."""

    @property
    def restarted_by(self) -> str | None:
        """Who is to start the run again: the queue of ``slurm``, where the job may be, or ``sync``, or nobody."""
        if not self.asked or self.given_up:
            return None
        return "sync" if self.over else "slurm"


def requeue_of(events: Sequence[AnyEvent]) -> RequeueRecord | None:
    """What the events of a start tell of its being put back, or of a preflight that failed; None if neither.

    A start whose node 0 did not live to say more than ``requeue`` was to be put back too.
    """
    asked = [event for event in events if event.kind == "requeue"]
    refusals = [event for event in events if event.kind == "end" and event.data.get("cause") == PREFLIGHT]
    if not asked and not refusals:
        return None
    first = asked[0] if asked else None
    root = next(
        (end for end in refusals if not end.data.get("cascade", False)), refusals[0] if first and refusals else None
    )
    if first is None and root is None:
        return None
    cause = str(first.data.get("cause", PREFLIGHT)) if first is not None else PREFLIGHT
    end = root if cause == PREFLIGHT else None
    failed = [event for event in events if event.kind == "requeue_failed"]
    repaired = any(event.source.startswith(_COMMANDS) for event in asked)
    return RequeueRecord(
        cause=cause,
        reason=str(end.data.get("reason", "") if end else first.data.get("why", "") if first else ""),
        at=float((end.data.get("failed_at") if end else None) or _time(end, first)),
        asked=bool(asked),
        excluded=tuple(dict.fromkeys(str(host) for event in asked for host in event.data.get("exclude", ()))),
        problem="" if repaired else _reason([one for one in failed if not one.source.startswith(_COMMANDS)]),
        given_up=given_up(events),
        over=is_over(events),
    )


def given_up(events: Sequence[AnyEvent]) -> str:
    """Why no command starts the run again after this start; empty where one may."""
    failed = [one for one in events if one.kind == "requeue_failed" and one.source.startswith(_COMMANDS)]
    return _reason(failed)


def is_over(events: Sequence[AnyEvent]) -> bool:
    """Whether Slurm has said that the job ended, and was not put back, or a command has ended it to start another."""
    return any(event.kind == "replaced" or _is_over(event) for event in events)


def in_words(reason: str, excluded: Sequence[str], restarted_by: str, problem: str = "", after: str = "") -> str:
    """Why a run that was interrupted waits, and who starts it again. ``after``: from when on, in words."""
    without = f" without {', '.join(excluded)}" if excluded else ""
    if restarted_by == "sync":
        return f"{reason}; 'slurmtrain sync' or 'watch' starts it again{without}{after}"
    if problem:
        return f"{reason}; its job could not be put back into the queue ({problem}): 'slurmtrain sync' sees to it"
    return f"{reason}; starts again{without}{after}"


def _time(end: AnyEvent | None, first: AnyEvent | None) -> float:
    return end.time if end is not None else first.time if first is not None else 0.0


def _is_over(event: AnyEvent) -> bool:
    if event.kind != "observed":
        return False
    state = str(event.data.get("state"))
    return is_final(state) and base(state) != "REQUEUED"


def _reason(events: Sequence[AnyEvent]) -> str:
    return next((str(event.data.get("reason", "")) for event in reversed(events)), "")
