"""Whole replicas of models: one in each process, or one on each GPU of a single process.

That is torch's DistributedDataParallel, or its DataParallel.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from slurmtrain.errors import StrategyError
from slurmtrain.model.spec.strategy import HIERARCHICAL, POWERSGD, TOPK, StrategySpec
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.strategies.buckets import make_buckets
from slurmtrain.runtime.strategies.hooks.casts import CASTS
from slurmtrain.runtime.strategies.hooks.feedback import FeedbackHook
from slurmtrain.runtime.strategies.hooks.hierarchical import Hierarchical, reduce_by_layers
from slurmtrain.runtime.strategies.mesh import across_nodes


def replicate(
    model: nn.Module, spec: StrategySpec, ranks: RankGroup, node: int
) -> tuple[nn.Module, FeedbackHook | None]:
    """The ``model`` on the device of these ``ranks``, in DistributedDataParallel with the options of ``spec``.

    With a single process, or without a parameter to train, there is nothing to reduce, and it stays as it is. This rank
    is on the given ``node``.

    Returns:
        The model, and its communication hook if that has a state.

    Raises:
        StrategyError: The hook cannot compress the gradients of the model, or does not suit the nodes.
    """
    model = model.to(ranks.device)
    if ranks.world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model, None
    hook = _feedback(model, spec)
    replica = DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        bucket_cap_mb=spec.bucket_cap_mb,
        static_graph=spec.static_graph,
        gradient_as_bucket_view=spec.gradient_as_bucket_view,
        find_unused_parameters=spec.find_unused_parameters,
    )
    if hook is not None:
        hook.register(replica)
        return replica, hook
    if spec.hook == HIERARCHICAL:
        _reduce_by_layers(replica, ranks, node)
    elif spec.hook is not None:
        replica.register_comm_hook(None, CASTS[spec.hook])
    # With the former it keeps its first buckets, which depend on the model alone; with the latter it takes the first
    # step as the example of all others, so that there cannot be another one before it.
    if not (spec.find_unused_parameters or spec.static_graph):
        make_buckets(replica)
    return replica, None


def on_all_gpus(model: nn.Module, ranks: RankGroup) -> nn.Module:
    """The ``model``, in DataParallel over the GPUs of these ``ranks``, which must be a single one.

    With a single GPU, and on a CPU, it stays as it is. Raises StrategyError if there are several ranks.
    """
    if ranks.world_size > 1:
        raise StrategyError(f"'strategy: dp' is a single process, and there are {ranks.world_size}: use 'ddp'")
    model = model.to(ranks.device)
    if ranks.device.type != "cuda" or torch.cuda.device_count() == 1:
        return model
    return DataParallel(model)


def _feedback(model: nn.Module, spec: StrategySpec) -> FeedbackHook | None:
    """The hook of ``spec`` for the gradients of the ``model``, if it is one with error feedback."""
    # torch's hook needs NumPy.
    if spec.hook == POWERSGD:
        from slurmtrain.runtime.strategies.hooks.powersgd import PowerSgd

        return PowerSgd(model, spec)
    if spec.hook == TOPK:
        from slurmtrain.runtime.strategies.hooks.topk import TopK

        return TopK(model, spec)
    return None


def _reduce_by_layers(replica: DistributedDataParallel, ranks: RankGroup, node: int) -> None:
    """Let a ``replica`` reduce its gradients within nodes first; with one rank on each, or one node, as it does."""
    mesh = across_nodes(ranks.gather(node), ranks.device, f"hook: {HIERARCHICAL}")
    if mesh is not None:
        replica.register_comm_hook(Hierarchical(mesh, ranks.device), reduce_by_layers)
