"""A check that ranks which divide layers among them compute everything else alike.

Otherwise they would train with wrong gradients, and nothing else would say so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from slurmtrain.errors import StrategyError
from slurmtrain.runtime.job.torch_private import map_tree

# At most so many numbers of a tensor are compared.
_COMPARED = 1000
# By how much numbers may differ, relative to the largest: results of the same sum may have been rounded differently.
_ROUNDING = 0.01


def check_first_inputs(module: nn.Module, mesh: DeviceMesh, problem: str) -> None:
    """Compare the inputs of a module when it is called for the first time with gradients, and not compiled.

    Args:
        module: It gets a hook, which raises StrategyError.
        mesh: The ranks whose inputs must be the same: one dimension.
        problem: What the error says.
    """
    is_first = True

    def compare(_module: nn.Module, args: Any, options: Any) -> None:
        nonlocal is_first
        if not is_first or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        is_first = False
        hook.remove()
        gathered: list[Any] = [None] * mesh.size()
        dist.all_gather_object(gathered, _samples((args, options)), group=mesh.get_group())
        if not all(_are_same(samples, gathered[0]) for samples in gathered[1:]):
            raise StrategyError(problem)

    hook = module.register_forward_pre_hook(compare, prepend=True, with_kwargs=True)


def _samples(inputs: Any) -> list[tuple[tuple[int, ...], Tensor]]:
    """The shape of each tensor in ``inputs``, and some of its numbers; infinite ones count as 0."""
    samples: list[tuple[tuple[int, ...], Tensor]] = []

    def sample(value: Any) -> Any:
        if isinstance(value, Tensor) and not (isinstance(value, DTensor) or value.is_complex()):
            numbers = value.detach().reshape(-1)
            numbers = numbers[:: 1 + numbers.numel() // _COMPARED].cpu()
            numbers = numbers.double().nan_to_num(0.0, 0.0, 0.0) if numbers.is_floating_point() else numbers.long()
            samples.append((tuple(value.shape), numbers))
        return value

    map_tree(sample, inputs)
    return samples


def _are_same(samples: list[tuple[tuple[int, ...], Tensor]], others: list[tuple[tuple[int, ...], Tensor]]) -> bool:
    if [(shape, numbers.dtype) for shape, numbers in samples] != [(shape, numbers.dtype) for shape, numbers in others]:
        return False
    return all(_are_close(numbers, other) for (_, numbers), (_, other) in zip(samples, others, strict=True))


def _are_close(numbers: Tensor, other: Tensor) -> bool:
    if not numbers.is_floating_point() or not numbers.numel():
        return torch.equal(numbers, other)
    largest = float(torch.maximum(numbers.abs(), other.abs()).max())
    return torch.allclose(numbers, other, rtol=0, atol=_ROUNDING * largest)
