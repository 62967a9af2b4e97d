"""How long steps took and how fast they were, from the times when they were finished. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from slurmtrain.model.metrics.curves import Segment
from slurmtrain.model.metrics.step_figures import quantile

# Parts that a run's steps are divided into, to see how much its speed varies, and how many say anything.
_PARTS, _LEAST_PARTS = 8, 4
# From the median absolute deviation to the standard deviation of a normal distribution.
_BY_DEVIATION = 1.4826
# When training stood still, in seconds since 1970, and for how many seconds.
Stall = tuple[float, float]


class FinishedStep(NamedTuple):
    """How long a step took, the mean of several between two lines; ``at``: when it was finished, since 1970."""

    attempt: int
    step: int
    at: float
    seconds: float


def step_times(rows: Sequence[Segment], restarts: Mapping[int, Sequence[float]]) -> list[FinishedStep]:
    """The time of each step from the end of the one that was logged before it by the same ranks.

    Args:
        rows: When steps were finished, in the order of logging.
        restarts: When ranks were restarted inside an attempt, in seconds since 1970, by its number.
    """
    points = [
        (row.attempt, row.block.steps[place], row.block.times[place])
        for row in rows
        for place in range(row.start, row.stop)
    ]
    times = []
    for (attempt, step, began), (number, reached, ended) in pairwise(points):
        if attempt != number or reached <= step or ended <= began:
            continue
        since = sorted(restarts.get(attempt, ()))
        if bisect_right(since, began) == bisect_right(since, ended):
            times.append(FinishedStep(attempt, reached, ended, (ended - began) / (reached - step)))
    return times


def last_of_looks(steps: Sequence[int], times: Sequence[float], apart_s: float) -> tuple[list[int], list[float]]:
    """The steps that were the last ones of each look at a script's output, and the times of these looks.

    Lines that were there at the first look may be of any age, and count as if all were printed then: only the last of
    them has about that time.

    Args:
        steps: Finished steps, in order.
        times: When each was read, in seconds since 1970.
        apart_s: Two looks are at least so many seconds apart.
    """
    places = [
        place for place, time in enumerate(times) if place + 1 == len(times) or times[place + 1] - time >= apart_s
    ]
    return [steps[place] for place in places], [times[place] for place in places]


# --- how fast steps were ----------------------------------------------------------------------------------------------


def rate_of_steps(
    steps: Sequence[int], times: Sequence[float], stalls: Iterable[Stall] = (), left_out: tuple[int, float] = (0, 0.0)
) -> float | None:
    """How many steps ranks made in a second, from the first finished step to the last; None: they made too few.

    Args:
        steps: The numbers of finished steps, in order, since these ranks were started.
        times: When each was finished, in seconds since 1970.
        stalls: When they stood still for a save, and for how many seconds: that does not count.
        left_out: How many steps do not count either, and how many seconds these took.
    """
    if len(steps) < 2:
        return None
    stalled = sum(seconds for at, seconds in stalls if times[0] <= at < times[-1])
    made, seconds = steps[-1] - steps[0] - left_out[0], times[-1] - times[0] - stalled - left_out[1]
    return made / seconds if seconds > 0 and made > 0 else None


def error_of_rate(steps: Sequence[int], times: Sequence[float], stalls: Sequence[Stall] = ()) -> float | None:
    """How uncertain a rate of steps is, as a part of it: how much parts of the run differ; None: it is too short.

    Args:
        steps: As of :func:`rate_of_steps`.
        times: As there.
        stalls: As there.
    """
    parts = min(_PARTS, (len(steps) - 1) // 2)
    bounds = [round(number * (len(steps) - 1) / parts) for number in range(parts + 1)] if parts > 0 else []
    # Whole parts, since a step that takes long is often followed by others.
    rates = [
        rate
        for begin, end in pairwise(bounds)
        if (rate := rate_of_steps(steps[begin : end + 1], times[begin : end + 1], stalls)) is not None
    ]
    if len(rates) < _LEAST_PARTS:
        return None
    # Medians leave out parts with profiled steps.
    middle = median(rates)
    return _BY_DEVIATION * median(abs(rate - middle) for rate in rates) / math.sqrt(len(rates)) / middle


def times_of_steps(
    steps: Sequence[int], times: Sequence[float], stalls: Iterable[Stall] = (), least_s: float = 0.0
) -> list[float]:
    """How long steps took, each or, where they were not noted one by one, several of them on average.

    Args:
        steps: As of :func:`rate_of_steps`.
        times: As there.
        stalls: As there.
        least_s: Take the average over as many steps as take so many seconds: times are not more exact.
    """
    waiting = sorted(stalls, reverse=True)
    took: list[float] = []
    # The last step that is in ``took``, and when it was finished.
    before, began = (steps[0], times[0]) if steps else (0, 0.0)
    for step, ended in zip(steps[1:], times[1:], strict=True):
        if 0 < ended - began < least_s:
            continue
        stalled = 0.0
        while waiting and waiting[-1][0] < ended:
            at, seconds = waiting.pop()
            stalled += seconds if at >= began else 0.0
        if step > before and ended - began > stalled:
            made = step - before
            took += [(ended - began - stalled) / made] * made
        before, began = step, ended
    return took


# --- drawing ----------------------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """How many ``steps`` took from ``low`` to less than ``high`` seconds; the last bar has the longest one too."""

    low: float
    high: float
    steps: int


@dataclass(frozen=True, slots=True)
class StepDistribution:
    """Times of steps. ``log``: the bars are equally wide on a logarithmic scale."""

    count: int
    quantiles: Mapping[str, float]
    bars: Sequence[Bar]
    log: bool


# From this ratio of the longest to the shortest on, bars of equal widths would show one peak and nothing else.
_WIDE = 20.0
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


def distribution_of(seconds: Iterable[float], bars: int) -> StepDistribution | None:
    """The distribution of some times; None if there are none.

    Args:
        seconds: The times, all above 0.
        bars: How many bars it has.
    """
    ordered = sorted(seconds)
    if not ordered:
        return None
    quantiles = {name: quantile(ordered, share) or 0.0 for name, share in QUANTILES.items()}
    low, high = ordered[0], ordered[-1]
    is_log = high > _WIDE * low
    if high <= low:
        bounds = [low * 0.95, low * 1.05]
    elif is_log:
        bounds = [low * math.exp(math.log(high / low) * place / bars) for place in range(bars + 1)]
    else:
        bounds = [low + (high - low) * place / bars for place in range(bars + 1)]
    places = [0, *(bisect_right(ordered, bound) for bound in bounds[1:-1]), len(ordered)]
    counts = [Bar(*pair, last - first) for pair, (first, last) in zip(pairwise(bounds), pairwise(places), strict=True)]
    return StepDistribution(len(ordered), quantiles, counts, is_log)
