"""Layers that are divided over ranks: the model trains as on one process, in every mesh, and bad plans are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import Pair, alone
from helpers.rare import rare
from helpers.word_training import BATCH, LENGTH, SAME, WORDS, continue_with, expected, objects_of, strategy_of, train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional

from slurmtrain.errors import StrategyError
from slurmtrain.model.experiment.strategy import MeshSpec, StrategySpec
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training.strategy_interface import Strategy, is_sharded

WIDTH = 8
PLAN = {
    "embed": "rowwise", "places": "rowwise", "blocks.*.norm": "sequence_parallel", "blocks.*.up": "colwise",
    "blocks.*.each": "replicated_with_grad_allreduce", "blocks.*.down": "rowwise",
    "norm": "sequence_parallel", "head": "colwise_rep",
}  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        # Of each of four heads.
        self.each = nn.LayerNorm(WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.each(self.up(self.norm(x)).unflatten(-1, (-1, WIDTH)))
        return x + self.down(functional.gelu(heads.flatten(-2)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Predicts words of a text."""

    def __init__(self, seed: int = 1, plan: Mapping[str, Any] = PLAN) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.odd = nn.Linear(WIDTH, 6) if "odd" in plan else None
        self._plan = plan

    def tensor_plan(self, size: int) -> Mapping[str, Any]:
        if "heads" in self._plan:
            raise ValueError(f"{self._plan['heads']} heads cannot be divided among {size} processes")
        return self._plan

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def figures_with(ranks: RankGroup, spec: StrategySpec) -> tuple[list[float], bool]:
    strategy = strategy_of(ranks, spec)
    # Each rank makes other weights: all must begin with rank 0's.
    objects = objects_of(strategy, Net(seed=1 + ranks.rank))
    whole = all(isinstance(parameter, DTensor) for parameter in objects["model"].parameters())
    return train(ranks, strategy, objects, plain=True), whole


SOME = {
    "blocks.*.up": "colwise", "blocks.*.each": "replicated_with_grad_allreduce", "*.1.down": "rowwise",
    "blocks.0.down": "rowwise",
}  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(StrategySpec(name="tensor"), id="tp", marks=rare),
        pytest.param(StrategySpec(name="tensor", sequence_parallel=True), id="sequence", marks=rare),
        pytest.param(StrategySpec(mesh=MeshSpec(dp=2, tp=2), plan=SOME), id="ddp-tp"),
        pytest.param(StrategySpec(name="fsdp", mesh=MeshSpec(tp=2), sequence_parallel=True), id="fsdp-sequence"),
        pytest.param(StrategySpec(name="hsdp", mesh=MeshSpec(tp=2)), id="hsdp-tp", marks=rare),
        pytest.param(StrategySpec(name="hsdp", mesh=MeshSpec(tp=1)), id="hsdp", marks=rare),
    ],
)
def test_divided_layers_train_as_on_one_process(four: Pair, spec: StrategySpec) -> None:
    (figures, whole), *others = four.run(figures_with, spec)
    assert all(other[0] == figures for other in others)
    assert whole == spec.is_sharded
    assert figures == pytest.approx(expected(Net), rel=SAME)


TENSOR, BOTH, FSDP_TP = (
    StrategySpec(name="tensor"),
    StrategySpec(mesh=MeshSpec(tp=2)),
    StrategySpec(name="fsdp", mesh=MeshSpec(tp=2)),
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(TENSOR, StrategySpec(name="ddp"), id="tensor-ddp", marks=rare),
        pytest.param(StrategySpec(name="zero1"), FSDP_TP, id="zero1-fsdp-tp", marks=rare),
        pytest.param(FSDP_TP, TENSOR, id="fsdp-tp-tensor", marks=rare),
        pytest.param(BOTH, StrategySpec(name="fsdp"), id="ddp-tp-fsdp"),
        pytest.param(StrategySpec(name="fsdp"), BOTH, id="fsdp-ddp-tp", marks=rare),
    ],
)
def test_a_checkpoint_of_divided_layers_is_restored_under_other_strategies_and_the_reverse(
    four: Pair, tmp_path: Path, before: StrategySpec, after: StrategySpec
) -> None:
    figures = four.run(continue_with, tmp_path, Net, before, after, True)[0]
    assert figures == pytest.approx(expected(Net), rel=SAME)


