"""What runs may cost that are not submitted yet: at most, and as earlier runs of their names did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from slurmtrain.errors import NoPrice
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.prices import LOCAL, Prices
from slurmtrain.model.experiment.slurm_options import named_options
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.ops.shared.run_costs import costs_of_namesakes
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.notes import groups_of_runs
from slurmtrain.slurm import outer_variables
from slurmtrain.specfile import SpecFile

_HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Estimate:
    """What all runs of a spec may cost.

    ``at_most``: one attempt of each that lasts until its time limit, in ``currency``; None: a price or a limit is
    missing, ``problem`` says which, or there are no prices. ``expected``: what they cost if each costs as much as
    completed runs of its name did on average, in ``unit``; None: there are none. ``earlier_runs``: how many these are.
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


def estimate(workspace: Workspace, spec: SpecFile, executor: str) -> Estimate:
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
            groups = groups_of_runs(spec)
            at_most = sum(_most(prices, plan, pack, executor) for plans, pack in groups for plan in plans)
        except NoPrice as error:
            problem = str(error)
    names = Counter(plan.spec.name for plans, _ in groups_of_runs(spec) for plan in plans)
    unit, expected, earlier_runs = _expected(workspace, names)
    return Estimate(prices.currency if prices else None, unit, at_most, expected, earlier_runs, problem)


def _most(prices: Prices, plan: Plan, pack: Pack | None, executor: str) -> float:
    """The most that one attempt of a plan can cost. Raises NoPrice."""
    if plan.spec.resources.time is None:
        raise NoPrice("nothing limits it without 'resources.time'")
    shares = (1.0, 1.0) if pack is None else (1 / pack.runs, pack.gpu_sets / pack.runs)
    per_hour = 0.0
    for part in outer_variables.placed(plan).components:
        resources = part.spec.resources
        names = str(named_options(part.spec.slurm).get("partition") or "").split(",") if executor != LOCAL else [LOCAL]
        if not any(names):
            raise NoPrice("'slurm.partition' does not say which partition's price it has")
        # Slurm may choose the dearest of several.
        node = max(prices.per_hour(name, resources.gpus_per_node, resources.gpu_type, shares) for name in names if name)
        per_hour += resources.allocated.max * node
    return per_hour * plan.spec.resources.time / _HOUR_S


def _expected(workspace: Workspace, names: Mapping[str, int]) -> tuple[str | None, float | None, int]:
    """The unit, the expected cost of so many runs of these ``names``, and how many earlier runs say so."""
    costs = costs_of_namesakes(workspace, list(names))
    units = Counter(cost["unit"] for of_name in costs.values() for cost in of_name)
    if len(units) != 1 or any(not costs.get(name) for name in names):
        return None, None, 0
    means = {name: fmean(cost["spent"] for cost in costs[name]) for name in names}
    return next(iter(units)), sum(count * means[name] for name, count in names.items()), units.total()
