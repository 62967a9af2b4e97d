"""Why the workers of a node ended: pure decisions over their exits."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# How a rank says "I was asked to stop, saved, and can go on": EX_TEMPFAIL of sysexits.h.
STOPPED = 75

# What a rank says when another one died: it may say so before that death has been noticed here.
_CASCADE = re.compile(
    r"connection (?:closed|reset) by|closed by (?:remote )?peer|caused by a remote worker|ncclRemoteError|broken pipe",
    re.IGNORECASE,
)
_CASCADE_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """One worker's end. ``code`` is negative for a signal; ``at`` is in seconds since 1970.

    ``raised`` is the exception that the session saw, with its time, which precedes the exit by the interpreter's end.
    """

    rank: int
    pid: int
    code: int
    at: float
    raised: tuple[float, str] | None = None
    last_lines: Sequence[str] = ()

    @property
    def failed(self) -> bool:
        return self.code not in (0, STOPPED)

    @property
    def failed_at(self) -> float:
        return self.raised[0] if self.raised else self.at

    @property
    def cascade(self) -> bool:
        """Whether it failed because another rank had.

        One that raised may still be killed before it has ended, and NCCL's watchdog aborts its process.
        """
        if self.raised is not None:
            return _CASCADE.search(self.raised[1]) is not None
        ended_itself = self.code > 0 or self.code == -signal.SIGABRT
        return ended_itself and _CASCADE.search("\n".join(self.last_lines[-_CASCADE_LINES:])) is not None

    @property
    def blame(self) -> tuple[bool, float]:
        """The one that sorts first is to blame: the earliest of those that did not fail because of another."""
        return (self.cascade, self.failed_at)

    def describe(self) -> str:
        """In words, with the last thing it said."""
        said = self.raised[1] if self.raised else next((line for line in reversed(self.last_lines) if line.strip()), "")
        how = f"was killed by {_signal_name(-self.code)}" if self.code < 0 else f"exited with code {self.code}"
        return f"rank {self.rank} {how}" + (f": {said.strip()}" if said else "")

    def to_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "pid": self.pid,
            "exit_code": self.code if self.code >= 0 else None,
            "signal": _signal_name(-self.code) if self.code < 0 else None,
            "at": self.failed_at,
            "error": self.raised[1] if self.raised else None,
            "last_lines": list(self.last_lines),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """Why the workers were asked to stop before they were done. ``node`` is the one that has the reason.

    ``signal``: the name of the signal that asked; what it stands for only the scheduler, or a person, can tell.
    """

    cause: str
    why: str
    at: float
    node: int
    signal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReport:
    """What a node says of its end. ``failed_at`` is None unless the reason lies with this node.

    ``without``: hosts without which it may be worth another try.
    """

    cause: str
    reason: str
    failed_at: float | None = None
    cascade: bool = False
    failures: Sequence[Mapping[str, Any]] = ()
    signal: str | None = None
    without: Sequence[str] = ()
    sure: bool = False
    """Whether the scheduler was asked what the signal stands for."""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As the journal has it."""
        return {
            "cause": self.cause,
            "reason": self.reason,
            "failed_at": self.failed_at,
            "cascade": self.cascade,
            "signal": self.signal,
            "sure": self.sure,
            "failures": list(self.failures),
            "evidence": dict(self.evidence),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ExitReport:
        """Read what :meth:`to_dict` gave."""
        return cls(**{name: plain[name] for name in ("cause", "reason", "failed_at", "cascade", "signal", "sure",
                                                     "failures", "evidence")})  # fmt: skip

    @property
    def blame(self) -> tuple[bool, bool, float]:
        """Of several nodes the one whose end sorts first is the cause; who was only told to stop comes after others."""
        return (self.cascade, self.signal is not None, self.failed_at if self.failed_at is not None else math.inf)


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How an attempt ended: on this node, and, at node 0, the end that all others follow from."""

    ending: ExitReport
    root: ExitReport


def are_gone(names: Sequence[str]) -> str:
    """That the agents of these nodes have died, in words."""
    agents = "its agent has" if len(names) == 1 else "their agents have"
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} gone: {agents} not been heard of any more"


def root_of(endings: Sequence[ExitReport]) -> ExitReport:
    """The end that all others follow from."""
    failed = [one for one in endings if one.cause != "completed"]
    return min(failed, key=lambda one: one.blame) if failed else endings[0]


def decide(exits: Sequence[Exit], request: StopRequest | None, node: int) -> ExitReport:
    """The cause of a node's end, from the exits of all its workers and what they were asked before.

    A worker that failed before anybody asked for a stop is the cause. After a request, whatever the workers exit with
    follows from it, but for exit code 0 on all of them: then the work was done in spite of it.
    """
    failed = sorted((one for one in exits if one.failed and not _follows(one, request)), key=lambda one: one.blame)
    if failed:
        first = failed[0]
        return ExitReport(
            cause="crash",
            reason=first.describe(),
            failed_at=first.failed_at,
            cascade=first.cascade,
            failures=[one.to_dict() for one in failed],
        )
    if all(one.code == 0 for one in exits):
        return ExitReport(cause="completed", reason="")
    if request is not None:
        at = request.at if request.node == node else None
        return ExitReport(cause=request.cause, reason=request.why, failed_at=at, signal=request.signal)
    return ExitReport(cause="cancelled", reason="the workers were asked to stop, saved and left")


def _follows(one: Exit, request: StopRequest | None) -> bool:
    """Whether this exit is what the request asked for. Signals reach agent and workers in any order."""
    if request is None:
        return False
    return one.failed_at >= request.at or one.code in (
        -signal.SIGTERM,
        -signal.SIGINT,
        -signal.SIGHUP,
        -signal.SIGUSR1,
        -signal.SIGUSR2,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
