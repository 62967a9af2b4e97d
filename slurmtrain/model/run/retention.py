"""Which checkpoints of a run stay and which may be deleted: pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurmtrain.model.spec.spec import BestSpec, KeepSpec


@dataclass(frozen=True, slots=True)
class Saved:
    """A published checkpoint: the finished steps, and the latest metrics when it was saved (None: not a number)."""

    step: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)


def reasons(saved: Sequence[Saved], keep: KeepSpec) -> dict[int, str]:
    """Why each checkpoint that stays does so, by its step, the oldest first; the newest always stays.

    ``saved``: all that are complete, in any order, each step once.
    """
    ordered = sorted(saved, key=lambda checkpoint: checkpoint.step)
    why: dict[int, list[str]] = {checkpoint.step: [] for checkpoint in ordered}
    for checkpoint in ordered[-max(1, keep.last) :]:
        why[checkpoint.step].append("newest" if checkpoint is ordered[-1] else f"one of the last {keep.last}")
    if keep.every_steps is not None:
        for step in _firsts(ordered, keep.every_steps):
            why[step].append(f"every {keep.every_steps} steps")
    if keep.best is not None:
        count = f"best {keep.best.n} of" if keep.best.n > 1 else "best"
        for step, value in _best(ordered, keep.best).items():
            why[step].append(f"{count} {keep.best.metric} ({value:.4g})")
    return {step: ", ".join(rules) for step, rules in why.items() if rules}


def disposable(saved: Sequence[Saved], keep: KeepSpec) -> list[int]:
    """The steps of the checkpoints that may be deleted, oldest first."""
    staying = reasons(saved, keep)
    return sorted(checkpoint.step for checkpoint in saved if checkpoint.step not in staying)


def _firsts(ordered: Sequence[Saved], every: int) -> list[int]:
    """For each multiple of ``every`` above zero the first step from it on, before the next multiple.

    Saves that are timed by a clock hit a multiple only by chance.
    """
    firsts: dict[int, int] = {}
    for checkpoint in ordered:
        firsts.setdefault(checkpoint.step // every, checkpoint.step)
    return [step for multiple, step in firsts.items() if multiple > 0]


def _best(ordered: Sequence[Saved], best: BestSpec) -> dict[int, float]:
    """The steps with the best ``n`` values of those that have the metric as a number; of equal ones the later."""
    values = {saved.step: value for saved in ordered if (value := _number(saved.metrics.get(best.metric))) is not None}
    sign = 1 if best.mode == "min" else -1
    ranked = sorted(values, key=lambda step: (sign * values[step], -step))
    return {step: values[step] for step in ranked[: best.n]}


def _number(value: float | None) -> float | None:
    """The value, unless it is no number, NaN, infinite, or beyond a float's range."""
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None
