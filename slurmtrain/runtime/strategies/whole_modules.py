"""Modules of which each rank has all parameters, beside layers that are divided over ranks.

Their parameters are DTensors, as those of divided layers are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from slurmtrain.runtime.job.torch_private import map_tree
from slurmtrain.runtime.strategies.step.precision import wrap_forward


class Whole(ParallelStyle):
    """Each rank computes all of the module: ranks have the same inputs, and the same gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, _replicate, _to_dtensors, _to_locals)


class WholeOnParts(ParallelStyle):
    """Each rank computes a part of the features, such as its heads: gradients are the sum of those of all ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, part in module.named_modules():
            _replicate(name, part, device_mesh)
        wrap_forward(module, partial(_with_local_parameters, module))
        return module


def _replicate(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for own, parameter in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(own, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _to_dtensors(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    def convert(value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
        return value

    return map_tree(convert, inputs)


def _to_locals(_module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
    def convert(value: Any) -> Any:
        return value.redistribute(mesh, [Replicate()]).to_local() if isinstance(value, DTensor) else value

    return map_tree(convert, outputs)


def _with_local_parameters(module: nn.Module, forward: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Call ``forward``, whose ``module`` has plain tensors meanwhile; their gradients are parts of a sum."""
    hidden = []
    for part in module.modules():
        for own, parameter in part.named_parameters(recurse=False):
            # Attributes in the dictionary come before parameters, which stay what optimizers know.
            if isinstance(parameter, DTensor):
                part.__dict__[own] = parameter.to_local(grad_placements=[Partial()])
                hidden.append((part, own))
    try:
        return forward(*args, **more)
    finally:
        for part, own in hidden:
            del part.__dict__[own]
