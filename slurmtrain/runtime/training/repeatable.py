"""Makes what a rank computes repeatable, as far as its spec demands that: ``seed`` and ``deterministic``."""

from __future__ import annotations

import torch

from slurmtrain.runtime.checkpoint.states import rng
from slurmtrain.runtime.environment.worker import Worker

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
        # What use_deterministic_algorithms(True) sets, without importing torch's compiler, to which a variable says it.
        torch.set_deterministic_debug_mode("error")
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    if worker.seed is not None:
        rng.seed_all(worker.seed)


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
