"""Measures of a metric's curve, which questions may use like fields: ``min:loss``, ``loss@1000``, ``area:loss``.

They are about what survived rollbacks. A field of the same name comes first: ``metrics.hits@10`` is a metric.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from slurmtrain.errors import QueryError
from slurmtrain.model.experiment.kinds import nearest, suggestion
from slurmtrain.model.query.fields import ABSENT, Record, look_up, names_in

# What the registry has of each metric.
_SUMMARISED = ("last", "min", "max")
KINDS = (*_SUMMARISED, "area")
_OF_CURVE = re.compile(rf"(?P<kind>{'|'.join(KINDS)}):(?P<metric>.+)", re.DOTALL)
_AT_STEP = re.compile(r"(?P<metric>.+)@(?P<step>\d{1,15})", re.DOTALL | re.ASCII)
_METRICS = "metrics."
_SECTIONS = (_METRICS, "params.")
# How many fields a mistake lists.
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Measure:
    """A number that the curve of the ``metric`` gives. ``kind``: one of KINDS, or ``at`` for its value at ``step``."""

    kind: str
    metric: str
    step: int = 0

    @property
    def is_summarised(self) -> bool:
        """Whether the registry has it, so that no curve needs to be read."""
        return self.kind in _SUMMARISED

    def of_summary(self, summary: Any) -> float | None:
        """Its value, by a ``summary`` with the curve's ``last``, ``min`` and ``max``; None if it is not finite."""
        value: float | None = getattr(summary, self.kind)
        return value if value is not None and math.isfinite(value) else None

    def of_curve(self, steps: Sequence[int], values: Sequence[float], reached: int) -> float | None:
        """Its value for a curve; None if there is none.

        Args:
            steps: The steps of the curve's points, increasing.
            values: Their values.
            reached: The largest step of any metric that survived.
        """
        if self.kind == "area":
            return area(steps, values)
        # A run that has not come so far has no value there: its newest one would be compared with later ones.
        return value_at_step(steps, values, self.step) if self.step <= reached else None


def read_measure(name: str) -> Measure | None:
    """The measure that a name stands for; None if it is none."""
    if name.startswith(_SECTIONS):
        return None
    if match := _OF_CURVE.fullmatch(name):
        return Measure(match["kind"], match["metric"].removeprefix("metrics."))
    if match := _AT_STEP.fullmatch(name):
        return Measure("at", match["metric"], int(match["step"]))
    return None


def area(steps: Sequence[int], values: Sequence[float]) -> float | None:
    """The area below the finite values, as trapezoids over the steps; None for less than two values."""
    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if len(points) < 2:
        return None
    # Halved before they are added: the sum of two finite values may be infinite.
    total = math.fsum((step - before) * (value / 2 + last / 2) for (before, last), (step, value) in pairwise(points))
    return total if math.isfinite(total) else None


def value_at_step(steps: Sequence[int], values: Sequence[float], step: int) -> float | None:
    """The value at a ``step``, or the newest one before it; None if there is none, or it is not finite.

    ``steps``: the steps of the ``values``, increasing.
    """
    place = bisect_right(steps, step) - 1
    return values[place] if place >= 0 and math.isfinite(values[place]) else None


_WORDS = re.compile(r"[a-z]+[0-9]*")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# Words in the names of metrics; "negative" turns a likelihood around, so that it shows nothing.
_OF_SMALLER = """
loss losses error errors err perplexity ppl time latency seconds duration mse rmse mae mape msle nll nelbo wer cer ter
fid kid lpips brier ece eer kl divergence distance cost regret bpb bpc bpd penalty energy residual negative neg
"""
_OF_LARGER = """
acc accuracy f1 fscore auc auroc auprc roc precision recall ap map mrr ndcg bleu rouge meteor chrf cider iou miou dice
psnr ssim reward return returns score winrate r2 correlation pearson spearman mcc kappa throughput goodput speedup mfu
likelihood elbo em hits success
"""
_SMALLER, _LARGER = frozenset(_OF_SMALLER.split()), frozenset(_OF_LARGER.split())


