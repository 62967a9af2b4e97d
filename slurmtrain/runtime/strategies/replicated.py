"""Whole replicas of models: one in each process, or one on each GPU of a single process.

That is torch's DistributedDataParallel, or its DataParallel.

DistributedDataParallel begins with buckets of its own, and makes others after its first backward pass, by the order of
its gradients. A run that goes on from a checkpoint would then reduce its first step in other buckets than a run that
has never stopped, so that with three ranks or more sums differ in the last place. Hence the final buckets are made at
once, by the reverse of the order of the model's parameters, which is about the order of the backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DataParallel, DistributedDataParallel

from slurmtrain.errors import StrategyError
from slurmtrain.model.experiment.strategy import BF16, FP16, StrategySpec
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.system.plugins import STRATEGIES, load_plugin


class CommHook(ABC):
    """A communication hook that a plug-in has: how DistributedDataParallel reduces gradients."""

    is_settled = False
    """Whether the replica has its final buckets; before that, nothing is reduced."""

    @abstractmethod
    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The future mean over ranks of the gradients in a ``bucket``."""


def replicate(model: nn.Module, spec: StrategySpec, ranks: RankGroup, node: int) -> tuple[nn.Module, CommHook | None]:
    """The ``model`` on the device of these ``ranks``, in DistributedDataParallel with the options of ``spec``.

    With a single process, or without a parameter to train, there is nothing to reduce, and it stays as it is. This rank
    is on the given ``node``.

    Returns:
        The model, and its communication hook if a plug-in has that.

    Raises:
        StrategyError: The hook cannot compress the gradients of the model, or does not suit the nodes.
    """
    model = model.to(ranks.device)
    if ranks.world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model, None
    hook: CommHook | None = None
    if spec.hook is not None and spec.hook not in _CASTS:
        hook = load_plugin(STRATEGIES, spec.hook)(model, spec, ranks, node)
    replica = DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        bucket_cap_mb=spec.bucket_cap_mb,
        static_graph=spec.static_graph,
        gradient_as_bucket_view=spec.gradient_as_bucket_view,
        find_unused_parameters=spec.find_unused_parameters,
    )
    if hook is not None:
        replica.register_comm_hook(hook, _reduce)
    elif spec.hook in _CASTS:
        replica.register_comm_hook(None, _CASTS[spec.hook])
    # With the former it keeps its first buckets, which depend on the model alone; with the latter it takes the first
    # step as the example of all others, so that there cannot be another one before it.
    if not (spec.find_unused_parameters or spec.static_graph):
        _make_buckets(replica)
    if hook is not None:
        hook.is_settled = True
    return replica, hook


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


def completed(value: Tensor) -> Future[Tensor]:
    """A future that already has its ``value``."""
    future: Future[Tensor] = Future(devices=[value.device] if value.device.type == "cuda" else None)
    future.set_result(value)
    return future


# DistributedDataParallel refuses annotations that are texts, as in this module; and torch's own bf16_compress_hook, by
# its name, where there is no NCCL, though gloo can reduce bfloat16.
def _reduce(hook, bucket):  # type: ignore[no-untyped-def]
    return hook.reduce(bucket) if hook.is_settled else completed(bucket.buffer())


def _compress_by(name):  # type: ignore[no-untyped-def]
    def compress(state, bucket):  # type: ignore[no-untyped-def]
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        return getattr(default_hooks, name)(state, bucket)

    return compress


_CASTS = {BF16: _compress_by("bf16_compress_hook"), FP16: _compress_by("fp16_compress_hook")}  # type: ignore[no-untyped-call]


def _make_buckets(replica: DistributedDataParallel) -> None:
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
