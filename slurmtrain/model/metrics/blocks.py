"""Lines of a metrics file in columns: a small part of the memory that points take, and of the time to walk them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import ge, gt

from slurmtrain.model.run.progress import Point


@dataclass(frozen=True, slots=True)
class MetricColumn:
    """The ``values`` of a metric, and the ``rows`` that have them, in increasing order; None: all rows."""

    values: Sequence[float]
    rows: Sequence[int] | None = None


@dataclass(frozen=True)
class Block:
    """Lines of one attempt, in the order of logging: a row each.

    ``steps``: finished steps; ``times``: in seconds since 1970; ``columns``: the metrics, by name.
    """

    steps: Sequence[int]
    times: Sequence[float]
    columns: Mapping[str, MetricColumn]

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def descents(self) -> list[int]:
        """The rows whose step is smaller than the step of the row before."""
        steps = self.steps
        if self.increases or not any(map(gt, steps, steps[1:])):
            return []
        return [row for row in range(1, len(steps)) if steps[row] < steps[row - 1]]

    @cached_property
    def increases(self) -> bool:
        """Whether each step is larger than the one before."""
        return isinstance(self.steps, range) or is_increasing(self.steps)


def is_increasing(steps: Sequence[int]) -> bool:
    """Whether each of these ``steps`` is larger than the one before."""
    return not any(map(ge, steps, steps[1:]))


def block_of(points: Iterable[Point]) -> Block:
    """A block of ``points``."""
    points = list(points)
    steps = array("q", [point.step for point in points])
    times = array("d", [point.time for point in points])
    return Block(steps, times, columns_of_lines([point.metrics for point in points]))


def columns_of_lines(lines: Sequence[Mapping[str, float]]) -> dict[str, MetricColumn]:
    """The metrics of ``lines`` as columns: a line becomes a row."""
    return _uniform(lines) or _sparse(lines)


def _uniform(lines: Sequence[Mapping[str, float]]) -> dict[str, MetricColumn] | None:
    """The columns of lines that all have the same metrics, as most do; None if they differ."""
    names = list(lines[0]) if lines else []
    if sum(map(len, lines)) != len(names) * len(lines):
        return None
    try:
        return {name: MetricColumn(array("d", [line[name] for line in lines])) for name in names}
    except KeyError:
        return None


def _sparse(lines: Sequence[Mapping[str, float]]) -> dict[str, MetricColumn]:
    columns: dict[str, tuple[array[float], array[int]]] = {}
    for row, line in enumerate(lines):
        for name, value in line.items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = (array("d"), array("i"))
            column[0].append(value)
            column[1].append(row)
    return {
        name: MetricColumn(values, None if len(values) == len(lines) else rows)
        for name, (values, rows) in columns.items()
    }
