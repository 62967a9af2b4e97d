"""Communication hooks with error feedback: what they send, and that no checkpoint or other number of ranks loses it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.ranks import Attempt, Pair, alone
from helpers.rare import rare
from torch import Tensor, nn

from slurmtrain.errors import StrategyError
from slurmtrain.model.experiment.strategy import StrategySpec
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training.strategy_interface import Strategy

WIDTH, BATCH, STEPS, SAVED = 24, 16, 9, 5
# 0.004 MiB: one bucket for the parameters of about two layers.
POWERSGD = StrategySpec(
    name="ddp", hook="powersgd", matrix_approximation_rank=2, start_powersgd_iter=2, bucket_cap_mb=0.004
)
TOPK = StrategySpec(name="ddp", hook="topk", density=0.05, bucket_cap_mb=0.004)
EITHER = [pytest.param(POWERSGD, id="powersgd"), pytest.param(TOPK, id="topk", marks=rare)]


def make_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


class Training:
    """A model, its optimizer and the hook of a strategy on one rank; the batch of a step depends on the step alone."""

    def __init__(self, ranks: RankGroup, spec: StrategySpec, seed: int = 1) -> None:
        self.ranks = ranks
        self.strategy = Strategy(spec, ranks, 0)
        self.model = self.strategy.parallelize(make_net(seed))
        self.optimizer = self.strategy.optimizer(torch.optim.AdamW, self.model.parameters(), {"lr": 0.02})
        self.states = self.strategy.states()

    def attempt(self, root: Path, restart: int = 0) -> Attempt:
        objects = {"model": self.model, "optimizer": self.optimizer, **self.states}
        return Attempt(root, self.ranks, objects, restart=restart, additions=self.states)

    def train(self, first: int, last: int) -> list[float]:
        """The losses of the whole batch at these steps."""
        losses = []
        for step in range(first, last):
            inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step % 3))
            part = inputs.tensor_split(self.ranks.world_size)[self.ranks.rank]
            self.optimizer.zero_grad()
            loss = (self.model(part) - part[:, :3].sin()).square().mean()
            loss.backward()
            self.optimizer.step()
            losses.append(sum(self.ranks.gather(loss.item())) / self.ranks.world_size)
        return losses

    def weights(self) -> Tensor:
        return torch.cat([each.detach().flatten() for each in self.model.parameters()])

    def errors(self) -> dict[str, Tensor]:
        [hook] = self.states.values()
        errors: dict[str, Tensor] = hook.state_dict()["errors"]
        return errors


def undisturbed(ranks: RankGroup, spec: StrategySpec) -> tuple[list[float], Tensor, dict[str, Tensor], int]:
    training = Training(ranks, spec)
    losses = training.train(0, STEPS)
    [hook] = training.states.values()
    return losses, training.weights(), training.errors(), len(hook._buckets)


def interrupted(
    ranks: RankGroup, spec: StrategySpec, root: Path, forget: bool = False
) -> tuple[list[float], Tensor, dict[str, Tensor], int]:
    """Save after some steps, and go on with other objects; ``forget`` leaves the hook's state out."""
    before = Training(ranks, spec)
    losses = before.train(0, SAVED)
    with before.attempt(root) as attempt:
        assert attempt.save(SAVED) == ""
    after = Training(ranks, spec, seed=7)
    [hook] = after.states.values()
    if forget:
        after.states = {}
    with after.attempt(root, restart=1) as attempt:
        assert attempt.restore() is not None
    losses += after.train(SAVED, STEPS)
    return losses, after.weights(), hook.state_dict()["errors"], len(hook._buckets)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(POWERSGD, id="powersgd"),
        pytest.param(
            replace(POWERSGD, name="zero1", batch_tensors_with_same_shape=True, gradient_as_bucket_view=True),
            id="powersgd_zero1",
            marks=rare,
        ),
        pytest.param(replace(POWERSGD, warm_start=False), id="powersgd_cold", marks=rare),
        pytest.param(TOPK, id="topk"),
        pytest.param(replace(TOPK, name="zero1", find_unused_parameters=True), id="topk_zero1", marks=rare),
    ],
)
def test_an_interrupted_run_is_the_same_bit_for_bit(two: Pair, tmp_path: Path, spec: StrategySpec) -> None:
    expected = two.run(undisturbed, spec)
    results = two.run(interrupted, spec, tmp_path)
    for (losses, weights, errors, buckets), actual in zip(expected, results, strict=True):
        assert buckets > 1
        assert losses == actual[0]
        assert torch.equal(weights, actual[1])
        assert torch.equal(weights, expected[0][1])
        assert errors.keys() == actual[2].keys()
        assert all(torch.equal(error, actual[2][name]) for name, error in errors.items())
        assert any(error.any() for error in errors.values())
    # Each rank has an error of its own.
    assert not torch.equal(*(torch.cat([*expected[rank][2].values()]) for rank in (0, 1)))
    if spec is POWERSGD:
        # Without the state of the hook it would be another run.
        losses, *_ = two.run(interrupted, spec, tmp_path / "forgotten", True)[0]
        assert (losses[:SAVED], losses[-1] == expected[0][0][-1]) == (expected[0][0][:SAVED], False)


