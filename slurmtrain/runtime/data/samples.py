"""A dataset whose samples draw the same random numbers whichever process loads them, and when.

Before a sample is loaded, the generators of Python, NumPy and torch are seeded with a number that depends on the seed,
the epoch and the sample alone. So an augmentation is the same with any number of workers and ranks, with workers that
live for one epoch or for all, and after a resume.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.utils.data import Dataset, Subset


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
        """``dataset``: the script's own. ``seed``: on which its random numbers depend; None if it draws none."""
        self.dataset = dataset
        self.seed = seed

    def __getitems__(self, batch: OwnBatch) -> Sequence[Any]:
        """The samples of a ``batch``. Leaves the generators seeded for what collates it."""
        if _reads_batches(self.dataset):
            self._seed_for(batch.epoch, batch.indices[0])
            samples: Sequence[Any] = self.dataset.__getitems__(batch.indices)
        else:
            samples = [self._sample(batch.epoch, index) for index in batch.indices]
        self._seed_for(batch.epoch, batch.indices[0], ":batch")
        return samples

    def _sample(self, epoch: int, index: int) -> Any:
        self._seed_for(epoch, index)
        return self.dataset[index]

    def _seed_for(self, epoch: int, index: int, suffix: str = "") -> None:
        if self.seed is not None:
            seed_generators(xxhash.xxh3_64_intdigest(f"{self.seed}:{epoch}:{index}{suffix}".encode()))


def _reads_batches(dataset: Any) -> bool:
    if type(dataset) is Subset:
        # It has the method in any case, and without one in its dataset only calls that for each sample.
        return _reads_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def seed_generators(number: int) -> None:
    """Seed the generators that datasets draw from with a ``number`` of up to 64 bits.

    Not those of devices, on which the process may be training.
    """
    random.seed(number)
    torch.default_generator.manual_seed(number % 2**63)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)


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
