"""Communication hooks of DistributedDataParallel: which options they have, and what contradicts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from slurmtrain.model.spec.kinds import Conflict
from slurmtrain.model.spec.strategy.precision import BF16, FP16, may_be

if TYPE_CHECKING:
    from slurmtrain.model.spec.strategy.section import StrategySpec

POWERSGD, TOPK, HIERARCHICAL = "powersgd", "topk", "hierarchical"
HOOKS = (BF16, FP16, POWERSGD, TOPK, HIERARCHICAL)
# Hooks that keep the unsent part of a gradient.
WITH_FEEDBACK = (POWERSGD, TOPK)
_OWNERS = {
    "matrix_approximation_rank": POWERSGD,
    "start_powersgd_iter": POWERSGD,
    "min_compression_rate": POWERSGD,
    "use_error_feedback": POWERSGD,
    "warm_start": POWERSGD,
    "orthogonalization_epsilon": POWERSGD,
    "batch_tensors_with_same_shape": POWERSGD,
    "density": TOPK,
}
OPTIONS = tuple(_OWNERS)


def hook_conflicts(strategy: StrategySpec) -> Iterator[Conflict]:
    """What contradicts the hook of a ``strategy`` that may have one."""
    for option in fields(strategy):
        owner = _OWNERS.get(option.name)
        if owner not in (None, strategy.hook) and getattr(strategy, option.name) != option.default:
            yield option.name, f"it has no effect without 'hook: {owner}'; leave it out"
    if strategy.hook in WITH_FEEDBACK and strategy.static_graph:
        yield "static_graph", f"'hook: {strategy.hook}' needs its buckets before the first step has shown the graph"
    if strategy.hook in WITH_FEEDBACK and may_be(strategy.mixed_precision, FP16):
        yield "hook", "infinite gradients of 'mixed_precision: fp16' would stay in what the hook has not sent: use bf16"
    remembers = strategy.use_error_feedback or strategy.warm_start
    if strategy.hook == POWERSGD and remembers and strategy.start_powersgd_iter < 2:
        yield (
            "start_powersgd_iter",
            "PowerSGD cannot begin before the third step, so that this is at least 2, unless 'use_error_feedback' and "
            "'warm_start' are false",
        )
