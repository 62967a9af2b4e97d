"""What the files of a run show about an attempt that was killed before it could journal it."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import CheckpointError
from slurmtrain.model.run.layout import AttemptDir, RunDir, checkpoint_step
from slurmtrain.model.run.run import Attempt
from slurmtrain.system.owned_files import open_readable

if TYPE_CHECKING:
    from slurmtrain.model.run.events.checkpoint_events import CheckpointRecord

# How much of the end of a log is read, and how many characters of a line are shown.
_TAIL_BYTES = 4096
_LINE_CHARACTERS = 300
# What Slurm writes when it ends a start of a job that may be started again, and when it ends any step (slurmstepd).
_START_ENDED = re.compile(r"\*\*\* (?:JOB|STEP) .* DUE TO (?:JOB REQUEUE|PREEMPTION|NODE FAILURE)")
_STEP_ENDED = re.compile(r"\*\*\* (?:JOB|STEP) .*(?:CANCELLED|FAILED|DUE TO)")
# What srun writes if a node could not start its task, or if there could be no step at all.
_NOT_LAUNCHED = re.compile(r"Task launch for .* failed on node|Unable to create step")


def last_written_at(directory: AttemptDir, attempt: Attempt | None) -> float:
    """When the attempt last wrote anything, in seconds since 1970; its start if it has written nothing."""
    times = [0.0] if attempt is None else [attempt.started_at or attempt.submitted_at or 0.0]
    for path in directory.path.rglob("*"):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    # The clock of a node or file server may be ahead of ours.
    return min(max(times), time.time())


def checkpoints_on_disk(directory: RunDir) -> list[CheckpointRecord]:
    """All published checkpoints, including ones whose save was killed before it was journaled."""
    from slurmtrain.model.run.events.checkpoint_events import CheckpointRecord
    from slurmtrain.runtime.checkpoint.checkpoint_files import bytes_of, published, read_manifest, relative_path

    records: list[CheckpointRecord] = []
    for path in published(directory.checkpoints):
        try:
            record = CheckpointRecord.from_json(read_manifest(path).describe(path))
        except CheckpointError:
            step = checkpoint_step(path.name)
            record = CheckpointRecord(step=step, path=relative_path(path), bytes=bytes_of(path))
        if record is not None:
            records.append(record)
    return records


def last_error_line(log: Path) -> str:
    """The line of a job's log that tells the error, else the last line; without secrets, empty if none.

    The log has the lines of all starts of the job: only lines after the last one that Slurm writes at the end of a
    start count. Messages that Slurm ended the steps of a job, and srun's lines about tasks, say least: they follow from
    the error.
    """
    from slurmtrain.model.urls import redact

    with contextlib.suppress(OSError), open_readable(log) as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        lines = lines[max((at + 1 for at, line in enumerate(lines) if _START_ENDED.search(line)), default=0) :]
        chosen = max(enumerate(lines), key=lambda numbered: (_worth(numbered[1]), numbered[0]), default=None)
        return redact(chosen[1])[:_LINE_CHARACTERS] if chosen else ""
    return ""


def _worth(line: str) -> int:
    """How much a line of a job's log says about what went wrong."""
    if _STEP_ENDED.search(line):
        return 0
    if line.startswith("srun: "):
        return 2 if _NOT_LAUNCHED.search(line) else 1
    return 4 if "error" in line.lower() else 1 if line.startswith("slurmstepd") else 3
