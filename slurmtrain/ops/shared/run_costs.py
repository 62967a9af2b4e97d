"""What runs cost, from the registry alone: no directory of a run is read."""

from __future__ import annotations

from typing import Any

from slurmtrain.model.experiment.prices import gpus_of_node
from slurmtrain.model.run.costs import add_up, charges_of, cost_json
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.workspace import Workspace


def cost_of_run(workspace: Workspace, run: Run) -> dict[str, Any]:
    """The field ``cost`` of a run.

    Args:
        workspace: Where it is.
        run: The run.
    """
    prices = workspace.config.prices
    currency = prices.currency if prices else None
    return cost_json(add_up(charges_of(run, prices)), currency, has_gpus=bool(gpus_of_node(run.resources)))
