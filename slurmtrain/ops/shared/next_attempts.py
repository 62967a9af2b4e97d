"""Attempts that are about to be started: the next one of a run, what it follows, and which share a submission to Slurm.

The runs of a sweep that request the same are the elements of one job array, or share the jobs of its elements. How many
run at once is limited by job arrays on Slurm, and on this machine by turns.

A cancel of a run that shares its job must not end the job of the others. Its lease is closed, which its agent reads,
and which ends it at once if the job starts later. Only if no other run needs the job, it is cancelled.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from slurmtrain.errors import PathError, SlurmDown, SlurmtrainError, UserError
from slurmtrain.model.experiment.plan import REDACTED, Plan
from slurmtrain.model.experiment.sweep import Pack, packing_problem
from slurmtrain.model.interruption.interval import InterruptionStats, add_attempts, too_slow
from slurmtrain.model.run.events.base import is_plain
from slurmtrain.model.run.events.command_events import JobReplaced, RunCreated
from slurmtrain.model.run.layout import AttemptDir, RunDir, SubmissionDir
from slurmtrain.model.written import texts_as_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.node import Turn, read_launch, read_plan
from slurmtrain.runtime.job import lease
from slurmtrain.runtime.upstreams import read_upstreams

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
            f"the values of {', '.join(missing)} are secret, so they were not recorded; set them in the "
            "environment and try again"
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


# --- groups -----------------------------------------------------------------------------------------------------------


def group_attempts(
    workspace: Workspace, attempts: Sequence[NewAttempt], limits: Mapping[str, SweepLimit] | None = None
) -> list[tuple[Sequence[NewAttempt], SweepLimit]]:
    """The attempts that share a submission to Slurm, how many of its jobs may run at once, and how runs share those.

    Args:
        workspace: where the runs are.
        attempts: the attempts.
        limits: what holds for each run, by its id; None: as it was submitted; the runs have been observed.
    """
    # Slurm need not be asked how large an array may be: most submissions are of a single run.
    if len(attempts) < 2:
        return [(attempts, SweepLimit())] if attempts else []
    limits = read_limits(workspace, [each.run.id for each in attempts]) if limits is None else limits
    bounded: dict[SweepLimit, list[NewAttempt]] = {}
    for each in attempts:
        limit = limits[each.run.id]
        # An override of the run's may have made it too large for a pack.
        if limit.pack is not None and packing_problem(each.plan.spec.resources, limit.pack, each.plan.spec.slurm):
            limit = replace(limit, pack=None)
        # Runs without a limit may share an array, whichever sweep they are of.
        bounded.setdefault(limit if limit.parallel else SweepLimit(pack=limit.pack), []).append(each)
    largest = workspace.scheduler.max_array_size()
    groups: list[tuple[Sequence[NewAttempt], SweepLimit]] = []
    for limit, members in bounded.items():
        keyed = [(request_key(each.plan, each.secrets, each.run), each) for each in members]
        split = split_groups(keyed, largest, limit.pack.runs if limit.pack is not None else 1)
        shares = share_limit(limit.parallel, [len(group) for group in split], limit.pack)
        for group, at_once in zip(split, shares, strict=True):
            groups.append((group, replace(limit, parallel=at_once, pack=pack_of_group(limit.pack, len(group)))))
    return groups


def request_key(plan: Plan, secrets: Mapping[str, str], run: RunDir | None = None) -> str | None:
    """What a run requests from Slurm, as text: two runs with the same text can share a batch script.

    None: it cannot share one, since heterogeneous jobs cannot be elements of an array (sbatch(1)).

    Args:
        plan: the run's plan.
        secrets: the values that reach its job by the environment of sbatch alone.
        run: its directory, which says after which runs it starts; None: there is none yet.
    """
    spec = plan.spec
    if spec.resources.components:
        return None
    script = (spec.resources, sorted(spec.slurm.items()), spec.setup, spec.requeue.enabled, spec.network.profile)
    after = [upstream.run for upstream in read_upstreams(run)] if run is not None else []
    return repr((script, spec.preflight.exclude, spec.tracking.mlflow, sorted(secrets.items()), after))


def split_groups(keyed: Iterable[tuple[str | None, T]], largest: int, pack: int = 1) -> list[Sequence[T]]:
    """Groups of what has the same key, each in the given order, by their first members.

    Args:
        keyed: what to group, with its key; None: it is a group of its own.
        largest: how many jobs a group may be; with less than 2 there are only groups of one job.
        pack: how many members share a job. A group fills all of its jobs, or has fewer members than fill one.
    """
    groups: dict[str | int, list[T]] = {}
    for number, (key, member) in enumerate(keyed):
        # Keys are text, so a number never joins a member to others.
        groups.setdefault(number if key is None else key, []).append(member)
    size = max(1, largest) * pack
    parts: list[Sequence[T]] = []
    for group in groups.values():
        full = len(group) // pack * pack
        parts += [group[start : min(start + size, full)] for start in range(0, full, size)]
        parts += [group[full:]] if full < len(group) else []
    return parts


def pack_of_group(pack: Pack | None, members: int) -> Pack | None:
    """How the members of one of the groups of :func:`split_groups` share jobs; None: each has its own.

    Args:
        pack: how they are to.
        members: how many there are: if they do not fill a job, they are a smaller pack.
    """
    return pack if pack is None or members >= pack.runs else replace(pack, runs=members)


def share_limit(limit: int | None, sizes: Sequence[int], pack: Pack | None = None) -> list[int | None]:
    """How many jobs of each of several arrays may run at once, so that the runs of all together are ``limit``.

    Slurm limits each array by itself, and counts jobs. Larger arrays get more, and each at least one job: if these
    alone have more runs than ``limit``, that many may run at once.

    Args:
        limit: how many runs may run at once; None: all.
        sizes: how many runs the arrays have.
        pack: how runs share jobs, as :func:`pack_of_group` has it for each array; None: each has its own.

    Returns:
        The limit of each array; None: it needs none.
    """
    if limit is None or sum(sizes) <= limit:
        return [None] * len(sizes)
    runs = _runs_of_a_job(sizes, pack)
    jobs = [-(-size // each) for size, each in zip(sizes, runs, strict=True)]
    shares, left = [1] * len(sizes), limit - sum(runs)
    # The next start goes to the array with the smallest share of elements that may run.
    parts = [(1 / count, index) for index, count in enumerate(jobs)]
    heapq.heapify(parts)
    while parts and left > 0:
        _, index = heapq.heappop(parts)
        if shares[index] < jobs[index] and runs[index] <= left:
            shares[index] += 1
            left -= runs[index]
            heapq.heappush(parts, (shares[index] / jobs[index], index))
    return [share if share < count else None for share, count in zip(shares, jobs, strict=True)]


def _runs_of_a_job(sizes: Sequence[int], pack: Pack | None) -> list[int]:
    """How many runs share a job of each of the arrays."""
    return [1 if pack is None else min(pack.runs, size) for size in sizes]


def describe_excess(limit: int | None, sizes: Sequence[int], pack: Pack | None = None) -> list[str]:
    """A note if more than ``limit`` may run at once, since arrays of these ``sizes`` are limited one by one.

    ``pack``: as for :func:`share_limit`.
    """
    least = sum(_runs_of_a_job(sizes, pack))
    if limit is None or least <= limit:
        return []
    return [
        f"up to {least} runs may run at once, and not {limit}: they are {len(sizes)} jobs and job arrays, as they "
        "request different resources or are too many for one, and Slurm limits each array by itself"
    ]


# --- jobs that runs share --------------------------------------------------------------------------------------------


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
        return any(
            lease.granted_to(other.run) == other.number and lease.ended_as(other.run, other.number) is None
            for other in others
            if other.run.id != submission.run.id
        )
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
