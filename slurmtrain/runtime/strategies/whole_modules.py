"""Modules whose parameters are whole on each rank, beside layers that are divided over ranks.

Their parameters are DTensors, like the parameters of divided layers, so that optimizers, norms and checkpoints meet one
kind of tensor. They compute with plain tensors: each operation on DTensors costs about as much as a small layer does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from slurmtrain.runtime.job.torch_private import map_tree
from slurmtrain.runtime.strategies.step.precision import wrap_forward


class Whole(ParallelStyle):
    """Each rank computes all of the module: ranks have the same inputs, and the same gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _compute_locally(module, device_mesh, Replicate())


class WholeOnParts(ParallelStyle):
    """Each rank computes a part of the features, such as its heads: gradients are the sum over all ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _compute_locally(module, device_mesh, Partial())


def _compute_locally(module: nn.Module, mesh: DeviceMesh, of_gradients: Placement) -> nn.Module:
    for part in module.modules():
        for own, parameter in list(part.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
            part.register_parameter(own, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    wrap_forward(module, partial(_with_local_parameters, module, of_gradients))
    return module


def _with_local_parameters(
    module: nn.Module, of_gradients: Placement, forward: Callable[..., Any], *args: Any, **more: Any
) -> Any:
    """Call ``forward``, whose ``module`` has plain tensors meanwhile; ``of_gradients``: how ranks have theirs."""
    hidden = []
    for part in module.modules():
        for own, parameter in part.named_parameters(recurse=False):
            # Attributes in the dictionary come before parameters, which stay what optimizers know.
            if isinstance(parameter, DTensor):
                part.__dict__[own] = parameter.to_local(grad_placements=[of_gradients])
                hidden.append((part, own))
    try:
        return forward(*map_tree(_whole, args), **map_tree(_whole, more))
    finally:
        for part, own in hidden:
            del part.__dict__[own]


def _whole(value: Any) -> Any:
    """A plain tensor instead of a DTensor, which a torch style before this module may have made."""
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(value.device_mesh, [Replicate()]).to_local()
