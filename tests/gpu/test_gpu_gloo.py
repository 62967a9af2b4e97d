"""Gradients on GPUs that gloo reduces, as between GPUs that NCCL does not connect: ranks may share a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.ranks import Pair
from torch import nn

from slurmtrain.model.experiment.strategy import StrategySpec
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training.passes import hardware_of
from slurmtrain.runtime.training.strategy_interface import Strategy

STEPS = 4


@pytest.fixture(scope="module")
def four() -> Iterator[Pair]:
    ranks = Pair(4)
    yield ranks
    ranks.close()


def losses_on(ranks: RankGroup, spec: StrategySpec, device: str) -> list[float]:
    """The losses of four ranks, of which two are on each node, with gloo."""
    group = RankGroup(ranks.rank, ranks.world_size, torch.device(device))
    strategy = Strategy(spec, group, ranks.rank // 2)
    torch.manual_seed(ranks.rank)
    model = strategy.parallelize(nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 7)))
    optimizer = strategy.optimizer(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    losses = []
    for step in range(STEPS):
        batch = torch.randn(8, 33, generator=torch.Generator().manual_seed(4 * step + ranks.rank)).to(device)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        strategy.gradients.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    group.close()
    return losses


@pytest.mark.parametrize(
    "spec",
    [
        StrategySpec(name="ddp", bucket_cap_mb=0.004),
        StrategySpec(name="zero1", hook="hierarchical", bucket_cap_mb=0.004),
        StrategySpec(name="ddp", hook="topk", density=1, bucket_cap_mb=0.004),
    ],
    ids=["ddp", "hierarchical", "topk"],
)
def test_gloo_reduces_gradients_on_a_gpu_as_those_on_cpus(four: Pair, gpu_count: int, spec: StrategySpec) -> None:
    for on_gpu, on_cpu in zip(four.run(losses_on, spec, "cuda:0"), four.run(losses_on, spec, "cpu"), strict=True):
        # Matrix products on GPUs sum in another order.
        assert on_gpu == pytest.approx(on_cpu, rel=1e-4)


def test_auto_computes_in_the_precision_that_the_gpu_has(four: Pair, gpu_count: int, device: torch.device) -> None:
    name, has_bf16 = hardware_of(device)
    assert name == torch.cuda.get_device_name(device)
    assert has_bf16 == (torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0))
    spec = StrategySpec(name="ddp", mixed_precision="auto")
    for on_gpu, on_cpu in zip(
        four.run(losses_on, spec, "cuda:0"), four.run(losses_on, StrategySpec(name="ddp"), "cpu"), strict=True
    ):
        assert on_gpu == pytest.approx(on_cpu, rel=0.03)
