"""A search: a sweep whose runs are chosen one after the other, by what the runs before them have reached."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.model.spec.kinds import KeyPath, Report, choice, suggestion, text, whole_number
from slurmtrain.model.spec.sweep.expressions import Distribution

SAMPLERS = ("tpe", "random")
PRUNERS = ("none", "median", "percentile")
_KEYS = ("metric", "mode", "trials", "parallel", "sampler", "pruner", "seed")


@dataclass(frozen=True, slots=True)
class Method:
    """A sampler or a pruner: its name, and its settings as its constructor in Optuna calls them."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpec:
    """What is searched, and how.

    ``space``: the values that each key may have. ``metric``: its last value is what a run has reached. ``larger``:
    whether larger values are better. ``trials``: how many runs there are in the end. ``parallel``: how many of them
    run at once. ``seed``: where random numbers begin.
    """

    space: Mapping[str, Distribution]
    metric: str
    larger: bool
    trials: int
    parallel: int = 1
    sampler: Method = Method("tpe")
    pruner: Method = Method("none")
    seed: int = 0

    @property
    def objective(self) -> dict[str, Any]:
        """What each of its runs records: ``metric``, ``mode`` (``min`` or ``max``) and ``trials``."""
        return {"metric": self.metric, "mode": "max" if self.larger else "min", "trials": self.trials}

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {
            "space": {key: each.to_dict() for key, each in self.space.items()},
            "metric": self.metric,
            "larger": self.larger,
            "trials": self.trials,
            "parallel": self.parallel,
            "sampler": [self.sampler.name, dict(self.sampler.settings)],
            "pruner": [self.pruner.name, dict(self.pruner.settings)],
            "seed": self.seed,
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> SearchSpec:
        """Read what :meth:`to_dict` returned. Raises LookupError, TypeError or ValueError if it is not that."""
        return cls(
            space={str(key): Distribution.from_dict(each) for key, each in plain["space"].items()},
            metric=str(plain["metric"]),
            larger=bool(plain["larger"]),
            trials=int(plain["trials"]),
            parallel=int(plain["parallel"]),
            sampler=Method(*plain["sampler"]),
            pruner=Method(*plain["pruner"]),
            seed=int(plain["seed"]),
        )

    def describe(self) -> str:
        """What is searched, as a sentence without a full stop."""
        better = "largest" if self.larger else "smallest"
        return (
            f"a search of {self.trials} trials, {self.parallel} at once, for the {better} {self.metric} "
            f"(sampler {self.sampler.name}, pruner {self.pruner.name})"
        )


def read_search(value: Any, space: Mapping[str, Distribution], max_runs: int, report: Report) -> SearchSpec | None:
    """The value of ``sweep.search``; None after a mistake.

    Args:
        value: the value.
        space: the values that each key of the sweep may have.
        max_runs: how many runs a sweep may have.
        report: receives what is wrong, with its place below ``sweep``.
    """
    if not isinstance(value, Mapping):
        report(("search",), f"expected a mapping such as {{metric: loss, mode: min, trials: 20}}, found {value!r}")
        return None
    reader = _Reader(value, report)
    metric = reader.read("metric", text().parse)
    mode = reader.read("mode", choice("min", "max").parse)
    trials = reader.read("trials", whole_number(1, max_runs, "sweep_max_runs in slurmtrain.yaml changes that").parse)
    parallel = reader.read("parallel", whole_number(1).parse, 1)
    seed = reader.read("seed", whole_number(0, 2**31).parse, 0)
    sampler = reader.read("sampler", lambda each: _method(each, SAMPLERS), Method("tpe"))
    pruner = reader.read("pruner", lambda each: _method(each, PRUNERS), Method("none"))
    if trials is not None and parallel is not None and parallel > trials:
        reader.report("parallel", f"{parallel} at once are more than the {trials} trials that there are")
    if not space:
        report(("search",), "there is nothing to search: name a key, as in 'params.lr: loguniform(1e-5, 1e-1)'")
    if reader.mistaken or not space:
        return None
    return SearchSpec(
        space=space, metric=metric, larger=mode == "max", trials=trials, parallel=parallel, sampler=sampler,
        pruner=pruner, seed=seed,
    )  # fmt: skip


class _Reader:
    """Reads the keys of the section one by one."""

    def __init__(self, section: Mapping[Any, Any], report: Report) -> None:
        self._section = section
        self._report = report
        self.mistaken = False
        for key in section:
            if key not in _KEYS:
                self.report(str(key), f"there is no key {key!r} here{suggestion(str(key), _KEYS)}")

    def report(self, key: str, message: str) -> None:
        """Report what is wrong with a key."""
        self.mistaken = True
        at: KeyPath = ("search", key) if key in self._section else ("search",)
        self._report(at, message)

    def read(self, key: str, parse: Callable[[Any], Any], default: Any = None) -> Any:
        """The value of a key, or its default; without a default it is required. None after a mistake."""
        value = self._section.get(key)
        if value is None:
            if default is None:
                self.report(key, f"{key!r} is missing")
            return default
        try:
            return parse(value)
        except ValueError as error:
            self.report(key, str(error))
            return None


def _method(value: Any, names: Sequence[str]) -> Method:
    """A name, or a mapping from a name to settings. Raises ValueError."""
    settings: Any = {}
    if isinstance(value, Mapping) and len(value) == 1:
        [(value, settings)] = value.items()
    if not isinstance(value, str) or not isinstance(settings, Mapping | None):
        raise ValueError(f"expected one of {', '.join(names)}, or a mapping from one to its settings, found {value!r}")
    if value not in names:
        raise ValueError(f"expected one of {', '.join(names)}, found {value!r}{suggestion(value, names)}")
    return Method(value, {str(key): each for key, each in (settings or {}).items()})


def is_same(value: Any, other: Any) -> bool:
    """Whether two values of a key are the same; 1, 1.0 and True are not."""
    return json.dumps(value) == json.dumps(other)
