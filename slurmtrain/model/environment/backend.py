"""Which of torch's backends lets ranks with unequal hardware communicate, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

GLOO, NCCL = "gloo", "nccl"
# How many hosts a reason names.
_MAX_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHardware:
    """What a rank computes on and communicates by."""

    host: str
    """The name of its node."""
    name: str
    """The name of its GPU, or ``CPU``."""
    has_gpu: bool
    """Whether it computes on a GPU."""
    library: str = ""
    """Which library its torch is built with: ``NCCL``, or ``RCCL`` for GPUs of AMD; empty if with none."""
    version: str = ""
    """The version of that library."""


@dataclass(frozen=True, slots=True)
class ElectedBackend:
    """The backend for tensors on GPUs, and why, as a phrase."""

    name: str
    why: str


def elect_backend(ranks: Sequence[RankHardware]) -> ElectedBackend:
    """NCCL if all of these ranks can use it with each other, else gloo, which also reduces tensors on GPUs.

    NCCL connects GPUs of any generations that its build supports, but refuses peers with another version of itself
    ("Mismatched NCCL version detected", init.cc of NCCL 2). Whether torch supports a GPU at all is for preflight, which
    multiplies matrices on each.

    Args:
        ranks: The hardware of each.
    """
    with_gpu = [rank for rank in ranks if rank.has_gpu]
    if not with_gpu:
        return ElectedBackend(GLOO, "no process has a GPU")
    if len(with_gpu) < len(ranks):
        return ElectedBackend(GLOO, f"processes have no GPU on {_name(rank for rank in ranks if not rank.has_gpu)}")
    libraries = list(dict.fromkeys((rank.library, rank.version) for rank in ranks))
    if libraries == [("", "")]:
        return ElectedBackend(GLOO, "torch is built without NCCL")
    if len(libraries) == 1:
        return ElectedBackend(NCCL, "all processes have {} {}".format(*libraries[0]))
    holders = []
    for library, version in libraries:
        hosts = _name(rank for rank in ranks if (rank.library, rank.version) == (library, version))
        holders.append(f"{f'{library} {version}' if library else 'no NCCL'} on {hosts}")
    return ElectedBackend(GLOO, f"there is {'; '.join(holders)}")


def _name(ranks: Iterable[RankHardware]) -> str:
    """The hosts of some ``ranks``."""
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    more = f" and {len(hosts) - _MAX_NAMED} more" if len(hosts) > _MAX_NAMED else ""
    return ", ".join(hosts[:_MAX_NAMED]) + more
