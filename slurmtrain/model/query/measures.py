"""Measures of a metric's curve, which questions may use like fields: ``min:loss``, ``loss@1000``, ``area:loss``.

They are about what survived rollbacks. A field of the same name comes first: ``metrics.hits@10`` is a metric.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

# What the registry has of each metric.
_SUMMARISED = ("last", "min", "max")
KINDS = (*_SUMMARISED, "area")
_OF_CURVE = re.compile(rf"(?P<kind>{'|'.join(KINDS)}):(?P<metric>.+)", re.DOTALL)
_AT_STEP = re.compile(r"(?P<metric>.+)@(?P<step>\d{1,15})", re.DOTALL | re.ASCII)
_SECTIONS = ("metrics.", "params.")


class Summary(Protocol):
    """What is known of a curve without its points; None: not a number, or there is none."""

    @property
    def last(self) -> float | None:
        """The newest value."""

    @property
    def min(self) -> float | None:
        """The smallest finite value."""

    @property
    def max(self) -> float | None:
        """The largest finite value."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A number that the curve of the ``metric`` gives. ``kind``: one of KINDS, or ``at`` for its value at ``step``."""

    kind: str
    metric: str
    step: int = 0

    @property
    def is_summarised(self) -> bool:
        """Whether the registry has it, so that no curve needs to be read."""
        return self.kind in _SUMMARISED

    def of_summary(self, summary: Summary) -> float | None:
        """Its value, by the ``summary`` of the curve; None if it is not a finite number."""
        value = {"last": summary.last, "min": summary.min, "max": summary.max}[self.kind]
        return value if value is not None and math.isfinite(value) else None

    def of_curve(self, steps: Sequence[int], values: Sequence[float], reached: int) -> float | None:
        """Its value for a curve; None if there is none.

        Args:
            steps: The steps of the curve's points, increasing.
            values: Their values.
            reached: The largest step of any metric that survived.
        """
        if self.kind == "area":
            return area(steps, values)
        return value_at(steps, values, self.step) if self.step <= reached else None


def read_measure(name: str) -> Measure | None:
    """The measure that a name stands for; None if it is none."""
    if name.startswith(_SECTIONS):
        return None
    if match := _OF_CURVE.fullmatch(name):
        return Measure(match["kind"], match["metric"].removeprefix("metrics."))
    if match := _AT_STEP.fullmatch(name):
        return Measure("at", match["metric"], int(match["step"]))
    return None


def area(steps: Sequence[int], values: Sequence[float]) -> float | None:
    """The area below the finite values, as trapezoids over the steps; None for less than two values."""
    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if len(points) < 2:
        return None
    total = math.fsum((step - before) * (value / 2 + last / 2) for (before, last), (step, value) in pairwise(points))
    return total if math.isfinite(total) else None


def value_at(steps: Sequence[int], values: Sequence[float], step: int) -> float | None:
    """The value at a ``step``, or the newest one before it; None if there is none, or it is not finite.

    ``steps``: the steps of the ``values``, increasing.
    """
    place = bisect_right(steps, step) - 1
    return values[place] if place >= 0 and math.isfinite(values[place]) else None
