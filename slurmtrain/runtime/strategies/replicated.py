"""Models of which each process has a replica: DistributedDataParallel."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurmtrain.model.spec.strategy.section import BF16, FP16, StrategySpec
from slurmtrain.runtime.job.process_group import RankGroup


def replicate(model: nn.Module, spec: StrategySpec, ranks: RankGroup) -> nn.Module:
    """The ``model`` on the device of these ``ranks``, in DistributedDataParallel with the options of ``spec``.

    With a single process, or without a parameter to train, there is nothing to reduce, and it stays as it is.
    """
    model = model.to(ranks.device)
    if ranks.world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    replica = DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        bucket_cap_mb=spec.bucket_cap_mb,
        static_graph=spec.static_graph,
        gradient_as_bucket_view=spec.gradient_as_bucket_view,
        find_unused_parameters=spec.find_unused_parameters,
    )
    if spec.hook is not None:
        replica.register_comm_hook(None, {BF16: _compress_to_bf16, FP16: _compress_to_fp16}[spec.hook])
    return replica


# DistributedDataParallel refuses torch's own bf16_compress_hook, by its name, where there is no NCCL, though gloo can
# reduce bfloat16; and annotations that are texts, as in this module.
def _compress_to_bf16(state, bucket):  # type: ignore[no-untyped-def]
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.bf16_compress_hook(state, bucket)


def _compress_to_fp16(state, bucket):  # type: ignore[no-untyped-def]
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.fp16_compress_hook(state, bucket)
