"""How far an attempt has come, from its ``metrics.jsonl``.

A line is ``{"t": seconds since 1970, "step": finished steps, "metrics": {name: number}}``, one for each finished step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress after the lines read so far; reading the same lines in several parts gives the same result."""

    last_step: int | None = None
    last_time: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def advance(self, records: Iterable[Mapping[str, Any]]) -> Progress:
        """The progress after these further lines."""
        step, time, metrics = self.last_step, self.last_time, dict(self.metrics)
        for record in records:
            if not isinstance(record.get("step"), int):
                continue
            step, time = record["step"], float(record["t"])
            if isinstance(record.get("metrics"), dict):
                metrics.update(record["metrics"])
        return Progress(step, time, metrics)


def steps_per_second(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Steps per second over these lines of one attempt; None if they are too few."""
    points = [(record["t"], record["step"]) for record in records if isinstance(record.get("step"), int)]
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return None
    return float(points[-1][1] - points[0][1]) / float(points[-1][0] - points[0][0])
