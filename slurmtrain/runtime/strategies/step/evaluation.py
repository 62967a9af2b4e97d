"""The loss of a model over batches that it is not trained with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from slurmtrain.errors import DataError
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.strategies.sharded import is_sharded


@contextlib.contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A context where ``modules`` are in eval mode and gradients are off; both are restored at its end."""
    inner = list({id(each): each for module in modules for each in module.modules()}.values())
    modes = [(module, module.training) for module in inner]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module in inner:
            # Some shards are freed by the backward pass alone; the optimizer would change them, and not what has been
            # gathered from them.
            if is_sharded(module):
                module.reshard()  # type: ignore[operator]


class MeanLoss:
    """The mean of losses over all samples of all ranks."""

    def __init__(self) -> None:
        """No sample yet."""
        self._sum: Tensor | None = None
        self._samples = 0

    def add(self, total: Tensor, samples: int) -> None:
        """Count so many ``samples`` of this rank, with the ``total`` of their losses: a number, or several."""
        total = total.detach().double()
        self._sum = total if self._sum is None else self._sum + total
        self._samples += samples

    def over(self, ranks: RankGroup) -> Tensor:
        """The mean, the same on all ``ranks``, which call it alike. Raises DataError if there is no sample."""
        gathered = ranks.gather((None if self._sum is None else self._sum.tolist(), self._samples))
        samples = sum(samples for _, samples in gathered)
        if not samples:
            raise DataError("run.evaluate() takes batches of inputs and targets, and there was none with a sample")
        sums = [torch.tensor(total, dtype=torch.float64) for total, _ in gathered if total is not None]
        return (torch.stack(sums).sum(0) / samples).float().to(ranks.device)
