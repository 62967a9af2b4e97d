"""An attempt that ended before it trained, because nodes failed its preflight: why, and who starts the run again. Pure.

Node 0 says that it is about to put the job back into the queue, without these nodes (``requeue``), then ends, then
does it. It can be killed anywhere, so what became of the job is for Slurm to say: there is a later start of it, or it
is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmtrain.model.event import Event
from slurmtrain.model.jobstate import base, is_final

CAUSE = "preflight"
# Where the word of commands is kept, which comes after all that the agents have said.
_COMMANDS = "journal/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What is known of it.

    ``excluded``: nodes that the next start goes without; empty where the job was not to start again. ``problem``: why
    it could not be put back, as long as nobody has done so since. ``given_up``: why no command will. Times are seconds
    since 1970.
    """

    reason: str
    at: float
    excluded: Sequence[str] = ()
    problem: str = ""
    given_up: str = ""
    over: bool = False
    """Whether Slurm says that the job has ended without being put back."""

    @property
    def restarted_by(self) -> str | None:
        """Who is to start the run again: the queue of ``slurm``, where the job may be, or ``sync``, or nobody."""
        if not self.excluded or self.given_up:
            return None
        return "sync" if self.over else "slurm"


def refusal(events: Sequence[Event]) -> Refusal | None:
    """What the events of an attempt tell of a preflight that failed; None where none did.

    An attempt whose node 0 did not live to say more than ``requeue`` was refused too.
    """
    asked = [event for event in events if event.kind == "requeue"]
    ends = [event for event in events if event.kind == "end" and event.data.get("cause") == CAUSE]
    words = [end for end in ends if not end.data.get("cascade", False)] or (ends if asked else [])
    if not words and not asked:
        return None
    end = words[0] if words else None
    failed = [event for event in events if event.kind == "requeue_failed"]
    repaired = any(event.source.startswith(_COMMANDS) for event in asked)
    by_agent = [event for event in failed if not event.source.startswith(_COMMANDS)]
    by_command = [event for event in failed if event.source.startswith(_COMMANDS)]
    return Refusal(
        reason=str(end.data.get("reason", "") if end else asked[0].data.get("why", "")),
        at=float((end.data.get("failed_at") if end else None) or (end or asked[0]).time),
        excluded=tuple(dict.fromkeys(str(host) for event in asked for host in event.data.get("exclude", ()))),
        problem="" if repaired else _reason(by_agent),
        given_up=_reason(by_command),
        over=any(_is_over(event) for event in events),
    )


def in_words(reason: str, excluded: Sequence[str], restarted_by: str, problem: str = "") -> str:
    """Why a run that was refused waits, and who starts it again."""
    without = f"without {', '.join(excluded)}"
    if restarted_by == "sync":
        return f"{reason}; 'slurmtrain sync' submits it again {without}"
    if problem:
        return f"{reason}; its job could not be put back into the queue ({problem}): 'slurmtrain sync' sees to it"
    return f"{reason}; starts again {without}"


def _is_over(event: Event) -> bool:
    """Whether this is an observation that the job ended, and was not put back into the queue."""
    if event.kind != "observed":
        return False
    state = str(event.data.get("state"))
    return is_final(state) and base(state) != "REQUEUED"


def _reason(events: Sequence[Event]) -> str:
    return next((str(event.data.get("reason", "")) for event in reversed(events)), "")
