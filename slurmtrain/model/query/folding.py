"""A sweep as one entry of a list: its states, the values that it tries, its best run, and what went wrong."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from slurmtrain.model.query.comparison import count_states
from slurmtrain.model.query.fields import differing_values, number_of, write_measured, write_value
from slurmtrain.model.query.measures import is_larger_better
from slurmtrain.model.run.job_state import commonest

# What several runs together do not have.
_EMPTY = dict.fromkeys(("step", "total_steps", "eta_seconds", "steps_per_second", "checkpoint"))
# Runs that somebody may have to look at; none of them is the best.
_BROKEN = frozenset({"failed", "lost", "unreadable"})
# Beginnings of the names of metrics that say more about a run than metrics of its training data.
_HELD_OUT = ("val", "eval", "test")


class Objective(NamedTuple):
    """What a sweep is for: a ``metric``, and whether ``larger`` values of it are better."""

    metric: str
    larger: bool


def fold_sweep(runs: Sequence[Mapping[str, Any]], objective: Objective | None = None) -> dict[str, Any]:
    """What a list shows of a sweep, partly under the names of the fields of a run.

    Also ``states``, how many runs are in each; ``swept``, the different values of each setting that has several;
    ``best``, the best run by the objective, with its value; and ``errors``, the commonest reason of failures.

    Args:
        runs: RUN of the JSON of each.
        objective: What the sweep is for; None: what names of metrics say.
    """
    states = Counter(run["state"] for run in runs)
    reason, count = commonest(run["reason"] for run in runs if run["state"] in _BROKEN)
    return {
        **_EMPTY,
        "id": runs[0]["sweep"],
        "name": _shared_name([run["name"] for run in runs]),
        "state": count_states(list(states.elements())),
        "states": dict(states),
        "params": {},
        "submitted_at": min((run["submitted_at"] for run in runs if run["submitted_at"]), default=None),
        "metrics": {},
        "swept": swept_values([run["params"] for run in runs])
        or swept_values([{"resources": run["resources"] or {}} for run in runs]),
        "best": _best(runs, objective),
        "errors": {"reason": reason, "runs": count} if count else None,
        # Why they all wait, or will never start.
        "reason": "",
    }


def is_folded(line: Mapping[str, Any]) -> bool:
    """Whether an entry of a list stands for a sweep, not for a run."""
    return "swept" in line


def states_of(line: Mapping[str, Any]) -> list[str]:
    """The states of the runs that an entry of a list stands for."""
    return list(Counter(line["states"]).elements()) if is_folded(line) else [line["state"]]


def _shared_name(names: Iterable[str]) -> str:
    """The name of all, or a pattern that they match: they may contain swept values."""
    different = list(dict.fromkeys(names))
    if len(different) == 1:
        return different[0]
    begin = common_beginning(different)
    end = common_beginning([name[len(begin) :][::-1] for name in different])[::-1]
    return f"{begin}*{end}" if begin or end else f"{different[0]} and {len(different) - 1} more"


def common_beginning(texts: Sequence[str]) -> str:
    """The longest text with which all of these begin."""
    first, last = min(texts, default=""), max(texts, default="")
    # All others lie between the two.
    same = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:same]


def swept_values(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The different values of each setting that has several: numbers in order, others as they come.

    Args:
        settings: The settings of each run.
    """
    swept = differing_values(settings)
    for name, values in swept.items():
        numbers = [number_of(value) for value in values]
        if None not in numbers:
            swept[name] = [
                values[place] for place in sorted(range(len(values)), key=lambda place: numbers[place] or 0.0)
            ]
    return swept


