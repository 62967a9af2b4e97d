"""The step that a run had logged at some time, found in its metrics without reading all of them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from slurmtrain.errors import UntrustedPath
from slurmtrain.model.run.journal import read_lines
from slurmtrain.model.run.layout import METRICS, RunDir
from slurmtrain.model.run.progress import Point, points_of
from slurmtrain.system.owned_files import open_regular

# So much of a file is read at a time: many lines.
_WINDOW_BYTES = 1 << 16


def logged_step(run: RunDir, at: float) -> int | None:
    """The last step that any attempt of a run had logged by a time; None if none had.

    Args:
        run: The run.
        at: In seconds since 1970.
    """
    points = [point for path in run.attempts.glob(f"*/{METRICS}") if (point := _last_before(path, at)) is not None]
    return max(points, key=lambda point: point.time).step if points else None


def _last_before(metrics: Path, at: float) -> Point | None:
    with contextlib.suppress(OSError, UntrustedPath):
        handle = open_regular(metrics)
        try:
            return _search(handle, at, metrics.name)
        finally:
            os.close(handle)
    return None


def _search(handle: int, at: float, name: str) -> Point | None:
    """Halve the part of the file that the point is in until one window holds it: lines are in the order of time."""
    begin, end = 0, os.fstat(handle).st_size
    while end - begin > _WINDOW_BYTES:
        middle = (begin + end) // 2
        points = _points(handle, middle, _WINDOW_BYTES, name)
        if points and points[0].time <= at:
            begin = middle
        else:
            end = middle
    # The line that ends the last window begins before it does.
    points = _points(handle, begin, end - begin + _WINDOW_BYTES, name)
    return next((point for point in reversed(points) if point.time <= at), None)


def _points(handle: int, offset: int, length: int, name: str) -> list[Point]:
    return points_of(record for _, record in read_lines(os.pread(handle, length, offset), offset, name).records)
