"""What taking runs into the registry consists of: the CPU time of each part alone, over the same runs."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from slurmtrain.model.run.fold import RunBuilder
from slurmtrain.model.run.journal import events_of
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.progress import Progress
from slurmtrain.system.journal_files import journal_files, read_bytes, read_pieces
from slurmtrain.system.metric_lines import read_metric_lines

T = TypeVar("T")


def cpu_seconds(action: Callable[[], T]) -> tuple[float, T]:
    """The CPU time of an action, in seconds, and its result. Other work on the machine does not count."""
    gc.collect()
    gc.disable()
    try:
        began = time.process_time()
        result = action()
        return time.process_time() - began, result
    finally:
        gc.enable()


def seconds_of_json(lines: Sequence[str]) -> float:
    """The time to parse each of these lines."""
    return cpu_seconds(lambda: [json.loads(line) for line in lines])[0]


def seconds_of_parts(directories: Sequence[RunDir]) -> dict[str, float]:
    """Seconds by part.

    ``files``: listing, checking and reading the files; ``json``: parsing each line; ``events``: typed events of what
    has been parsed; ``points``: reading and parsing metrics files into columns; ``build``: the runs of their events.
    """
    spent, files = cpu_seconds(lambda: [journal_files(run) for run in directories])
    reading, texts = cpu_seconds(lambda: [read_bytes(file, 0, file.size) for each in files for file in each])
    lines = [line for text in texts for line in text.decode().splitlines()]
    pieces = [[piece for file in each if file.metrics_of is None for piece in read_pieces(file)] for each in files]
    readings = [[(piece.reading, piece.name) for piece in each] for each in pieces]
    typing, events = cpu_seconds(
        lambda: [[event for reading in each for event in events_of(*reading)[0]] for each in readings]
    )
    columns, points = cpu_seconds(
        lambda: [{file.metrics_of: list(read_metric_lines(file)) for file in each if file.metrics_of} for each in files]
    )
    progress = [
        {str(key): Progress().advance([part.newest for part in parts if part.newest]) for key, parts in of_run.items()}
        for of_run in points
    ]

    def build() -> None:
        for run, of_run, reached in zip(directories, events, progress, strict=True):
            builder = RunBuilder(run.id)
            builder.add(of_run)
            builder.build(reached)

    return {
        "files": spent + reading,
        "json": seconds_of_json(lines),
        "events": typing,
        "points": columns,
        "build": cpu_seconds(build)[0],
    }
