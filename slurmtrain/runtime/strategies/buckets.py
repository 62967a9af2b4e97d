"""The buckets that DistributedDataParallel reduces gradients in, made before the first step.

It begins with buckets of its own, and makes others after its first backward pass, by the order of its gradients. A run
that goes on from a checkpoint would then reduce its first step in other buckets than a run that has never stopped, so
that with three ranks or more sums differ in the last place. Hence the final buckets are made at once, by the reverse of
the order of the model's parameters, which is about the order of the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def make_buckets(replica: DistributedDataParallel) -> None:
    """Let a ``replica`` make its final buckets, by a backward pass that has all gradients in reverse order.

    Call it on all ranks.
    """
    module = replica.module
    replica.module = _Sum(module)
    try:
        replica().backward()
    finally:
        replica.module = module
    for parameter in module.parameters():
        parameter.grad = None


class _Sum(nn.Module):
    """The sum of all parameters of a module. Autograd goes through its terms in reverse order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self) -> Tensor:
        """The sum."""
        terms = [parameter.sum().float() for parameter in self.inner.parameters() if parameter.requires_grad]
        return torch.stack(terms).sum()
