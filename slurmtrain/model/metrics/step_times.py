"""How long steps took, from the times at which they were finished. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from slurmtrain.model.metrics.curves import Segment
from slurmtrain.model.metrics.step_figures import quantile


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
