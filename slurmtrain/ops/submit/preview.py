"""What a submission would be, before anything is created: its runs, what varies among them, and what they may cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.config import Config
from slurmtrain.model.spec.sweep import SweepCost, cost_of
from slurmtrain.model.spec.sweep_values import SearchSpec
from slurmtrain.ops.shared.attempts import pack_of_group, request_key, split_groups
from slurmtrain.ops.submit.notes import notes_on_pack, notes_on_plans
from slurmtrain.specfile import PlannedRun, SpecFile


@dataclass(frozen=True, slots=True)
class Preview:
    """The runs of a spec. ``keys``: those that vary. ``notes``: what ``submit`` would warn of in the spec.

    ``search``: what chooses the values of runs, of which the only one here is an example.
    """

    runs: Sequence[PlannedRun]
    keys: Sequence[str]
    cost: SweepCost
    notes: Sequence[str]
    search: SearchSpec | None = None

    def to_json(self) -> dict[str, Any]:
        """What ``submit --dry-run --json`` prints."""
        runs = [
            {
                "name": run.plan.spec.name,
                "plan_hash": run.plan.hash,
                "varies": dict(run.varies),
                "overrides": list(run.overrides),
            }
            for run in self.runs
        ]
        search = {"search": self.search.to_dict()} if self.search is not None else {}
        return {"schema": 1, "runs": runs, **search, "cost_per_attempt": cost_json(self.cost)}


def preview(spec: SpecFile, executor: str) -> Preview:
    """What submitting all runs of ``spec`` would be; ``executor``: what would start them, for the notes."""
    plans = [run.plan for run in spec.runs]
    keys = list(dict.fromkeys(key for run in spec.runs for key in run.varies))
    notes = [*map(str, spec.warnings), *notes_on_pack(spec.pack, executor), *notes_on_plans(plans, executor)]
    return Preview(spec.runs, keys, cost_of_runs(spec), notes, spec.search)


def cost_of_runs(spec: SpecFile) -> SweepCost:
    """What all runs of a spec may cost."""
    # The runs of a search are all like its example.
    runs = spec.runs * (spec.search.trials if spec.search is not None else 1)
    if spec.pack is None:
        return cost_of(run.plan.spec.resources for run in runs)
    # As they are submitted: those that do not fill a job are a smaller pack, which has a node to itself all the same.
    keyed = ((request_key(run.plan, run.secrets), run.plan.spec.resources) for run in runs)
    groups = split_groups(keyed, len(runs), spec.pack.runs)
    return sum((cost_of(group, pack_of_group(spec.pack, len(group))) for group in groups), cost_of(()))


def cost_json(cost: SweepCost) -> dict[str, Any]:
    """A cost in JSON; sums that nothing bounds are null."""
    bounded = not cost.without_limit
    return {
        "runs": cost.runs,
        "node_hours": cost.node_hours if bounded else None,
        "gpu_hours": cost.gpu_hours if bounded else None,
        "runs_without_limit": cost.without_limit,
    }


def large_sweep(config: Config, spec: SpecFile) -> str:
    """Why a sweep should be confirmed before it is submitted, as a sentence without a full stop; empty if not."""
    if len(spec.runs) == 1 and spec.search is None:
        return ""
    cost = cost_of_runs(spec)
    excess = cost.excess(config.sweep_confirm_runs, config.sweep_confirm_gpu_hours)
    return f"this sweep is {cost}: {excess}" if excess else ""
