"""The MLflow runs that are the parents of the runs of sweeps: one for each sweep in each experiment.

A parent is found by a tag, whoever has created it. If several processes create one at the same time, such as node 0 of
each run, all take the one that was chosen (:mod:`.choices`), and the others are deleted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from slurmtrain.model.run.root import RunsRoot
from slurmtrain.model.run.run import Run
from slurmtrain.tracking.to_mlflow import description
from slurmtrain.tracking.to_mlflow.choices import FIRST, Choices
from slurmtrain.tracking.tracker import TrackedRun

_CREATED_AT = "slurmtrain.created_at"
_TAG_LENGTH = 5000


class SweepRuns:
    """The parents in one store."""

    def __init__(self, client: Any, get: Callable[[str], Any | None], uri: str, root: RunsRoot) -> None:
        """Use a store.

        Args:
            client: As in :class:`.run.MlflowRuns`.
            get: The MLflow run with an id, which may have been deleted; None if the store has none.
            uri: The store.
            root: The runs root.
        """
        self._client = client
        self._get = get
        self._uri = uri
        self._root = root
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
            present = self._present(experiment, sweep)
            parent = self._choose(experiment, tracked, origin, present)
            for other in present:
                if other != parent:
                    self._client.delete_run(other)
            self._parents[experiment, sweep] = parent
        return self._parents[experiment, sweep]

    def _choose(self, experiment: str, tracked: TrackedRun, origin: description.Origin, present: Sequence[str]) -> str:
        """The parent of a run of a sweep: the one that was chosen; else the first that is ``present``; else a new one.

        The other arguments are as for :meth:`parent`.
        """
        choices = Choices(self._root.mlflow_sweeps, self._uri, experiment, str(tracked.run.sweep))
        last, chosen = FIRST, choices.after(FIRST)
        while chosen is not None:
            # It may have been created after ``present`` was known.
            shown = None if chosen in present else self._get(chosen)
            if chosen in present or (shown is not None and shown.info.lifecycle_stage == "active"):
                return chosen
            last, chosen = chosen, choices.after(chosen)
        created = present[0] if present else self._create(experiment, tracked, origin)
        parent = choices.choose(created, last)
        if parent != created:
            self._client.delete_run(created)
        return parent

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

    def _present(self, experiment: str, sweep: str) -> list[str]:
        """The parents that a sweep has, which one was created first coming first: more than one after a kill."""
        present = self._client.search_runs([experiment], f"tags.`{description.SWEEP_TAG}` = '{sweep}'")
        ordered = sorted(present, key=lambda run: (run.data.tags.get(_CREATED_AT, ""), run.info.run_id))
        return [str(run.info.run_id) for run in ordered]

    def _create(self, experiment: str, tracked: TrackedRun, origin: description.Origin) -> str:
        run = tracked.run
        tags = description.lasting_tags(run, origin, tracked.plan.spec, "")
        for name in (description.RUN_TAG, "slurmtrain.plan_hash", "slurmtrain.sweep"):
            tags.pop(name, None)
        tags |= {
            description.SWEEP_TAG: str(run.sweep),
            "slurmtrain.varies": ", ".join(origin.varies),
            _CREATED_AT: f"{time.time():.6f}",
        }
        created = self._client.create_run(
            experiment,
            start_time=description.started_ms(run),
            tags={name: value[:_TAG_LENGTH] for name, value in tags.items() if value},
            run_name=description.sweep_name(run),
        )
        return str(created.info.run_id)
