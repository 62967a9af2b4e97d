"""Which part of a batch each rank gets: equal ones, unless ranks differ in speed and have agreed on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slurmtrain.errors import DataError
from slurmtrain.model.data.batches import divide, equal_shares, loss_weight
from slurmtrain.runtime.data.loaders import Loaders


class Shares:
    """The shares of a session, the same on all ranks."""

    def __init__(self, rank: int, ranks: int, loaders: Loaders) -> None:
        """``rank``: which of the ``ranks`` among which batches are divided this is. ``loaders``: of the session."""
        self._weight = 1.0
        self.samples_taken: tuple[int, int] | None = None
        """How many samples this rank has of the first batch since this was None, and how many that batch has."""
        self._rank = rank
        self._ranks = ranks
        self._loaders = loaders
        self._shares: tuple[int, ...] = ()

    @property
    def current(self) -> tuple[int, ...]:
        """How many samples of a full batch each rank gets; empty: as many as each other."""
        return self._shares

    @property
    def weight(self) -> float:
        """By what to multiply the mean loss of this rank's samples: the mean over ranks is then that over samples."""
        return self._loaders.weight if self._loaders.is_stepping else self._weight

    def part_of(self, parts: Sequence[Any]) -> list[Any]:
        """This rank's samples of each of ``parts``, which have as many. Raises DataError."""
        sizes = {len(part) for part in parts}
        if len(sizes) != 1:
            raise DataError(f"run.share() takes parts of one batch, and these have {sorted(sizes)} samples")
        size = sizes.pop()
        if size < 1:
            raise DataError("run.share() takes a batch with at least one sample")
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
        if self.samples_taken is None:
            self.samples_taken = own, whole

    def change(self, shares: Sequence[int]) -> None:
        """Divide batches in these proportions from the next one on; call it on all ranks after the same step."""
        self._shares = tuple(shares)
        self._loaders.share(self._shares)

    def state_dict(self) -> dict[str, Any]:
        """The shares."""
        return {"shares": list(self._shares)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the shares of a ``state``."""
        if state["shares"]:
            self.change(state["shares"])

    def reshard_state_dict(self, states: Sequence[Any], rank: int, world_size: int) -> None:
        """Begin with equal shares: the ``states`` are of other ranks than ``rank`` of now ``world_size``."""
