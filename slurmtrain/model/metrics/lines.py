"""Lines of a metrics file that are as a session writes them, read all at once."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from slurmtrain.model.metrics.blocks import Block, columns_of_lines
from slurmtrain.model.run.events.values import is_whole
from slurmtrain.model.run.journal import is_time
from slurmtrain.model.run.progress import Point

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
