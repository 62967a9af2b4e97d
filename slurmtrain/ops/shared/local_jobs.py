"""Runs whose jobs are processes on a machine: which are alive, and what must be journaled for a dead one.

If a submission was killed, its job is searched for among the processes whose command line has the submission's
directory. A controller is adopted with its own ``submitted`` event; a launcher is waited for; if there is neither, and
no agent has written a journal, the attempt never started (``unstarted``).
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from slurmtrain.model.run.layout import RunDir, SubmissionDir
from slurmtrain.model.run.run import GONE, Attempt, Run
from slurmtrain.ops.shared.run_files import checkpoints_on_disk, last_error_line, last_written_at
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.task import ENTRY
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.locks import locked
from slurmtrain.system.process import Process

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
    named = [
        process
        for process, command in processes_with_argument(f"{directory.submissions}/")
        if any(program in command for program in _SUBMITIT) and _is_mine(process)
    ]
    alive = [process for process in journaled if process.alive()]
    return list(dict.fromkeys([*alive, *named])) or find_leftovers(directory)


def _is_mine(process: Process) -> bool:
    try:
        return Path(f"/proc/{process.pid}").stat().st_uid == os.getuid()
    except OSError:
        return False


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
    from slurmtrain.local.local_launch import find_controller

    if attempt.submitted_from not in (None, socket.gethostname()):
        return False  # its processes must be searched for on that machine
    with contextlib.ExitStack() as stack:
        if stack.enter_context(locked(directory.lock, wait=False)) is None:
            return False  # the submission is still in progress
        process, starting = find_controller(directory.submission(attempt.submission))
        if process is None and starting:
            return False
        journal = stack.enter_context(workspace.journal(directory, "adopt"))
        number, job_id = attempt.submission, attempt.job_id
        if process is not None:
            journal.write(Submitted(submission=number, job_id=job_id, process=process.to_dict(), adopted=True))
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
    try:
        with workspace.journal(directory, "observe") as journal:
            journal.write(
                JobObserved(
                    job_id=attempt.job_id,
                    restart=attempt.restart,
                    source="host",
                    state=GONE,
                    reason=_why_gone(attempt, directory.submission(attempt.submission)),
                    last_seen=last_written_at(place, attempt),
                    checkpoints=checkpoints_on_disk(directory),
                )
            )
    except OSError as error:
        return (
            f"its processes are gone, and its end cannot be noted in {directory.path}: {describe_os_error(error)}; "
            "put that right, and look again"
        )
    return ""


def _why_gone(attempt: Attempt, submission: SubmissionDir) -> str:
    if attempt.hosts:
        return "its processes are gone and journaled no end: killed, or the machine went down"
    line = last_error_line(submission.controller_log)
    return "its job ended before it began" + (f": {line}" if line else "")