def save_with(ranks: RankGroup, spec: StrategySpec, root: Path) -> dict[str, Tensor]:
    """Train and save; returns the errors of this rank."""
    training = Training(ranks, spec)
    training.train(0, SAVED)
    with training.attempt(root) as attempt:
        assert attempt.save(SAVED) == ""
    return training.errors() if training.states else {}


def go_on_with(ranks: RankGroup, spec: StrategySpec, root: Path) -> tuple[Tensor, dict[str, Tensor], list[float]]:
    """Restore; returns the weights, the errors of this rank, and the losses of more steps."""
    training = Training(ranks, spec, seed=7)
    with training.attempt(root, restart=1) as attempt:
        assert attempt.restore() is not None
    weights = training.weights().clone() if not spec.is_sharded else torch.zeros(0)
    errors = training.errors() if training.states else {}
    return weights, errors, training.train(SAVED, STEPS)


def mean(errors: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([each.get(name, torch.zeros(())).expand_as(errors[0][name]) for each in errors]).mean(0)


@pytest.mark.parametrize("spec", EITHER)
def test_on_another_number_of_ranks_the_mean_of_the_errors_stays(
    two: Pair, four: Pair, tmp_path: Path, spec: StrategySpec
) -> None:
    saved = four.run(save_with, spec, tmp_path)
    results = two.run(go_on_with, spec, tmp_path)
    restored = [errors for _, errors, _ in results]
    assert restored[0].keys() == saved[0].keys()
    assert all(torch.allclose(mean(restored, name), mean(saved, name), rtol=1e-4, atol=1e-7) for name in saved[0])
    assert results[0][2] == results[1][2]
    assert results[0][2][-1] < results[0][2][0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(POWERSGD, StrategySpec(name="fsdp"), id="powersgd_to_fsdp"),
        pytest.param(StrategySpec(name="ddp"), TOPK, id="ddp_to_topk", marks=rare),
        pytest.param(TOPK, POWERSGD, id="topk_to_powersgd"),
    ],
)
def test_a_checkpoint_of_another_strategy_is_restored_without_errors(
    two: Pair, tmp_path: Path, before: StrategySpec, after: StrategySpec
) -> None:
    two.run(save_with, before, tmp_path)
    for weights, errors, losses in two.run(go_on_with, after, tmp_path):
        assert not errors
        assert losses[-1] < losses[0]
        assert len(weights) == 0 or weights.any()


def losses_with(ranks: RankGroup, spec: StrategySpec) -> list[float]:
    return Training(ranks, spec).train(0, STEPS)


def test_whole_gradients_are_reduced_before_powersgd_begins_and_by_topk_with_density_1(two: Pair) -> None:
    expected = Training(alone(), StrategySpec(name="ddp")).train(0, STEPS)
    for spec in (replace(POWERSGD, start_powersgd_iter=STEPS), replace(TOPK, density=1)):
        assert two.run(losses_with, spec)[0] == pytest.approx(expected, rel=1e-5)


@rare
def test_compressed_gradients_train_nearly_as_whole_ones_and_not_the_same(two: Pair) -> None:
    expected = Training(alone(), StrategySpec(name="ddp")).train(0, STEPS)
    for spec in (POWERSGD, TOPK):
        losses, *others = two.run(losses_with, spec)
        assert others == [losses]
        assert losses != pytest.approx(expected, rel=1e-4)
        assert losses[-1] < losses[0]


# --- what is refused ------------------------------------------------------------------------------------------------


def problem_with(ranks: RankGroup, spec: StrategySpec, model: nn.Module) -> str:
    try:
        Strategy(spec, ranks, 0).parallelize(model)
    except StrategyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("spec", EITHER)
def test_float16_and_sparse_gradients_are_refused(two: Pair, spec: StrategySpec) -> None:
    half = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    [problem, *others] = two.run(problem_with, spec, half)
    assert f"'strategy.hook: {spec.hook}' does not work with float16, and the parameter '1.weight' has it" in problem
    assert others == [problem]
    [problem, *_] = two.run(problem_with, spec, nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 2)))
    assert "sparse gradients, and '0' has them: make it with sparse=False" in problem
    assert two.run(problem_with, spec, nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2).bfloat16())) == [""] * 2
