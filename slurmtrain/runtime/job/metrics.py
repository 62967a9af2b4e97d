"""Rank 0's metrics: one line for each finished step, in one write, so that a kill loses no finished step."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from slurmtrain.system.journal import open_appending

_PLAIN = frozenset((int, float))


class MetricsFile:
    """Appends to ``metrics.jsonl``. A line costs microseconds: no fsync, no network.

    Training has emptied the processor's caches when a line is written, so that what counts is how much code it touches:
    one formatting of a template that is kept takes half the time of putting a line together from its parts.
    """

    def __init__(self, path: Path) -> None:
        self._handle = open_appending(path)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line: ``step`` finished steps, and the ``metrics`` logged since the line before.

        Raises OSError, and TypeError where a metric is no number.
        """
        values = metrics.values()
        try:
            # Python writes these as JSON does. A sum is finite only if all of its parts are.
            plain = _PLAIN.issuperset(map(type, values)) and math.isfinite(sum(values))
        except OverflowError:
            plain = False
        if plain:
            line = _template(tuple(metrics)) % (time.time(), step, *values)
        else:
            texts = [_json_number(name, value) for name, value in metrics.items()]
            line = _template(tuple(metrics), b"%b") % (time.time(), step, *texts)
        os.write(self._handle, line)

    def close(self) -> None:
        """Close the file; nothing can be written after that."""
        os.close(self._handle)


def are_plain(values: Iterable[object]) -> bool:
    """Whether all ``values`` are ints or floats themselves, neither of a subclass nor anything to be read first."""
    return _PLAIN.issuperset(map(type, values))


def as_number(name: str, value: Any) -> float | int:
    """The metric called ``name`` as a plain number; tensors and NumPy values of one element are read.

    Raises TypeError where ``value`` is not one number.
    """
    if type(value) in _PLAIN:
        number: float | int = value
        return number
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"the metric {name!r} must be one number, not {type(value).__name__}") from None


def _json_number(name: str, value: Any) -> bytes:
    return json.dumps(as_number(name, value)).encode()


# Scripts log the same few sets of names again and again; the bound is for those that make up names as they go.
@lru_cache(maxsize=64)
def _template(names: tuple[str, ...], value: bytes = b"%a") -> bytes:
    """A line with places for the time, the step and a value for each of the ``names``."""
    pairs = b",".join(json.dumps(name).encode().replace(b"%", b"%%") + b":" + value for name in names)
    return b'{"t":%.4f,"step":%d' + (b',"metrics":{' + pairs + b"}" if names else b"") + b"}\n"
