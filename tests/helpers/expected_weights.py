"""The weights that ``tests/local/scripts/steps.py`` ends with, computed in this process, without a run."""

from __future__ import annotations

import hashlib

import torch


def expected_digests(*runs: int, ranks: int = 1) -> list[str]:
    """The hashes of their last weights that ranks print, of a chain of runs of which each begins with those before.

    Args:
        runs: The number of steps of each run.
        ranks: One or two. What more of them have would depend on the order of a sum.
    """
    assert ranks in (1, 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 1)
    digests = []
    for steps in runs:
        _train(model, steps, ranks)
        digests.append(hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
    return digests


def _train(model: torch.nn.Module, steps: int, ranks: int) -> None:
    drawn = [torch.Generator().manual_seed(100 + rank) for rank in range(ranks)]
    for _ in range(steps):
        gradients = [_gradients(model, torch.randn(8, 4, generator=generator)) for generator in drawn]
        with torch.no_grad():
            for weights, *of_ranks in zip(model.parameters(), *gradients, strict=True):
                weights -= 0.01 * sum(of_ranks) / ranks


def _gradients(model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(model(batch).square().mean(), list(model.parameters()))
