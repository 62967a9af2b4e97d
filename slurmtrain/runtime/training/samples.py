"""A dataset whose samples draw the same random numbers whichever process loads them, and when.

Before a sample is loaded, the generators of Python, NumPy and torch are seeded with a number that depends on the seed,
the epoch and the sample alone, unless it draws none. So an augmentation is the same with any number of workers and
ranks, with workers that live for one epoch or for all, and after a resume.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import xxhash
from torch.utils.data import Dataset, Subset

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
            self._draws = _draw() != _undisturbed()
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


def seed_modules(number: int) -> None:
    """Seed the generators of Python and NumPy with a ``number`` of up to 64 bits."""
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)


def _draw() -> tuple[float, ...]:
    """The next numbers of these generators."""
    numpy = sys.modules["numpy"].random.random() if "numpy" in sys.modules else 0.0
    return random.random(), numpy  # noqa: S311 (no secret)


@cache
def _undisturbed() -> tuple[float, ...]:
    """The numbers after :data:`_PROBE` if nothing has drawn since. It seeds the generators itself."""
    seed_modules(_PROBE)
    return _draw()


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
