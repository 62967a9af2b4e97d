"""Runs that share a job with others: which of them still need it, and how one leaves it.

A cancel of one run must not end the job of the others. Its lease is closed, which its agent reads, and which ends it at
once if the job starts later. Only if no other run needs the job, it is cancelled.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.run.events.command import JobReplaced
from slurmtrain.model.run.layout import RunDir, SubmissionDir
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.node import read_launch
from slurmtrain.runtime.job import lease

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run


def is_needed_by_others(workspace: Workspace, run: Run) -> bool:
    """Whether other runs of a run's pack need the job of its newest attempt, as far as their leases say.

    Args:
        workspace: where the runs are.
        run: the run.
    """
    newest = run.newest
    if newest is None or newest.pack < 2:
        return False
    return shares_job(workspace, workspace.root.run(run.id).submission(newest.submission))


def shares_job(workspace: Workspace, submission: SubmissionDir) -> bool:
    """The same for the job of a submission. If it cannot be found out, others count as needing it.

    Args:
        workspace: where the runs are.
        submission: the submission of one run of a pack.
    """
    try:
        others = [SubmissionDir(link.readlink()) for link in _links(workspace, submission)]
        return any(_needs_job(other) for other in others if other.run.id != submission.run.id)
    except (OSError, SlurmtrainError):
        return True


def _links(workspace: Workspace, submission: SubmissionDir) -> list[Path]:
    """The links to the submissions of all runs that share the job of this one; empty if none does."""
    launch = read_launch(submission)
    if launch is not None:
        if launch.pack is None or launch.array is None:
            return []
        array, index = launch.array
        # By name: to list the links of all runs of the array for each of them would take minutes for a large sweep.
        links = [workspace.root.array(array).element(index, slot) for slot in range(launch.pack.runs)]
        return [link for link in links if link.is_symlink()]
    # The run's directory was deleted.
    for link in workspace.root.arrays.glob("*/elements/*.*"):
        if link.readlink() == submission.path:
            return list(link.parent.glob(f"{link.name.partition('.')[0]}.*"))
    return []


def _needs_job(submission: SubmissionDir) -> bool:
    number = submission.number
    return lease.granted_to(submission.run) == number and lease.final_state(submission.run, number) is None


def leave(workspace: Workspace, directory: RunDir, run: Run) -> None:
    """Take a run whose lease is closed out of its job, unless its agent runs, which notices that itself.

    Args:
        workspace: where the run is.
        directory: its directory.
        run: the run.

    Raises:
        PathError: its directory cannot be written.
    """
    newest = run.newest
    if newest is None or (newest.hosts and not newest.ended):
        return
    with workspace.journal(directory, "cancel") as journal:
        why = "it was cancelled, and its job goes on with other runs"
        journal.write(JobReplaced(job_id=newest.job_id, restart=newest.restart, why=why))
