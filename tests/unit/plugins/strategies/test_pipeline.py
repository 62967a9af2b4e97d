"""Models whose parts are divided over ranks: they train as on one process, and what has no stages is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import Pair, alone
from helpers.rare import rare
from helpers.word_training import (
    BATCH,
    LENGTH,
    SAME,
    WORDS,
    continue_with,
    expected,
    forward_backward,
    loss_of,
    objects_of,
    strategy_of,
    train,
)
from torch import Tensor, nn
from torch.nn import functional

from slurmtrain.errors import StrategyError
from slurmtrain.model.experiment.strategy import MeshSpec, StrategySpec
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training.strategy_interface import Strategy

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Predicts words of a text."""

    def __init__(self, seed: int = 1, blocks: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))

    def pipeline_parts(self) -> Sequence[str]:
        return ["embed", *(f"blocks.{index}" for index in range(len(self.blocks))), "head"]

    def tensor_plan(self, _size: int) -> dict[str, str]:
        return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head.1": "colwise_rep"}

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def figures_with(ranks: RankGroup, spec: StrategySpec, accumulation: int) -> tuple[list[float], list[str]]:
    strategy = strategy_of(ranks, spec, accumulation)
    # Each rank makes other weights: all must begin with rank 0's.
    objects = objects_of(strategy, Net(seed=1 + ranks.rank))
    names = sorted({".".join(name.split(".")[:2]) for name in objects["model"].state_dict()})
    return train(ranks, strategy, objects, accumulation=accumulation), names


PP2 = MeshSpec(pp=2)


@pytest.mark.parametrize(
    ("spec", "accumulation", "first_rank_has"),
    [
        pytest.param(StrategySpec(name="pipeline"), 1, ["blocks.0", "embed.weight"], id="1f1b"),
        pytest.param(
            StrategySpec(name="pipeline", schedule="gpipe", split=("blocks.0", "blocks.1", "head"), microbatches=2),
            2,
            ["embed.weight"],
            id="gpipe",
            marks=rare,
        ),
        pytest.param(
            StrategySpec(name="pipeline", schedule="interleaved1f1b"),
            1,
            ["blocks.3", "embed.weight"],
            id="interleaved1f1b",
        ),
        pytest.param(StrategySpec(name="pipeline", schedule="loopedbfs"), 1, [], id="loopedbfs", marks=rare),
        pytest.param(StrategySpec(mesh=PP2), 2, [], id="pp-ddp", marks=rare),
        pytest.param(StrategySpec(name="fsdp", mesh=PP2, microbatches=4), 1, [], id="pp-fsdp", marks=rare),
        pytest.param(StrategySpec(mesh=MeshSpec(pp=2, dp=1, tp=2)), 1, [], id="pp-tp"),
    ],
)
def test_stages_train_as_on_one_process(
    four: Pair, spec: StrategySpec, accumulation: int, first_rank_has: list[str]
) -> None:
    (figures, names), *others = four.run(figures_with, spec, accumulation)
    assert all(other[0] == pytest.approx(figures, rel=SAME) for other in others)
    assert not first_rank_has or names == first_rank_has
    assert figures == pytest.approx(expected(Net), rel=SAME)


@pytest.mark.parametrize(
    ("spec", "accumulation"),
    [
        pytest.param(StrategySpec(name="pipeline", mixed_precision="bf16"), 1, id="bf16"),
        pytest.param(StrategySpec(name="fsdp", mesh=PP2, mixed_precision="fp16"), 2, id="pp-fsdp-fp16"),
    ],
)
def test_stages_compute_in_lower_precision(four: Pair, spec: StrategySpec, accumulation: int) -> None:
    (figures, _), *_ = four.run(figures_with, spec, accumulation)
    assert figures == pytest.approx(expected(Net), rel=0.03)
    assert figures != pytest.approx(expected(Net), rel=SAME)


def layers() -> nn.Sequential:
    """A sequence which has the same activation function twice, and a norm with statistics of each microbatch."""
    torch.manual_seed(1)
    act = nn.Tanh()
    linear = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(linear[0], act, nn.BatchNorm1d(WIDTH), linear[1], act, *linear[2:])


