"""Which runs share a submission to Slurm, and the jobs that runs share.

The runs of a sweep that request the same are the elements of one job array, or share the jobs of its elements. How many
run at once is limited by job arrays on Slurm, and on this machine by turns.

A cancel of a run that shares its job must not end the job of the others. Its lease is closed, which its agent reads,
and which ends it at once if the job starts later. Only if no other run needs the job, it is cancelled.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.sweep import Pack, packing_problem
from slurmtrain.model.run.events.command_events import JobReplaced
from slurmtrain.model.run.layout import RunDir, SubmissionDir
from slurmtrain.ops.shared.next_attempts import NewAttempt, SweepLimit, read_limits
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.node import read_launch
from slurmtrain.runtime.job import lease
from slurmtrain.runtime.upstreams import read_upstreams

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run

T = TypeVar("T")


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
        f"up to {least} runs may run at once instead of {limit}: they need {len(sizes)} jobs and job arrays, because "
        "they request different resources or are too many for one, and Slurm limits each array separately"
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


def leave_job(workspace: Workspace, directory: RunDir, run: Run) -> None:
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
        why = "it was cancelled; its job continues with other runs"
        journal.write(JobReplaced(job_id=newest.job_id, restart=newest.restart, why=why))
