"""Reading how busy the nodes of a run are and were, from the files that their agents write."""

from __future__ import annotations

import glob
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.diagnosis.idleness import Idle, find_idle
from slurmtrain.model.experiment.prices import mean_gpus
from slurmtrain.model.metrics.load import LoadSample, read_sample
from slurmtrain.model.run.journal_lines import Reading, read_lines
from slurmtrain.model.run.layout import AttemptDir, RunDir, split_attempt
from slurmtrain.system.journal_files import JournalFile, Piece, last_records, read_pieces

# The newest samples of a node, in bytes: enough to see that it is busy.
_TAIL_BYTES = 16_384


def load_files(attempt: AttemptDir) -> list[Path]:
    """The files of an ``attempt`` with the load of its nodes, the first node's first."""
    paths = attempt.logs.glob("system-*.jsonl")
    numbers = {path: path.stem.partition("-")[2] for path in paths}
    return sorted((path for path in numbers if numbers[path].isdecimal()), key=lambda path: int(numbers[path]))


def read_load(path: Path, at_most: int | None = None) -> Iterator[LoadSample]:
    """All samples in a file of :func:`load_files`, in order; none if it cannot be read.

    Args:
        path: The file.
        at_most: About how many to read, from its first to its last one; None: all.
    """
    with suppress(OSError, PathError):
        for piece in read_pieces(JournalFile(path.name, str(path), path.stat().st_size)):
            reading = piece.reading if at_most is None else _thinned(piece, at_most)
            for _, record in reading.records:
                if (sample := read_sample(record)) is not None:
                    yield sample


def newest_load_files(directory: RunDir, job_id: str | None) -> list[Path]:
    """The :func:`load_files` of the newest start of a job of a run in this ``directory``; none without a ``job_id``."""
    folders = [] if job_id is None else directory.attempts.glob(f"{glob.escape(job_id)}.*")
    starts = [start for folder in folders if (start := split_attempt(folder.name)) is not None]
    return load_files(directory.attempt(*max(starts, key=lambda start: start[1]))) if starts else []


def newest_sample(path: Path) -> LoadSample | None:
    """The last sample in the file at this ``path``; None if there is none."""
    return next(reversed(_tail(path)), None)


def _thinned(piece: Piece, at_most: int) -> Reading:
    """Some of the lines of a piece, among them the last: parsing them takes a hundred times as long as finding them."""
    lines = piece.whole_lines.splitlines(keepends=True)
    stride = -(-len(lines) // at_most)
    return read_lines(b"".join(lines[::-1][:: max(1, stride)][::-1]), 0, piece.name)


def idle_of(directory: RunDir, job_id: str | None, resources: Mapping[str, Any]) -> Idle | None:
    """Since when a run that is said to run has been idle; None if it is not, or if that is unknown.

    Args:
        directory: The run.
        job_id: The job of its newest attempt; None: it has none.
        resources: What the run has asked for.
    """
    paths = newest_load_files(directory, job_id)
    now, wants_gpus = time.time(), mean_gpus(resources) > 0
    # Most runs are busy on their first node, which a look at its end shows.
    if not paths or find_idle({paths[0].name: _tail(paths[0])}, now, wants_gpus=wants_gpus) is None:
        return None
    nodes = {path.name: list(read_load(path)) for path in paths}
    return find_idle(nodes, now, wants_gpus=wants_gpus)


def _tail(path: Path) -> list[LoadSample]:
    return [sample for record in last_records(path, _TAIL_BYTES) if (sample := read_sample(record)) is not None]
