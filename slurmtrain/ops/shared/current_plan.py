"""What the next attempt of a run is based on: the run's current plan, and what came before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from slurmtrain.errors import PathError
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.events.base import is_plain
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.written import texts_as_json
from slurmtrain.runtime.environment.node import read_plan

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run


def current_plan(directory: RunDir, run: Run) -> Plan:
    """The plan of the newest attempt, or of the run if it has none. Raises PathError if it cannot be read."""
    newest = run.newest
    plan = read_plan(directory.submission(newest.submission).plan) if newest else None
    plan = plan or read_plan(directory.plan)
    if plan is None:
        raise PathError(f"run {run.id} has no plan ({directory.plan} is missing); it cannot be started again")
    return plan


def after_oom_overrides(run: Run, overrides: Sequence[str] = ()) -> list[str]:
    """The overrides for the next attempt of a run that ran out of memory, by its policy.

    Args:
        run: the run, which has ended.
        overrides: the user's overrides, which may set its memory.
    """
    by_user = any(override.startswith(("resources.mem=", "resources.accumulation=")) for override in overrides)
    if by_user or run.newest is None or run.newest.cause != "oom":
        return []
    # Imported here: a first attempt has nothing behind it.
    from slurmtrain.model.interruption.policy import BatchMemory, decision

    had = BatchMemory.of_attempt(run.executor, run.resources)
    decided = decision(run.attempts, run.checkpoints, had)
    return decided.memory.overrides(had) if decided.memory is not None else []


class RunSettings(TypedDict):
    """What events record of a plan, so that lists need not read plans."""

    params: Mapping[str, Any]
    written: Sequence[Sequence[str]] | None
    command: str
    resources: Mapping[str, Any]
    tracked: bool


def run_settings(plan: Plan) -> RunSettings:
    """What events record of a plan."""
    # A spec may have integers that SQLite, and so a journal, has no room for.
    params = {name: value if is_plain(value) else str(value) for name, value in plan.spec.params.items()}
    return {
        "params": params,
        "written": texts_as_json(params) or None,
        "command": plan.spec.command,
        "resources": plan.content["resources"],
        "tracked": bool(plan.spec.tracking.trackers),
    }


def last_fresh_start(run: Run) -> float | None:
    """When the run was last started with --from-start, in seconds since 1970; None if never.

    What its script saved before that must not be restored.
    """
    return max((attempt.submitted_at or 0.0 for attempt in run.attempts if attempt.from_start), default=None)


def predecessor(directory: RunDir, run: Run) -> AttemptDir | None:
    """The attempt that precedes the next one: the newest that has a job; None if there is none."""
    newest = next((attempt for attempt in reversed(run.attempts) if attempt.job_id), None)
    return directory.attempt(newest.job_id, newest.restart) if newest is not None else None
