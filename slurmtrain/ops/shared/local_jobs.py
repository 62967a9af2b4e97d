"""Runs whose jobs are processes on a machine: which are alive, and what must be journaled for a dead one.

The files of a run, on Slurm too, show what an attempt that was killed could not journal.

If a submission was killed, its job is searched for among the processes whose command line has the submission's
directory. A controller is adopted with its own ``submitted`` event; a launcher is waited for; if there is neither, and
no agent has written a journal, the attempt never started (``unstarted``).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import CheckpointError
from slurmtrain.model.run.job_state import GONE
from slurmtrain.model.run.layout import AttemptDir, RunDir, checkpoint_step
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.task import ENTRY
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.locks import locked
from slurmtrain.system.owned_files import open_readable
from slurmtrain.system.process import Process

if TYPE_CHECKING:
    from slurmtrain.model.run.events.checkpoint_events import CheckpointRecord

# Programs whose arguments name a directory of submitit: the controller of a local job, and the agents.
_SUBMITIT = (b"submitit.local._local", ENTRY.encode())


def alive(run: Run) -> bool | None:
    """Whether any process of the newest attempt runs; None if this machine cannot tell."""
    if run.newest is None:
        return False
    lives = [Process.from_dict(process).alive() for process in run.newest.processes]
    return True if any(lives) else (None if None in lives else False)


def processes_of(directory: RunDir, run: Run | None) -> list[Process]:
    """The processes of a run on this machine, whether or not its directory exists.

    Args:
        directory: Where it is, or was.
        run: What is known of it; None: nothing.

    Returns:
        The controller and the agents or, where they are gone, what its ranks have left.
    """
    from slurmtrain.runtime.job.lease import find_leftovers
    from slurmtrain.system.process import processes_with_argument

    journaled = [Process.from_dict(process) for process in run.newest.processes] if run and run.newest else []
    named = []
    for process, command in processes_with_argument(f"{directory.submissions}/"):
        # It may have ended meanwhile; nobody else's counts.
        with contextlib.suppress(OSError):
            is_own = Path(f"/proc/{process.pid}").stat().st_uid == os.getuid()
            if is_own and any(program in command for program in _SUBMITIT):
                named.append(process)
    alive = [process for process in journaled if process.alive()]
    return list(dict.fromkeys([*alive, *named])) or find_leftovers(directory)


def is_dead(run: Run) -> bool:
    """Whether the newest attempt was submitted and none of its processes is left."""
    return run.newest is not None and run.newest.handed_over and alive(run) is False


def adopt(workspace: Workspace, directory: RunDir, run: Run) -> bool:
    """Finish the bookkeeping of a submission that was killed while it started its job.

    Args:
        workspace: Where the run is.
        directory: Its directory.
        run: What is known of it.

    Returns:
        Whether anything may have been journaled.
    """
    # Imported here: defining the event classes takes longer than a check that finds nothing new.
    from slurmtrain.model.run.events.command_events import Submitted, Unstarted

    attempt = run.newest
    if attempt is None or attempt.handed_over or attempt.ended:
        return False
    from slurmtrain.local import find_controller

    if attempt.submitted_from not in (None, socket.gethostname()):
        return False  # its processes must be searched for on that machine
    with contextlib.ExitStack() as stack:
        if stack.enter_context(locked(directory.lock, wait=False)) is None:
            return False  # the submission is still in progress
        process, starting = find_controller(directory.submission(attempt.submission))
        # What the killed command has left may still start a controller: the next look decides.
        if process is None and starting:
            return False
        journal = stack.enter_context(workspace.journal(directory, "adopt"))
        number, job_id = attempt.submission, attempt.job_id
        if process is not None:
            journal.write(Submitted(submission=number, job_id=job_id, process=process.to_dict(), adopted=True))
        # If an agent has journaled, the job began, and its own journal tells the rest.
        elif not any(directory.attempt(attempt.job_id, attempt.restart).path.glob("node-*.jsonl")):
            reason = "its submission was killed before the job began"
            journal.write(Unstarted(submission=number, job_id=job_id, reason=reason))
    return True


def note_gone(workspace: Workspace, directory: RunDir, run: Run) -> str:
    """Journal that the newest attempt's processes are gone, unless it journaled its own end.

    Args:
        workspace: Where the run is.
        directory: Its directory.
        run: What is known of it.

    Returns:
        Why that cannot be journaled, as a sentence without a full stop; empty if it can, or need not.
    """
    from slurmtrain.model.run.events.command_events import JobObserved

    attempt = run.newest
    if attempt is None or attempt.ended:
        return ""
    place = directory.attempt(attempt.job_id, attempt.restart)
    reason = "its processes are gone without recording an end: they were killed, or the machine went down"
    if not attempt.hosts:
        line = last_error_line(directory.submission(attempt.submission).controller_log)
        reason = "its job ended before it began" + (f": {line}" if line else "")
    try:
        with workspace.journal(directory, "observe") as journal:
            journal.write(
                JobObserved(
                    job_id=attempt.job_id,
                    restart=attempt.restart,
                    source="host",
                    state=GONE,
                    reason=reason,
                    last_seen=last_written_at(place, attempt),
                    checkpoints=checkpoints_on_disk(directory),
                )
            )
    except OSError as error:
        return (
            f"its processes are gone, but its end cannot be recorded in {directory.path}: {describe_os_error(error)}; "
            "fix that, and look again"
        )
    return ""


# --- what files show about an attempt that was killed before it could journal it -------------------------------------

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
