"""A run's history, from the files in its directory: for the agent, which has no registry."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.fold import RunBuilder
from slurmtrain.model.run.journal import events_of
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.run.progress import Progress, points_of
from slurmtrain.model.run.run import Run
from slurmtrain.system.journal_files import JournalFile, journal_files, read_pieces

# Among ranks, only rank 0 journals what the state of a run depends on, and there may be thousands of others.
_OTHER_RANK = re.compile(r"attempts/[^/]+/rank-(?!0\.).*\.jsonl")
_TAIL_BYTES = 65_536


def read_run(run: RunDir) -> Run:
    """The run as its journals have it now, before the policy is asked. What cannot be read is skipped."""
    builder, progress = RunBuilder(run.id), {}
    for file in journal_files(run):
        if file.metrics_of is not None:
            progress[file.metrics_of] = _last(Path(file.path))
        elif not _OTHER_RANK.fullmatch(file.name):
            builder.add(_events(file))
    return builder.build(progress)


def read_events(path: Path, source: str) -> list[AnyEvent]:
    """The events of the journal at ``path``, called ``source``; empty if there is no such file yet."""
    with contextlib.suppress(OSError):
        return _events(JournalFile(source, str(path), path.stat().st_size))
    return []


def last_step(attempt: AttemptDir) -> int | None:
    """The last step in an attempt's metrics; None if there are none."""
    return _last(attempt.metrics).last_step


def _events(file: JournalFile) -> list[AnyEvent]:
    return [event for piece in read_pieces(file) for event in events_of(piece.reading, file.name)[0]]


def _last(metrics: Path) -> Progress:
    """Progress according to the end of a metrics file, which may be long."""
    with contextlib.suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
        records = []
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("t"), int | float):
                    records.append(record)
        return Progress().advance(points_of(records))
    return Progress()
