"""How busy the nodes of a run are and were, from the files that their agents write, and so how much it used."""

from __future__ import annotations

import glob
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.diagnosis.node_load import Idle, LoadSample, find_idle, read_sample
from slurmtrain.model.diagnosis.usage import Elapsed, Usage, judge_usage, use_of_node
from slurmtrain.model.experiment.prices import mean_gpus
from slurmtrain.model.run.journal_lines import Reading, read_lines
from slurmtrain.model.run.layout import AttemptDir, RunDir, split_attempt
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.workspace import Workspace
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
            reading = piece.reading if at_most is None else _some_lines(piece, at_most)
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
    return next(reversed(_newest_samples(path)), None)


def _some_lines(piece: Piece, at_most: int) -> Reading:
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
    if not paths or find_idle({paths[0].name: _newest_samples(paths[0])}, now, wants_gpus=wants_gpus) is None:
        return None
    nodes = {path.name: list(read_load(path)) for path in paths}
    return find_idle(nodes, now, wants_gpus=wants_gpus)


def _newest_samples(path: Path) -> list[LoadSample]:
    return [sample for record in last_records(path, _TAIL_BYTES) if (sample := read_sample(record)) is not None]


def usage_of(workspace: Workspace, run: Run, to_go: float | None) -> list[Usage]:
    """How much a run asked for and used, an entry for each resource, also where nothing is known.

    Args:
        workspace: Where it is.
        run: The run.
        to_go: The seconds until its last step, while it trains; None: unknown.
    """
    directory = workspace.root.run(run.id)
    started = [attempt for attempt in run.attempts if attempt.started_at is not None]
    paths = [path for each in started for path in load_files(directory.attempt(each.job_id, each.restart))]
    now = time.time()
    spans = [
        max(0.0, (now if each.ended_at is None else each.ended_at) - each.started_at)
        for each in started
        if each.started_at is not None and (each.ended_at is not None or run.state == "running")
    ]
    elapsed = Elapsed(
        longest=round(max(spans), 1) if spans else None,
        total=sum(spans),
        to_go=to_go,
        is_completed=run.state == "completed",
        causes=[each.cause for each in started if each.cause is not None],
    )
    return judge_usage(run.resources, [use_of_node(read_load(path)) for path in paths], elapsed)


def usage_by_resource(workspace: Workspace, run: Run, to_go: float | None) -> dict[str, dict[str, Any]]:
    """The same by resource, so that columns and conditions can name a figure: ``usage.memory.used``.

    Args:
        workspace: Where it is.
        run: The run.
        to_go: As for :func:`usage_of`.
    """
    return {each.resource: each.to_dict() for each in usage_of(workspace, run, to_go)}
