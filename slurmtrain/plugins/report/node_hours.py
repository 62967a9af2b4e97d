"""What node-hours went into: of some attempts, and by day.

When an attempt began is known, and what its time was spent on to the microsecond; only where it spans several days its
kinds of time have to be divided among them. They then follow one another as an attempt goes through them, with stalls
spread over the training: sums are exact, and days inexact only where ranks were restarted inside an attempt.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from itertools import pairwise

from slurmtrain.model.run.accounting import KINDS, mean_nodes
from slurmtrain.model.run.costs import interruptions_of
from slurmtrain.model.run.run import CAUSES, GROW, Attempt

_HOUR_S = 3600.0
# The kinds of time in the order of an attempt; those in one part are mixed.
_PARTS = (("queue",), ("start",), ("preflight",), ("restore",), ("train", "stall"), ("lost",), ("stop",))
# 2100: a journal may hold any number as a time.
_LATEST = 4.1e9


def node_hours(attempts: Iterable[Attempt]) -> dict[str, float]:
    """Node-hours by kind, without kinds that took none; of ``queue``, hours that as many nodes were waited for.

    Runs of a pack share their nodes.
    """
    total: dict[str, float] = defaultdict(float)
    for attempt in attempts:
        for kind, hours in _weighed(attempt, attempt.spent).items():
            total[kind] += hours
    return as_hours(total)


def as_hours(total: Mapping[str, float]) -> dict[str, float]:
    """Hours by kind as JSON, in the order of an attempt."""
    return {kind: hours for kind in KINDS if (hours := round(total.get(kind, 0.0), 6))}


def _weighed(attempt: Attempt, seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of an attempt by kind in hours of all its nodes."""
    weight = mean_nodes(attempt) / attempt.pack / _HOUR_S
    return {kind: weight * each for kind, each in seconds.items() if each}


def _interruptions(attempt: Attempt) -> list[tuple[float | None, str]]:
    """When an attempt was interrupted, in seconds since 1970, and why, as costs count it."""
    restarts = [restart for restart in attempt.restarts if restart.get("cause") != GROW]
    causes: list[tuple[float | None, object]] = [(float(restart["at"]), restart.get("cause")) for restart in restarts]
    if interruptions_of(attempt).total() > len(causes):
        causes.append((attempt.ended_at, attempt.cause))
    return [(at, str(cause) if cause in CAUSES else "other") for at, cause in causes]


@dataclass(slots=True)
class Day:
    """Node-hours by kind, and how often attempts were interrupted, by cause."""

    hours: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    interruptions: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Calendar:
    """Days by their dates, in the time zone of this machine."""

    days: dict[date, Day] = field(default_factory=lambda: defaultdict(Day))

    def add(self, attempts: Sequence[Attempt]) -> None:
        """Add the attempts of a run, in order; without those whose times no calendar has."""
        before: Attempt | None = None
        for attempt in attempts:
            # When its time begins to count, as the accounting has it.
            again = before.ended_at if before is not None and before.job_id == attempt.job_id else None
            begin = next((at for at in (again, attempt.submitted_at, attempt.started_at) if at is not None), None)
            end = (begin or 0.0) + math.fsum(attempt.spent.values())
            before = attempt
            if begin is None or not 0 <= begin <= end < _LATEST:
                continue
            for day, seconds in _divided(attempt, begin, end):
                hours = self.days[day].hours
                for kind, each in _weighed(attempt, seconds).items():
                    hours[kind] += each
            for at, cause in _interruptions(attempt):
                if 0 <= (moment := end if at is None else at) < _LATEST:
                    self.days[date.fromtimestamp(moment)].interruptions[cause] += 1


def _divided(attempt: Attempt, begin: float, end: float) -> Iterator[tuple[date, Mapping[str, float]]]:
    """The seconds of an attempt by kind, for each day."""
    spans = list(pairwise(_bounds(begin, end)))
    if len(spans) <= 1:
        yield date.fromtimestamp(begin), attempt.spent
        return
    parts: list[dict[str, float]] = [defaultdict(float) for _ in spans]
    at = begin
    for kinds in _PARTS:
        length = math.fsum(attempt.spent.get(kind, 0.0) for kind in kinds)
        if length <= 0:
            continue
        for (first, last), part in zip(spans, parts, strict=True):
            share = max(0.0, min(last, at + length) - max(first, at)) / length
            for kind in kinds:
                part[kind] += share * attempt.spent.get(kind, 0.0)
        at += length
    for (first, _), part in zip(spans, parts, strict=True):
        yield date.fromtimestamp(first), part


def _bounds(begin: float, end: float) -> list[float]:
    """The begin, each midnight after it, and the end."""
    bounds = [begin]
    midnight = datetime.combine(date.fromtimestamp(begin), datetime.min.time())
    # By the calendar: when clocks change, a day does not have 24 hours.
    while (at := (midnight := midnight + timedelta(days=1)).timestamp()) < end:
        bounds.append(at)
    return [*bounds, end]
