"""Top-k: only the largest gradients of each bucket are sent; the rest is added to the gradients of the next step."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from slurmtrain.model.spec.strategy import TOPK, StrategySpec
from slurmtrain.runtime.strategies.hooks.feedback import FeedbackHook

_INDEX = torch.int32


class TopK(FeedbackHook):
    """The hook, and the gradients that it has not sent yet."""

    def __init__(self, module: nn.Module, spec: StrategySpec) -> None:
        """For the gradients of a ``module``, with the density of ``spec``. Raises StrategyError as its base does."""
        super().__init__(module, TOPK)
        self._density = spec.density
        self._unsent: dict[int, Tensor] = {}
        # What all ranks have sent, by the index of the bucket. It is kept, since a GPU adds it up later, on a stream of
        # which the allocator of memory does not know.
        self._received: dict[int, list[Tensor]] = {}

    @property
    def _errors(self) -> dict[int, Tensor]:
        return self._unsent

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        index, buffer, ranks = bucket.index(), bucket.buffer(), dist.get_world_size()
        if index not in self._unsent:
            self._unsent[index] = torch.zeros_like(buffer)
        unsent = self._unsent[index]
        unsent += buffer
        count = math.ceil(self._density * len(buffer))
        chosen = unsent.abs().topk(count, sorted=False).indices
        message = _packed(chosen, unsent[chosen])
        unsent[chosen] = 0
        if index not in self._received:
            self._received[index] = [torch.empty_like(message) for _ in range(ranks)]
        received = self._received[index]
        work = dist.all_gather(received, message, async_op=True)

        def add(_: object) -> Tensor:
            buffer.zero_()
            # Rank after rank, so that the order of the sums is always the same.
            for each in received:
                indices, values = _unpacked(each, count, buffer.dtype)
                buffer.index_add_(0, indices, values)
            return buffer.div_(ranks)

        summed: Future[Tensor] = work.get_future().then(add)
        return summed


def _packed(indices: Tensor, values: Tensor) -> Tensor:
    """Both as bytes, so that a single collective sends them."""
    return torch.cat([indices.to(_INDEX).view(torch.uint8), values.view(torch.uint8)])


def _unpacked(message: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The indices in a ``message``, so many, and their values, which have this ``dtype``."""
    # A copy, since the values may begin where numbers of their size cannot.
    end = count * _INDEX.itemsize
    return message[:end].view(_INDEX), message[end:].clone().view(dtype)
