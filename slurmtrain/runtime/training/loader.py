"""Batches of map-style datasets, divided over the ranks of a run, and the positions that checkpoints keep.

A sample draws the same random numbers whichever process loads it, and when: before it is loaded, the generators of
Python, NumPy and torch are seeded with a number that depends on the seed, the epoch and the sample alone, unless it
draws none. So an augmentation is the same with any number of workers and ranks, with workers that live for one epoch or
for all, and after a resume.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from slurmtrain.errors import CheckpointError, DataError
from slurmtrain.model.batches import DataPosition, Division, StepBatch, loss_weight, own_places
from slurmtrain.runtime.checkpoint.rng import seed_modules
from slurmtrain.runtime.training.parallel import Shares

# Any seed: with it, the next numbers show whether numbers were drawn.
_PROBE = 1


@dataclass(frozen=True, slots=True)
class OwnBatch:
    """The samples of a batch that a rank loads: their ``indices`` in the dataset, in this ``epoch``."""

    epoch: int
    indices: list[int]


class RepeatableDataset(Dataset[Any]):
    """A dataset as torch's DataLoader gets it: it is asked for the samples of an :class:`OwnBatch` at a time.

    A dataset that reads several samples at once (``__getitems__``) draws its numbers for all of them together, so they
    are the same only on the same number of ranks.
    """

    def __init__(self, dataset: Any, seed: int | None) -> None:
        """``dataset``: the script's own. ``seed``: seed of its random numbers; None if it draws none."""
        self.dataset = dataset
        self.seed = seed
        # Whether a sample has drawn from Python's or NumPy's generators, in this process.
        self._draws = False

    def __getitems__(self, batch: OwnBatch) -> Sequence[Any]:
        """The samples of a ``batch``. Leaves the generators seeded for what collates it."""
        first, *others = batch.indices
        if _reads_batches(self.dataset):
            self._seed(batch.epoch, first)
            samples: Sequence[Any] = self.dataset.__getitems__(batch.indices)
        elif self.seed is None:
            samples = [self.dataset[index] for index in batch.indices]
        else:
            # If samples draw, the first one shows it, and no other has to be loaded again.
            samples = [*self._load(batch.epoch, [first]), *self._load(batch.epoch, others)]
        # What collates them may draw, too: the suffix gives it other numbers than the first sample had.
        self._seed(batch.epoch, first, ":batch")
        return samples

    def _load(self, epoch: int, indices: list[int]) -> list[Any]:
        """These samples, each with generators of its own state.

        Seeding Python's and NumPy's takes several times as long as reading a sample from memory. So that is done only
        for datasets that draw from them; until a sample does, it is loaded without, and then once more.
        """
        if not self._draws:
            seed_modules(_PROBE)
            samples = []
            for index in indices:
                torch.default_generator.manual_seed(self._number(epoch, index) % 2**63)
                samples.append(self.dataset[index])
            self._draws = _next_numbers() != _undisturbed()
            if not self._draws:
                return samples
        samples = []
        for index in indices:
            self._seed(epoch, index)
            samples.append(self.dataset[index])
        return samples

    def _seed(self, epoch: int, index: int, suffix: str = "") -> None:
        """Seed the generators for a sample, but not devices' generators: the process may be training on devices."""
        if self.seed is not None:
            number = self._number(epoch, index, suffix)
            torch.default_generator.manual_seed(number % 2**63)
            seed_modules(number)

    def _number(self, epoch: int, index: int, suffix: str = "") -> int:
        return xxhash.xxh3_64_intdigest(f"{self.seed}:{epoch}:{index}{suffix}".encode())


def _reads_batches(dataset: Any) -> bool:
    if type(dataset) is Subset:
        # It has the method in any case, and without one in its dataset only calls that for each sample.
        return _reads_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def _next_numbers() -> tuple[float, ...]:
    """The next numbers of these generators."""
    numpy = sys.modules["numpy"].random.random() if "numpy" in sys.modules else 0.0
    return random.random(), numpy  # noqa: S311 (no secret)


@cache
def _undisturbed() -> tuple[float, ...]:
    """The numbers after :data:`_PROBE` if nothing has drawn since. It seeds the generators itself."""
    seed_modules(_PROBE)
    return _next_numbers()


@contextmanager
def generators_kept() -> Iterator[None]:
    """Keep what is drawn meanwhile from changing the numbers that this process draws later."""
    python, own = random.getstate(), torch.get_rng_state()
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(own)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)


