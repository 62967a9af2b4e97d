"""Starting an attempt of a run, such that it can be killed anywhere and nothing is started twice or lost.

The order is: the submission's files, "submitting" in the journal, lease, job, "submitted" in the journal. All of it
happens under the run's lock, which the kernel drops when this process, and whatever submits for it, is dead; then the
next command sees how far it came.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurmtrain.errors import LaunchError, PlaceError, Refused, RunBusy, TrackingError, Unsure, UserError
from slurmtrain.model.run.events.command import Submitted, Submitting, Unstarted
from slurmtrain.model.run.ids import ALPHABET
from slurmtrain.model.run.layout import AttemptDir, RunDir, SubmissionDir
from slurmtrain.model.spec.plan import REDACTED, Plan
from slurmtrain.model.spec.spec import write_requeue
from slurmtrain.ops.shared.interruption_stats import outlook
from slurmtrain.ops.shared.node_ledger import exclusions
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.job import lease
from slurmtrain.runtime.job.environment import Launch
from slurmtrain.system.files import DIRECTORY_MODE, describe_os_error, make_directory, write_json
from slurmtrain.system.process import Process

_JOB_DIGITS = 6
# Whose the claims of commands are, beside those of agents.
_COMMANDS = "submission"
# From claiming an attempt to saying that it submits the next one takes a command no time to speak of.
_CLAIM_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRequest:
    """An attempt to be started.

    ``number`` is the attempt's. ``hidden``: environment variables that reach the job and are written nowhere.
    ``after``: the run, and its controller, that must end first. ``since``: a script's own checkpoints count only if
    they are newer. ``without``: nodes of the cluster that it must not get. ``follows``: the attempt that it follows.
    """

    plan: Plan
    executor: str
    number: int
    hidden: Mapping[str, str]
    overrides: Sequence[str] = ()
    after: tuple[str, Process] | None = None
    from_start: bool = False
    since: float | None = None
    without: Sequence[str] = ()
    follows: AttemptDir | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """An attempt that was handed over: its controller, if it is a local one, and what a person should know of it."""

    process: Process | None
    notes: list[str]


def check_executor(workspace: Workspace, executor: str, plans: Sequence[Plan]) -> None:
    """Raise, before anything is created, for what cannot be started: NotAvailable, Refused or LaunchError."""
    if executor == "slurm":
        from slurmtrain.slurm.launch import check

        check(plans, workspace.scheduler)
        return
    from slurmtrain.local.launch import check as check_local

    for plan in plans:
        check_local(plan)


def start(workspace: Workspace, run: RunDir, lock: int, wanted: AttemptRequest, *, command: str) -> Started:
    """Start an attempt of a run whose lock the caller holds, by this handle.

    Raises LaunchError or Refused; the run is then as if nothing had been tried, but after Unsure. RunBusy where another
    command has taken it upon itself to start the run after the attempt that this one is to follow.
    """
    excluded = exclusions(workspace, wanted.plan, wanted.without, slurm=wanted.executor == "slurm")
    seen = outlook(workspace, run.id, wanted.plan, wanted.executor)
    variables, notes = _server_variables(workspace, run, wanted.plan)
    submission = _new_submission(run)
    try:
        _claim(wanted, submission)
    except RunBusy:
        submission.path.rmdir()
        raise
    write_json(submission.plan, wanted.plan.to_json())
    told = Launch(
        attempt=wanted.number,
        after=wanted.after,
        from_start=wanted.from_start,
        since=wanted.since,
        history=seen.history,
    )
    write_json(submission.launch, told.to_dict())
    # Slurm gives its jobs their ids; of a local one it is known before the job exists.
    job_id = _new_job_id() if wanted.executor == "local" else None
    with workspace.journal(run, command) as journal:
        nodes = wanted.plan.spec.resources.allocated
        journal.write(
            Submitting(
                submission=submission.number,
                job_id=job_id,
                attempt=wanted.number,
                executor=wanted.executor,
                host=socket.gethostname(),
                overrides=wanted.overrides,
                from_start=wanted.from_start,
                by=command,
                requeue=write_requeue(wanted.plan.spec.requeue),
                nodes=(nodes.min, nodes.max),
                follows=None if wanted.follows is None else wanted.follows.path.name,
                without=excluded.nodes or None,
                partition=seen.partition or None,
            )
        )
        lease.grant(submission)
        try:
            asked = replace(wanted, without=excluded.nodes)
            submitted = _hand_over(asked, submission, job_id, lock, {**wanted.hidden, **variables})
        except (LaunchError, Refused) as error:
            if not isinstance(error, Unsure):
                journal.write(Unstarted(submission=submission.number, job_id=job_id, reason=str(error)))
                if wanted.follows is not None:
                    lease.release_claim(wanted.follows, by=_COMMANDS)
            raise
        journal.write(submitted)
    workspace.scheduler.forget()
    process = submitted.process
    return Started(Process.from_dict(process) if process else None, [*excluded.notes, *seen.notes, *notes])


def _hand_over(
    wanted: AttemptRequest,
    submission: SubmissionDir,
    job_id: str | None,
    lock: int,
    variables: Mapping[str, str],
) -> Submitted:
    """Start the job; returns what is to be journaled of it. ``job_id``: a local job's."""
    if wanted.executor == "slurm":
        from slurmtrain.slurm.launch import LaunchRequest
        from slurmtrain.slurm.launch import launch as launch_slurm

        follows = wanted.follows is not None
        handing = LaunchRequest(wanted.plan, submission, lock, wanted.without, singleton=follows)
        return Submitted(submission=submission.number, job_id=launch_slurm(handing, variables))
    from slurmtrain.local.launch import launch as launch_here

    assert job_id is not None
    process = launch_here(wanted.plan, submission, job_id, variables)
    return Submitted(submission=submission.number, job_id=job_id, process=process.to_dict())


