"""What runs may cost: node-hours and GPU-hours, if each uses all of its time limit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slurmtrain.model.spec.resources.section import ResourcesSpec
from slurmtrain.model.spec.sweep.pack import Pack

_HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class SweepCost:
    """The most that one attempt of each run can take: time limit x nodes x GPUs.

    ``runs``: how many. ``without_limit``: how many of these have no time limit, and are in no sum.
    """

    runs: int
    node_hours: float
    gpu_hours: float
    without_limit: int

    def __add__(self, other: SweepCost) -> SweepCost:
        return SweepCost(
            self.runs + other.runs,
            self.node_hours + other.node_hours,
            self.gpu_hours + other.gpu_hours,
            self.without_limit + other.without_limit,
        )

    def __str__(self) -> str:
        runs = f"{self.runs} run{'s' * (self.runs != 1)}"
        if self.without_limit == self.runs:
            return f"{runs} without a time limit"
        hours = f"{runs}, at most {self.gpu_hours:,.1f} GPU-hours and {self.node_hours:,.1f} node-hours per attempt"
        return f"{hours}, and {self.without_limit} of them without a time limit" if self.without_limit else hours

    def excess(self, most_runs: int, most_gpu_hours: float) -> str:
        """Which limit this exceeds, as half a sentence that names its key in the configuration; empty if none.

        Args:
            most_runs: The limit of runs.
            most_gpu_hours: The limit of GPU-hours.
        """
        if self.runs > most_runs:
            return f"more than {most_runs:,} runs (sweep_confirm_runs)"
        if self.gpu_hours > most_gpu_hours:
            return f"more than {most_gpu_hours:,g} GPU-hours (sweep_confirm_gpu_hours)"
        return ""


def cost_of(resources: Iterable[ResourcesSpec], pack: Pack | None = None) -> SweepCost:
    """The cost of runs with these ``resources``. Spare nodes count; a range of nodes counts with its largest number.

    ``pack``: how they share jobs, which they fill: each has its share of a node then, and perhaps of the GPUs.
    """
    sharing = 1 if pack is None else pack.runs
    runs = without_limit = 0
    node_hours = gpu_hours = 0.0
    for each in resources:
        runs += 1
        if each.time is None:
            without_limit += 1
            continue
        hours = each.time / _HOUR_S
        node_hours += hours * each.allocated.max / sharing
        gpu_hours += hours * each.most_gpus / (sharing if pack is not None and pack.share_gpu else 1)
    return SweepCost(runs, node_hours, gpu_hours, without_limit)
