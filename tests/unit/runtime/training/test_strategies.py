"""Each strategy trains as one process does, on four processes, and what it cannot do is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import CPU, Attempt, Pair, alone
from helpers.rare import rare
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from slurmtrain.errors import StrategyError
from slurmtrain.model.experiment.strategy import StrategySpec
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training.strategy_interface import Strategy, is_sharded

BATCH, WIDTH, STEPS = 8, 6, 3
# In float32 the order of summation differs: over these few steps by some units in the last place.
SAME = 1e-6
# bfloat16 has 8 bits, so that activations and weights differ by up to 1 part in 256 each.
IN_BF16 = 0.03
# Gradients alone, with 11 bits.
IN_FP16 = 0.003


class Block(nn.Module):
    """A residual block with a width that does not divide evenly among four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks, between an embedding and a head with the same weight."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((WIDTH,), float(seed)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale  # type: ignore[no-any-return]


def objects_of(strategy: Strategy, *, seed: int) -> dict[str, Any]:
    model = strategy.parallelize(Net(seed))
    optimizer = strategy.optimizer(torch.optim.AdamW, model.parameters(), {"lr": 0.02})
    strategy.check_optimizers({"model": model, "optimizer": optimizer})
    strategy.check_applied()
    return {"model": model, "optimizer": optimizer}


def train(ranks: RankGroup, objects: dict[str, Any], first: int, last: int) -> list[float]:
    """The losses of the whole batch at these steps."""
    losses = []
    for step in range(first, last):
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        objects["optimizer"].zero_grad()
        loss = objects["model"](batch.tensor_split(ranks.world_size)[ranks.rank]).square().mean()
        loss.backward()
        objects["optimizer"].step()
        losses.append(sum(ranks.gather(loss.item())) / ranks.world_size)
    return losses


def expected_losses() -> list[float]:
    strategy = Strategy(None, alone(), 0)
    return train(alone(), objects_of(strategy, seed=1), 0, STEPS)