# Options of torch's DataLoader that say what a loader of the session decides itself, and what to do instead.
_DECIDED = {
    "sampler": "it draws every sample of an epoch once; leave it out, and let the dataset choose among samples",
    "batch_sampler": "it makes the batches itself; leave it out, and let the dataset choose among samples",
    "generator": "give it a seed instead",
    "in_order": "batches out of order would be counted wrongly",
}


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
        self, dataset: Any, division: Division, order: Order, shares: Shares, options: Mapping[str, Any]
    ) -> None:
        """``run.loader`` makes it, having checked everything.

        ``dataset``: the script's. ``division``: of its epochs, each in the ``order``. ``shares``: of the session.
        ``options``: of torch's DataLoader.
        """
        self.dataset = dataset
        """The dataset, as the script has it."""
        self.weight = 1.0
        """By what to multiply the mean loss of this rank's samples of the current batch, so that the mean over ranks is
        that over samples; 1 unless ranks have different numbers of them. ``run.backward(loss)`` does so itself."""
        self._shares = shares
        self._order = order
        self._division = division
        self._position = DataPosition()
        # Without workers a dataset may have its tensors on the GPU, and these cannot be pinned.
        pins = shares.device.type == "cuda" and bool(options.get("num_workers"))
        self._options = {"pin_memory": pins, **options}
        # To seed the generators takes ten times as long as to read a sample of tensors, which draws no numbers.
        self._draws = type(dataset) is not TensorDataset or bool(self._options.get("collate_fn"))
        self._stream: Iterator[tuple[StepBatch, Any]] | None = None
        # The shares by which the stream divides batches.
        self._streamed: tuple[int, ...] = ()
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
        ranks = self._shares.ranks
        if self._division.length < ranks:
            raise DataError(
                f"the dataset has {self._division.length} samples, fewer than the {ranks} processes: one process "
                "would have no batch, and the others would wait for it"
            )
        plan = self._division.whole_epoch(self._position.epoch, ranks)
        # Made once: with persistent_workers the workers go on from epoch to epoch.
        if self._whole is None:
            sampler = self._sampler(plan)
            self._whole = sampler, self._loading(sampler)
        sampler, loading = self._whole
        sampler.plan, sampler.shares = plan, self._full()
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
                    f"the loader had consumed {position.consumed} of {saved[0]} samples with shuffle={saved[1]}, but "
                    f"now it has {own[0]} with shuffle={own[1]}, so the remaining samples are unknown; give it the "
                    "same dataset, or begin with the weights alone (start_from.load: weights)"
                )
            # Either all or nothing of the state's epoch was consumed: the other dataset begins with a whole one.
            position = DataPosition(position.epoch + (position.consumed > 0))
        self._order = replace(self._order, seed=state["seed"])
        # It was made with the former seed.
        self._whole = None
        self._go_to(position)

    # --- what the session uses --------------------------------------------------------------------------------------

    def with_steps(self, steps: Iterator[int]) -> Iterator[tuple[int, Any]]:
        """Each of the ``steps`` with its batch.

        A batch counts as consumed from here on: the position is saved between steps only, when its step is finished.
        With other shares, workers are started anew.
        """
        for step in steps:
            began = time.perf_counter()
            if self._stream is None or self._streamed != self._shares.current:
                self._streamed = self._shares.current
                plan = partial(self._division.batches, self._position)
                self._stream = zip(plan(), self._loading(self._sampler(plan())), strict=True)
            with self._generators():
                batch, data = next(self._stream)
            sizes = self._shares.sizes(batch.size, self.batch_size)
            self._shares.take(sizes)
            self.weight = self._shares.weight
            self._position = batch.end
            self._shares.waited_s = time.perf_counter() - began
            yield step, data

    def close(self) -> None:
        """End the workers."""
        # torch ends the workers of an iterator that nothing refers to any more.
        self._stream = self._whole = None

    # --- batches ----------------------------------------------------------------------------------------------------

    def _sampler(self, plan: Iterable[StepBatch]) -> _Sampler:
        return _Sampler(plan, self._division.length, self._order, self._full(), self._shares.rank)

    def _full(self) -> tuple[int, ...]:
        """The shares of a full batch."""
        return self._shares.sizes(self.batch_size)

    def _loading(self, sampler: _Sampler) -> DataLoader[Any]:
        # A generator of its own: DataLoader draws a number from it, which would be one of the script's otherwise.
        numbers = torch.Generator().manual_seed(self._order.seed)
        dataset = RepeatableDataset(self.dataset, self._order.seed if self._draws else None)
        batches: Any = sampler
        return DataLoader(dataset, batch_sampler=batches, generator=numbers, **self._options)

    def _generators(self) -> AbstractContextManager[None]:
        """Keeps the script's random numbers apart from numbers that samples draw in this process, if they do."""
        return generators_kept() if self._draws and not self._options.get("num_workers") else nullcontext()

    def _within_step(self, plan: Iterable[StepBatch], loaded: Iterator[Any]) -> Iterator[Any]:
        began = self._shares.step()
        for batch in plan:
            with self._generators():
                data = next(loaded)
            if self._shares.step() != began:
                raise DataError(
                    "the loop over the loader and run.steps() are separate, so checkpoints would not have the "
                    "loader's position, and the loop would end with the epoch: write 'for step, batch in "
                    "run.steps(total, loader)', which continues after a resume, and from epoch to epoch"
                )
            self.weight = loss_weight(self._shares.sizes(batch.size, self.batch_size), self._shares.rank)
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


