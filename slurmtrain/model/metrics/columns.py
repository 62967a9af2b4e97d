"""Lines of a metrics file in columns, which take a small part of the memory of points, and a summary of a metric."""

from __future__ import annotations

import contextlib
import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import ge, gt
from typing import Any

from slurmtrain.model.run.events.base import is_whole
from slurmtrain.model.run.journal_lines import Point, is_timestamp


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
        # Without a loop in Python: most blocks have no descent.
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


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """What survives of a metric: how many points, the newest one, and the smallest and largest finite values.

    Of equal values, the earliest counts. ``last`` may be infinite; None: it is not a number.
    """

    points: int
    last_step: int
    last: float | None
    min: float | None = None
    min_step: int | None = None
    max: float | None = None
    max_step: int | None = None

    def then(self, later: MetricSummary) -> MetricSummary:
        """The summary of these points and ``later`` ones."""
        low = later if self.min is None or (later.min is not None and later.min < self.min) else self
        high = later if self.max is None or (later.max is not None and later.max > self.max) else self
        return MetricSummary(
            self.points + later.points, later.last_step, later.last, low.min, low.min_step, high.max, high.max_step
        )


def block_of(points: Iterable[Point]) -> Block:
    """A block of ``points``."""
    points = list(points)
    steps = array("q", [point.step for point in points])
    times = array("d", [point.time for point in points])
    return Block(steps, times, columns_of_lines([point.metrics for point in points]))


def columns_of_lines(lines: Sequence[Mapping[str, float]]) -> dict[str, MetricColumn]:
    """The metrics of ``lines`` as columns: a line becomes a row."""
    names = list(lines[0]) if lines else []
    # Most files have the same metrics in all lines.
    if sum(map(len, lines)) == len(names) * len(lines):
        # Lines with equally many metrics may still have different ones: then the slower way follows.
        with contextlib.suppress(KeyError):
            return {name: MetricColumn(array("d", [line[name] for line in lines])) for name in names}
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


# A line that a session writes has "t", "step" and "metrics".
_KEYS = 3


def read_plain_lines(text: bytes) -> tuple[Block, Point] | None:
    """The points of whole lines, and the newest step and time with each metric's newest value.

    Args:
        text: Lines of a metrics file, each with its newline.

    Returns:
        Both; None if any line is not as a session writes it, so that they have to be read one by one: it may not be a
        record, or one with unusual values.
    """
    try:
        records = _parse(text)
        # Other keys may be written by another version, or by hand: such lines are read one by one.
        if not records or {*map(len, records)} != {_KEYS}:
            return None
        steps = [record["step"] for record in records]
        times = [record["t"] for record in records]
        metrics = [record["metrics"] for record in records]
    except (KeyError, ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    if {*map(type, steps)} != {int} or not (is_whole(min(steps)) and is_whole(max(steps))):
        return None
    # The smallest and the largest time show nothing if one is NaN; the sum does.
    if {*map(type, times)} != {float} or math.isnan(sum(times)):
        return None
    if not (is_timestamp(min(times)) and is_timestamp(max(times)) and _are_metrics(metrics)):
        return None
    newest: dict[str, float] = {}
    for each in metrics:
        newest.update(each)
    block = Block(array("q", steps), array("d", times), columns_of_lines(metrics))
    return block, Point(steps[-1], times[-1], newest)


def _parse(text: bytes) -> list[Mapping[str, Any]] | None:
    """The JSON objects of lines, one a line; None if that may not be what the lines hold.

    They are parsed as the elements of one list. No line can complete the one before it: between two lines there is a
    newline, which JSON does not allow in a string, then a comma, and then a brace, which is not allowed after a comma
    in an object; and there are no other lists. So each line holds whole objects; if there are as many objects as lines,
    it holds one.
    """
    count = text.count(b"\n")
    if b"[" in text or not (text.startswith(b"{") and text.endswith(b"}\n") and text.count(b"}\n{") == count - 1):
        return None
    records: list[Mapping[str, Any]] = json.loads("[" + text[:-1].decode().replace("\n", "\n,") + "]")
    return records if len(records) == count else None


def _are_metrics(values: Sequence[Any]) -> bool:
    # Other names than ASCII may be impossible to encode, which only reading line by line finds out.
    if {*map(type, values)} != {dict} or not all(map(str.isascii, set().union(*values))):
        return False
    types = {*map(type, chain.from_iterable(map(dict.values, values)))}
    if types <= {float}:
        return True
    return types <= {float, int} and all(
        type(value) is float or is_whole(value) for metrics in values for value in metrics.values()
    )
