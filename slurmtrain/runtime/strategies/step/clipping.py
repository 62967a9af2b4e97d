"""The norm of gradients over all ranks, also where these have shards or parts of the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    *,
    device: torch.device,
    parts: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale the gradients of ``parameters`` so that their norm is at most ``max_norm``.

    Args:
        parameters: The parameters of the whole model, or of this rank's part of it.
        max_norm: The greatest norm.
        norm_type: Which norm; infinity for the greatest absolute value.
        device: Where this rank computes.
        parts: The group of ranks that have different parts of the model, such as the stages of a pipeline.

    Returns:
        The norm before, on all ranks.
    """
    # torch computes with tensors of the same mesh only.
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    norms = [_norm(group, norm_type).to(device) for group in groups.values()]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=device)
    if parts is not None:
        total = _over_parts(total, norm_type, parts)
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total


def _norm(parameters: Iterable[Tensor], norm_type: float) -> Tensor:
    norm = get_total_norm((parameter.grad for parameter in parameters if parameter.grad is not None), norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _over_parts(total: Tensor, norm_type: float, parts: dist.ProcessGroup) -> Tensor:
    if math.isinf(norm_type):
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=parts)
        return total
    powers = total**norm_type
    dist.all_reduce(powers, group=parts)
    return powers ** (1.0 / norm_type)
