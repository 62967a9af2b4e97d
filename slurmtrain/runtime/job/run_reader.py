"""What a run has been through, from the files of its directory: for the agent, which has no registry."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.fold import fold
from slurmtrain.model.run.journal import events_of, read_lines
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.run.progress import Progress
from slurmtrain.model.run.run import Run

# Of ranks, rank 0 alone says what the state of a run depends on.
_JOURNAL = re.compile(r"node-\d+\.jsonl|rank-0(?:\.\d+)?\.jsonl")
_TAIL_BYTES = 65_536


def read_run(run: RunDir) -> Run:
    """The run as its journals have it now, before the policy is asked. What cannot be read is passed over."""
    return fold(run.id, _events(run), _progress(run))


def read_events(path: Path, source: str) -> list[AnyEvent]:
    """The events of one journal, which may not be there yet."""
    with contextlib.suppress(OSError):
        return events_of(read_lines(path.read_bytes(), 0, source), source)[0]
    return []


def last_step(attempt: AttemptDir) -> int | None:
    """The last step that an attempt's metrics have; None where there are none."""
    return _last(attempt.metrics).last_step


def _events(run: RunDir) -> Iterator[AnyEvent]:
    for path in _journals(run):
        yield from read_events(path, str(path.relative_to(run.path)))


def _journals(run: RunDir) -> Iterator[Path]:
    yield from run.journals.glob("*.jsonl")
    for path in run.attempts.glob("*/*.jsonl"):
        if _JOURNAL.fullmatch(path.name):
            yield path


def _progress(run: RunDir) -> Mapping[str, Progress]:
    return {place.name: _last(place / "metrics.jsonl") for place in run.attempts.glob("*") if place.is_dir()}


def _last(metrics: Path) -> Progress:
    """Progress by the end of a metrics file, which may be long."""
    with contextlib.suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
        records = []
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("t"), int | float):
                    records.append(record)
        return Progress().advance(records)
    return Progress()
