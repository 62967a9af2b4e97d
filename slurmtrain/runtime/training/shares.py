"""Which part of a batch each rank gets, and its microbatches: equal ones, unless ranks differ and have agreed so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from slurmtrain.errors import DataError
from slurmtrain.model.batches import divide, loss_weight, microbatch_sizes


class Shares:
    """The shares of a session, the same on all ranks, and what this rank has of the current batch."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        device: torch.device,
        *,
        step: Callable[[], int | None] = lambda: None,
        microbatches: int = 1,
        differ: bool = False,
    ) -> None:
        """Equal shares.

        Args:
            rank: The number of this rank among the ``ranks``.
            ranks: The number of ranks that batches are divided among.
            device: Where this rank computes.
            step: Returns the step of ``run.steps`` that the script is in, None outside.
            microbatches: The least number of microbatches that a rank divides its samples into.
            differ: Whether ranks may have different numbers of microbatches.
        """
        self.rank = rank
        self.ranks = ranks
        self.device = device
        self.step = step
        self.current: tuple[int, ...] = ()
        """How many samples of a full batch each rank gets; empty: as many as each other."""
        self.weight = 1.0
        """By what to multiply the mean loss of this rank's samples: the mean over ranks is then that over samples."""
        self.samples_taken: tuple[int, int] | None = None
        """How many samples this rank has of the first batch since this was None, and how many that batch has."""
        self.at_once: int | None = None
        """The most samples of a microbatch since this was None; None if none was divided."""
        self.samples = 0
        """How many samples all batches so far had, of all ranks together."""
        self._least = microbatches
        self._differ = differ
        self._limits: tuple[int | None, ...] = ()
        # The weight at the beginning of each step: as before the loop over steps.
        self._before_steps = 1.0

    @property
    def limits(self) -> list[int]:
        """How many samples fit into the memory of each rank at once, 0 where that is unknown; empty if it is of all."""
        return [limit or 0 for limit in self._limits] if any(self._limits) else []

    def begin_steps(self, *, are_loaded: bool) -> None:
        """Begin a loop over steps; what was shared before counts in all of them, unless batches ``are_loaded``."""
        self._before_steps = 1.0 if are_loaded else self.weight

    def begin_step(self) -> None:
        """Begin or leave a step: what was shared in the one before does not count any more."""
        self.weight = self._before_steps

    @property
    def has_samples(self) -> bool:
        """Whether this rank has any of the samples that were shared last, rather than one in place of none."""
        return self.weight != 0.0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context that shares other samples; the step's samples count again after it."""
        weight, batch, samples = self.weight, self.samples_taken, self.samples
        self.weight = 1.0
        try:
            yield
        finally:
            self.weight, self.samples_taken, self.samples = weight, batch, samples

    def part_of(self, parts: Sequence[Any]) -> list[Any]:
        """This rank's samples of each of ``parts``, which have as many. Raises DataError."""
        size = samples_of(parts, "run.share()")
        sizes = self.sizes(size)
        self.take(sizes)
        start = sum(sizes[: self.rank])
        stop = start + sizes[self.rank]
        # A rank without a sample gets the first one, with the weight 0: it has to take part in the step.
        return [part[start:stop] if start < stop else part[:1] for part in parts]

    def sizes(self, size: int, full: int | None = None) -> tuple[int, ...]:
        """How many of a batch's ``size`` samples each rank gets, where a ``full`` one has so many, by default as many.

        A batch that is not full has no more for a rank than a full one.
        """
        return divide(size, divide(full or size, self.current or (1,) * self.ranks))

    def take(self, sizes: Sequence[int]) -> None:
        """Note that each rank takes so many samples of a batch for a step."""
        self.weight = loss_weight(sizes, self.rank)
        self.samples += sum(sizes)
        if self.samples_taken is None:
            self.samples_taken = sizes[self.rank], sum(sizes)

    def microbatches(self, samples: int) -> tuple[int, ...]:
        """The sizes of the microbatches into which this rank divides so many ``samples``. Raises DataError."""
        if samples < (1 if self._differ else self._least):
            raise DataError(
                f"{samples} samples cannot be divided into {self._least} microbatches: raise the batch size, or reduce "
                "'resources.accumulation'"
            )
        sizes = microbatch_sizes(samples, self._least, self._limits[self.rank] if self._limits else None)
        self.at_once = max(self.at_once or 0, *sizes)
        return sizes

    def change(self, shares: Sequence[int], limits: Sequence[int | None] = ()) -> None:
        """Divide batches anew from the next one on; call it on all ranks after the same step.

        Args:
            shares: The proportions, by rank.
            limits: How many samples fit into the memory of each rank at once, None where that is unknown.
        """
        self.current, self._limits = tuple(shares), tuple(limits)

    def state_dict(self) -> dict[str, Any]:
        """The shares, and what limits microbatches."""
        return {"shares": list(self.current), "limits": list(self._limits)}

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
