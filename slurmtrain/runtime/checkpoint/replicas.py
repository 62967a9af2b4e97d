"""Whether tensors with the same name on several ranks are the same tensor.

Replicas are written once, so names must tell tensors apart: stages of a pipeline that all call their first layer ``0``
would lose all but one. A few elements of each parameter are compared: replicas may differ a little, by rounding or
between two averagings, whereas different tensors have nothing in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slurmtrain.errors import CheckpointError
from slurmtrain.model.interruption.policy import DIFFERENT_REPLICAS

_SAMPLES = 8
# Two independent samples differ by 1.4 times their length, replicas by much less than one.
_DIFFERENT = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """Some elements of a tensor, or of a rank's part of one.

    ``where``: the offset of the part; ``shape`` of the whole and ``size`` of the part.
    """

    name: str
    where: tuple[int, ...]
    shape: tuple[int, ...]
    size: tuple[int, ...]
    values: tuple[float, ...]


def sample(name: str, where: Sequence[int], shape: Sequence[int], part: torch.Tensor) -> Sample:
    """A sample of ``part``, which begins at offset ``where`` of the tensor called ``name``, of this ``shape``."""
    count = part.numel()
    values: tuple[float, ...] = ()
    if count:
        flat = (torch.view_as_real(part) if part.is_complex() else part).detach().reshape(-1)
        places = torch.linspace(0, flat.numel() - 1, min(_SAMPLES, flat.numel()), device=flat.device).long()
        values = tuple(flat[places].to(torch.float32).tolist())
    return Sample(name, tuple(where), tuple(shape), tuple(part.shape), values)


def check(samples: Sequence[Sequence[Sample]]) -> None:
    """Raise CheckpointError if ranks have different tensors of the same name. ``samples``: of each rank."""
    first: dict[tuple[str, tuple[int, ...]], tuple[int, Sample]] = {}
    for rank, own in enumerate(samples):
        for each in own:
            other, earlier = first.setdefault((each.name, each.where), (rank, each))
            if earlier is not each and _differ(earlier, each):
                raise CheckpointError(
                    f"{each.name!r} {DIFFERENT_REPLICAS} {other} and {rank}: each trains a model of its own; "
                    "model = run.parallelize(model), or DistributedDataParallel (DDP), keeps replicas equal, and parts "
                    "of a model, such as the stages of a pipeline, need names that are unique in the whole model"
                )


def _differ(first: Sample, second: Sample) -> bool:
    if (first.shape, first.size) != (second.shape, second.size):
        return True
    # Biases and the like are equal at first, and then differ by all that they have learned.
    if len(first.shape) < 2:
        return False
    distance = sum((a - b) ** 2 for a, b in zip(first.values, second.values, strict=True))
    length = max(sum(a * a for a in first.values), sum(b * b for b in second.values))
    return distance > _DIFFERENT**2 * length
