"""Whether a trainer trains on all ranks of the run."""

from __future__ import annotations

from slurmtrain.errors import UserError
from slurmtrain.runtime.training.loop import Loop


def check_world(loop: Loop, size: int, advice: str) -> None:
    """Raise UserError if a trainer does not train on all ranks: each would train alone, and save to the same place.

    ``loop``: this process's. ``size``: how many processes the trainer trains on. ``advice``: what to do.
    """
    ranks = loop.worker.world_size
    if loop.is_active and size != ranks:
        raise UserError(f"this run has {ranks} ranks, but its trainer trains on {size}: {advice}")
