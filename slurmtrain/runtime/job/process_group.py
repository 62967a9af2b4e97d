"""Agreement between the ranks of a run, in a process group of its own, separate from the one that trains.

All ranks must stop, save and vote after the same step, or a collective hangs. So they agree by a single all-reduce
(MAX) of a :class:`~slurmtrain.model.interruption.interval.Vote`, about every 0.25 s, judged by the measured step time:
fast steps are not slowed by a collective, slow ones are each followed by a vote. The all-reduce uses its own gloo
group, which neither waits for training nor disturbs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from slurmtrain.model.interruption.interval import Vote

T = TypeVar("T")


class RankGroup:
    """slurmtrain's own collectives, on gloo. With one rank nothing is communicated."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        """Create the group, on all ranks alike: this is ``rank`` of ``world_size``, and computes on ``device``."""
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._group = dist.new_group(backend="gloo") if world_size > 1 else None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group, for libraries that communicate themselves; None with one rank."""
        return self._group

    def close(self) -> None:
        """Destroy the group and end its threads; the ranks cannot agree on anything after that.

        A gloo thread that drops the last reference to a tensor takes the interpreter's lock, and aborts the process if
        the interpreter is already shutting down: the threads must be gone before.
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

    def at_first(self, value: T, decide: Callable[[list[T]], list[T]]) -> T:
        """Have rank 0 receive every rank's value and decide what each gets back; returns this rank's part.

        What ``decide`` raises on rank 0 is raised on all ranks.
        """
        if self._group is None:
            return decide([value])[0]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        answers: list[Any] | None = None
        if values is not None:
            try:
                answers = [(value, None) for value in decide(values)]
            except Exception as error:  # noqa: BLE001 (any error: the other ranks are waiting)
                answers = [(None, error)] * self.world_size
        box: list[Any] = [None]
        dist.scatter_object_list(box, answers, src=0, group=self._group)
        answer: T
        answer, problem = box[0]
        if problem is not None:
            raise problem
        return answer

    def agree(self, vote: Vote) -> Vote:
        """The result that all ranks act on: the maximum of each field of their votes."""
        return vote if self._group is None else Vote.from_numbers(*self.greatest(*vote.numbers()))

    def greatest(self, *numbers: int) -> list[int]:
        """The maximum of each number over all ranks."""
        if self._group is None:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [int(number) for number in tensor]
