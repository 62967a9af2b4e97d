"""Models of which each process has a replica: DistributedDataParallel."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurmtrain.model.spec.strategy.hook import POWERSGD, TOPK
from slurmtrain.model.spec.strategy.section import StrategySpec
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.strategies.hooks.casts import CASTS
from slurmtrain.runtime.strategies.hooks.feedback import FeedbackHook


def replicate(model: nn.Module, spec: StrategySpec, ranks: RankGroup) -> tuple[nn.Module, FeedbackHook | None]:
    """The ``model`` on the device of these ``ranks``, in DistributedDataParallel with the options of ``spec``.

    With a single process, or without a parameter to train, there is nothing to reduce, and it stays as it is.

    Returns:
        The model, and its communication hook if that has a state.

    Raises:
        StrategyError: The hook cannot compress the gradients of the model.
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
    elif spec.hook is not None:
        replica.register_comm_hook(None, CASTS[spec.hook])
    return replica, hook


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
