"""Which part of a batch each rank gets, and its microbatches: equal ones, unless ranks differ and have agreed so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from slurmtrain.errors import DataError
from slurmtrain.model.batches import divide, equal_shares, loss_weight, microbatch_sizes
from slurmtrain.runtime.training.loaders import Loaders


class Shares:
    """The shares of a session, the same on all ranks."""

    def __init__(self, rank: int, ranks: int, loaders: Loaders, *, microbatches: int = 1, differ: bool = False) -> None:
        """Equal shares.

        Args:
            rank: The number of this rank among the ``ranks``.
            ranks: The number of ranks that batches are divided among.
            loaders: Of the session.
            microbatches: The least number of microbatches that a rank divides its samples into.
            differ: Whether ranks may have different numbers of microbatches.
        """
        # The weight of the last shared samples of this step; None: none were shared.
        self._weight: float | None = None
        self._before_steps: float | None = None
        self.samples_taken: tuple[int, int] | None = None
        """How many samples this rank has of the first batch since this was None, and how many that batch has."""
        self.at_once: int | None = None
        """The most samples of a microbatch since this was None; None if none was divided."""
        self._least = microbatches
        self._differ = differ
        self.samples = 0
        """How many samples all batches so far had, of all ranks together."""
        self._rank = rank
        self._ranks = ranks
        self._loaders = loaders
        self._shares: tuple[int, ...] = ()
        self._limits: tuple[int | None, ...] = ()

    @property
    def current(self) -> tuple[int, ...]:
        """How many samples of a full batch each rank gets; empty: as many as each other."""
        return self._shares

    @property
    def limits(self) -> list[int]:
        """How many samples fit into the memory of each rank at once, 0 where that is unknown; empty if it is of all."""
        return [limit or 0 for limit in self._limits] if any(self._limits) else []

    @property
    def weight(self) -> float:
        """By what to multiply the mean loss of this rank's samples: the mean over ranks is then that over samples."""
        return self._loaders.weight if self._weight is None else self._weight

    def begin_steps(self) -> None:
        """Begin a loop over steps; what was shared before counts in all of them, unless they go through a loader."""
        self._before_steps = None if self._loaders.is_stepping else self._weight

    def begin_step(self) -> None:
        """Begin or leave a step: what was shared in the one before does not count any more."""
        self._weight = self._before_steps

    @property
    def has_samples(self) -> bool:
        """Whether this rank has any of the samples that were shared last, rather than one in place of none."""
        return self._weight != 0.0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context that shares other samples; the step's samples count again after it."""
        weight, batch, samples = self._weight, self.samples_taken, self.samples
        self._weight = None
        try:
            yield
        finally:
            self._weight, self.samples_taken, self.samples = weight, batch, samples

    def part_of(self, parts: Sequence[Any]) -> list[Any]:
        """This rank's samples of each of ``parts``, which have as many. Raises DataError."""
        size = samples_of(parts, "run.share()")
        own = self.places(size)
        # A rank without a sample gets the first one, with the weight 0: it has to take part in the step.
        return [part[own.start : own.stop] if own else part[:1] for part in parts]

    def places(self, size: int) -> range:
        """The samples of this rank in a batch of this ``size``; sets the weight."""
        sizes = divide(size, self._shares) if self._shares else equal_shares(size, self._ranks)
        self._weight = loss_weight(sizes, self._rank)
        self.take(sizes[self._rank], size)
        start = sum(sizes[: self._rank])
        return range(start, start + sizes[self._rank])

    def take(self, own: int, whole: int) -> None:
        """Note that this rank takes ``own`` samples of a batch that has ``whole``."""
        self.samples += whole
        if self.samples_taken is None:
            self.samples_taken = own, whole

    def microbatches(self, samples: int) -> tuple[int, ...]:
        """The sizes of the microbatches into which this rank divides so many ``samples``. Raises DataError."""
        if samples < (1 if self._differ else self._least):
            raise DataError(
                f"{samples} samples cannot be divided into {self._least} microbatches: raise the batch size, or reduce "
                "'resources.accumulation'"
            )
        sizes = microbatch_sizes(samples, self._least, self._limits[self._rank] if self._limits else None)
        self.at_once = max(self.at_once or 0, *sizes)
        return sizes

    def change(self, shares: Sequence[int], limits: Sequence[int | None] = ()) -> None:
        """Divide batches anew from the next one on; call it on all ranks after the same step.

        Args:
            shares: The proportions, by rank.
            limits: How many samples fit into the memory of each rank at once, None where that is unknown.
        """
        self._shares, self._limits = tuple(shares), tuple(limits)
        self._loaders.share(self._shares)

    def state_dict(self) -> dict[str, Any]:
        """The shares, and what limits microbatches."""
        return {"shares": list(self._shares), "limits": list(self._limits)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the shares of a ``state``, which may be of a version without limits."""
        if state["shares"]:
            self.change(state["shares"], state.get("limits", ()))

    def reshard_state_dict(self, states: Sequence[Any], rank: int, world_size: int) -> None:
        """Begin with equal shares: the ``states`` are of other ranks than ``rank`` of now ``world_size``."""


def samples_of(parts: Sequence[Any], taker: str) -> int:
    """How many samples each of the ``parts`` of a batch has. Raises DataError, which names their ``taker``."""
    sizes = {len(part) for part in parts}
    if len(sizes) != 1:
        raise DataError(f"{taker} takes parts of one batch, and these have {sorted(sizes)} samples")
    size = sizes.pop()
    if size < 1:
        raise DataError(f"{taker} takes a batch with at least one sample")
    return size
