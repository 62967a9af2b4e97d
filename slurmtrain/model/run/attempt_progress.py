"""How far an attempt has come, from its ``metrics.jsonl``.

A line is ``{"t": seconds since 1970, "step": finished steps, "metrics": {name: number}}``, one for each finished step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slurmtrain.model.run.events.event_values import is_text, is_whole

_FLOATS = frozenset({float})


class Point(NamedTuple):
    """A line: the number of finished steps, the time in seconds since 1970, and what was logged. Values may be NaN."""

    step: int
    time: float
    metrics: Mapping[str, float]


def read_point(record: Mapping[str, Any], flaws: list[str] | None = None) -> Point | None:
    """The point of a line's ``record``, which has a time; None if it has no step.

    ``flaws`` receives what cannot be used: ``step``, or names of metrics.
    """
    step, metrics = record.get("step"), record.get("metrics") or {}
    if not is_whole(step):
        if flaws is not None:
            flaws.append("step")
        return None
    if not isinstance(metrics, dict):
        usable, unusable = {}, ["metrics"]
    # One comparison for all values, since this is done for each step of each run.
    elif _FLOATS.issuperset(map(type, metrics.values())) and all(map(str.isascii, metrics)):
        return Point(step, float(record["t"]), metrics)  # type: ignore[arg-type]
    else:
        usable = {name: value for name, value in metrics.items() if is_text(name) and _is_value(value)}
        unusable = [name.encode(errors="replace").decode() for name in metrics if name not in usable]
    if flaws is not None:
        flaws += unusable
    return Point(step, float(record["t"]), usable)  # type: ignore[arg-type]


def _is_value(value: object) -> bool:
    return type(value) is float or is_whole(value)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress after the lines read so far; reading the same lines in several parts gives the same result."""

    last_step: int | None = None
    last_time: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def advance(self, points: Iterable[Point]) -> Progress:
        """The progress after these further points."""
        step, time, metrics = self.last_step, self.last_time, dict(self.metrics)
        for point in points:
            step, time = point.step, point.time
            metrics.update(point.metrics)
        return Progress(step, time, metrics)


def points_of(records: Iterable[Mapping[str, Any]]) -> list[Point]:
    """The points among these records, in the same order."""
    return [point for record in records if (point := read_point(record)) is not None]


def steps_per_second(points: Sequence[Point]) -> float | None:
    """Steps per second over these points of one attempt; None if they are too few."""
    if len(points) < 2 or points[-1].time <= points[0].time:
        return None
    return float(points[-1].step - points[0].step) / (points[-1].time - points[0].time)
