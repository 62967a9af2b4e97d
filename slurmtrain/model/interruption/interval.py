"""When to save, when ranks agree on something, and how they vote: pure decisions.

The optimal interval balances the cost of saving against the work lost in an interruption. J. W. Young, "A first order
approximation to the optimum checkpoint interval", CACM 17(9), 1974: sqrt(2 d M), for a save that stalls training for
d seconds and a mean time M between interruptions without notice. J. T. Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", FGCS 22(3), 2006, equation 37, corrects it for an M that is not much longer
than d.

Two times of a save matter: its stall, while training stands still, and its total duration until it is published, while
training continues. An interruption loses the work since the last published save began: on average half an interval
plus one duration. The duration does not depend on the interval, so only the stall determines the optimum. But saves
cannot be more frequent than their duration allows, and one that does not fit into the grace of a preemption is useless.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any

from slurmtrain.model.experiment.checkpoint import Every
from slurmtrain.model.run.events.base import is_number

# Assumed mean time between unnoticed interruptions of one node: six hours, as for spot instances. It weighs as much as
# one observed interruption, so a hundred undisturbed nodes outweigh it within minutes.
PRIOR_MTBF_S = 6 * 3600.0
PRIOR_WEIGHT = 1.0
# The first save of a run comes this early, to measure what a save costs and to show that saving works.
FIRST_SAVE_S = 30.0
SHORTEST_S = 10.0
# At most an hour's work is put at risk, unless saving every hour costs more than the fraction CHEAP of the time.
LONGEST_S = 3600.0
CHEAP = 0.005
# The largest fraction of the time that saving may cost while no interruption was seen and the prior alone justifies it.
# CheckFreq (FAST 2021) uses the same figure. Observed interruptions lift it: if they are frequent, 3.5 % is too low.
MOST_OVERHEAD = 0.035
# A save within the grace may take longer than the last ones did, and may have to wait for another one to end.
GRACE_MARGIN = 1.5
# How long ranks may take to stop if the grace is unknown: the default of torch elastic, and Slurm's default KillWait.
DEFAULT_GRACE_S = 30.0
# How many of the last saves are used to estimate the next one.
_REMEMBERED = 8
# How often ranks agree on whether to stop or save. A stop request waits at most this long plus one step.
AGREE_S = 0.25
# The same while a checkpoint is being written: it is published at the first agreement afterwards.
AGREE_SAVING_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionStats:
    """What is known, before a job begins, about interruptions where it runs, and about its saves.

    ``uptime_s`` is in node-seconds. ``interruptions`` came without notice; ``announced`` ones (preemptions, time
    limits) left the job ``grace_s`` seconds to save in; None: unknown, or there are none. ``stall_s`` and ``save_s``:
    stall and duration of the run's own last save; if they come from another run of the same name, only ``save_s`` is
    set.
    """

    uptime_s: float = 0.0
    interruptions: int = 0
    announced: int = 0
    grace_s: float | None = None
    stall_s: float | None = None
    save_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> InterruptionStats:
        """Read the result of :meth:`to_dict`, of this version or another; missing and odd values are unknown."""
        return cls(**{name: plain[name] for name in cls.__slots__ if is_number(plain.get(name))})


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalChoice:
    """How often to save, in seconds between the end of one stall and the next save, and why.

    ``optimum_s``: the interval before bounds. ``bounded_by``: the bound that applies: ``shortest``, ``longest``,
    ``save`` (the duration of a save), ``overhead``, ``first`` (no save has been measured), or None. ``mtbf_s``: the
    expected time between unnoticed interruptions of this job; ``interruptions``: how many the estimate is based on.
    ``why``: the reason in words.
    """

    seconds: float
    optimum_s: float | None
    stall_s: float | None
    save_s: float | None
    mtbf_s: float
    interruptions: int
    bounded_by: str | None
    why: str

    def to_dict(self) -> dict[str, Any]:
        """This as journaled."""
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}


class Cost:
    """What the saves of an attempt have cost so far.

    The stall is the mean of the last ones, since every save pays it; the duration is the longest of them, since a save
    within the grace must fit. The first save also allocates memory and makes plans that later ones reuse, so it is
    dropped once there is a second.
    """

    def __init__(self) -> None:
        self._saves: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._count = 0

    def add(self, *, stall_s: float, save_s: float) -> None:
        """Add a save: how long training stood still, and how long it took until it was published."""
        if self._count == 1:
            self._saves.clear()
        self._saves.append((stall_s, save_s))
        self._count += 1

    @property
    def stall_s(self) -> float | None:
        """The expected stall of the next save, in seconds; None before the first."""
        return sum(stall for stall, _ in self._saves) / len(self._saves) if self._saves else None

    @property
    def save_s(self) -> float | None:
        """The duration to expect of the next save at most, in seconds; None before the first."""
        return max((save for _, save in self._saves), default=None)


def choose_interval(
    history: InterruptionStats, *, nodes: int, uptime_s: float, stall_s: float | None, save_s: float | None
) -> IntervalChoice:
    """How often a job on ``nodes`` nodes saves, after ``uptime_s`` seconds and with this ``history`` of interruptions.

    ``stall_s`` and ``save_s`` are None before the attempt's first save; the figures of the run's own last save are then
    used. Choose again after every save.
    """
    if stall_s is None and history.stall_s is not None:
        stall_s, save_s = history.stall_s, history.save_s
    interruptions = history.interruptions
    # A preemption that leaves too little time for a save costs as much work as one without notice.
    ahead = bool(history.announced) and fits_grace(save_s or history.save_s, history.grace_s) is False
    if ahead:
        interruptions += history.announced
    observed = history.uptime_s + max(0.0, uptime_s) * nodes
    mtbf = (observed + PRIOR_WEIGHT * PRIOR_MTBF_S) / (interruptions + PRIOR_WEIGHT) / nodes
    best = None if stall_s is None else optimum(stall_s, mtbf)
    seconds, bound = _bounded(best, stall_s, save_s, interruptions)
    grounds = f"{interruptions or 'none'} seen in {_figure(observed / 3600)} node-hours"
    grounds += ", preemptions included, whose grace is too short for a save" if ahead else ""
    count = "1 node" if nodes == 1 else f"{nodes} nodes"
    risk = f"{count} may be interrupted without notice every {_in_units(mtbf)} ({grounds})"
    if stall_s is None or best is None:
        why = f"the first save comes early, to measure the cost of a save; {risk}"
    else:
        why = f"a save stalls training for {_in_units(stall_s)}, and {risk}"
        because = {
            "shortest": "it is never shorter",
            "save": f"a save takes {_in_units(save_s or 0.0)}",
            "overhead": f"until an interruption is seen, saves may take at most {MOST_OVERHEAD:.1%} of the time",
            "longest": "this is the most work to put at risk",
        }
        why += f"; {_in_units(best)} would be best, but {because[bound]}" if bound else ""
    return IntervalChoice(
        seconds=seconds,
        optimum_s=best,
        stall_s=stall_s,
        save_s=save_s,
        mtbf_s=mtbf,
        interruptions=interruptions,
        bounded_by=bound,
        why=why,
    )


def optimum(stall_s: float, mtbf_s: float) -> float:
    """The optimal seconds of work between saves (Daly's equation 37).

    It holds for a stall below 2 M. A longer stall, where little can be gained anyway, gets the value at 2 M.
    """
    root = math.sqrt(min(1.0, stall_s / (2 * mtbf_s)))
    # sqrt(2 d M) (1 + r / 3 + r^2 / 9) - d, with d = 2 M r^2
    return mtbf_s * (2 * root - 4 / 3 * root**2 + 2 / 9 * root**3)


def fits_grace(save_s: float | None, grace_s: float | None) -> bool | None:
    """Whether a save of ``save_s`` seconds fits into the grace with a margin; None if either is unknown."""
    return None if save_s is None or grace_s is None else save_s * GRACE_MARGIN <= grace_s


def too_slow(save_s: float | None, grace_s: float | None, every: Every, where: str) -> str | None:
    """A warning if a save of ``save_s`` seconds does not fit into the ``grace_s`` of ``where``; None if it may.

    ``every``: the spec's ``checkpoint.every``, which determines the advice.
    """
    if fits_grace(save_s, grace_s) is not False:
        return None
    assert save_s is not None
    assert grace_s is not None
    ahead = (
        "checkpoint.every: auto therefore saves as if preemptions came without notice"
        if every.is_auto
        else "checkpoint.every: auto would save as if preemptions came without notice"
    )
    return (
        f"a job that is preempted in {where} has {grace_s:.0f} s to save, but the last save took {save_s:.1f} s: the "
        f"work since the previous checkpoint may be lost; {ahead}; a GraceTime of {math.ceil(save_s * GRACE_MARGIN)} "
        "s would suffice, and with more ranks a save takes less time"
    )


# --- which ends are interruptions -------------------------------------------------------------------------------------

UNNOTICED = "unnoticed"
ANNOUNCED = "announced"

_KIND_BY_CAUSE = {
    "node_fail": UNNOTICED, "lost": UNNOTICED, "hang": UNNOTICED, "preempted": ANNOUNCED, "timeout": ANNOUNCED,
}  # fmt: skip
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
    """UNNOTICED or ANNOUNCED for an end that interrupted training; None for any other. ``failures``: of its ranks.

    How often a cluster interrupts jobs without notice determines how often to save there. By the ``cause`` of an
    attempt's end (``CAUSES`` in model/run/run.py):

    * ``node_fail``, ``lost`` and ``hang`` come from nodes, networks and file servers, without notice.
    * ``crash`` counts as well if a rank was killed by a signal that programs do not raise themselves, or if its error
      blames a device or the network. Any other crash is the program's own and says nothing about the cluster.
    * ``preempted`` and ``timeout`` are announced: the job had a grace period to save in.
    * ``oom`` is the program's own: its memory use depends neither on when it saves nor on other runs.
    * ``completed``, ``cancelled``, ``preflight``, ``early`` and ``upstream`` do not interrupt training.
    """
    if cause != "crash" or not failures:
        return _KIND_BY_CAUSE.get(cause or "")
    # The other failures follow from the first one.
    first = failures[0]
    lines = [first.get("error") or "", *(first.get("last_lines") or ())[-_LAST_LINES:]]
    is_foreign = first.get("signal") in _FOREIGN_SIGNALS or any(_FOREIGN_WORDS.search(str(line)) for line in lines)
    return UNNOTICED if is_foreign else None


def add_attempts(stats: InterruptionStats, attempts: Iterable[AttemptSpan]) -> InterruptionStats:
    """The statistics with these attempts added."""
    for attempt in attempts:
        kind = interruption_kind(attempt.cause, attempt.failures)
        stats = replace(
            stats,
            # Clocks of nodes differ: an attempt may seem to end before it began.
            uptime_s=stats.uptime_s + max(0.0, attempt.node_seconds),
            interruptions=stats.interruptions + (kind == UNNOTICED),
            announced=stats.announced + (kind == ANNOUNCED),
        )
    return stats


# --- agreeing ---------------------------------------------------------------------------------------------------------


class SaveReason(IntEnum):
    """Why rank 0 wants to save after the step just finished. Of several reasons the greatest counts."""

    NONE = 0
    STEPS = 1
    INTERVAL = 2
    REQUESTED = 3

    @property
    def why(self) -> str:
        """The reason as written in manifests and journals."""
        return "asked" if self is SaveReason.REQUESTED else self.name.lower()


class Publication(IntEnum):
    """What rank 0 knows about the publication of a checkpoint that all ranks have written."""

    NONE = 0
    PUBLISHED = 1
    FAILED = 2
    FENCED = 3
    """Another attempt has taken over the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """A rank's vote in an agreement. For each field, all ranks act on the greatest value of any rank.

    Ranks without an opinion on a field leave it at 0: only rank 0 sets ``gap``, ``save`` and ``publication``.
    """

    stop: bool = False
    """Whether a stop signal was received."""
    gap: int = 0
    """The number of steps until the next agreement."""
    save: SaveReason = SaveReason.NONE
    """Whether to save now, and why."""
    writing: bool = False
    """Whether this rank's part of a checkpoint is still being written."""
    publication: Publication = Publication.NONE
    """The outcome of a checkpoint's publication."""
    balance: bool = False
    """Whether batches should be divided by the ranks' speeds anew."""

    def numbers(self) -> tuple[int, ...]:
        """The fields as numbers, in order, for the all-reduce."""
        numbers = self.stop, self.gap, self.save, self.writing, self.publication, self.balance
        return tuple(map(int, numbers))

    @classmethod
    def from_numbers(cls, stop: int, gap: int, save: int, writing: int, publication: int, balance: int) -> Vote:
        """Read the maximum of all ranks' :meth:`numbers`.

        They are ``stop``, ``gap``, ``save``, ``writing``, ``publication`` and ``balance``.
        """
        return cls(
            stop=bool(stop),
            gap=gap,
            save=SaveReason(save),
            writing=bool(writing),
            publication=Publication(publication),
            balance=bool(balance),
        )


def steps_to_agreement(step_s: float, previous: int, *, saving: bool = False) -> int:
    """The number of steps until the next agreement, at ``step_s`` seconds per step.

    They take about AGREE_S seconds, or AGREE_SAVING_S if a checkpoint is being written (``saving``). The number at most
    doubles each time: ``previous`` is the last one.
    """
    limit = int((AGREE_SAVING_S if saving else AGREE_S) / step_s) if step_s > 0 else previous * 2
    # A single step that was short by chance must not put a stop request off for long.
    return max(1, min(limit, previous * 2))


# --- the interval's parts ---------------------------------------------------------------------------------------------


def _bounded(
    best: float | None, stall_s: float | None, save_s: float | None, interruptions: int
) -> tuple[float, str | None]:
    """The optimum within bounds, and the bound that applies. The duration of a save outranks LONGEST_S."""
    if best is None or stall_s is None:
        return FIRST_SAVE_S, "first"
    floors = [
        (SHORTEST_S, "shortest"),
        (save_s or 0.0, "save"),
        (0.0 if interruptions else stall_s / MOST_OVERHEAD, "overhead"),
    ]
    floor, name = max(floors, key=lambda bound: bound[0])
    cap = max(LONGEST_S, stall_s / CHEAP)
    if best < floor:
        return floor, name
    return (max(cap, floor), "longest") if best > max(cap, floor) else (best, None)


def _in_units(seconds: float) -> str:
    """A duration in a suitable unit."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{_figure(seconds / length)} {unit}"
    return f"{_figure(seconds)} s"


def _figure(number: float) -> str:
    """A number with about three significant digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
