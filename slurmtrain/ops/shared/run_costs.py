"""What runs cost, from the registry alone: no directory of a run is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slurmtrain.model.run.accounting import mean_gpus
from slurmtrain.model.run.costs import Charges, add_up, charges_of, cost_json
from slurmtrain.model.run.events.command_events import RunCreated, Submitting
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.workspace import Workspace


def charges_of_runs(workspace: Workspace, runs: Mapping[str, Run]) -> dict[str, list[Charges]]:
    """What each attempt of each of these ``runs`` took, by the run's id.

    Args:
        workspace: Where they are.
        runs: The runs, by id.
    """
    submitting = workspace.store.events_of(list(runs), Submitting)
    created = workspace.store.events_of(list(runs), RunCreated)
    return {
        run_id: charges_of(
            run,
            {event.payload.submission: event.payload for event in submitting.get(run_id, ())},
            next((event.payload.resources for event in created.get(run_id, ())), run.resources),
            workspace.config.prices,
            {},
        )
        for run_id, run in runs.items()
    }


def cost_of_run(workspace: Workspace, run: Run) -> dict[str, Any]:
    """The field ``cost`` of a run.

    Args:
        workspace: Where it is.
        run: The run.
    """
    prices = workspace.config.prices
    charges: Sequence[Charges] = charges_of_runs(workspace, {run.id: run})[run.id]
    return cost_json(add_up(charges), prices.currency if prices else None, has_gpus=bool(mean_gpus(run.resources)))