def losses_with(ranks: RankGroup, spec: StrategySpec, per_node: int) -> list[float]:
    # Each rank makes other weights: all must begin with rank 0's.
    objects = objects_of(Strategy(spec, ranks, ranks.rank // per_node), seed=1 + ranks.rank)
    model = objects["model"]
    assert is_sharded(model) == spec.is_sharded == all(map(is_sharded, getattr(model, "blocks", [nn.Module()])))
    assert isinstance(model, DistributedDataParallel) != spec.is_sharded
    assert isinstance(objects["optimizer"], ZeroRedundancyOptimizer) == (spec.name == "zero1")
    return train(ranks, objects, 0, STEPS)


@pytest.mark.parametrize(
    ("spec", "tolerance"),
    [
        (StrategySpec(name="ddp", bucket_cap_mb=0.001, static_graph=True, gradient_as_bucket_view=True), SAME),
        (StrategySpec(name="ddp", hook="bf16"), IN_BF16),
        (StrategySpec(name="zero1", hook="fp16"), IN_FP16),
        (StrategySpec(name="fsdp"), SAME),
        (StrategySpec(name="fsdp", reshard_after_forward=False, wrap=("Block",)), SAME),
        (StrategySpec(name="fsdp", offload=True), SAME),
        pytest.param(StrategySpec(name="fsdp", mixed_precision="bf16"), IN_BF16, marks=rare),
        (StrategySpec(name="hsdp", reduce_dtype="fp32"), SAME),
        pytest.param(StrategySpec(name="zero1", find_unused_parameters=True), SAME, marks=rare),
        (StrategySpec(name="zero1", hook="hierarchical", bucket_cap_mb=0.001, gradient_as_bucket_view=True), SAME),
    ],
    ids=["ddp", "ddp_bf16", "zero1_fp16", "zero3", "zero2", "offload", "bf16", "hsdp", "zero1", "hierarchical"],
)
def test_four_processes_train_as_one_does(four: Pair, spec: StrategySpec, tolerance: float) -> None:
    losses, *others = four.run(losses_with, spec, 2)
    assert all(other == losses for other in others)
    assert losses == pytest.approx(expected_losses(), rel=tolerance)
    assert len(set(losses)) == STEPS


def shapes_of_shards(ranks: RankGroup, name: str) -> tuple[tuple[int, ...], int]:
    """The mesh of each rank, and how many rows of a weight with 13 rows it has."""
    model: Any = Strategy(StrategySpec(name=name), ranks, ranks.rank // 2).parallelize(Net())
    weight = model.blocks[0].inner[0].weight
    return tuple(weight.device_mesh.mesh.shape), weight.to_local().shape[0]


def test_hsdp_shards_within_a_node_and_replicates_across_nodes(four: Pair) -> None:
    assert four.run(shapes_of_shards, "hsdp") == [((2, 2), 7), ((2, 2), 6)] * 2
    assert four.run(shapes_of_shards, "fsdp") == [((4,), 4), ((4,), 4), ((4,), 4), ((4,), 1)]


def sums_of(ranks: RankGroup, per_node: int) -> tuple[int, list[tuple[list[int], int]]]:
    """The number of gradients, and of each sum over ranks in a step: over which, and of how many numbers."""
    spec = StrategySpec(name="ddp", hook="hierarchical", bucket_cap_mb=0.001)
    objects = objects_of(Strategy(spec, ranks, ranks.rank // per_node), seed=1)
    sums = []

    def all_reduce(tensor: Tensor, *args: Any, group: Any = None, **more: Any) -> Any:
        sums.append((dist.get_process_group_ranks(group), tensor.numel()))
        return plain(tensor, *args, group=group, **more)

    plain, dist.all_reduce = dist.all_reduce, all_reduce
    try:
        train(ranks, objects, 0, 1)
    finally:
        dist.all_reduce = plain
    return sum(each.numel() for each in objects["model"].parameters()), sums


def test_by_layers_each_rank_sums_its_part_of_the_gradients_over_nodes(four: Pair) -> None:
    for rank, (gradients, sums) in enumerate(four.run(sums_of, 2)):
        assert len(sums) > 1
        assert [over for over, _ in sums] == [[rank % 2, rank % 2 + 2]] * len(sums)
        # One number more for each bucket that cannot be halved.
        assert gradients <= 2 * sum(numbers for _, numbers in sums) <= gradients + len(sums)
    # With one rank on each node, or one node, nothing is different from torch's own.
    assert [sums for _, sums in four.run(sums_of, 1) + four.run(sums_of, 4)] == [[]] * 8


def failure_of(ranks: RankGroup) -> str:
    model = Strategy(StrategySpec(name="ddp", hook="hierarchical"), ranks, ranks.rank // 2).parallelize(Net())

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("connection reset by peer")

    plain, dist.all_reduce = dist.all_reduce, fail
    try:
        model(torch.ones(1, WIDTH)).sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        dist.all_reduce = plain
    return ""


def test_a_collective_that_fails_between_layers_ends_the_backward_pass(four: Pair) -> None:
    assert all("connection reset by peer" in problem for problem in four.run(failure_of))


def continue_with(ranks: RankGroup, root: Path, before: StrategySpec, after: StrategySpec) -> list[float]:
    """Train with one strategy, save, and go on with another one."""
    objects = objects_of(Strategy(before, ranks, ranks.rank // 2), seed=1)
    losses = train(ranks, objects, 0, 2)
    with Attempt(root, ranks, objects) as attempt:
        assert attempt.save(2) == ""
    others = objects_of(Strategy(after, ranks, ranks.rank // 2), seed=9)
    with Attempt(root, ranks, others, restart=1) as attempt:
        assert attempt.restore() is not None
    return losses + train(ranks, others, 2, STEPS)


def test_a_model_in_data_parallel_is_saved_like_any_other(tmp_path: Path) -> None:
    """DataParallel on GPUs: without any, it calls the module inside."""
    strategy = Strategy(StrategySpec(name="dp"), alone(), 0)
    objects = objects_of(strategy, seed=1)
    losses = train(alone(), objects, 0, 2)
    with Attempt(tmp_path, alone(), {**objects, "model": nn.DataParallel(objects["model"])}) as attempt:
        assert attempt.save(2) == ""
    others = objects_of(Strategy(None, alone(), 0), seed=9)
    with Attempt(tmp_path, alone(), others, restart=1) as attempt:
        assert attempt.restore() is not None
    assert losses + train(alone(), others, 2, STEPS) == expected_losses()


@pytest.mark.parametrize(
    "spec",
    [
        StrategySpec(name="ddp", bucket_cap_mb=0.001),
        StrategySpec(name="ddp", bucket_cap_mb=0.001, hook="hierarchical"),
        pytest.param(StrategySpec(name="zero1", bucket_cap_mb=0.001, hook="fp16"), marks=rare),
    ],
    ids=["ddp", "hierarchical", "zero1-fp16-hook"],
)
def test_replicas_go_on_from_a_checkpoint_bit_for_bit(four: Pair, tmp_path: Path, spec: StrategySpec) -> None:
    # More than one bucket, and more than two ranks: the order of summation depends on the buckets.
    [undisturbed, *_] = four.run(losses_with, spec, 2)
    assert four.run(continue_with, tmp_path, spec, spec)[0] == undisturbed


# --- what is refused ------------------------------------------------------------------------------------------------


def problem_of(ranks: RankGroup, spec: StrategySpec, nodes: list[int], optimizer_first: bool = False) -> str:
    try:
        strategy, model = Strategy(spec, ranks, nodes[ranks.rank]), Net()
        optimizer = torch.optim.AdamW(model.parameters()) if optimizer_first else None
        strategy.parallelize(model)
        strategy.check_optimizers({"optimizer": optimizer})
    except StrategyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("spec", "nodes", "optimizer_first", "problem"),
    [
        (StrategySpec(name="fsdp", wrap=("Blok",)), [0] * 4, False, "no module of that class; did you mean 'Block'?"),
        (StrategySpec(name="fsdp", wrap=("ModuleList",)), [0] * 4, False, "name its elements"),
        (StrategySpec(name="hsdp"), [0, 0, 0, 3], False, "there are 3 on node 0, 1 on node 3"),
        (StrategySpec(hook="hierarchical"), [0, 0, 0, 3], False,
         "'hook: hierarchical' needs the same number of processes on each node"),
        (StrategySpec(name="fsdp"), [0] * 4, True, "'optimizer' was made before run.parallelize(model)"),
        (StrategySpec(name="ddp"), [0] * 4, True, ""),
        (StrategySpec(name="dp"), [0] * 4, False, "'strategy: dp' is a single process, but there are 4"),
    ],
    ids=["name", "list", "hsdp", "hierarchical", "optimizer", "ddp", "dp"],
)  # fmt: skip
def test_what_does_not_fit_the_model_or_the_nodes_is_refused_on_all_ranks(
    four: Pair, spec: StrategySpec, nodes: list[int], optimizer_first: bool, problem: str
) -> None:
    [first, *others] = four.run(problem_of, spec, nodes, optimizer_first)
    assert problem in first
    assert bool(problem) == bool(first)
    assert others == [first] * 3


def test_a_strategy_that_the_script_does_not_apply_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"call model = run.parallelize\(model\) before the first step"):
        Strategy(StrategySpec(name="fsdp"), alone(), 0).check_applied()
    strategy = Strategy(StrategySpec(name="zero1"), alone(), 0)
    strategy.parallelize(Net())
    with pytest.raises(StrategyError, match=r"make it with run.optimizer\(torch.optim.AdamW"):
        strategy.check_applied()
    Strategy(None, alone(), 0).check_applied()


def test_only_a_module_with_values_that_nothing_distributes_yet_is_taken() -> None:
    strategy = Strategy(None, alone(), 0)
    # As torch.compile makes it, whose first call imports a compiler.
    compiled = nn.Module()
    compiled._orig_mod = Net()
    with pytest.raises(StrategyError, match="compile the returned model"):
        strategy.parallelize(compiled)
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(StrategyError, match="'weight' is on the meta device"):
        strategy.parallelize(empty)
    model = Net()
    assert strategy.parallelize(model) is model
    assert next(model.parameters()).device == CPU
