"""Models of which each process has a replica: DistributedDataParallel."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurmtrain.model.spec.strategy.section import StrategySpec
from slurmtrain.runtime.job.process_group import RankGroup


def replicate(model: nn.Module, spec: StrategySpec, ranks: RankGroup) -> nn.Module:
    """The ``model`` on the device of these ``ranks``, in DistributedDataParallel with the options of ``spec``.

    With a single process, or without a parameter to train, there is nothing to reduce, and it stays as it is.
    """
    model = model.to(ranks.device)
    if ranks.world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    return DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        bucket_cap_mb=spec.bucket_cap_mb,
        static_graph=spec.static_graph,
        gradient_as_bucket_view=spec.gradient_as_bucket_view,
        find_unused_parameters=spec.find_unused_parameters,
    )
