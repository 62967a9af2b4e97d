"""Lines of a metrics file in columns: a small part of the memory that points take, and of the time to walk them."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import ge, gt
from typing import Any

from slurmtrain.model.run.attempt_progress import Point
from slurmtrain.model.run.events.event_values import is_whole
from slurmtrain.model.run.journal_lines import is_time


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
        if not records or {*map(len, records)} != {_KEYS}:
            return None
        steps = [record["step"] for record in records]
        times = [record["t"] for record in records]
        metrics = [record["metrics"] for record in records]
    except (KeyError, ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    if not (_are_steps(steps) and _are_times(times) and _are_metrics(metrics)):
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


def _are_steps(values: Sequence[Any]) -> bool:
    return {*map(type, values)} == {int} and is_whole(min(values)) and is_whole(max(values))


def _are_times(values: Sequence[Any]) -> bool:
    # The smallest and the largest show nothing if a value is NaN; the sum does.
    return (
        {*map(type, values)} == {float}
        and is_time(min(values))
        and is_time(max(values))
        and not math.isnan(sum(values))
    )


def _are_metrics(values: Sequence[Any]) -> bool:
    if {*map(type, values)} != {dict} or not all(map(str.isascii, set().union(*values))):
        return False
    types = {*map(type, chain.from_iterable(map(dict.values, values)))}
    if types <= {float}:
        return True
    return types <= {float, int} and all(
        type(value) is float or is_whole(value) for metrics in values for value in metrics.values()
    )
