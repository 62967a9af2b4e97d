"""Starting an attempt of a run, such that it can be killed anywhere and nothing is started twice or lost.

The order is: the submission's files, "submitting" in the journal, lease, job, "submitted" in the journal. All of it
happens under the run's lock, which the kernel drops when this process, and whatever submits for it, is dead; then the
next command sees how far it came.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurmtrain.errors import LaunchError, Refused, TrackingError, Unsure, UserError
from slurmtrain.model.ids import ALPHABET
from slurmtrain.model.layout import RunDir, SubmissionDir
from slurmtrain.model.plan import REDACTED, Plan
from slurmtrain.ops.history import outlook
from slurmtrain.ops.ledger import exclusions
from slurmtrain.ops.workspace import Workspace
from slurmtrain.runtime import lease
from slurmtrain.runtime.context import Launch
from slurmtrain.system.files import make_directory, write_json
from slurmtrain.system.process import Process

_JOB_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An attempt to be started.

    ``number`` is the attempt's. ``hidden``: environment variables that reach the job and are written nowhere.
    ``after``: the run, and its controller, that must end first. ``since``: a script's own checkpoints count only if
    they are newer. ``without``: nodes of the cluster that it must not get.
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


def start(workspace: Workspace, run: RunDir, lock: int, wanted: Wanted, *, command: str) -> Started:
    """Start an attempt of a run whose lock the caller holds, by this handle.

    Raises LaunchError or Refused; the run is then as if nothing had been tried, but after Unsure.
    """
    excluded = exclusions(workspace, wanted.plan, wanted.without, slurm=wanted.executor == "slurm")
    seen = outlook(workspace, run.id, wanted.plan, wanted.executor)
    variables, notes = _server_variables(workspace, run, wanted.plan)
    submission = _new_submission(run)
    write_json(submission.plan, wanted.plan.to_json())
    told = Launch(
        attempt=wanted.number,
        after=wanted.after,
        from_start=wanted.from_start,
        since=wanted.since,
        history=seen.history,
    )
    write_json(submission.launch, told.plain())
    named: dict[str, Any] = {"submission": submission.number}
    if wanted.executor == "local":
        named["job_id"] = _new_job_id()
    with workspace.journal(run, command) as journal:
        journal.write(
            "submitting",
            **named,
            attempt=wanted.number,
            executor=wanted.executor,
            host=socket.gethostname(),
            overrides=list(wanted.overrides),
            from_start=wanted.from_start,
            **({"without": list(excluded.nodes)} if excluded.nodes else {}),
            **({"partition": seen.partition} if seen.partition else {}),
        )
        lease.grant(submission)
        try:
            asked = replace(wanted, without=excluded.nodes)
            more = _hand_over(asked, submission, named, lock, {**wanted.hidden, **variables})
        except (LaunchError, Refused) as error:
            if not isinstance(error, Unsure):
                journal.write("unstarted", **named, reason=str(error))
            raise
        journal.write("submitted", **{**named, **more})
    workspace.scheduler.forget()
    process = more.get("process")
    return Started(Process.from_plain(process) if process else None, [*excluded.notes, *seen.notes, *notes])


def _hand_over(
    wanted: Wanted,
    submission: SubmissionDir,
    named: Mapping[str, Any],
    lock: int,
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """Start the job; returns what is to be journaled of it."""
    if wanted.executor == "slurm":
        from slurmtrain.slurm.launch import Handing
        from slurmtrain.slurm.launch import launch as launch_slurm

        return {"job_id": launch_slurm(Handing(wanted.plan, submission, lock, wanted.without), variables)}
    from slurmtrain.local.launch import launch as launch_here

    return {"process": launch_here(wanted.plan, submission, str(named["job_id"]), variables).plain()}


def _new_submission(run: RunDir) -> SubmissionDir:
    numbers = [int(entry.name) for entry in run.submissions.glob("*") if entry.name.isdigit()]
    submission = run.submission(max(numbers, default=0) + 1)
    make_directory(run.submissions)
    make_directory(submission.path)
    return submission


def _server_variables(workspace: Workspace, run: RunDir, plan: Plan) -> tuple[dict[str, str], list[str]]:
    """What a script needs to reach an MLflow server. One that is down is worth a note, and no reason not to train."""
    from slurmtrain.ops.mirror import server_variables

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
