"""Starting an attempt of a run, such that it can be killed anywhere and nothing is started twice or lost.

The order is: plan of the attempt, "submitting" in the journal, lease, job, "submitted" in the journal. All of it
happens under the run's lock, which the kernel drops when this process dies; then the next command sees how far it came.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmtrain.errors import LaunchError, NotAvailable, TrackingError, UserError
from slurmtrain.local import launch as local
from slurmtrain.model.ids import ALPHABET
from slurmtrain.model.layout import RunDir
from slurmtrain.model.plan import REDACTED, Plan
from slurmtrain.ops.workspace import Workspace
from slurmtrain.runtime.context import Launch
from slurmtrain.system.files import make_directory, write_json
from slurmtrain.system.process import Process

_JOB_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Started:
    """An attempt that was handed over: its controller, and what a person should know of it."""

    process: Process
    notes: list[str]


def check_executor(executor: str, plan: Plan) -> None:
    """Raise NotAvailable, before anything is created, for what cannot be started."""
    if executor == "slurm":
        raise NotAvailable(
            "not available with this executor: this version renders the batch script ('slurmtrain render') but does "
            "not submit it to Slurm yet; use --executor local"
        )
    local.check(plan)


def start(
    workspace: Workspace,
    run: RunDir,
    plan: Plan,
    *,
    number: int,
    command: str,
    hidden: Mapping[str, str],
    overrides: Sequence[str] = (),
    after: tuple[str, Process] | None = None,
    from_start: bool = False,
    since: float | None = None,
) -> Started:
    """Start attempt ``number`` of a run whose lock the caller holds.

    ``hidden``: environment variables that reach the job and are written nowhere. ``after``: the run, and its
    controller, that must end first. ``since``: a script's own checkpoints count only if they are newer. Raises
    LaunchError; the run is then as if nothing had been tried.
    """
    variables, notes = _server_variables(workspace, run, plan)
    handed = Launch(job_id=_new_job_id(), attempt=number, after=after, from_start=from_start, since=since)
    attempt = run.attempt(handed.job_id, 0)
    make_directory(attempt.path)
    write_json(attempt.plan, plan.to_json())
    named = {"job_id": handed.job_id, "restart": 0}
    with workspace.journal(run, command) as journal:
        journal.write(
            "submitting",
            **named,
            attempt=number,
            executor="local",
            host=socket.gethostname(),
            overrides=list(overrides),
            from_start=from_start,
        )
        write_json(run.lease, {"job_id": handed.job_id, "attempt": number})
        try:
            process = local.launch(plan, attempt, handed, {**hidden, **variables})
        except LaunchError as error:
            journal.write("unstarted", **named, reason=str(error))
            raise
        journal.write("submitted", **named, process=process.plain())
    return Started(process, notes)


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
