"""Rank 0's metrics: one line for each finished step, in one write, so that a kill loses no finished step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmtrain.system.journal import open_appending

# Made once: json.dumps with separators makes an encoder for every call.
_encode = json.JSONEncoder(separators=(",", ":")).encode


class MetricsFile:
    """Appends to ``metrics.jsonl``. A line costs microseconds: no fsync, no network."""

    def __init__(self, path: Path) -> None:
        self._handle = open_appending(path)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line: ``step`` finished steps, and what was logged since the line before. Raises OSError, TypeError."""
        record: dict[str, Any] = {"t": round(time.time(), 4), "step": step}
        if metrics:
            record["metrics"] = {name: as_number(name, value) for name, value in metrics.items()}
        os.write(self._handle, _encode(record).encode() + b"\n")

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
