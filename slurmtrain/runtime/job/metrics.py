"""Rank 0's metrics: one line for each finished step, in one write, so that a kill loses no finished step."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmtrain.system.journal import open_appending


class MetricsFile:
    """Appends to ``metrics.jsonl``. A line costs microseconds: no fsync, no network."""

    def __init__(self, path: Path) -> None:
        self._handle = open_appending(path)
        self._names: dict[str, str] = {}

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line: ``step`` finished steps, and what was logged since the line before. Raises OSError, TypeError."""
        line = f'{{"t":{time.time():.4f},"step":{step}'
        if metrics:
            line += f',"metrics":{{{",".join([self._pair(name, value) for name, value in metrics.items()])}}}'
        os.write(self._handle, f"{line}}}\n".encode())

    def _pair(self, name: str, value: Any) -> str:
        """``"name":value``. By hand, since a JSON encoder costs twice the time when training has emptied the caches."""
        quoted = self._names.get(name)
        if quoted is None:
            quoted = self._names[name] = json.dumps(name)
        number = as_number(name, value)
        return f"{quoted}:{number!r}" if math.isfinite(number) else f"{quoted}:{json.dumps(number)}"

    def close(self) -> None:
        os.close(self._handle)


def as_number(name: str, value: Any) -> float | int:
    """A metric as a plain number; tensors and NumPy values of one element are read. Raises TypeError for others."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"the metric {name!r} must be one number, not {type(value).__name__}") from None
