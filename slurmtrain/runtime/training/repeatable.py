"""Makes what a rank computes repeatable, as far as its spec demands that: ``seed`` and ``deterministic``."""

from __future__ import annotations

import io

import torch

from slurmtrain.runtime.checkpoint import rng
from slurmtrain.runtime.environment.node import Worker
from slurmtrain.runtime.job.process_group import RankGroup

# How torch begins the end of its message about an operation that has no deterministic implementation.
_REFUSED = "does not have a deterministic implementation"


def make_repeatable(worker: Worker) -> None:
    """Seed the random numbers of this process, and let torch use only deterministic algorithms, if the spec says so.

    All ranks get the same seed, so that they initialize the same weights: the convention of Lightning, accelerate and
    transformers, too. Workers of torch's data loader derive theirs from it.

    Args:
        worker: This process.
    """
    if worker.deterministic:
        # As use_deterministic_algorithms(True) does, without importing torch's compiler, which learns it from a
        # variable.
        torch.set_deterministic_debug_mode("error")
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    if worker.seed is not None:
        rng.seed_all(worker.seed)


def share_random_numbers(ranks: RankGroup, size: int) -> None:
    """Give ranks that divide layers among them the first one's random numbers, such as the numbers for dropout.

    Otherwise they would not compute the same between these layers.

    Args:
        ranks: All ranks.
        size: How many neighbouring ranks have the same.
    """
    if size > 1:
        # Pickling alone cannot read NumPy's state again, a tensor of unsigned numbers.
        packed = io.BytesIO()
        torch.save(rng.capture(ranks.device), packed)
        first = ranks.gather(packed.getvalue())[ranks.rank - ranks.rank % size]
        rng.restore(torch.load(io.BytesIO(first), weights_only=True), ranks.device)


def name_key(message: str) -> str:
    """The message of an exception that ended a rank, with the key of the spec if that is its reason.

    Args:
        message: What the exception says.
    """
    if _REFUSED not in message:
        return message
    operation = message.partition(_REFUSED)[0].strip()
    return (
        f"{operation} has no deterministic implementation, which 'deterministic: true' in the spec demands; use "
        f"another operation, or remove the key ({message})"
    )
