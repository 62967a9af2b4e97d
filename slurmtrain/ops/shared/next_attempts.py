"""Attempts that are about to be started: the next one of a run, the one before it, and the orders of its job."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from slurmtrain.errors import PathError, SlurmDown, UserError
from slurmtrain.model.experiment.kinds import texts_as_json
from slurmtrain.model.experiment.plan import REDACTED, Plan
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.model.interruption.interval import InterruptionStats, add_attempts, too_slow
from slurmtrain.model.run.events.base import is_plain
from slurmtrain.model.run.events.command_events import RunCreated
from slurmtrain.model.run.layout import AttemptDir, RunDir, unusable_in_root
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.node import Turn, read_plan
from slurmtrain.system.locks import locked

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run
    from slurmtrain.specfile import PlannedRun

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HeldRun:
    """A run whose lock this command holds. ``lock``: its descriptor, which whoever submits the job inherits.

    ``cancels``: the :func:`cancels` when the command took the lock; a run that nobody could see before has none.
    """

    directory: RunDir
    lock: int
    cancels: frozenset[str] = frozenset()

    @property
    def id(self) -> str:
        """The run's id."""
        return self.directory.id

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody has requested the end of the run since, without its lock."""
        return bool(cancels(self.directory) - self.cancels)


def cancels(run: RunDir) -> frozenset[str]:
    """The journals that request the end of a run so far: a command writes each request to a journal of its own.

    ``cancel`` does not wait for ever for a command that holds the run's lock. That command carries out the request,
    which it recognizes by a journal that was not there when it took the lock, whatever the clocks say.
    """
    return frozenset(path.name for path in run.journals.glob("cancel-*.jsonl"))


def hold(directory: RunDir, locks: contextlib.ExitStack) -> HeldRun | None:
    """Take the lock of the run in a ``directory``, until ``locks`` is left; None if another command has it."""
    lock = locks.enter_context(locked(directory.lock, wait=False))
    return None if lock is None else HeldRun(directory, lock, cancels(directory))


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAttempt:
    """An attempt to start.

    ``number``: counts from 1. ``secrets``: environment variables that reach the job but are never written.
    ``is_as_created``: the plan equals the run's ``plan.json``. ``turn``: the turn that a run of a local sweep waits
    for. ``since``: the script's own checkpoints count only if they are newer than this, in seconds since 1970.
    ``excluded_nodes``: nodes that it must not get. ``predecessor``: the attempt before it. ``inherited``: the variables
    of the submitting shell that count beside the plan; before it is submitted, the variables of the attempt before it,
    if it follows without a person.
    """

    held: HeldRun
    plan: Plan
    executor: str
    number: int
    secrets: Mapping[str, str]
    is_as_created: bool = False
    overrides: Sequence[str] = ()
    turn: Turn | None = None
    from_start: bool = False
    since: float | None = None
    excluded_nodes: Sequence[str] = ()
    predecessor: AttemptDir | None = None
    inherited: Mapping[str, str] = field(default_factory=dict)

    @property
    def run(self) -> RunDir:
        """The directory of its run."""
        return self.held.directory


def next_attempt(
    workspace: Workspace, held: HeldRun, run: Run, planned: PlannedRun, behind: str | None = None
) -> NewAttempt:
    """The attempt after the newest of a run; the first if there is none.

    Args:
        workspace: where the run is.
        held: the run.
        run: what is known of it: it has been observed.
        planned: what the attempt runs, with the overrides that have changed it.
        behind: the run of its sweep that was started before it.

    Raises:
        UserError: the value of a secret is missing.
    """
    is_in_sweep = run.executor == "local" and run.sweep is not None
    limit = read_limits(workspace, [run.id])[run.id] if is_in_sweep else SweepLimit()
    return NewAttempt(
        held=held,
        plan=planned.plan,
        executor=run.executor,
        number=len(run.attempts) + 1,
        secrets=secret_values(planned.plan, planned.secrets),
        overrides=planned.overrides,
        turn=limit.turn(run.executor, behind),
        since=last_fresh_start(run),
        predecessor=predecessor(held.directory, run),
    )


def secret_values(plan: Plan, overrides: Mapping[str, str]) -> dict[str, str]:
    """Values of the variables that the plan names but does not record: from ``overrides``, else this environment.

    Raises a UserError that names all missing ones.
    """
    names = [name for name, value in plan.spec.env.items() if value == REDACTED]
    values = {name: overrides.get(name, os.environ.get(name)) for name in names}
    missing = sorted(name for name, value in values.items() if value is None)
    if missing:
        raise UserError(
            f"the values of {', '.join(missing)} are secret and were not recorded; set them in the environment and "
            "try again"
        )
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class SweepLimit:
    """What holds for a run of a sweep. ``sweep``: the sweep's id; None: it is a single run.

    ``parallel``: how many of its runs may run at once; None: the spec does not say. ``pack``: how they share jobs of
    Slurm; None: each has its own. On this machine so many may run at once, unless ``parallel`` says another number.
    """

    sweep: str | None = None
    parallel: int | None = None
    pack: Pack | None = None

    def turn(self, executor: str, behind: str | None = None) -> Turn | None:
        """What a run waits for: without a limit, for all runs of its sweep that run. None: for nothing.

        Args:
            executor: what starts it.
            behind: the run that was submitted before it.
        """
        if executor != "local" or self.sweep is None:
            return None
        return Turn(self.sweep, self.parallel or (self.pack.runs if self.pack is not None else 1), behind)


def read_limits(workspace: Workspace, run_ids: Collection[str]) -> dict[str, SweepLimit]:
    """What was submitted with each of these runs, which have been observed."""
    created = workspace.store.events_of(run_ids, RunCreated)
    limits = dict.fromkeys(run_ids, SweepLimit())
    for run_id, [first, *_] in created.items():
        origin = first.payload
        pack = Pack.from_dict(origin.pack) if origin.pack else None
        limits[run_id] = SweepLimit(origin.sweep, origin.parallel, pack)
    return limits


def check_executor(workspace: Workspace, executor: str, plans: Sequence[Plan], pack: Pack | None = None) -> None:
    """Check, before anything is created, that the plans can be started.

    Args:
        workspace: provides the scheduler to ask.
        executor: ``slurm`` or ``local``.
        plans: what will be started.
        pack: how they share jobs of Slurm; None: each has its own.

    Raises:
        NotAvailable: the executor, or something that a plan needs, is missing.
        RequestRefused: no partition could ever run one of the plans.
        LaunchError: Slurm does not answer.
        PathError: the runs root has a name that a job's files cannot have.
    """
    problem = unusable_in_root(workspace.root.path, executor)
    if problem is not None:
        raise PathError(problem)
    if executor == "slurm":
        from slurmtrain.slurm.slurm_launch import check

        check(plans, workspace.scheduler, pack)
        return
    from slurmtrain.local import check_here

    for plan in plans:
        check_here(plan)


# --- the plan and the past of a run ----------------------------------------------------------------------------------


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


def run_settings(plan: Plan) -> dict[str, Any]:
    """What events record of a plan, so that lists need not read plans."""
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


# --- what a submission tells its job about interruptions -------------------------------------------------------------

# Nodes are repaired and replaced, so anything older says little.
_WINDOW_S = 90 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class PartitionStats:
    """What is known about the partition that a run goes to, and notes on it for the user.

    ``partition`` is empty for local runs, and if Slurm does not report its default.
    """

    partition: str
    history: InterruptionStats
    notes: tuple[str, ...] = ()


def outlook(workspace: Workspace, run_id: str, plan: Plan, executor: str) -> PartitionStats:
    """What this registry knows about interruptions where a run is about to go. Slurm is not queried again.

    Args:
        workspace: Where the registry is.
        run_id: The run, possibly a new one.
        plan: Its plan.
        executor: ``slurm`` or ``local``.
    """
    partition, grace_s = "", None
    if executor == "slurm":
        from slurmtrain.slurm import site

        # From the answer that Slurm gave when the request was checked.
        with contextlib.suppress(SlurmDown):
            partitions = workspace.scheduler.partitions()
            partition, grace_s = site.partition_names(plan, partitions), site.grace_s(plan, partitions)
    history = InterruptionStats(grace_s=grace_s)
    if workspace.has_registry and (partition or executor == "local"):
        from slurmtrain.registry.queries import partition_history

        since = time.time() - _WINDOW_S
        recorded = workspace.store.ask(
            lambda db: partition_history(db, run_id, plan.spec.name, executor, partition, since)
        )
        # What a stall costs depends on the run's own model and ranks; how long a save takes, less so.
        stall_s = recorded.stall_s if recorded.own else None
        costs = InterruptionStats(grace_s=grace_s, stall_s=stall_s, save_s=recorded.save_s)
        history = add_attempts(costs, recorded.lived)
    note = too_slow(history.save_s, grace_s, plan.spec.checkpoint.every, f"partition {partition}")
    return PartitionStats(partition, history, (note,) if note else ())