def tied_figures(ranks: RankGroup, spec: StrategySpec | None) -> tuple[list[float], bool, list[str]]:
    """What training gives with a head that has the embedding's weights, and norms that are not trained."""
    model = Net()
    model.head.weight = model.embed.weight
    for norm in (model.norm, model.blocks[0].norm, model.blocks[0].each):
        norm.requires_grad_(False)
    strategy = strategy_of(ranks, spec)
    figures = train(ranks, strategy, objects_of(strategy, model), plain=True)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return figures, model.head.weight is model.embed.weight, frozen


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(StrategySpec(name="fsdp", mesh=MeshSpec(tp=2), sequence_parallel=True), id="fsdp-sequence"),
        pytest.param(StrategySpec(name="tensor", plan=SOME), id="outside-the-plan", marks=rare),
    ],
)
def test_divided_weights_stay_tied_and_frozen(four: Pair, spec: StrategySpec) -> None:
    figures, tied, frozen = four.run(tied_figures, spec)[0]
    assert tied
    expected_figures, _, expected_frozen = tied_figures(alone(), None)
    assert figures == pytest.approx(expected_figures, rel=SAME)
    assert frozen == expected_frozen


# --- what is refused ------------------------------------------------------------------------------------------------


def problems_of(ranks: RankGroup, spec: StrategySpec, plans: Sequence[Mapping[str, Any]]) -> list[str]:
    # Nothing of what it has refused stays.
    problems: list[str] = []
    try:
        strategy = Strategy(spec, ranks, ranks.rank // 3)
        for plan in plans:
            model = Net(plan={pattern: style for pattern, style in plan.items() if pattern != "tied"})
            if "tied" in plan:
                model.head.weight = model.embed.weight
            with pytest.raises(StrategyError) as caught:
                strategy.parallelize(model)
            problems.append(str(caught.value))
    except StrategyError as error:
        problems.append(str(error))
    return problems


@pytest.mark.parametrize(
    ("spec", "refused"),
    [
        (TENSOR, [
            ({}, "has no plan for dividing its layers"),
            ({"blocks.*.upp": "colwise"}, "the plan names 'blocks.*.upp', but the model has no such module"),
            ({"head": "columns"}, "has 'columns' for 'head': expected one of colwise, colwise_rep"),
            ({"norm": "rowwise"}, "'rowwise' for 'norm', a LayerNorm"),
            ({"norm": ColwiseParallel()}, "the plan's style for 'norm': ColwiseParallel currently only support"),
            ({"embed": "rowwise", "tied": True}, "(tied weights), in different ways"),
            ({"odd": "colwise"}, "the 6 output features of 'odd' cannot be divided among 4 processes (tp)"),
            ({"heads": "2"}, "Net.tensor_plan(4): 2 heads cannot be divided among 4 processes"),
        ]),
        (StrategySpec(name="tensor", sequence_parallel=True),
         [({key: PLAN[key] for key in PLAN if key != "places"}, "does not say what becomes of 'places'")]),
        (StrategySpec(mesh=MeshSpec(dp=3, tp=2)), [(PLAN, "'strategy.mesh': dp 3 x tp 2 are not 4 processes")]),
        (StrategySpec(name="hsdp", mesh=MeshSpec(tp=2)), [(PLAN, "there are 3 on node 0, 1 on node 1")]),
    ],
    ids=["plan", "sequence", "mesh", "nodes"],
)  # fmt: skip
def test_what_does_not_fit_the_model_or_the_ranks_is_refused_on_all_ranks(
    four: Pair, spec: StrategySpec, refused: list[tuple[Mapping[str, Any], str]]
) -> None:
    [problems, *others] = four.run(problems_of, spec, [plan for plan, _ in refused])
    assert [text for (_, text), problem in zip(refused, problems, strict=True) if text not in problem] == []
    assert others == [problems] * 3


def problem_of_call(ranks: RankGroup, plan: Mapping[str, Any], wrong_batch: bool) -> tuple[str, str]:
    """What the first and the second call of a divided model raise."""
    strategy = Strategy(BOTH, ranks, 0)
    model = strategy.parallelize(Net(plan=plan))
    words = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    words = words[ranks.rank :: ranks.world_size] if wrong_batch else words[strategy.dp_rank :: strategy.dp_size]
    problems = []
    for _ in range(2):
        try:
            model(words).sum().backward()
            problems.append("")
        except StrategyError as error:
            problems.append(str(error))
    return problems[0], problems[1]


def test_ranks_that_divide_layers_must_compute_everything_else_alike(four: Pair) -> None:
    # Otherwise gradients would be wrong, and nothing would say so.
    [(problem, _), *others] = four.run(problem_of_call, PLAN, True)
    assert "have different batches: divide each batch by run.dp_size" in problem
    assert [first for first, _ in others] == [problem] * 3
    without = {pattern: style for pattern, style in PLAN.items() if pattern != "blocks.*.each"}
    problem = four.run(problem_of_call, without, False)[0][0]
    assert "have different inputs of 'blocks.0.each'" in problem
    assert "must be 'replicated_with_grad_allreduce'" in problem
    assert four.run(problem_of_call, PLAN, False) == [("", "")] * 4


def divided_twice(ranks: RankGroup) -> tuple[bool, str]:
    """Whether fully_shard was applied to a model whose replica is the only one, and what dividing it again raises."""
    strategy = Strategy(TENSOR, ranks, 0)
    model = strategy.parallelize(Net())
    try:
        strategy.parallelize(model)
    except StrategyError as error:
        return is_sharded(model), str(error)
    return is_sharded(model), ""


def test_a_model_without_replicas_is_divided_once_and_not_wrapped_for_reductions(four: Pair) -> None:
    [(wrapped, problem), *_] = four.run(divided_twice)
    assert not wrapped
    assert problem == ("the model is already distributed (Net): call run.parallelize() with the module itself")


# --- models of transformers -----------------------------------------------------------------------------------------


def qwen() -> Any:
    """A model with tied weights and norms of each head."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": WORDS}
    torch.manual_seed(1)
    config = transformers.Qwen3Config(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    return transformers.Qwen3ForCausalLM(config)


def figures_of_transformers(ranks: RankGroup, spec: StrategySpec | None) -> list[float]:
    strategy = strategy_of(ranks, spec)
    model = strategy.parallelize(qwen())

    def logits(words: Tensor) -> Any:
        return model(input_ids=words).logits

    logits.parameters = model.parameters  # type: ignore[attr-defined]
    # AdamW makes steps of the same size with gradients that are nothing but rounding.
    optimizer = strategy.optimizer(torch.optim.SGD, model.parameters(), {"lr": 0.3})
    return train(ranks, strategy, {"model": logits, "optimizer": optimizer}, plain=True)


def problem_of_heads(ranks: RankGroup) -> str:
    try:
        Strategy(TENSOR, ranks, 0).parallelize(qwen())
    except StrategyError as error:
        return str(error)
    return ""


@rare
def test_a_model_of_transformers_is_divided_by_its_own_plan(four: Pair) -> None:
    figures = four.run(figures_of_transformers, StrategySpec(name="fsdp", mesh=MeshSpec(tp=2)))[0]
    assert figures == pytest.approx(figures_of_transformers(alone(), None), rel=SAME)
    [problem, *_] = four.run(problem_of_heads)
    assert problem == "the 2 num_key_value_heads of Qwen3ForCausalLM cannot be divided among 4 processes (tp)"
