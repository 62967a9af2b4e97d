"""Which samples of an epoch are the batch of a step, and how many of them each rank gets.

A position counts the samples of all ranks together, not batches, so it means the same on any number of ranks and with
any batch size. Samples are named by their places in the order of their epoch, from 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class DataPosition:
    """How much of the data has been consumed: the samples of all epochs before ``epoch``, and ``consumed`` of it."""

    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The batch of a step, of all ranks together: the places from ``start`` to ``stop`` in the order of ``epoch``."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.stop - self.start

    @property
    def end(self) -> DataPosition:
        """The position once this batch is consumed."""
        return DataPosition(self.epoch, self.stop)


@dataclass(frozen=True, slots=True)
class Division:
    """How an epoch of ``length`` samples is divided into batches of ``batch_size``.

    Its last batch has what remains, or is left out with ``drop_last``.
    """

    length: int
    batch_size: int
    drop_last: bool = False

    @property
    def steps(self) -> int:
        """The number of batches of an epoch."""
        full, rest = divmod(self.length, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    @property
    def samples(self) -> int:
        """The number of samples of an epoch."""
        return self.steps * self.batch_size if self.drop_last else self.length

    def next_batch(self, position: DataPosition) -> StepBatch:
        """The batch that comes after a ``position``. An epoch must have at least one."""
        # A checkpoint after the last batch of an epoch has a position that has nothing behind it.
        if self.is_end(position):
            position = DataPosition(position.epoch + 1)
        stop = min(position.consumed + self.batch_size, self.length)
        return StepBatch(position.epoch, position.consumed, stop)

    def is_end(self, position: DataPosition) -> bool:
        """Whether the epoch of this ``position`` has no further batch."""
        remaining = self.length - position.consumed
        return remaining < (self.batch_size if self.drop_last else 1)

    def batches(self, position: DataPosition) -> Iterator[StepBatch]:
        """The batches that come after a ``position``, epoch after epoch, without end."""
        while True:
            batch = self.next_batch(position)
            yield batch
            position = batch.end

    def whole_epoch(self, epoch: int, ranks: int) -> list[StepBatch]:
        """The batches of an ``epoch``, each with a sample for every one of ``ranks`` ranks.

        The last one is part of the one before if it has fewer samples; an epoch must have as many.
        """
        batches: list[StepBatch] = []
        position = DataPosition(epoch)
        while not self.is_end(position):
            batches.append(self.next_batch(position))
            position = batches[-1].end
        # A rank without a sample would have no batch to compute, while the others wait for it in a collective.
        if len(batches) > 1 and batches[-1].size < ranks:
            last = batches.pop()
            batches[-1] = StepBatch(epoch, batches[-1].start, last.stop)
        return batches


def equal_shares(batch_size: int, ranks: int) -> tuple[int, ...]:
    """How many samples of a batch each of ``ranks`` ranks gets if all are to have as many, give or take one."""
    return divide(batch_size, (1,) * ranks)


def divide(size: int, shares: Sequence[int]) -> tuple[int, ...]:
    """How many of a batch's ``size`` samples each rank gets, in proportion to the ranks' ``shares`` of a full batch.

    Each rank gets at least one, and of a batch that is not full no more than its share; if there are fewer samples than
    ranks, the last ranks get none. Shares are positive.
    """
    ranks = len(shares)
    if size < ranks:
        return tuple(int(rank < size) for rank in range(ranks))
    # A sample of each rank is set aside, so that rounding leaves none without.
    spare = [share - 1 for share in shares]
    # Shares of one sample each have nothing to spare.
    weights = spare if any(spare) else shares
    # In whole numbers: each rank divides by itself, and all must come to the same result.
    bounds = [(size - ranks) * sum_before // sum(weights) for sum_before in accumulate(weights, initial=0)]
    return tuple(1 + stop - start for start, stop in pairwise(bounds))


def own_places(batch: StepBatch, shares: Sequence[int], rank: int) -> range:
    """The places of a ``batch`` that a ``rank`` gets, as the ranks' ``shares`` divide it; possibly none."""
    sizes = divide(batch.size, shares)
    start = batch.start + sum(sizes[:rank])
    return range(start, start + sizes[rank])


def loss_weight(sizes: Sequence[int], rank: int) -> float:
    """By what to multiply the mean loss of a ``rank``'s samples, so that the mean over ranks is that over samples.

    ``sizes``: how many samples of the batch each rank has.
    """
    return sizes[rank] * len(sizes) / sum(sizes)


def microbatch_sizes(samples: int, least: int, most: int | None = None) -> tuple[int, ...]:
    """The sizes of a rank's microbatches, which differ by at most one sample.

    Args:
        samples: How many samples of the batch the rank has, at least one.
        least: The least number of microbatches. There are fewer only where there are fewer samples.
        most: How many samples fit into the memory at once, at least one; None if that is unknown.
    """
    parts = least if most is None else max(least, math.ceil(samples / most))
    return equal_shares(samples, min(samples, parts))
