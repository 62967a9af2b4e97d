"""Pipelines: the schedules that torch has, and how a model is divided into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """A schedule of torch.distributed.pipelining.

    ``name``: torch's. ``per_rank``: how many stages each rank has. ``fills``: whether it needs as many microbatches as
    ranks.
    """

    name: str
    per_rank: int = 1
    fills: bool = False

    @property
    def forward(self) -> str:
        """The schedule for forward passes alone, for any number of microbatches: all schedules have the same order."""
        return "GPipe" if self.per_rank == 1 else "LoopedBFS"

    def stages_of(self, rank: int, ranks: int) -> list[int]:
        """The stages of a ``rank`` among so many ``ranks`` of a pipeline, in order."""
        return list(range(rank, ranks * self.per_rank, ranks))


# By their names in a spec, which are torch's in lower case. Schedules that compute the gradients of weights apart from
# the gradients of inputs (zero bubble) are left out: with FSDP2 they lose gradients (torch 2.13).
SCHEDULES = {
    "gpipe": PipelineSchedule("GPipe"),
    "1f1b": PipelineSchedule("1F1B", fills=True),
    "interleaved1f1b": PipelineSchedule("Interleaved1F1B", per_rank=2, fills=True),
    "loopedbfs": PipelineSchedule("LoopedBFS", per_rank=2),
}
DEFAULT_SCHEDULE = "1f1b"


def even_split(sizes: Sequence[int], stages: int) -> list[int]:
    """Where to begin each stage, so that none is without parameters in vain, and the largest is as small as possible.

    Args:
        sizes: The parameters of each part of a model, in order; at least as many as there are stages.
        stages: How many stages there are, each of at least one part.

    Returns:
        The index of the first part of each stage; the first is 0.
    """
    sums = [0, *accumulate(sizes)]
    count = len(sizes)
    # By the number of stages, if they are the first parts: how many have no parameters, the size of the largest one,
    # and where the last one begins.
    best = [[(int(not sums[end]), float(sums[end]), 0) for end in range(count + 1)]]
    for stage in range(1, stages):
        row = [(count, float("inf"), 0)] * (count + 1)
        for end in range(stage + 1, count + 1):
            row[end] = min(
                (
                    best[-1][begin][0] + (sums[end] == sums[begin]),
                    max(best[-1][begin][1], sums[end] - sums[begin]),
                    begin,
                )
                for begin in range(stage, end)
            )
        best.append(row)
    begins, end = [], count
    for row in reversed(best):
        end = row[end][2]
        begins.append(end)
    return begins[::-1]