def _best(runs: Sequence[Mapping[str, Any]], objective: Objective | None) -> dict[str, Any] | None:
    """The run with the best newest value, apart from runs that have failed; None if nothing shows which that is."""
    candidates = [(run["id"], run["metrics"]) for run in runs if run["state"] not in _BROKEN]
    if objective is None:
        names = dict.fromkeys(name for _, metrics in candidates for name in metrics)
        guesses = [Objective(name, larger) for name in names if (larger := is_larger_better(name)) is not None]
        # Rather a metric of data that no run has trained on.
        objective = min(guesses, key=lambda each: not each.metric.lower().startswith(_HELD_OUT), default=None)
    if objective is None:
        return None
    values = [
        (value, run_id)
        for run_id, metrics in candidates
        if isinstance(value := metrics.get(objective.metric), int | float) and math.isfinite(value)
    ]
    if not values:
        return None
    value, run_id = (max if objective.larger else min)(values, key=lambda pair: pair[0])
    return {"run": run_id, "metric": objective.metric, "value": value}


# --- in words ---------------------------------------------------------------------------------------------------------

# So many swept keys, and values of a key, are listed.
_SWEPT, _VALUES = 6, 3
# What ends a part of a key with words of its own, and the shortest beginning that is worth leaving out.
_WORDS, _SHORTEST = re.compile(r".*[-_/ ]", re.S), 5


def describe_sweep(runs: Sequence[Mapping[str, Any]], objective: Objective | None = None) -> str:
    """All that a list says of a sweep, in a line: below a list of its runs, or above it.

    Args:
        runs: RUN of the JSON of each.
        objective: As in :func:`fold_sweep`.
    """
    line = fold_sweep(runs, objective)
    parts = (line["state"], ", ".join(swept_texts(line)), best_text(line), errors_text(line))
    return f"sweep {line['id']}: {'; '.join(filter(None, parts))}"


def swept_texts(line: Mapping[str, Any]) -> list[str]:
    """The values that a sweep tries: ``lr 0.01..0.3``, ``batch_size 32|64``. ``line``: from :func:`fold_sweep`."""
    swept: Mapping[str, Sequence[Any]] = line["swept"]
    short = short_keys(list(swept))
    parts = [f"{short[name]} {_range(values)}" for name, values in swept.items()]
    return [*parts[:_SWEPT], f"{len(parts) - _SWEPT} more swept"] if len(parts) > _SWEPT else parts


def _range(values: Sequence[Any]) -> str:
    if len(values) <= _VALUES:
        return "|".join(map(write_value, values))
    if all(number_of(value) is not None for value in values):
        return f"{write_value(values[0])}..{write_value(values[-1])}"
    return "|".join(map(write_value, values[:_VALUES])) + f"|…+{len(values) - _VALUES}"


def best_text(line: Mapping[str, Any]) -> str:
    """The best run, and its value; empty if that is unknown. ``line``: from :func:`fold_sweep`."""
    best = line["best"]
    if not best:
        return ""
    value = write_measured(best["value"]) if isinstance(best["value"], float) else best["value"]
    return f"best {best['run']} {best['metric']}={value}"


def errors_text(line: Mapping[str, Any]) -> str:
    """The commonest error, and how often; empty if there is none. ``line``: from :func:`fold_sweep`."""
    errors = line["errors"]
    if not errors:
        return ""
    often = f"{errors['runs']} times " if errors["runs"] > 1 else ""
    return often + (errors["reason"] or "failed for no known reason")


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Short names of settings, by their whole ones: the fewest last words between dots that no other one has."""
    counts: dict[str, int] = {}
    endings = {key: [key.split(".", number)[-1] for number in range(key.count("."), -1, -1)] for key in keys}
    for each in endings.values():
        for ending in each:
            counts[ending] = counts.get(ending, 0) + 1
    short = {key: next((ending for ending in each if counts[ending] == 1), key) for key, each in endings.items()}
    match = _WORDS.match(common_beginning(list(short.values()))) if len(short) > 1 else None
    shared = match[0] if match and len(match[0]) >= _SHORTEST else ""
    return {key: "…" + each.removeprefix(shared) if shared else each for key, each in short.items()}
