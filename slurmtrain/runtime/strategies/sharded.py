"""Models whose parameters are sharded over processes: torch's ``fully_shard`` (FSDP2).

Modules are gathered one at a time: modules of the classes that the spec names, by default the elements of the model's
module lists and sequences, such as the blocks of a transformer. Everything outside them is gathered with the model.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slurmtrain.model.spec.strategy import FP32, StrategySpec
from slurmtrain.runtime.strategies.chosen_modules import elements, of_classes
from slurmtrain.runtime.strategies.step.precision import DTYPES

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

_FSDP = "torch.distributed.fsdp"


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the ``model``."""
    fsdp = sys.modules.get(_FSDP)
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def units_of(model: nn.Module, wrap: Sequence[str]) -> list[nn.Module]:
    """The modules that are gathered one at a time, inner ones first.

    Args:
        model: The whole model.
        wrap: The names of their classes; if empty, they are the elements of its module lists and sequences.

    Raises:
        StrategyError: The model has none of these classes.
    """
    if wrap:
        return of_classes(model, wrap, "strategy.wrap")
    own = [module for module in elements(model) if any(True for _ in module.parameters())]
    return [module for module in own if not _shares_parameters(module, model)]


def shard(model: nn.Module, spec: StrategySpec, mesh: DeviceMesh, units: Sequence[nn.Module]) -> nn.Module:
    """Shard a ``model``, whose weights are the same on all ranks, as ``spec`` says.

    Args:
        model: Any module that is not on the meta device; it is changed.
        spec: The strategy's options.
        mesh: The ranks: one dimension to shard over, or two, the first to replicate over.
        units: The modules that are gathered one at a time.

    Returns:
        The model.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    precision, of_model = _precisions(spec)
    # CPUOffloadPolicy refuses to pin memory where there is no accelerator.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if spec.offload else OffloadPolicy()
    # None: the model itself, whose parameters the backward pass needs first, is not freed in between.
    reshard = None if spec.reshard_after_forward else False
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision, offload_policy=offload)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=of_model, offload_policy=offload)
    return model


def _precisions(spec: StrategySpec) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """The precision of a module inside the model, and of the model itself, from whose output the loss is computed."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if spec.mixed_precision is None:
        reduced = None if spec.reduce_dtype is None else DTYPES[spec.reduce_dtype]
        policy = MixedPrecisionPolicy(reduce_dtype=reduced)
        return policy, policy
    # Versions of torch reduce in different types unless told. One for all processes: the spec refuses others.
    computed, reduced = DTYPES[str(spec.mixed_precision)], DTYPES[spec.reduce_dtype or FP32]
    inside = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=reduced)
    return inside, MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=reduced, output_dtype=torch.float32)


def _shares_parameters(module: nn.Module, model: nn.Module) -> bool:
    """Whether parameters of ``module`` are used elsewhere in the ``model`` too, so that it cannot be gathered alone."""
    everywhere = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    inside = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    return any(everywhere[parameter] > count for parameter, count in inside.items())


def share_weights(model: nn.Module) -> None:
    """Give all ranks rank 0's parameters and buffers: each keeps a shard of its own ones."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