def is_larger_better(name: str) -> bool | None:
    """Whether larger values of the metric ``name`` are better; None if its name does not show it."""
    words = _WORDS.findall(_CAMEL.sub("_", name).lower())
    # A number at the end, as in acc5, says nothing about which values are better.
    stems = {*words, *(word.rstrip("0123456789") for word in words)}
    smaller, larger = bool(stems & _SMALLER), bool(stems & _LARGER)
    return None if smaller == larger else larger


@dataclass(frozen=True, slots=True)
class Criterion:
    """``name``: a field, such as ``metrics.acc``. ``guessed``: only the name shows whether larger values are better."""

    name: str
    larger: bool
    guessed: bool = False

    @property
    def better(self) -> str:
        """Which values are better: ``larger`` or ``smaller``."""
        return "larger" if self.larger else "smaller"

    def __str__(self) -> str:
        return f"by {self.name}: {self.better} is better"


def choose_criterion(name: str | None, larger: bool | None, records: Sequence[Record]) -> Criterion:
    """What to judge runs by.

    Args:
        name: A field, or a metric without ``metrics.``; None: the only metric that the runs have.
        larger: Whether larger values are better; None: its name shows it.
        records: The runs.

    Raises:
        QueryError: There is no such field, or it does not show which values are better.
    """
    if name is None:
        names = [f"{_METRICS}{each}" for each in names_in(record["metrics"] for record in records)]
        if len(names) != 1:
            choice = f"choose a metric with --by: {', '.join(names)}" if names else "none of the runs has a metric"
            raise QueryError(choice)
    field = names[0] if name is None else field_of_metric(name, records)
    # What a person says wins over the name.
    guess = is_larger_better(field.removeprefix(_METRICS))
    if larger is None and guess is None:
        raise QueryError(
            f"the name of {field} does not show whether larger or smaller values are better: --max or --min"
        )
    return Criterion(field, bool(guess if larger is None else larger), guessed=larger is None)


def field_of_metric(name: str, records: Sequence[Record]) -> str:
    """The field that ``name`` stands for, which may be a metric without ``metrics.``. Raises QueryError."""
    for field in (name, f"{_METRICS}{name}"):
        if any(look_up(record, field) is not ABSENT for record in records):
            return field
    # What somebody ranks by is more often a metric than another field.
    if near := nearest(name, names_in(record["metrics"] for record in records)):
        raise QueryError(f"none of these runs has a metric {name!r}; did you mean {near!r}?")
    check_field(name, records)
    return name


def check_field(name: str, records: Sequence[Record]) -> None:
    """Raise QueryError if no run has this field, although there are runs that would show it.

    A metric, for example, is unknown only if a run has metrics and none has this one.

    Args:
        name: The name of the field.
        records: All runs.
    """
    if not records or any(look_up(record, name) is not ABSENT for record in records):
        return
    # Before a first metric is logged, no name of one can be called wrong.
    if read_measure(name) is not None and not any(record["metrics"] for record in records):
        return
    head, dot, _ = name.partition(".")
    sections = [record[head] for record in records if dot and head in record]
    if sections and not any(sections):
        return
    names = names_in(records)
    # One that only lacks its section, such as params, or the most similar one.
    inner = [each for each in names if each.endswith(f".{name}")][:_SHOWN]
    meant = f"; did you mean {' or '.join(map(repr, inner))}?" if inner else suggestion(name, names)
    near = meant or "; 'slurmtrain status --json' prints all fields"
    raise QueryError(_unknown_measure(name, names) or f"none of these runs has a field {name!r}{near}")


def _unknown_measure(name: str, names: Sequence[str]) -> str:
    """What is wrong with a name that is meant to be a measure, such as ``min:los``; empty if it is not."""
    metrics = [each.removeprefix(_METRICS) for each in names if each.startswith(_METRICS)]
    measure = read_measure(name)
    if measure is None:
        kinds = f"; there are {', '.join(KINDS)}"
        kind, colon, metric = name.partition(":")
        if not colon or metric.removeprefix(_METRICS) not in metrics:
            return ""
        return f"there is no measure {kind!r}{suggestion(kind, KINDS) or kinds}"
    if name in metrics or not metrics:
        return ""
    return f"none of these runs has a metric {measure.metric!r}{suggestion(measure.metric, metrics)}"
