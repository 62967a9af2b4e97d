"""Where the values of a metric of two runs begin to differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.metrics.curves import Points


@dataclass(frozen=True, slots=True)
class Divergence:
    """How a metric of two runs compares.

    ``steps``: the number of steps that both runs have. ``step``: the first of them where the values differ; None if
    they are equal at all. ``values``: the two values at that step.
    """

    steps: int
    step: int | None = None
    values: tuple[float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {"steps": self.steps, "step": self.step, "values": None if self.values is None else list(self.values)}


def find_divergence(first: Points, second: Points) -> Divergence:
    """Compare the values of a metric bit for bit, at the steps that both runs have; NaN equals NaN.

    Args:
        first: What one run has kept of it, in increasing steps.
        second: The same of the other one.
    """
    others = dict(zip(second.steps, second.values, strict=True))
    steps = [step for step in first.steps if step in others]
    for step, value in zip(first.steps, first.values, strict=True):
        other = others.get(step)
        if other is not None and value != other and not (math.isnan(value) and math.isnan(other)):
            return Divergence(len(steps), step, (value, other))
    return Divergence(len(steps))