def _claim(wanted: AttemptRequest, submission: SubmissionDir) -> None:
    """Be the one that starts the run after the attempt that this one follows. Raises RunBusy where somebody else is.

    The run's lock sees to that already, but for file systems without locks. A claim of whoever was killed before it
    said that it submits is void after a while.
    """
    after = wanted.follows
    if after is None:
        return
    said = lease.read_claim(after, by=_COMMANDS)
    if said is not None and _is_void(submission, said):
        lease.release_claim(after, by=_COMMANDS)
    if not lease.claim_restart(after, _COMMANDS, {"submission": submission.number}):
        raise RunBusy(f"another command is just starting run {submission.run.id} again; look at it in a moment")


def _is_void(submission: SubmissionDir, said: Mapping[str, Any]) -> bool:
    """Whether nothing has come of a claim: a submission of which nothing is told, or that never started a job."""
    from slurmtrain.runtime.job.run_reader import read_run

    process = said.get("process")
    dead = process is not None and Process.from_dict(process).alive() is False
    if not dead and abs(time.time() - float(said.get("t", 0.0))) < _CLAIM_S:
        return False
    number = said.get("submission")
    return all(attempt.submission != number for attempt in read_run(submission.run).attempts)


def _new_submission(run: RunDir) -> SubmissionDir:
    """A directory that no other submission has, even where locks fail and another command makes one just now."""
    make_directory(run.submissions)
    numbers = [int(entry.name) for entry in run.submissions.glob("*") if entry.name.isdigit()]
    for number in itertools.count(max(numbers, default=0) + 1):
        submission = run.submission(number)
        try:
            submission.path.mkdir(mode=DIRECTORY_MODE)
        except FileExistsError:
            continue
        except OSError as error:
            raise PlaceError(f"cannot create the directory {submission.path}: {describe_os_error(error)}") from error
        break
    return submission


def _server_variables(workspace: Workspace, run: RunDir, plan: Plan) -> tuple[dict[str, str], list[str]]:
    """What a script needs to reach an MLflow server. One that is down is worth a note, and no reason not to train."""
    from slurmtrain.ops.shared.mirror import server_variables

    try:
        return server_variables(workspace, run.id, plan), []
    except TrackingError as error:
        return {}, [f"{error}; the run goes on without MLFLOW_RUN_ID, and 'slurmtrain sync' sends its metrics later"]


def hidden_values(plan: Plan, given: Mapping[str, str]) -> dict[str, str]:
    """Values of the variables that the plan names but does not hold: as given now, or from this environment.

    Raises UserError that names all that are missing.
    """
    names = [name for name, value in plan.spec.env.items() if value == REDACTED]
    values = {name: given.get(name, os.environ.get(name)) for name in names}
    missing = sorted(name for name, value in values.items() if value is None)
    if missing:
        raise UserError(
            f"the values of {', '.join(missing)} are secret, so they were not recorded; set them in the "
            "environment and try again"
        )
    return {name: value for name, value in values.items() if value is not None}


def _new_job_id() -> str:
    return "local-" + "".join(secrets.choice(ALPHABET) for _ in range(_JOB_DIGITS))
