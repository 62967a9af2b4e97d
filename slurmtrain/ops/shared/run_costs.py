"""What runs cost, from the registry alone: no directory of a run is read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurmtrain.model.experiment.prices import mean_gpus
from slurmtrain.model.run.costs import Charges, add_up, charges_of, cost_json
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.diagnosis.node_load import Idle
    from slurmtrain.ops.shared.views import RunRecord

# So many earlier runs of a name say what another one will cost.
_NAMESAKES = 20


def costs_of_runs(workspace: Workspace, records: Mapping[str, RunRecord]) -> dict[str, dict[str, Any]]:
    """The field ``cost`` of each of these runs, by the run's id.

    Args:
        workspace: Where they are.
        records: The runs, as lists show them, by id.
    """
    attempts = workspace.store.charged_attempts(list(records))
    return {
        run_id: _cost(workspace, attempts.get(run_id, ()), record.listed.row["executor"], record.listed.resources)
        for run_id, record in records.items()
    }


def costs_of_namesakes(workspace: Workspace, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The field ``cost`` of the newest completed runs of each of these ``names``. It creates no registry.

    Args:
        workspace: Where they are.
        names: Names of runs.
    """
    if not workspace.has_registry:
        return {}
    completed = workspace.store.completed_namesakes(names)
    attempts = workspace.store.charged_attempts(list(completed))
    costs: dict[str, list[dict[str, Any]]] = {}
    for run_id, (name, executor) in completed.items():
        of_run = attempts.get(run_id, [])
        if len(costs.setdefault(name, [])) < _NAMESAKES and of_run:
            costs[name].append(_cost(workspace, of_run, executor, of_run[-1].resources))
    return costs


def cost_of_run(workspace: Workspace, run: Run, idle: Idle | None) -> dict[str, Any]:
    """The field ``cost`` of a run.

    Args:
        workspace: Where it is.
        run: The run.
        idle: Since when it has been idle; None: it is not.
    """
    return _cost(workspace, run.attempts, run.executor, run.resources, idle)


def idle_part(charges: Sequence[Charges], idle: Idle | None) -> tuple[Charges, float] | None:
    """What the newest attempt of a run took, and for how many seconds it has been idle; None: it is not.

    Args:
        charges: What each of its attempts took, in order.
        idle: Since when it has been idle; None: it is not.
    """
    return (charges[-1], max(0.0, time.time() - idle.since)) if charges and idle is not None else None


def _cost(
    workspace: Workspace,
    attempts: Sequence[Attempt],
    executor: str,
    resources: Mapping[str, Any],
    idle: Idle | None = None,
) -> dict[str, Any]:
    prices = workspace.config.prices
    charges = charges_of(attempts, executor, prices)
    return cost_json(
        add_up(charges),
        prices.currency if prices else None,
        has_gpus=bool(mean_gpus(resources)),
        idle=idle_part(charges, idle),
    )
