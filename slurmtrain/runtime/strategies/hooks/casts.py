"""Hooks that compress gradients to 16 bits while they are reduced."""

from __future__ import annotations

from slurmtrain.model.spec.strategy import BF16, FP16


# DistributedDataParallel refuses torch's own bf16_compress_hook, by its name, where there is no NCCL, though gloo can
# reduce bfloat16; and annotations that are texts, as in this module.
def _compress_to_bf16(state, bucket):  # type: ignore[no-untyped-def]
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.bf16_compress_hook(state, bucket)


def _compress_to_fp16(state, bucket):  # type: ignore[no-untyped-def]
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.fp16_compress_hook(state, bucket)


CASTS = {BF16: _compress_to_bf16, FP16: _compress_to_fp16}
"""The hooks, by the precision that they compress to."""
