"""How long a rank takes for a step, by times that scatter, and how sure that is. Pure.

Times are compared by their logarithms, since what disturbs a step makes it longer by a part of its time. Medians leave
out single steps that take much longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

# As many times as a pace needs at least, and as it is computed from at most.
LEAST_TIMES = 5
MOST_TIMES = 40
# Factors from robust estimates to the standard deviation of a normal distribution: from the median absolute deviation,
# and from the median absolute difference of two values; and from the standard error of the mean to the standard error
# of the median (P. J. Rousseeuw, C. Croux, JASA 88(424), 1993).
_BY_DEVIATION = 1.4826
_BY_DIFFERENCE = 1.0483
_OF_MEDIAN = 1.2533
# Clocks and schedulers make times differ at least by this part.
_LEAST_SCATTER = 0.01
# From so many times on it can be told how much neighbouring ones resemble each other; before that it is assumed, since
# what disturbs a step often disturbs the next one, too. No more is believed than the last one.
_FEW = 20
_ASSUMED_ALIKE = 0.5
_MOST_ALIKE = 0.8
# What noise makes of a difference, in standard errors.
_NOISE = 3.0
# The least change of a pace that matters.
_DRIFT = 0.1


@dataclass(frozen=True, slots=True)
class Pace:
    """The time of a step."""

    seconds: float
    error: float
    """Its standard error, as a part of ``seconds``."""

    def differs_from(self, other: Pace) -> bool:
        """Whether this rank has become faster or slower since it had the ``other`` pace, by more than noise.

        The other one counts as no less sure: it may be of few times, or of some before and some after a change.
        """
        noise = _NOISE * math.hypot(self.error, min(self.error, other.error))
        return abs(math.log(self.seconds / other.seconds)) > max(noise, math.log1p(_DRIFT))


def pace_of(times: Sequence[float]) -> Pace:
    """The pace by ``times`` in seconds, in their order: one at least, all positive."""
    logs = [math.log(each) for each in times]
    return Pace(math.exp(median(logs)), _error(_scatter(logs), len(logs)))


def since_change(times: Sequence[float]) -> list[float]:
    """The last ones of ``times``, since the rank has become faster or slower; all of them if it has not.

    The last 5, 10 or 20 times are compared with the times before them, relative to the scatter of both around their
    medians.
    """
    logs = [math.log(each) for each in times]
    count = LEAST_TIMES
    while len(logs) - count >= LEAST_TIMES:
        before, after = logs[:-count], logs[-count:]
        middles = median(before), median(after)
        scatter = _scatter([each - middles[0] for each in before] + [each - middles[1] for each in after])
        noise = _NOISE * math.hypot(_error(scatter, len(before)), _error(scatter, len(after)))
        if abs(middles[1] - middles[0]) > noise:
            return list(times[-count:])
        count *= 2
    return list(times)


def _scatter(logs: Sequence[float]) -> float:
    """The standard deviation of independent values whose median is as uncertain as the median of ``logs``.

    If something disturbs several steps, neighbouring values resemble each other, and there are fewer independent ones:
    in a first-order autoregressive process, fewer by (1 + r) / (1 - r). The differences of neighbours show 1 - r (J.
    von Neumann, Annals of Mathematical Statistics 12(4), 1941).
    """
    middle = median(logs)
    around = _BY_DEVIATION * median(abs(each - middle) for each in logs)
    between = _BY_DIFFERENCE * _median(abs(second - first) for first, second in pairwise(logs))
    if len(logs) < _FEW:
        alike = _ASSUMED_ALIKE
    else:
        alike = min(_MOST_ALIKE, max(0.0, 1 - (between / around) ** 2)) if around else 0.0
    return max(around * math.sqrt((1 + alike) / (1 - alike)), _LEAST_SCATTER)


def _error(scatter: float, count: int) -> float:
    # Of few values the scatter is unknown, too: about what Student's distribution says of three standard errors.
    return _OF_MEDIAN * scatter / math.sqrt(count) * (1 + LEAST_TIMES / count)


def _median(values: Iterable[float]) -> float:
    listed = list(values)
    return median(listed) if listed else 0.0
