"""Runs side by side: their settings where they differ, and their metrics, over seeds where only these differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.query.fields import differing, identity

_SEEDS = ("seed", "random_state")
_UNFINISHED = ("failed", "lost", "cancelled", "unreadable")


@dataclass(frozen=True, slots=True)
class Score:
    """A metric of a run: its newest value, the best one with its step, and None for what is not known."""

    last: float | None = None
    best: float | None = None
    best_step: int | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """A run with its settings, by name, and its metrics."""

    id: str
    name: str
    state: str
    settings: Mapping[str, Any]
    scores: Mapping[str, Score]


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean of values, and their standard deviation; None for less than two of them."""

    mean: float
    deviation: float | None


def spread_of(values: Sequence[float]) -> Spread | None:
    """The mean of some values, and their standard deviation; None for no values."""
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Spread(mean, None)
    # Of a sample, hence n - 1: these seeds stand for all others.
    return Spread(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)))


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """Runs that differ in nothing but seeds, or other settings of little interest, the best first; maybe only one."""

    runs: Sequence[Compared]

    def spread(self, metric: str, *, best: bool = False) -> Spread | None:
        """The newest values of a metric, or the ``best`` ones, over the runs; None if no run has one."""
        scores = [run.scores.get(metric, Score()) for run in self.runs]
        return spread_of([value for score in scores if (value := score.best if best else score.last) is not None])


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Runs side by side.

    ``differs``: the names of the settings that differ; ``groups``: the best first; ``over``: the settings that may
    differ between runs of a group.
    """

    differs: Sequence[str]
    groups: Sequence[SeedGroup]
    over: Sequence[str] = ()


def is_seed(name: str) -> bool:
    """Whether a setting is a seed of random numbers, such as ``seed``, ``params.seed`` or ``params.run.seed``."""
    if name == "seed":
        return True
    last = name.rpartition(".")[2]
    return name.startswith("params.") and (last in _SEEDS or last.endswith("_seed"))


def is_unfinished(state: str) -> bool:
    """Whether a run in this ``state`` ended before it was done, so that its metrics describe a part of it."""
    return state in _UNFINISHED


def compare_runs(
    runs: Sequence[Compared],
    metric: str | None,
    *,
    larger: bool,
    over: Sequence[str] = (),
    any_state: bool = False,
) -> SideBySide:
    """Compare runs.

    Args:
        runs: The runs.
        metric: The metric to sort the runs by: by the mean of the newest values over seeds; None: they stay in order.
        larger: Whether larger values of it are better.
        over: The settings that may differ between runs of a group; empty: seeds.
        any_state: Runs that ended before they were done do not come after the others.
    """
    differs = differing([run.settings for run in runs])
    over = [name for name in differs if (name in over if over else is_seed(name))]
    groups = _groups(runs, [name for name in differs if name not in over]) if over else [[run] for run in runs]
    if metric is None:
        return SideBySide(differs, [SeedGroup(group) for group in groups], over)

    def order(group: SeedGroup) -> tuple[bool, bool, float]:
        spread = group.spread(metric)
        # A value that is not a number compares as neither, and would upset the order of the others.
        if spread is None or not math.isfinite(spread.mean):
            return True, False, 0.0
        last = not any_state and all(is_unfinished(run.state) for run in group.runs)
        return False, last, -spread.mean if larger else spread.mean

    sorted_groups = [SeedGroup(sorted(group, key=lambda run: order(SeedGroup([run])))) for group in groups]
    return SideBySide(differs, sorted(sorted_groups, key=order), over)


def _groups(runs: Sequence[Compared], names: Sequence[str]) -> list[list[Compared]]:
    """The runs of one name whose settings of these ``names`` are equal, together."""
    groups: dict[tuple[Any, ...], list[Compared]] = {}
    for run in runs:
        # A missing setting is a value too: a run without it is no repetition of one with it.
        key = [identity(run.settings[name]) if name in run.settings else None for name in names]
        groups.setdefault((run.name, *key), []).append(run)
    return list(groups.values())


# States in the order of counting: first the states that somebody may have to look at.
_STATES = ("unreadable", "failed", "lost", "running", "requeued", "pending", "created", "cancelled", "completed")


def count_states(states: Sequence[str]) -> str:
    """How many there are of each of these states, such as ``2 failed, 5 running``."""
    counts = Counter(states)
    # A state that only a newer version knows comes first, too.
    ordered = sorted(counts, key=lambda state: _STATES.index(state) if state in _STATES else -1)
    return ", ".join(f"{counts[state]} {state}" for state in ordered)
