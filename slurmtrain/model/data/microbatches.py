"""Into which microbatches a rank divides its samples of a batch, so that each fits into its memory. Pure."""

from __future__ import annotations

import math

from slurmtrain.model.data.batches import equal_shares

# The allocator needs more than what is allocated, and so do CUDA and NCCL themselves.
_USABLE = 0.85


def microbatch_sizes(samples: int, least: int, most: int | None = None) -> tuple[int, ...]:
    """The sizes of a rank's microbatches, which differ by at most one sample.

    Args:
        samples: How many samples of the batch the rank has, at least one.
        least: The least number of microbatches. There are fewer only where there are fewer samples.
        most: How many samples fit into the memory at once, at least one; None if that is unknown.
    """
    parts = least if most is None else max(least, math.ceil(samples / most))
    return equal_shares(samples, min(samples, parts))


def samples_that_fit(*, total: int, before: int, peak: int, samples: int) -> int | None:
    """How many samples fit into a memory at once; None if that cannot be told.

    Args:
        total: The bytes of the memory.
        before: How many were allocated before a step.
        peak: How many were allocated at most in the step.
        samples: How many samples the greatest microbatch of the step had: so many fit in any case.
    """
    of_sample = (peak - before) / samples
    return max(samples, int((_USABLE * total - before) / of_sample)) if of_sample > 0 else None
