"""Activation checkpointing: torch's, in the forward passes of chosen modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from slurmtrain.errors import StrategyError
from slurmtrain.model.spec.strategy import ActivationCheckpointing
from slurmtrain.runtime.strategies.chosen_modules import elements, of_classes
from slurmtrain.runtime.strategies.step.precision import wrap_forward

_KEY = "strategy.activation_checkpointing"


def recompute(model: nn.Module, spec: ActivationCheckpointing | None) -> None:
    """Have the modules of a ``model`` that ``spec`` chooses, if any, compute their activations again when needed.

    Raises StrategyError if there are none, or an operator whose results are to be kept is not torch's.
    """
    if spec is None:
        return
    options: dict[str, Any] = {}
    if spec.save:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _operators(spec.save))
    for module in _chosen(model, spec):
        wrap_forward(module, partial(_checkpointed, options))


def _chosen(model: nn.Module, spec: ActivationCheckpointing) -> list[nn.Module]:
    if spec.wrap:
        return of_classes(model, spec.wrap, _KEY)
    # Of a single layer nothing but its input is kept anyway.
    blocks = [module for module in elements(model) if any(True for _ in module.children())]
    if not blocks:
        raise StrategyError(
            f"{_KEY!r} is true, and no element of the model's module lists and sequences consists of modules: name "
            f"classes, such as 'activation_checkpointing: [Block]'"
        )
    return blocks


def _operators(names: Sequence[str]) -> list[Any]:
    """All variants of the operators with these names, such as ``mm``."""
    operators: list[Any] = []
    for name in names:
        operator = getattr(torch.ops.aten, name, None)
        if operator is None:
            raise StrategyError(
                f"'{_KEY}.save' names {name!r}, and torch has no such operator (torch.ops.aten): a linear layer with a "
                "bias is 'addmm', without one 'mm'"
            )
        operators += [getattr(operator, variant) for variant in operator.overloads()]
    return operators


def _checkpointed(options: dict[str, Any], forward: Callable[..., Any], *args: Any, **more: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **options, **more)