class Loaders:
    """The loaders that a script has made, numbered by creation."""

    def __init__(self, shares: Shares, seed: int | None) -> None:
        """``shares``: of the session. ``seed``: the spec's, for loaders that get none."""
        self._shares = shares
        self._seed = seed or 0
        self._loaders: list[Loader] = []
        # Loaders whose positions checkpoints contain, once the script has registered the other contents.
        self._registered: list[Loader] | None = None
        # Loaders that steps have gone through; others, as for evaluations, have no position worth keeping.
        self._stepped: set[int] = set()

    def make(
        self,
        dataset: Any,
        batch_size: int,
        options: Mapping[str, Any],
        *,
        shuffle: bool,
        drop_last: bool,
        seed: int | None,
    ) -> Loader:
        """A new loader; the arguments are as for ``run.loader``. Raises DataError.

        ``dataset``, ``batch_size``, ``shuffle``, ``drop_last`` and ``seed`` have a parameter each there; ``options``
        are all others, which go to torch's DataLoader.
        """
        ranks = self._shares.ranks
        for name in sorted(_DECIDED.keys() & options.keys()):
            raise DataError(f"run.loader() does not take {name!r}: {_DECIDED[name]}; or use torch's own DataLoader")
        is_listed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if isinstance(dataset, IterableDataset) or not is_listed:
            raise DataError(
                f"run.loader() needs a dataset with __getitem__ and __len__; {type(dataset).__name__} has none, so "
                "its samples cannot be divided over another number of processes: use torchdata's StatefulDataLoader, "
                "and run.checkpoint(..., loader=loader)"
            )
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise DataError(f"the batch_size of run.loader() must be a positive whole number, not {batch_size!r}")
        if batch_size < ranks:
            raise DataError(
                f"the batch_size of run.loader() counts a step's samples on all processes together, so {batch_size} "
                f"is too small for {ranks} processes: raise it, or use fewer processes (resources.nodes, "
                "resources.procs_per_node)"
            )
        if not len(dataset):
            raise DataError("the dataset of run.loader() is empty")
        division = Division(len(dataset), batch_size, drop_last)
        if not division.steps:
            raise DataError(
                f"the dataset of run.loader() has {len(dataset)} samples, too few for a batch of {batch_size}, and "
                "with drop_last=True nothing remains: reduce batch_size, or leave drop_last out"
            )
        order = Order(shuffle=shuffle, seed=self._seed if seed is None else seed)
        loader = Loader(dataset, division, order, self._shares, options)
        self._loaders.append(loader)
        return loader

    def register(self) -> dict[str, object]:
        """Note that checkpoints contain the loaders made so far, and how: by a name that no script's object has."""
        self._registered = list(self._loaders)
        return {"run.loaders": self} if self._loaders else {}

    def with_steps(self, steps: Iterator[int], loader: Loader) -> Iterator[tuple[int, Any]]:
        """Each of the ``steps`` with its batch of a ``loader``.

        Raises DataError for one that :meth:`make` has not made, or that is not in checkpoints although others are.
        """
        if not any(loader is each for each in self._loaders):
            raise DataError(
                f"run.steps(total, loader) needs a loader made by run.loader(), not {type(loader).__name__}: take the "
                "batches of any other loader within 'for step in run.steps(total)', and pass it to run.checkpoint()"
            )
        if self._registered is not None and not any(loader is each for each in self._registered):
            raise DataError(
                "the loader was made after run.checkpoint(), so checkpoints do not have its position: call "
                "run.loader() first"
            )
        self._stepped.add(self._loaders.index(loader))
        return loader.with_steps(steps)

    @property
    def epoch_samples(self) -> int | None:
        """The samples of an epoch of the loader that steps have gone through; None: there is none, or several."""
        return self._loaders[min(self._stepped)].epoch_samples if len(self._stepped) == 1 else None

    def state_dict(self) -> dict[str, Any]:
        """The positions of loaders that steps have gone through, by number."""
        return {str(number): self._loaders[number].state_dict() for number in sorted(self._stepped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the positions of a ``state`` that :meth:`state_dict` returned. Raises CheckpointError."""
        for number, position in state.items():
            if int(number) >= len(self._loaders):
                raise CheckpointError(
                    f"it has the position of loader {int(number) + 1}, and the script has made {len(self._loaders)}"
                )
            self._loaders[int(number)].load_state_dict(position)
            self._stepped.add(int(number))

    def close(self) -> None:
        """End the workers of all loaders."""
        for loader in self._loaders:
            loader.close()
