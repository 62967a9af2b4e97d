"""The MLflow runs that are the parents of the runs of sweeps: one for each sweep in each experiment.

A parent is found by a tag, whoever has created it. If two commands create one at the same time, both take the one that
was created first, and the other is deleted.
"""

from __future__ import annotations

import time
from typing import Any

from slurmtrain.model.run.run import Run
from slurmtrain.tracking.to_mlflow import description
from slurmtrain.tracking.tracker import TrackedRun

_CREATED_AT = "slurmtrain.created_at"
_TAG_LENGTH = 5000


class SweepRuns:
    """The parents in one store."""

    def __init__(self, client: Any) -> None:
        """``client``: MLflow's."""
        self._client = client
        self._parents: dict[tuple[str, str], str] = {}

    def parent(self, experiment: str, tracked: TrackedRun, origin: description.Origin) -> str:
        """The id of the parent of a run of a sweep, created if there is none.

        Args:
            experiment: The id of the experiment.
            tracked: The run.
            origin: Where it came from.
        """
        sweep = tracked.run.sweep
        assert sweep is not None
        if (experiment, sweep) not in self._parents:
            parent = self._find(experiment, sweep)
            if parent is None:
                self._create(experiment, tracked, origin)
                parent = self._find(experiment, sweep)
            assert parent is not None
            self._parents[experiment, sweep] = parent
        return self._parents[experiment, sweep]

    def set_status(self, parent: str, run: Run) -> None:
        """Set the status of the parent of a run, whose own is in MLflow already."""
        info = self._client.get_run(parent).info
        if not run.ended or self._has_children(info, parent, "RUNNING", "SCHEDULED"):
            if info.status != "RUNNING":
                self._client.update_run(parent, status="RUNNING")
            return
        status = next((each for each in ("FAILED", "KILLED") if self._has_children(info, parent, each)), "FINISHED")
        ended = max(description.milliseconds(run.ended_at or 0.0), info.end_time or 0)
        self._client.set_terminated(parent, status, ended)

    def _has_children(self, info: Any, parent: str, *statuses: str) -> bool:
        children = f"tags.`mlflow.parentRunId` = '{parent}'"
        conditions = (f"{children} and attributes.status = '{status}'" for status in statuses)
        return any(self._client.search_runs([info.experiment_id], each, max_results=1) for each in conditions)

    def _find(self, experiment: str, sweep: str) -> str | None:
        """The parent of a sweep; of several, the one that was created first, and the others are deleted."""
        present = self._client.search_runs([experiment], f"tags.`{description.SWEEP_TAG}` = '{sweep}'")
        ordered = sorted(present, key=lambda run: (run.data.tags.get(_CREATED_AT, ""), run.info.run_id))
        for run in ordered[1:]:
            self._client.delete_run(run.info.run_id)
        return str(ordered[0].info.run_id) if ordered else None

    def _create(self, experiment: str, tracked: TrackedRun, origin: description.Origin) -> None:
        run = tracked.run
        tags = description.lasting_tags(run, origin, tracked.plan.spec, "")
        for name in (description.RUN_TAG, "slurmtrain.plan_hash", "slurmtrain.sweep"):
            tags.pop(name, None)
        tags |= {
            description.SWEEP_TAG: str(run.sweep),
            "slurmtrain.varies": ", ".join(origin.varies),
            _CREATED_AT: f"{time.time():.6f}",
        }
        self._client.create_run(
            experiment,
            start_time=description.started_ms(run),
            tags={name: value[:_TAG_LENGTH] for name, value in tags.items() if value},
            run_name=description.sweep_name(run),
        )
