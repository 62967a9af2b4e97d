"""By what the ranks of a run communicate."""

from __future__ import annotations

import torch
import torch.distributed as dist


def has_nccl(device: torch.device) -> bool:
    """Whether collectives of tensors on a ``device`` use NCCL."""
    backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
    return backends.get(device.type) == dist.Backend.NCCL
