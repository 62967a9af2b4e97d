"""How many runs of a sweep may run at once: on Slurm by the limits of its job arrays, on this machine by slots."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmtrain.model.run.events.command import RunCreated
from slurmtrain.model.spec.sweep import Pack
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.launch import Turn

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run


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
    origins = {run_id: events[0].payload for run_id, events in created.items()}
    return {run_id: _limit_of(origins[run_id]) if run_id in origins else SweepLimit() for run_id in run_ids}


def _limit_of(origin: RunCreated) -> SweepLimit:
    return SweepLimit(origin.sweep, origin.parallel, Pack.from_dict(origin.pack) if origin.pack else None)


def turn_of(workspace: Workspace, run: Run, behind: str | None = None) -> Turn | None:
    """What the next attempt of a run waits for; None: for nothing.

    Args:
        workspace: where the run is.
        run: the run, which has been observed.
        behind: the run that was started before it.
    """
    if run.executor != "local" or run.sweep is None:
        return None
    return read_limits(workspace, [run.id])[run.id].turn(run.executor, behind)


def share_limit(limit: int | None, sizes: Sequence[int], pack: Pack | None = None) -> list[int | None]:
    """How many jobs of each of several arrays may run at once, so that the runs of all together are ``limit``.

    Slurm limits each array by itself, and counts jobs. Larger arrays get more, and each at least one job: if these
    alone have more runs than ``limit``, that many may run at once.

    Args:
        limit: how many runs may run at once; None: all.
        sizes: how many runs the arrays have.
        pack: how runs share jobs, as :func:`~slurmtrain.ops.shared.arrays.grouping.pack_of_group` has it for each
            array; None: each has its own.

    Returns:
        The limit of each array; None: it needs none.
    """
    if limit is None or sum(sizes) <= limit:
        return [None] * len(sizes)
    runs = _runs_of_a_job(sizes, pack)
    jobs = [-(-size // each) for size, each in zip(sizes, runs, strict=True)]
    shares, left = [1] * len(sizes), limit - sum(runs)
    # The next start goes to the array of which the smallest part may run.
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
