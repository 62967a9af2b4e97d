"""Lines of metrics that attempts of a run have logged, and what survives of them: point by point, the obvious way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from slurmtrain.model.metrics.columns import MetricSummary
from slurmtrain.model.metrics.curves import AttemptStart, Restart
from slurmtrain.model.run.journal_lines import Point

Row = tuple[int, int, float, float]
"""Attempt, step, time, value."""


@dataclass
class Lines:
    """What was logged: every attempt's start, and its points in the order in which they were logged."""

    attempts: list[tuple[AttemptStart, list[Point]]] = field(default_factory=list)

    def survivors(self) -> tuple[dict[str, list[Row]], dict[str, list[Row]]]:
        """What survives of each metric, and what was superseded."""
        kept: dict[str, list[Row]] = {}
        superseded: dict[str, list[Row]] = {}
        step, resumed = 0, False

        def roll_back(to: int) -> None:
            for name, rows in kept.items():
                superseded.setdefault(name, []).extend(row for row in rows if row[1] >= to)
                rows[:] = [row for row in rows if row[1] < to]

        def resume(at: int | None) -> None:
            nonlocal step, resumed
            resumed = True
            if at:
                roll_back(at + 1)
                step = at

        for start, points in self.attempts:
            resume(start.step)
            restarts = sorted(start.restarts, key=lambda restart: restart.at)
            for point in points:
                while restarts and point.time >= restarts[0].at:
                    resume(restarts.pop(0).step)
                if point.step < step or (resumed and point.step == step):
                    roll_back(point.step)
                step, resumed = point.step, False
                for name, value in point.metrics.items():
                    rows = kept.setdefault(name, [])
                    if rows and rows[-1][1] == step:
                        superseded.setdefault(name, []).append(rows.pop())
                    rows.append((start.number, step, point.time, float(value)))
            for restart in restarts:
                resume(restart.step)
        return kept, superseded

    def summaries(self) -> dict[str, MetricSummary]:
        """The summary of what survives of each metric."""
        kept, _ = self.survivors()
        return {name: _summary(rows) for name, rows in kept.items() if rows}


def _summary(rows: list[Row]) -> MetricSummary:
    finite = [row for row in rows if math.isfinite(row[3])]
    low = min(finite, key=lambda row: row[3], default=None)
    high = max(finite, key=lambda row: row[3], default=None)
    _, step, _, last = rows[-1]
    of_low = (low[3], low[1]) if low else (None, None)
    of_high = (high[3], high[1]) if high else (None, None)
    return MetricSummary(len(rows), step, None if math.isnan(last) else last, *of_low, *of_high)


_values = st.sampled_from([0.5, 1.0, 2.0, -1.0, math.nan, math.inf, -math.inf, 1e308])
_metrics = st.dictionaries(st.sampled_from(["loss", "val", "lr"]), _values, max_size=3)


@st.composite
def lines(draw: Any) -> Lines:
    """Lines of any attempts, restarts and rollbacks; steps may go back at any time, and clocks by a little."""
    result, now = Lines(), 1000.0
    for number in range(1, draw(st.integers(1, 4)) + 1):
        step = draw(st.integers(0, 8))
        start_step = draw(st.sampled_from([None, 0, step]))
        points, restarts = [], []
        for _ in range(draw(st.integers(0, 8))):
            now += draw(st.sampled_from([1.0, 1.0, 0.0, -0.5]))
            if draw(st.integers(0, 9)) == 0:
                step = draw(st.integers(0, 8))
                restarts.append(Restart(now, draw(st.sampled_from([None, step]))))
            step = max(0, step + draw(st.sampled_from([1, 1, 1, 0, 2, -2])))
            points.append(Point(step, now, draw(_metrics)))
        start = AttemptStart(number, start_step, tuple(restarts))
        result.attempts.append((start, points))
    return result
