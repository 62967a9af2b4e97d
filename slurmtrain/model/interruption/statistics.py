"""Which ends of attempts speak of the place they ran in, and which of the program: pure.

How often a job is interrupted without notice where it runs tells how often to save. Of the causes of an attempt's end
(``CAUSES`` in model/run/run.py):

* ``node_fail``, ``lost`` and ``hang`` come from nodes, networks and file servers, and without notice.
* ``crash`` does where a rank was killed by a signal that programs do not raise by themselves, or said that a device or
  the network failed it. Any other crash is the program's: it says nothing of the next program there.
* ``preempted`` and ``timeout`` are announced: the job had its grace to save in.
* ``oom`` is the program's: what it needs does not depend on when it saves, nor another run's memory on this one's.
* ``completed``, ``cancelled`` and ``preflight`` interrupt no training.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.interruption.interval import InterruptionStats

UNNOTICED = "unnoticed"
ANNOUNCED = "announced"

_OF_CAUSE = {
    "node_fail": UNNOTICED,
    "lost": UNNOTICED,
    "hang": UNNOTICED,
    "preempted": ANNOUNCED,
    "timeout": ANNOUNCED,
}
# From outside, and from memory or a mapped file that is gone.
_FOREIGN_SIGNALS = frozenset({"SIGKILL", "SIGBUS", "SIGPWR"})
# What CUDA, NCCL, gloo and the operating system say when not the program is wrong. NCCL's other errors are of its use.
_FOREIGN_WORDS = re.compile(
    r"uncorrectable (?:ECC|NVLink)|\bECC error|\bXid\b|fallen off the bus|GPU is lost|hardware error"
    r"|nccl(?:SystemError|RemoteError|InternalError)|unhandled system error|collective operation timeout"
    r"|connection (?:reset|refused|closed|timed out)|no route to host|network is (?:down|unreachable)"
    r"|input/output error|remote I/O error|stale file handle|transport endpoint",
    re.IGNORECASE,
)
_LAST_LINES = 8


@dataclass(frozen=True, slots=True)
class AttemptSpan:
    """An attempt as far as it tells of interruptions: for how many node-seconds it ran, and why it ended, if it has."""

    node_seconds: float
    cause: str | None
    failures: Sequence[Mapping[str, Any]] = ()


def kind(cause: str | None, failures: Sequence[Mapping[str, Any]] = ()) -> str | None:
    """Whether an end for this cause, with these failures of ranks, was ``unnoticed`` or ``announced``; else None."""
    if cause == "crash":
        return UNNOTICED if any(map(_is_foreign, failures[:1])) else None
    return _OF_CAUSE.get(cause or "")


def add(history: InterruptionStats, lived: Iterable[AttemptSpan]) -> InterruptionStats:
    """The history, with these attempts."""
    for one in lived:
        found = kind(one.cause, one.failures)
        history = history.plus(
            uptime_s=max(0.0, one.node_seconds),
            interruptions=int(found == UNNOTICED),
            announced=int(found == ANNOUNCED),
        )
    return history


def _is_foreign(failure: Mapping[str, Any]) -> bool:
    """Whether a rank failed because of something outside the program, as far as it and its signal say."""
    if failure.get("signal") in _FOREIGN_SIGNALS:
        return True
    said = [failure.get("error") or "", *(failure.get("last_lines") or ())[-_LAST_LINES:]]
    return any(_FOREIGN_WORDS.search(str(line)) for line in said)
