"""A model is evaluated under each strategy as on one process, and trains on as if it had not been."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.ranks import Pair, alone
from helpers.rare import rare
from helpers.word_training import forward_backward
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import slurmtrain
from slurmtrain.errors import DataError
from slurmtrain.model.experiment.strategy import MeshSpec, StrategySpec
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training.strategy_interface import Strategy

WIDTH, BATCH, STEPS = 8, 16, 3
# Of these batches the second and the third cannot be divided evenly, nor can the first among three microbatches.
SIZES = (16, 7, 5, 16)


class Net(nn.Module):
    """Layers whose results differ between training and evaluation, and depend on buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.3),
            nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH),
        )  # fmt: skip

    def pipeline_parts(self) -> list[str]:
        return [f"layers.{index}" for index in range(len(self.layers))]

    def tensor_plan(self, _size: int) -> dict[str, str]:
        return {"layers.0": "colwise", "layers.2": "rowwise"}

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def losses_of(output: Tensor, targets: Tensor) -> Tensor:
    """A loss, and another figure."""
    return torch.stack([functional.mse_loss(output, targets), functional.l1_loss(output, targets)])


def batches(dp_rank: int, dp_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for size in SIZES:
        batch = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(100 + size))
        own = batch.tensor_split(dp_size)[dp_rank]
        yield own, own.flip(1)


def trained(ranks: RankGroup, spec: StrategySpec | None, evaluates: bool) -> tuple[list[Any], list[Tensor]]:
    """What evaluations between and within steps return, and the losses and the state of this rank after the steps."""
    strategy = Strategy(spec, ranks, ranks.rank // 2)
    model = strategy.parallelize(Net())
    optimizer = strategy.optimizer(torch.optim.SGD, model.parameters(), {"lr": 0.2})
    torch.manual_seed(ranks.rank // 4)
    results, losses = [], []

    def evaluate() -> None:
        if evaluates:
            counted = ((*batch, True) for batch in batches(strategy.dp_rank, strategy.dp_size))
            results.append(strategy.evaluate(model, losses_of, counted).tolist())

    evaluate()
    for step in range(STEPS):
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        own = batch.tensor_split(strategy.dp_size)[strategy.dp_rank]
        losses.append(forward_backward(strategy, model, functional.mse_loss, (own, own.flip(1)), step))
        # With gradients that are not used yet.
        evaluate()
        optimizer.step()
        optimizer.zero_grad()
        evaluate()
    assert all(module.training for module in model.modules())
    # DistributedDataParallel gives all ranks the buffers of rank 0 in every forward pass.
    buffers = model.buffers() if ranks.rank == 0 or not isinstance(model, DistributedDataParallel) else ()
    state = [getattr(value, "to_local", lambda value=value: value)() for value in (*model.parameters(), *buffers)]
    return results, [*losses, *(value.detach().clone() for value in state)]


def with_and_without(ranks: RankGroup, spec: StrategySpec) -> tuple[list[Any], bool]:
    results, state = trained(ranks, spec, evaluates=True)
    _, expected = trained(ranks, spec, evaluates=False)
    return results, all(torch.equal(*pair) for pair in zip(state, expected, strict=True))


def untrained() -> list[float]:
    """The figures over all samples, without any of this."""
    model = Net().eval()
    inputs, targets = (torch.cat(parts) for parts in zip(*batches(0, 1), strict=True))
    return losses_of(model(inputs), targets).tolist()


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(StrategySpec(), id="ddp"),
        pytest.param(StrategySpec(name="fsdp", reshard_after_forward=False), id="zero2", marks=rare),
        pytest.param(StrategySpec(name="fsdp", mesh=MeshSpec(tp=2)), id="fsdp-tp"),
        pytest.param(StrategySpec(name="pipeline"), id="1f1b"),
        pytest.param(StrategySpec(name="fsdp", mesh=MeshSpec(pp=2), microbatches=4), id="pp-fsdp", marks=rare),
        pytest.param(
            StrategySpec(name="fsdp", mesh=MeshSpec(pp=2), schedule="interleaved1f1b"), id="pp-fsdp-interleaved"
        ),
        pytest.param(StrategySpec(name="zero1"), id="zero1", marks=rare),
        pytest.param(StrategySpec(name="hsdp"), id="hsdp", marks=rare),
        pytest.param(StrategySpec(mesh=MeshSpec(pp=2, dp=1, tp=2)), id="pp-tp", marks=rare),
        pytest.param(StrategySpec(mesh=MeshSpec(pp=2), schedule="loopedbfs"), id="pp-ddp-loopedbfs", marks=rare),
    ],
)
def test_an_evaluation_has_the_mean_of_all_samples_and_changes_nothing(four: Pair, spec: StrategySpec) -> None:
    (results, same), *others = four.run(with_and_without, spec)
    assert same
    assert all(other == (results, True) for other in others)
    assert results[0] == pytest.approx(untrained(), rel=1e-5)
    # Each step changes it, and nothing else does; batch norms have other statistics before their step, too.
    assert len({tuple(figures) for figures in results}) == len(results)


def evaluated_with_stand_ins(ranks: RankGroup) -> tuple[float, str]:
    """The mean where rank 3 has none of the samples, and what an evaluation without batches raises."""
    strategy = Strategy(StrategySpec(), ranks, 0)
    model = nn.Identity()
    targets = torch.zeros(2 if ranks.rank == 0 else 1)
    counted = [(torch.full_like(targets, ranks.rank), targets, ranks.rank < 3)]
    mean = strategy.evaluate(model, lambda output, _: output.mean(), counted)
    with pytest.raises(DataError) as caught:
        strategy.evaluate(model, functional.mse_loss, [])
    return mean.item(), str(caught.value)


def test_samples_that_do_not_count_are_left_out_and_no_samples_are_refused(four: Pair) -> None:
    for mean, problem in four.run(evaluated_with_stand_ins):
        assert mean == (0 + 0 + 1 + 2) / 4
        assert "run.evaluate() needs batches" in problem


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b"])
def test_a_pipeline_of_one_process_is_evaluated_too(schedule: str) -> None:
    with slurmtrain.session():
        strategy = Strategy(StrategySpec(name="pipeline", schedule=schedule), alone(), 0)
        model = strategy.parallelize(Net())
        counted = ((*batch, True) for batch in batches(0, 1))
        figures = strategy.evaluate(model, losses_of, counted).tolist()
    assert figures == pytest.approx(untrained(), rel=1e-5)
