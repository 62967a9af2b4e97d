"""The dimensions of a strategy's device mesh: how many copies of the model there are, and over how many ranks each is.

Neighbouring ranks are in the last dimension, which communicates most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from slurmtrain.model.spec.kinds import Conflict, Scalar, declare_key

# As torch's -1 in the shape of a view: what the others leave.
REST = -1


def _read_size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != REST):
        raise ValueError(f"expected a whole number of at least 1, or {REST} for the rest, found {value!r}")
    return value


_SIZE = Scalar(f"whole number of at least 1, or {REST}", _read_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """How many processes each dimension of the mesh has. Their product is the number of processes."""

    pp: int = declare_key(
        1,
        _SIZE,
        "How many processes have the stages of the model, one after the other (pipeline parallelism). -1: what the "
        "other dimensions leave.",
    )
    dp: int = declare_key(
        REST,
        _SIZE,
        "How many parts the batch has (data parallelism); `name` says what each of them holds. -1: what the other "
        "dimensions leave.",
    )
    tp: int = declare_key(
        1,
        _SIZE,
        "Over how many processes each layer of the `plan` is divided (tensor parallelism): neighbouring ranks, best on "
        "one node. -1: what the other dimensions leave.",
    )

    @property
    def is_whole(self) -> bool:
        """Whether each size is a number, and at most one of them is to be the rest."""
        sizes = (self.pp, self.dp, self.tp)
        return None not in sizes and sizes.count(REST) <= 1

    def conflicts(self) -> Iterator[Conflict]:
        """More than one size that is to be the rest."""
        rest = [name for name, size in self._items() if size == REST]
        if len(rest) > 1:
            yield rest[-1], f"only one size can be {REST}: the rest"

    def sizes(self, world_size: int) -> MeshSpec:
        """The mesh of this many processes, without a size that is to be the rest.

        Args:
            world_size: How many processes there are.

        Raises:
            ValueError: The sizes do not multiply to that; the message is a phrase.
        """
        fixed = {name: size for name, size in self._items() if size != REST}
        rest, left = divmod(world_size, math.prod(fixed.values()))
        has_rest = len(fixed) < len(self._items())
        if left or (rest != 1 and not has_rest):
            written = " x ".join(f"{name} {size}" for name, size in fixed.items() if size != 1 or len(fixed) == 1)
            raise ValueError(f"{written or 'dp 1'} {'do not divide' if has_rest else 'are not'} {world_size} processes")
        return MeshSpec(**{name: rest if size == REST else size for name, size in self._items()})

    def _items(self) -> tuple[tuple[str, int], ...]:
        return ("pp", self.pp), ("dp", self.dp), ("tp", self.tp)
