"""Which ends of attempts count as interruptions by the cluster, and which are the program's own. Pure.

How often a cluster interrupts jobs without notice determines how often to save there. By the cause of an attempt's end
(``CAUSES`` in model/run/run.py):

* ``node_fail``, ``lost`` and ``hang`` come from nodes, networks and file servers, without notice.
* ``crash`` counts as well if a rank was killed by a signal that programs do not raise themselves, or if its error
  blames a device or the network. Any other crash is the program's own and says nothing about the cluster.
* ``preempted`` and ``timeout`` are announced: the job had a grace period to save in.
* ``oom`` is the program's own: its memory use depends neither on when it saves nor on other runs.
* ``completed``, ``cancelled``, ``preflight``, ``early`` and ``upstream`` do not interrupt training.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.interruption.interval import InterruptionStats

UNNOTICED = "unnoticed"
ANNOUNCED = "announced"

_KIND_BY_CAUSE = {
    "node_fail": UNNOTICED,
    "lost": UNNOTICED,
    "hang": UNNOTICED,
    "preempted": ANNOUNCED,
    "timeout": ANNOUNCED,
}
# SIGKILL comes from outside, SIGBUS from failed memory or a mapped file that is gone, SIGPWR from a power failure.
_FOREIGN_SIGNALS = frozenset({"SIGKILL", "SIGBUS", "SIGPWR"})
# Errors of CUDA, NCCL, Gloo and the operating system that are not the program's fault. NCCL's other errors are misuse.
_FOREIGN_WORDS = re.compile(
    r"uncorrectable (?:ECC|NVLink)|\bECC error|\bXid\b|fallen off the bus|GPU is lost|hardware error"
    r"|nccl(?:SystemError|RemoteError|InternalError)|unhandled system error|collective operation timeout"
    r"|connection (?:reset|refused|closed|timed out)|no route to host|network is (?:down|unreachable)"
    r"|input/output error|remote I/O error|stale file handle|transport endpoint",
    re.IGNORECASE,
)
# How many of a rank's last lines are searched: the error is near the end, and earlier lines may be about other errors.
_LAST_LINES = 8


@dataclass(frozen=True, slots=True)
class AttemptSpan:
    """An attempt, reduced to what statistics need.

    ``node_seconds``: how long it ran, times its nodes. ``cause``: why it ended; None if it has not. ``failures``: of
    its ranks as journaled, the first one first.
    """

    node_seconds: float
    cause: str | None
    failures: Sequence[Mapping[str, Any]] = ()


def interruption_kind(cause: str | None, failures: Sequence[Mapping[str, Any]] = ()) -> str | None:
    """UNNOTICED or ANNOUNCED for an end that interrupted training; None for any other. ``failures``: of its ranks."""
    if cause == "crash":
        return UNNOTICED if any(map(_is_foreign, failures[:1])) else None
    return _KIND_BY_CAUSE.get(cause or "")


def add_attempts(stats: InterruptionStats, attempts: Iterable[AttemptSpan]) -> InterruptionStats:
    """The statistics with these attempts added."""
    for attempt in attempts:
        kind = interruption_kind(attempt.cause, attempt.failures)
        stats = stats.plus(
            # Clocks of nodes differ: an attempt may seem to end before it began.
            uptime_s=max(0.0, attempt.node_seconds),
            interruptions=int(kind == UNNOTICED),
            announced=int(kind == ANNOUNCED),
        )
    return stats


def _is_foreign(failure: Mapping[str, Any]) -> bool:
    """Whether a rank failed because of something outside the program, by its signal and its last lines."""
    if failure.get("signal") in _FOREIGN_SIGNALS:
        return True
    lines = [failure.get("error") or "", *(failure.get("last_lines") or ())[-_LAST_LINES:]]
    return any(_FOREIGN_WORDS.search(str(line)) for line in lines)
