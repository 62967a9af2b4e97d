"""What runs cost, from the registry alone: no directory of a run is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurmtrain.model.experiment.prices import gpus_of_node
from slurmtrain.model.run.costs import add_up, charges_of, cost_json
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.shared.views import RunRecord


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


def cost_of_run(workspace: Workspace, run: Run) -> dict[str, Any]:
    """The field ``cost`` of a run.

    Args:
        workspace: Where it is.
        run: The run.
    """
    return _cost(workspace, run.attempts, run.executor, run.resources)


def _cost(
    workspace: Workspace, attempts: Sequence[Attempt], executor: str, resources: Mapping[str, Any]
) -> dict[str, Any]:
    prices = workspace.config.prices
    charges = add_up(charges_of(attempts, executor, prices))
    return cost_json(charges, prices.currency if prices else None, has_gpus=bool(gpus_of_node(resources)))
