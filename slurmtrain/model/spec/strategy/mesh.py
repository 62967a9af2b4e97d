"""The dimensions of a strategy's device mesh: how many copies of the model there are, and over how many ranks each is.

Neighbouring ranks are in the last dimension, which communicates most.
"""

from __future__ import annotations

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

    dp: int = declare_key(
        REST,
        _SIZE,
        "How many parts the batch has (data parallelism); `name` says what each of them holds. -1: what the other "
        "dimension leaves.",
    )
    tp: int = declare_key(
        1,
        _SIZE,
        "Over how many processes each layer of the `plan` is divided (tensor parallelism): neighbouring ranks, best on "
        "one node. -1: what the other dimension leaves.",
    )

    @property
    def is_whole(self) -> bool:
        """Whether each size is a number, and at most one of them is to be the rest."""
        return None not in (self.dp, self.tp) and not self.dp == self.tp == REST

    def conflicts(self) -> Iterator[Conflict]:
        """More than one size that is to be the rest."""
        if self.dp == self.tp == REST:
            yield "tp", f"only one size can be {REST}: the rest"

    def sizes(self, world_size: int) -> MeshSpec:
        """The mesh of this many processes, without a size that is to be the rest.

        Args:
            world_size: How many processes there are.

        Raises:
            ValueError: The sizes do not multiply to that; the message is a phrase.
        """
        product = (self.dp if self.dp != REST else 1) * (self.tp if self.tp != REST else 1)
        rest, left = divmod(world_size, product)
        if left or (rest != 1 and REST not in (self.dp, self.tp)):
            written = " x ".join(f"{name} {size}" for name, size in (("dp", self.dp), ("tp", self.tp)) if size != REST)
            verb = "do not divide" if REST in (self.dp, self.tp) else "are not"
            raise ValueError(f"{written} {verb} {world_size} processes")
        return MeshSpec(dp=rest if self.dp == REST else self.dp, tp=rest if self.tp == REST else self.tp)
