"""Which checkpoints of a run are kept and which may be deleted: pure, and small, since agents and ranks import it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurmtrain.model.experiment.checkpoint import BestSpec, KeepSpec


@dataclass(frozen=True, slots=True)
class Saved:
    """A published checkpoint: the finished steps, and the latest metrics when it was saved (None: not a number)."""

    step: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)


def reasons_to_keep(saved: Sequence[Saved], keep: KeepSpec) -> dict[int, str]:
    """Why each kept checkpoint is kept, by step, the oldest first. The newest is always kept.

    ``saved``: all complete checkpoints, in any order, each step once.
    """
    ordered = sorted(saved, key=lambda checkpoint: checkpoint.step)
    why: dict[int, list[str]] = {checkpoint.step: [] for checkpoint in ordered}
    # At least 1, since a slice from -0 on has all of them.
    for checkpoint in ordered[-max(1, keep.last) :]:
        why[checkpoint.step].append("newest" if checkpoint is ordered[-1] else f"one of the last {keep.last}")
    if keep.every_steps is not None:
        # The first at or after each multiple: saves at time intervals hit a multiple only by chance.
        firsts: dict[int, int] = {}
        for checkpoint in ordered:
            firsts.setdefault(checkpoint.step // keep.every_steps, checkpoint.step)
        for step in (step for multiple, step in firsts.items() if multiple > 0):
            why[step].append(f"every {keep.every_steps} steps")
    if keep.best is not None:
        count = f"best {keep.best.n} of" if keep.best.n > 1 else "best"
        for step, value in best_steps(ordered, keep.best).items():
            why[step].append(f"{count} {keep.best.metric} ({value:.4g})")
    return {step: ", ".join(rules) for step, rules in why.items() if rules}


def disposable_steps(saved: Sequence[Saved], keep: KeepSpec) -> list[int]:
    """The steps of the checkpoints that may be deleted, oldest first."""
    staying = reasons_to_keep(saved, keep)
    return sorted(checkpoint.step for checkpoint in saved if checkpoint.step not in staying)


def best_steps(ordered: Sequence[Saved], best: BestSpec) -> dict[int, float]:
    """The steps with the best values of a metric that are numbers, the best first; of equal values the later step wins.

    Args:
        ordered: Checkpoints, each step once.
        best: The metric, whether larger values are better, and how many steps.
    """
    candidates = ((saved.step, saved.metrics.get(best.metric)) for saved in ordered)
    # Neither NaN, nor infinite, nor too large for a float.
    values = {
        step: float(value)
        for step, value in candidates
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max
    }
    sign = 1 if best.mode == "min" else -1
    ranked = sorted(values, key=lambda step: (sign * values[step], -step))
    return {step: values[step] for step in ranked[: best.n]}
