"""A whole step of a model that each rank calls: its microbatches one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slurmtrain.runtime.strategies.step.gradients import Gradients


def accumulated(
    gradients: Gradients,
    model: nn.Module,
    loss_of: Callable[[Any, Any], Tensor],
    batch: tuple[Any, Tensor],
    step: int,
    sizes: Sequence[int],
) -> Tensor:
    """Compute the gradients of a step; returns the mean loss of this rank's part of the batch.

    Args:
        gradients: The gradients of the step.
        model: The model to call.
        loss_of: The mean loss of a microbatch, of the model's output and the targets.
        batch: Inputs, a tensor or several in a tuple, and targets, with as many rows.
        step: The number of finished steps.
        sizes: The number of rows of each microbatch.
    """
    inputs, targets = batch
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    gradients.divide(sizes)
    losses = []
    for *part, target in zip(*(each.split(list(sizes)) for each in (*arguments, targets)), strict=True):
        with gradients.accumulate([model], step):
            loss = loss_of(model(*part), target)
            gradients.backward(loss)
        losses.append(loss.detach())
    stacked = torch.stack(losses)
    if len(set(sizes)) == 1:
        return stacked.mean()
    return (stacked * torch.tensor(sizes, dtype=stacked.dtype, device=stacked.device)).sum() / sum(sizes)
