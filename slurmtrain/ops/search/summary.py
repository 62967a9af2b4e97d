"""The progress of a search: how many of its trials are in each state, and the best one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slurmtrain.ops.search.trials import TrialRun, read_trials
from slurmtrain.ops.shared.workspace import Workspace

_STATES = ("complete", "running", "pruned", "failed")


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
            return f"{text}; none has a value of {self.metric} yet"
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
        if objective:
            summaries.append(_summary(sweep, runs, objective))
    return summaries


def _summary(sweep: str, runs: list[TrialRun], objective: Mapping[str, Any]) -> SearchSummary:
    larger = objective.get("mode") == "max"
    complete = [each for each in runs if each.trial.state == "complete"]
    # Of equal ones the first.
    ranked = sorted(complete, key=lambda each: (each.trial.value or 0.0) * (-1 if larger else 1))
    return SearchSummary(
        sweep=sweep,
        metric=str(objective.get("metric")),
        larger=larger,
        trials=max(int(objective.get("trials") or 0), len(runs)),
        states=Counter(each.trial.state for each in runs),
        best=ranked[0] if ranked else None,
    )
