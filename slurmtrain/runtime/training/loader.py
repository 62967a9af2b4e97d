"""Batches of a map-style dataset, divided over the ranks of a run, and the position that checkpoints keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from slurmtrain.errors import CheckpointError, DataError
from slurmtrain.model.batches import (
    DataPosition,
    Division,
    StepBatch,
    divide,
    equal_shares,
    loss_weight,
    own_places,
)
from slurmtrain.runtime.training.samples import OwnBatch, RepeatableDataset, generators_kept


@dataclass(frozen=True, slots=True)
class DataRank:
    """A process among those that divide the data, and the facts about its session."""

    rank: int
    world_size: int
    device: torch.device
    step: Callable[[], int | None]
    """Returns the step of ``run.steps`` that the script is in, None outside."""
    take: Callable[[int, int], None] | None = None
    """Called with how many samples this rank has of the batch of a step, and how many all ranks have."""


@dataclass(frozen=True, slots=True)
class Order:
    """The order of an epoch through a dataset."""

    shuffle: bool
    seed: int

    def indices(self, epoch: int, length: int) -> torch.Tensor:
        """All indices of a dataset of this ``length``, in the order that DistributedSampler gives an ``epoch``."""
        if not self.shuffle:
            return torch.arange(length)
        return torch.randperm(length, generator=torch.Generator().manual_seed(self.seed + epoch))


class Loader:
    """A dataset in batches: what ``run.loader(...)`` returns.

    ``run.steps(total, loader)`` goes through it epoch after epoch, and its position is in checkpoints. Iterating over
    it, as in ``for batch in loader``, goes through one whole epoch, as with torch's DataLoader; that does not change
    the position. In both cases all ranks have equally many batches.
    """

    def __init__(
        self, dataset: Any, division: Division, order: Order, rank: DataRank, options: Mapping[str, Any]
    ) -> None:
        """``run.loader`` makes it, having checked everything.

        ``dataset``: the script's. ``division``: of its epochs, each in the ``order``. ``rank``: of this process.
        ``options``: of torch's DataLoader.
        """
        self.dataset = dataset
        """The dataset, as the script has it."""
        self.weight = 1.0
        """By what to multiply the mean loss of this rank's samples of the current batch, so that the mean over ranks is
        that over samples; 1 unless ranks have different numbers of them. ``run.backward(loss)`` does so itself."""
        self._rank = rank
        self._order = order
        self._division = division
        self._shares = equal_shares(division.batch_size, rank.world_size)
        self._position = DataPosition()
        # Without workers a dataset may have its tensors on the GPU, and these cannot be pinned.
        pins = rank.device.type == "cuda" and bool(options.get("num_workers"))
        self._options = {"pin_memory": pins, **options}
        # To seed the generators takes ten times as long as to read a sample of tensors, which draws no numbers.
        self._draws = type(dataset) is not TensorDataset or bool(self._options.get("collate_fn"))
        self._stream: Iterator[tuple[StepBatch, Any]] | None = None
        self._whole: tuple[_Sampler, DataLoader[Any]] | None = None

    # --- what scripts use -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of batches of an epoch, and so of steps: ``run.steps(epochs * len(loader), loader)``."""
        return self._division.steps

    @property
    def batch_size(self) -> int:
        """The number of samples of a step, of all ranks together."""
        return self._division.batch_size

    @property
    def epoch_samples(self) -> int:
        """The number of samples of an epoch, of all ranks together."""
        return self._division.samples

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the batch that :meth:`run.steps` has returned last."""
        return self._position.epoch

    @property
    def ends_epoch(self) -> bool:
        """Whether the batch that :meth:`run.steps` has returned last is the last one of its epoch."""
        return self._division.is_end(self._position)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, as with torch's DistributedSampler; needed only without ``run.steps``.

        Args:
            epoch: Its number, from 0, which decides the order of its samples.
        """
        self._go_to(DataPosition(epoch))

    def __iter__(self) -> Iterator[Any]:
        """The batches of the current epoch, from its first one.

        Raises DataError if the loop goes on for more than one step of ``run.steps``, or if there are fewer samples than
        ranks.
        """
        ranks = self._rank.world_size
        if self._division.length < ranks:
            raise DataError(
                f"the dataset has {self._division.length} samples, fewer than the {ranks} processes: one of them would "
                "have no batch, while the others wait for it"
            )
        plan = self._division.whole_epoch(self._position.epoch, ranks)
        if self._whole is None:
            sampler = self._sampler(plan)
            self._whole = sampler, self._loading(sampler)
        sampler, loading = self._whole
        sampler.plan, sampler.shares = plan, self._shares
        return self._within_step(plan, iter(loading))

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on all ranks: the epoch, and how many samples of it finished steps have consumed."""
        return {
            "epoch": self._position.epoch,
            "consumed": self._position.consumed,
            "samples": self._division.length,
            "shuffle": self._order.shuffle,
            "seed": self._order.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a ``state`` that :meth:`state_dict` returned, on any number of ranks.

        The seed of the state wins. Raises CheckpointError if the rest of the epoch is unknown, because the dataset or
        ``shuffle`` is another one.
        """
        position = DataPosition(state["epoch"], state["consumed"])
        saved, own = (state["samples"], state["shuffle"]), (self._division.length, self._order.shuffle)
        if saved != own:
            if 0 < position.consumed < state["samples"]:
                raise CheckpointError(
                    f"the loader had consumed {position.consumed} of {saved[0]} samples with shuffle={saved[1]}, and "
                    f"has {own[0]} with shuffle={own[1]} now: which are left is not known; give it the same dataset, "
                    "or begin with the weights alone (start_from.load: weights)"
                )
            position = DataPosition(position.epoch + (position.consumed > 0))
        self._order = replace(self._order, seed=state["seed"])
        self._whole = None
        self._go_to(position)

    # --- what the session uses --------------------------------------------------------------------------------------

    def with_steps(self, steps: Iterator[int]) -> Iterator[tuple[int, Any]]:
        """Each of the ``steps`` with its batch.

        A batch counts as consumed from here on: the position is saved between steps only, when its step is finished.
        """
        for step in steps:
            if self._stream is None:
                plan = partial(self._division.batches, self._position)
                self._stream = zip(plan(), self._loading(self._sampler(plan())), strict=True)
            with self._generators():
                batch, data = next(self._stream)
            own = self._begin(batch)
            if self._rank.take is not None:
                self._rank.take(own, batch.size)
            self._position = batch.end
            yield step, data

    def share(self, shares: Sequence[int]) -> None:
        """Divide batches by these ``shares`` from the next one on: how many samples of a full one each rank gets.

        Call it on all ranks after the same step. Workers are started anew. Raises DataError if they do not add up.
        """
        if len(shares) != self._rank.world_size or sum(shares) != self.batch_size or min(shares) < 1:
            raise DataError(
                f"the shares {list(shares)} are not those of {self._rank.world_size} processes in a batch of "
                f"{self.batch_size}, with at least one sample for each"
            )
        self._shares = tuple(shares)
        self._go_to(self._position)

    def close(self) -> None:
        """End the workers."""
        self._stream = self._whole = None

    # --- batches ----------------------------------------------------------------------------------------------------

    def _sampler(self, plan: Iterable[StepBatch]) -> _Sampler:
        return _Sampler(plan, self._division.length, self._order, self._shares, self._rank.rank)

    def _loading(self, sampler: _Sampler) -> DataLoader[Any]:
        # A generator of its own: DataLoader draws a number from it, which would be one of the script's otherwise.
        numbers = torch.Generator().manual_seed(self._order.seed)
        dataset = RepeatableDataset(self.dataset, self._order.seed if self._draws else None)
        batches: Any = sampler
        return DataLoader(dataset, batch_sampler=batches, generator=numbers, **self._options)

    def _generators(self) -> AbstractContextManager[None]:
        """Keeps the script's random numbers apart from numbers that samples draw in this process, if they do."""
        return generators_kept() if self._draws and not self._options.get("num_workers") else nullcontext()

    def _begin(self, batch: StepBatch) -> int:
        """Set the weight for a ``batch``; returns how many of its samples this rank has."""
        sizes = divide(batch.size, self._shares)
        self.weight = loss_weight(sizes, self._rank.rank)
        return sizes[self._rank.rank]

    def _within_step(self, plan: Iterable[StepBatch], loaded: Iterator[Any]) -> Iterator[Any]:
        began = self._rank.step()
        for batch in plan:
            with self._generators():
                data = next(loaded)
            if self._rank.step() != began:
                raise DataError(
                    "a loop over a loader goes on from one step of run.steps() to the next, so that its position would "
                    "not be in checkpoints, and it would end with the epoch: 'for step, batch in run.steps(total, "
                    "loader)' goes on after a resume, and from epoch to epoch"
                )
            self._begin(batch)
            yield data

    def _go_to(self, position: DataPosition) -> None:
        self._position = position
        self._stream = None


@dataclass
class _Sampler:
    """Tells torch's DataLoader what this rank loads of the batches of a ``plan``.

    It does not refer to the loader: in a reference cycle queues might be collected before the workers that read them,
    for whose end the process would wait in vain.
    """

    plan: Iterable[StepBatch]
    length: int
    order: Order
    shares: Sequence[int]
    rank: int

    def __iter__(self) -> Iterator[OwnBatch]:
        epoch, indices = -1, torch.empty(0)
        for batch in self.plan:
            if batch.epoch != epoch:
                epoch, indices = batch.epoch, self.order.indices(batch.epoch, self.length)
            # A rank without a sample gets one of another rank's, with the weight 0: it has to take part in the step.
            own = own_places(batch, self.shares, self.rank) or range(batch.start, batch.start + 1)
            yield OwnBatch(epoch, indices[own.start : own.stop].tolist())