def shapes_with(ranks: RankGroup, spec: StrategySpec | None, accumulation: int) -> tuple[list[float], dict[str, Any]]:
    """The losses and the state after steps with batches of several shapes, two of them in a step."""
    strategy = Strategy(spec, ranks, 0, accumulation)
    model = strategy.parallelize(layers())
    optimizer = strategy.optimizer(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    losses = []
    for step, rows in enumerate([(16, 8), (8, 16), (16, 16)]):
        for count in rows:
            batch = torch.randn((count, WIDTH), generator=torch.Generator().manual_seed(step))
            loss = forward_backward(strategy, model, functional.mse_loss, (batch, batch.flip(1)), step, accumulation)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    full = {
        name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in model.state_dict().items()
    }
    return losses, {name: value.tolist() for name, value in full.items()}


def test_shapes_change_between_steps_and_learning_them_changes_nothing(four: Pair) -> None:
    losses, state = shapes_with(alone(), None, 4)
    results = four.run(shapes_with, StrategySpec(name="pipeline", microbatches=4), 1)
    merged = {name: value for _, part in results for name, value in part.items()}
    assert all(each == pytest.approx(losses, rel=SAME) for each, _ in results)
    assert merged.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(torch.tensor(merged[name]), torch.tensor(value), rtol=1e-5, atol=1e-6)


def steps_around_infinity(ranks: RankGroup) -> list[tuple[bool, float]]:
    """Whether each step was skipped, and how much it has changed the parameters of this rank.

    The loss of the second step is infinite, on the last stage, which alone computes it.
    """
    strategy = Strategy(StrategySpec(name="pipeline", mixed_precision="fp16"), ranks, 0)
    objects = objects_of(strategy, Net())
    model, optimizer, results = objects["model"], objects["optimizer"], []
    words = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    for factor in (1.0, torch.inf, 1.0):
        before = [parameter.detach().clone() for parameter in model.parameters()]

        def scaled(logits: Tensor, targets: Tensor, factor: float = factor) -> Tensor:
            return loss_of(logits, targets) * factor

        forward_backward(strategy, model, scaled, (words, words))
        optimizer.step()
        optimizer.zero_grad()
        changes = [(new - old).norm() for new, old in zip(model.parameters(), before, strict=True)]
        results.append((optimizer.step_was_skipped, float(sum(changes))))
    return results


def test_an_infinite_loss_on_the_last_stage_skips_the_step_on_all(four: Pair) -> None:
    for results in four.run(steps_around_infinity):
        assert [skipped for skipped, _ in results] == [False, True, False]
        assert [change > 0 for _, change in results] == [True, False, True]


PIPELINE = StrategySpec(name="pipeline")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(PIPELINE, StrategySpec(name="zero1"), id="pipeline-zero1"),
        pytest.param(StrategySpec(name="fsdp"), PIPELINE, id="fsdp-pipeline", marks=rare),
        pytest.param(
            StrategySpec(mesh=MeshSpec(pp=2, dp=1, tp=2)),
            StrategySpec(name="pipeline", schedule="interleaved1f1b"),
            id="pp-tp-interleaved",
            marks=rare,
        ),
        pytest.param(StrategySpec(name="tensor"), StrategySpec(mesh=PP2), id="tensor-pp-ddp", marks=rare),
    ],
)
def test_a_checkpoint_of_stages_is_restored_under_other_strategies_and_the_reverse(
    four: Pair, tmp_path: Path, before: StrategySpec, after: StrategySpec
) -> None:
    figures = four.run(continue_with, tmp_path, Net, before, after)[0]
    assert figures == pytest.approx(expected(Net), rel=SAME)


# --- what is refused ------------------------------------------------------------------------------------------------


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head[1].weight = self.embed.weight


class Outside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Named(Net):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def pipeline_parts(self) -> Sequence[str]:
        return [*super().pipeline_parts(), *self.names]


def problems_of(ranks: RankGroup, spec: StrategySpec, kinds: Sequence[str]) -> list[str]:
    models: dict[str, Any] = {
        "short": lambda: Net(blocks=1), "tied": Tied, "outside": Outside, "net": Net, "silent": Block,
        "empty": lambda: nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Tanh(), nn.Tanh(), nn.Linear(WIDTH, WORDS)),
        "twice": lambda: Named("blocks.0"), "inner": lambda: Named("head.1"),
    }  # fmt: skip
    # Nothing of what it has refused stays.
    strategy, problems = Strategy(spec, ranks, ranks.rank // 2), []
    for kind in kinds:
        with pytest.raises(StrategyError) as caught:
            model = strategy.parallelize(models[kind]())
            words = torch.zeros((BATCH - 1, LENGTH), dtype=torch.int64)
            forward_backward(strategy, model, loss_of, (words, words))
        problems.append(str(caught.value))
    return problems


REFUSED = {
    "short": "the model has 3 parts, fewer than the 4 stages of 'schedule: 1f1b' on 4 processes",
    "tied": "'head.1.weight' is also in the part 'embed' (tied weights)",
    "outside": "'scale' is in none of the parts that pipeline_parts() names",
    "silent": "Block does not say what its parts are: give it a method pipeline_parts()",
    "empty": "of 4 would have no parameters (1)",
    "twice": "pipeline_parts() names 'blocks.0' twice",
    "inner": "pipeline_parts() names 'head.1', which is in the part 'head'",
    "net": "15 samples cannot be divided into 4 microbatches evenly",
}


@pytest.mark.parametrize(
    ("split", "refused"),
    [
        ((), REFUSED),
        (("blocks.0", "blocks.9", "head"),
         {"net": "'strategy.split' names 'blocks.9', which is not a part of the model; did you mean 'blocks."}),
        (("blocks.1", "blocks.0", "head"),
         {"net": "must name the first parts of the stages 2 to 4, in the model's order"}),
    ],
    ids=["parts", "name", "order"],
)  # fmt: skip
def test_what_has_no_stages_is_refused_on_all_ranks(
    four: Pair, split: tuple[str, ...], refused: dict[str, str]
) -> None:
    [problems, *others] = four.run(problems_of, replace(PIPELINE, split=split), [*refused])
    assert [
        (kind, text) for (kind, text), problem in zip(refused.items(), problems, strict=True) if text not in problem
    ] == []
    assert others == [problems] * 3


def test_a_pipelined_model_is_not_called(four: Pair) -> None:
    assert "compute a step with run.forward_backward" in four.run(call_model)[0]


def call_model(ranks: RankGroup) -> str:
    model = Strategy(PIPELINE, ranks, 0).parallelize(Net())
    with pytest.raises(StrategyError) as caught:
        model(torch.zeros((1, LENGTH), dtype=torch.int64))
    return str(caught.value)
