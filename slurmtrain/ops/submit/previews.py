"""Runs before they are submitted: which they are, what ``submit`` would note, and how much they may cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from slurmtrain.config import Config
from slurmtrain.errors import NoPrice
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.prices import LOCAL, Prices
from slurmtrain.model.experiment.slurm_options import named_options
from slurmtrain.model.experiment.sweep import Pack, SweepCost, cost_of
from slurmtrain.model.experiment.sweep_values import SearchSpec
from slurmtrain.ops.shared.shared_jobs import pack_of_group, request_key, split_groups
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.notes import notes_on_pack, notes_on_plans
from slurmtrain.slurm import outer_variables
from slurmtrain.specfile import PlannedRun, SpecFile

_HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Estimate:
    """What all runs of a spec may cost.

    ``at_most``: one attempt of each that lasts until its time limit, in ``currency``; None: a price or a limit is
    missing, ``problem`` says which, or there are no prices. ``expected``: their cost if each costs as much as completed
    runs of its name did on average, in ``unit``; None: there are none. ``earlier_runs``: how many these are.
    """

    currency: str | None
    unit: str | None
    at_most: float | None
    expected: float | None
    earlier_runs: int
    problem: str | None

    def to_json(self) -> dict[str, Any]:
        """``price`` of what ``submit --dry-run --json`` prints."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Preview:
    """The runs of a spec. ``keys``: those that vary. ``notes``: what ``submit`` would warn of in the spec.

    ``price``: the money they may cost. ``search``: the search that chooses the values of runs, whose only run here is
    an example.
    """

    runs: Sequence[PlannedRun]
    keys: Sequence[str]
    cost: SweepCost
    price: Estimate
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
        # Sums that nothing bounds are null.
        bounded = not self.cost.without_limit
        limits = {
            "runs": self.cost.runs,
            "node_hours": self.cost.node_hours if bounded else None,
            "gpu_hours": self.cost.gpu_hours if bounded else None,
            "runs_without_limit": self.cost.without_limit,
        }
        return {
            "schema": 1,
            "runs": runs,
            **search,
            "cost_per_attempt": limits,
            "price": self.price.to_json(),
        }


def preview(workspace: Workspace, spec: SpecFile, executor: str, shown: str | None = None) -> Preview:
    """What submitting all runs of a spec would be.

    Args:
        workspace: where they would be.
        spec: the spec.
        executor: what would start them.
        shown: the executor that they are shown for, if it is another one: their cost depends on it.
    """
    plans = [run.plan for run in spec.runs]
    keys = list(dict.fromkeys(key for run in spec.runs for key in run.varies))
    notes = [*map(str, spec.warnings), *notes_on_pack(spec.pack, executor), *notes_on_plans(plans, executor)]
    price = _estimate(workspace, spec, shown or executor)
    return Preview(spec.runs, keys, cost_of_runs(spec), price, notes, spec.search)


def _groups_of_runs(spec: SpecFile) -> Iterator[tuple[Sequence[Plan], Pack | None]]:
    """The plans of all runs of a spec, as they share jobs. The runs of a search are all like its example."""
    runs = spec.runs * (spec.search.trials if spec.search is not None else 1)
    if spec.pack is None:
        yield [run.plan for run in runs], None
        return
    # As they are submitted: those that do not fill a job are a smaller pack, which has a node to itself all the same.
    keyed = ((request_key(run.plan, run.secrets), run.plan) for run in runs)
    for group in split_groups(keyed, len(runs), spec.pack.runs):
        yield group, pack_of_group(spec.pack, len(group))


def cost_of_runs(spec: SpecFile) -> SweepCost:
    """What all runs of a spec may cost."""
    groups = _groups_of_runs(spec)
    return sum((cost_of((plan.spec.resources for plan in plans), pack) for plans, pack in groups), cost_of(()))


def large_sweep(config: Config, spec: SpecFile) -> str:
    """Why a sweep should be confirmed before it is submitted, as a sentence without a full stop; empty if not."""
    if len(spec.runs) == 1 and spec.search is None:
        return ""
    cost = cost_of_runs(spec)
    excess = cost.excess(config.sweep_confirm_runs, config.sweep_confirm_gpu_hours)
    return f"this sweep is {cost}: {excess}" if excess else ""


# --- money ------------------------------------------------------------------------------------------------------------


def _estimate(workspace: Workspace, spec: SpecFile, executor: str) -> Estimate:
    """What all runs of a spec may cost.

    Args:
        workspace: Where earlier runs are.
        spec: The spec.
        executor: What would start them.
    """
    prices = workspace.config.prices
    at_most, problem = None, None
    if prices is not None:
        try:
            groups = _groups_of_runs(spec)
            at_most = sum(_highest_cost(prices, plan, pack, executor) for plans, pack in groups for plan in plans)
        except NoPrice as error:
            problem = str(error)
    names = Counter(plan.spec.name for plans, _ in _groups_of_runs(spec) for plan in plans)
    unit, expected, earlier_runs = _expected(workspace, names)
    return Estimate(prices.currency if prices else None, unit, at_most, expected, earlier_runs, problem)


def _highest_cost(prices: Prices, plan: Plan, pack: Pack | None, executor: str) -> float:
    """The most that one attempt of a plan can cost. Raises NoPrice."""
    if plan.spec.resources.time is None:
        raise NoPrice("there is no limit without 'resources.time'")
    shares = (1.0, 1.0) if pack is None else (1 / pack.runs, pack.gpu_sets / pack.runs)
    per_hour = 0.0
    for part in outer_variables.placed(plan).components:
        resources = part.spec.resources
        names = str(named_options(part.spec.slurm).get("partition") or "").split(",") if executor != LOCAL else [LOCAL]
        if not any(names):
            raise NoPrice("set 'slurm.partition', since the price depends on it")
        # Slurm may choose the dearest of several.
        node = max(prices.per_hour(name, resources.gpus_per_node, resources.gpu_type, shares) for name in names if name)
        per_hour += resources.allocated.max * node
    return per_hour * plan.spec.resources.time / _HOUR_S


def _expected(workspace: Workspace, names: Mapping[str, int]) -> tuple[str | None, float | None, int]:
    """The unit, the expected cost of so many runs of these ``names``, and how many earlier runs say so."""
    # Imported here: it reads earlier runs, which no submission does.
    from slurmtrain.ops.shared.run_costs import costs_of_namesakes

    costs = costs_of_namesakes(workspace, list(names))
    units = Counter(cost["unit"] for of_name in costs.values() for cost in of_name)
    if len(units) != 1 or any(not costs.get(name) for name in names):
        return None, None, 0
    means = {name: fmean(cost["spent"] for cost in costs[name]) for name in names}
    return next(iter(units)), sum(count * means[name] for name, count in names.items()), units.total()
