"""The trials of a search, read from its runs, and its progress; ``plugins/search`` chooses them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.run.events.command_events import CancelRequested, RunCreated
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.workspace import Workspace

_STATES = ("complete", "running", "pruned", "failed")


@dataclass(frozen=True, slots=True)
class Trial:
    """A run of a search.

    ``number``: counted from 0. ``values``: values of the searched keys. ``state``: ``running``, ``complete``,
    ``pruned`` or ``failed``. ``value``: its result, if it is complete. ``curve``: the metric by step.
    """

    number: int
    values: Mapping[str, Any]
    state: str
    value: float | None = None
    curve: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrialRun:
    """A trial and its run. ``is_pruned``: whether its search has ended it. ``is_cancelled``: whether a person has.

    ``objective``: what its search is for, as :attr:`.SearchSpec.objective`.
    """

    trial: Trial
    run: Run
    is_pruned: bool
    is_cancelled: bool
    objective: Mapping[str, Any]


def read_trials(
    workspace: Workspace, sweep: str, metric: str | None = None, *, with_curves: bool = False
) -> list[TrialRun]:
    """The trials that a search has, in the order of their numbers; none if the sweep is no search.

    Args:
        workspace: where the runs are, which have been observed.
        sweep: the id of its sweep.
        metric: what the search is for; None: what its runs say.
        with_curves: whether the values by step are needed, as pruners do.
    """
    from slurmtrain.registry import queries

    named = workspace.store.ask(lambda db: queries.named(db, [sweep]))
    run_ids = [run_id for run_id, row in named.items() if row.sweep == sweep]
    created = workspace.store.events_of(run_ids, RunCreated)
    searched = [run_id for run_id in run_ids if created.get(run_id) and created[run_id][0].payload.trial is not None]
    ends = workspace.store.events_of(searched, CancelRequested) if searched else {}
    trials = []
    for run_id, run in workspace.store.load_all(searched).items():
        origin = created[run_id][0].payload
        assert origin.trial is not None
        is_pruned = any(event.payload.prunes for event in ends.get(run_id, ()))
        objective = origin.search or {}
        name = metric or str(objective.get("metric"))
        last = run.metrics.get(name)
        value = last if last is not None and math.isfinite(last) else None
        trial = Trial(
            number=origin.trial,
            values=origin.varies,
            state=_state(run, value, is_pruned=is_pruned),
            value=value,
            curve=_curve_of_trial(workspace, run, name) if with_curves else {},
        )
        trials.append(TrialRun(trial, run, is_pruned, run.cancelled and not is_pruned, objective))
    return sorted(trials, key=lambda each: each.trial.number)


def _state(run: Run, value: float | None, *, is_pruned: bool) -> str:
    if not run.ended:
        return "running"
    if run.state == "cancelled" and is_pruned:
        return "pruned"
    return "complete" if run.state == "completed" and value is not None else "failed"


def _curve_of_trial(workspace: Workspace, run: Run, metric: str) -> dict[int, float]:
    """A metric by step, without what was rolled back."""
    # Imported here: lists do without.
    from slurmtrain.history import read_history

    try:
        curve = read_history(run, workspace.root.run(run.id), [metric]).curves.get(metric)
    except PathError:
        return {}
    points = zip(curve.kept.steps, curve.kept.values, strict=True) if curve else ()
    return {int(step): value for step, value in points if math.isfinite(value)}


# --- progress --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSummary:
    """A search.

    ``sweep``: the id of its sweep. ``trials``: their final number. ``states``: the number in each state.
    ``best``: the best complete one; None: none is complete yet.
    """

    sweep: str
    metric: str
    larger: bool
    trials: int
    states: Mapping[str, int]
    best: TrialRun | None

    def to_json(self) -> dict[str, Any]:
        """What ``status`` and ``best`` print of it as JSON."""
        best = self.best
        return {
            "sweep": self.sweep,
            "metric": self.metric,
            "mode": "max" if self.larger else "min",
            "trials": self.trials,
            "states": dict(self.states),
            "best": None
            if best is None
            else {"run": best.run.id, "value": best.trial.value, "varies": dict(best.trial.values)},
        }

    def __str__(self) -> str:
        states = ", ".join(f"{self.states[state]} {state}" for state in _STATES if self.states.get(state))
        text = f"search {self.sweep}: {sum(self.states.values())} of {self.trials} trials: {states}"
        if self.best is None:
            return f"{text}; none has logged {self.metric} yet"
        values = ", ".join(f"{key}={value}" for key, value in self.best.trial.values.items())
        return f"{text}; best {self.metric} {self.best.trial.value:.6g} of run {self.best.run.id} with {values}"


def summarize(workspace: Workspace, sweeps: Iterable[str]) -> list[SearchSummary]:
    """The sweeps among these that are searches.

    Args:
        workspace: where the runs are, which have been observed.
        sweeps: ids of sweeps; names that are not are left out.
    """
    summaries = []
    for sweep in sweeps:
        runs = read_trials(workspace, sweep)
        objective = runs[-1].objective if runs else {}
        if not objective:
            continue
        larger = objective.get("mode") == "max"
        best_of = max if larger else min
        complete = [each for each in runs if each.trial.state == "complete"]
        summary = SearchSummary(
            sweep=sweep,
            metric=str(objective.get("metric")),
            larger=larger,
            trials=max(int(objective.get("trials") or 0), len(runs)),
            states=Counter(each.trial.state for each in runs),
            # Of equal ones the first.
            best=best_of(complete, key=lambda each: each.trial.value or 0.0, default=None),
        )
        summaries.append(summary)
    return summaries


@dataclass(slots=True)
class Advance:
    """The changes to searches, by run id.

    ``runs``: all runs of the searches that were looked at. ``created``: new runs. ``pruned``: runs that were pruned
    earlier; ``ending``: runs that are pruned from now on.
    """

    runs: list[str] = field(default_factory=list)
    created: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)
    ending: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
