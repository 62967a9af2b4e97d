"""The ranks of a run as one: a process group of its own for agreeing, apart from the one that trains."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """Collectives of slurmtrain's own, on gloo. With one rank nothing is communicated."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._group = dist.new_group(backend="gloo") if world_size > 1 else None

    def close(self) -> None:
        """Give up the group and end its threads; nothing can be agreed after that.

        A thread of gloo that drops the last reference to a tensor takes the interpreter's lock, and aborts the process
        when the interpreter has begun to end by then: the threads must be gone before.
        """
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value."""
        if self._group is None:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        received: T = box[0]
        return received

    def greatest(self, *numbers: int) -> list[int]:
        """Of each number the greatest that any rank gives."""
        if self._group is None:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [int(number) for number in tensor]
