"""The helpers for a step do under each strategy, on four processes, what one process does."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import Attempt, Pair, alone
from helpers.rare import rare
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slurmtrain.errors import StrategyError
from slurmtrain.model.experiment.strategy import MeshSpec, StrategySpec
from slurmtrain.model.run.events.rank_events import HardwareCompared
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training.strategy_interface import Strategy

BATCH, WIDTH, STEPS = 8, 6, 3
# So small that gradients do not overflow in fp16, at the scale at which it begins.
LOSS_FACTOR, MAX_NORM, LR = 1 / 32, 0.5 / 32, 0.2 * 32
NAMES = ("ddp", "zero1", "fsdp", "hsdp")
# Layers that are divided over two ranks, beside one that is not.
DIVIDED = StrategySpec(
    name="fsdp", mesh=MeshSpec(dp=2, tp=2), plan={"blocks.*.inner.0": "colwise", "blocks.*.inner.2": "rowwise"}
)
SPECS = {
    **{name: StrategySpec(name=name) for name in NAMES},
    "tp": DIVIDED,
    "static_graph": StrategySpec(static_graph=True),
}
# In float32 the order of summation differs; bfloat16 has 8 bits, fp16 11.
SAME = 1e-6
TOLERANCES = {None: SAME, "bf16": 0.03, "fp16": 0.003}


class Block(nn.Module):
    """A residual block with a width that does not divide evenly among four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 14), nn.Tanh(), nn.Linear(14, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


OLD_GPU, NEW_GPU = ("Tesla V100-SXM2-16GB", False), ("NVIDIA A100-SXM4-80GB", True)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def strategy_of(ranks: RankGroup, spec: StrategySpec, microbatches: int = 1) -> Strategy:
    return Strategy(spec, ranks, ranks.rank // 2, microbatches)


def objects_of(strategy: Strategy) -> dict[str, Any]:
    model = strategy.parallelize(Net())
    # Its steps depend on the size of gradients, which AdamW's do not.
    optimizer = strategy.optimizer(torch.optim.SGD, model.parameters(), {"lr": LR, "momentum": 0.9})
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    strategy.check_applied()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(
    ranks: RankGroup, strategy: Strategy, objects: dict[str, Any], steps: range, parts: int = 1, broken: int = -1
) -> list[tuple[float, float]]:
    """The losses of the whole batch at these steps, and the norms of the gradients.

    In the step ``broken`` the loss of rank 1 is infinite.
    """
    model, optimizer, results = objects["model"], objects["optimizer"], []
    for step in steps:
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        share = batch.tensor_split(strategy.dp_size)[strategy.dp_rank]
        total = 0.0
        for part in share.chunk(parts):
            with strategy.gradients.accumulate([model], step) if parts > 1 else nullcontext():
                output = model(part)
                assert output.dtype == torch.float32
                loss = output.square().mean() * LOSS_FACTOR
                total += loss.item() / parts
                is_infinite = step == broken and ranks.rank == min(1, ranks.world_size - 1)
                strategy.gradients.backward(loss * torch.inf if is_infinite else loss)
                norm = strategy.clip_grad_norm_(model.parameters(), MAX_NORM, 2.0)
                optimizer.step()
                optimizer.zero_grad()
        objects["scheduler"].step()
        results.append((sum(ranks.gather(total)) / ranks.world_size, norm.item()))
    return results


def trained(ranks: RankGroup, spec: StrategySpec, parts: int) -> list[tuple[float, float]]:
    strategy = strategy_of(ranks, spec, parts)
    objects = objects_of(strategy)
    results = train(ranks, strategy, objects, range(STEPS), parts)
    assert all(parameter.dtype == torch.float32 for parameter in objects["model"].parameters())
    return results


# Each strategy once, each precision with several of them; with rare tests, all of all.
PRECISIONS = [(None, 2), ("fp16", 2), ("bf16", 1), ("fp16", 1)]
CHOSEN = {"ddp": 2, "zero1": 1, "fsdp": 0, "hsdp": 1, "tp": 0, "static_graph": 1}


@pytest.mark.parametrize(
    ("name", "precision", "parts"),
    [
        pytest.param(name, *each, marks=() if number == CHOSEN[name] else rare)
        for name in SPECS
        for number, each in enumerate(PRECISIONS)
    ],
)
def test_four_processes_do_what_one_does(four: Pair, name: str, precision: Any, parts: int) -> None:
    results, *others = four.run(trained, replace(SPECS[name], mixed_precision=precision), parts)
    assert all(other == results for other in others)
    expected = trained(alone(), StrategySpec(name="ddp"), 1)
    tolerance = TOLERANCES[precision]
    (losses, norms), (expected_losses, expected_norms) = zip(*results, strict=True), zip(*expected, strict=True)
    assert list(losses) == pytest.approx(expected_losses, rel=tolerance)
    assert list(norms) == pytest.approx(expected_norms, rel=3 * tolerance)
    # Clipped, and computed in the lower precision.
    assert min(expected_norms) > MAX_NORM
    assert (list(losses) == pytest.approx(expected_losses, rel=SAME)) == (precision is None)


# --- fp16 -----------------------------------------------------------------------------------------------------------


def step_with_infinity(ranks: RankGroup, spec: StrategySpec) -> tuple[bool, bool, float, bool]:
    """Whether a step was skipped, and left the model and the optimizer as they were; the scale; and the next step."""
    strategy = strategy_of(ranks, replace(spec, mixed_precision="fp16"))
    objects = objects_of(strategy)
    train(ranks, strategy, objects, range(1))
    before = [local(parameter).clone() for parameter in objects["model"].parameters()]
    train(ranks, strategy, objects, range(1, 2), broken=1)
    skipped = objects["optimizer"].step_was_skipped
    after = [local(parameter) for parameter in objects["model"].parameters()]
    unchanged = all(map(torch.equal, before, after))
    [scaler] = strategy.states().values()
    scale = scaler.state_dict()["scale"]
    train(ranks, strategy, objects, range(2, 3))
    return skipped, unchanged, scale, objects["optimizer"].step_was_skipped


def local(parameter: Tensor) -> Tensor:
    return parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()


@pytest.mark.parametrize(
    "name", ["zero1", "fsdp", *(pytest.param(name, marks=rare) for name in ("ddp", "hsdp", "tp", "static_graph"))]
)
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(four: Pair, name: str) -> None:
    assert four.run(step_with_infinity, SPECS[name]) == [(True, True, 65536 / 2, False)] * 4
    assert step_with_infinity(alone(), SPECS["ddp"]) == (True, True, 65536 / 2, False)


def continued(ranks: RankGroup, root: Path, before: StrategySpec, after: StrategySpec) -> tuple[Any, Any]:
    """The results and the state of the scaler without and with a save and a restore after two steps."""
    strategy = strategy_of(ranks, before)
    objects = objects_of(strategy)
    train(ranks, strategy, objects, range(2), broken=0 if before.mixed_precision else -1)
    states = strategy.states()
    with Attempt(root, ranks, {**objects, **states}, additions=states) as attempt:
        assert attempt.save(2) == ""
    results = train(ranks, strategy, objects, range(2, 5))

    other = strategy_of(ranks, after)
    others = objects_of(other)
    states = other.states()
    with Attempt(root, ranks, {**others, **states}, restart=1, additions=states) as attempt:
        assert attempt.restore() is not None
    again = train(ranks, other, others, range(2, 5))
    ends = [[each.state_dict() for each in states.states().values()] for states in (strategy, other)]
    return (results, ends[0]), (again, ends[1])


@pytest.mark.parametrize("name", ["fsdp", pytest.param("ddp", marks=rare)])
def test_the_scale_goes_on_from_a_checkpoint_bit_for_bit(four: Pair, tmp_path: Path, name: str) -> None:
    spec = StrategySpec(name=name, mixed_precision="fp16")
    for whole, (results, states) in four.run(continued, tmp_path, spec, spec):
        assert whole == (results, states)
        assert [state["scale"] for state in states] == [65536 / 2]
        assert [state["_growth_tracker"] for state in states] == [4]


def test_a_checkpoint_is_restored_with_another_precision(four: Pair, tmp_path: Path) -> None:
    in_fp16, in_fp32 = StrategySpec(name="zero1", mixed_precision="fp16"), StrategySpec(name="hsdp")
    for root, before, after, scales in (("a", in_fp16, in_fp32, []), ("b", in_fp32, in_fp16, [65536.0])):
        (_, (results, states)), *_ = four.run(continued, tmp_path / root, before, after)
        assert [state["scale"] for state in states] == scales
        assert results


# --- precision by hardware ------------------------------------------------------------------------------------------


def trained_on(ranks: RankGroup, spec: StrategySpec) -> tuple[list[tuple[float, float]], Any, torch.dtype, bool, float]:
    """Train on hardware of which rank 1 has an old piece, which multiplies its loss by infinity in the last step.

    Returns the losses and norms before that, what is journaled, what a layer of this rank computed in, whether the last
    step was skipped, and the sum of the weights after it.
    """
    strategy = Strategy(spec, ranks, ranks.rank // 2, hardware=OLD_GPU if ranks.rank == 1 else NEW_GPU)
    objects = objects_of(strategy)
    computed: set[torch.dtype] = set()
    layer = objects["model"].module.head
    layer.register_forward_hook(lambda module, inputs, output: computed.add(output.dtype))
    results = train(ranks, strategy, objects, range(STEPS))
    if strategy.states():
        train(ranks, strategy, objects, range(STEPS, STEPS + 1), broken=STEPS)
    [dtype] = computed
    weights = sum(each.detach().sum().item() for each in objects["model"].parameters())
    return results, strategy.hardware, dtype, getattr(objects["optimizer"], "step_was_skipped", False), weights


@pytest.mark.parametrize(
    ("mixed", "of_old"),
    [("auto", "fp16"), ({"default": "bf16", "v100": "fp16", "V100-SXM2-16GB": "fp32", "H100": "fp16"}, "fp32")],
    ids=["auto", "mapping"],
)
def test_each_rank_computes_in_the_precision_of_its_hardware(four: Pair, mixed: Any, of_old: str) -> None:
    precisions = ("bf16", of_old, "bf16", "bf16")
    names = tuple(OLD_GPU[0] if rank == 1 else NEW_GPU[0] for rank in range(4))
    ends = four.run(trained_on, StrategySpec(name="zero1", mixed_precision=mixed))
    assert [dtype for _, _, dtype, _, _ in ends] == [DTYPES[precision] for precision in precisions]
    assert all(event == HardwareCompared(names=names, precisions=precisions) for _, event, *_ in ends)
    # With fp16 anywhere, all scale their losses, and what is infinite on one is left out by all.
    assert {skipped for _, _, _, skipped, _ in ends} == {of_old == "fp16"}
    assert len({weights for *_, weights in ends}) == 1
    expected = trained(alone(), StrategySpec(name="ddp"), 1)
    for result, in_float32 in zip(ends[0][0], expected, strict=True):
        assert result == pytest.approx(in_float32, rel=3 * TOLERANCES["bf16"])


# --- microbatches ---------------------------------------------------------------------------------------------------


def accumulating() -> tuple[Strategy, dict[str, Any], Tensor]:
    strategy = strategy_of(alone(), StrategySpec(name="ddp"), 3)
    return strategy, objects_of(strategy), torch.ones(1, WIDTH)


def test_a_step_with_too_few_microbatches_is_refused() -> None:
    strategy, objects, batch = accumulating()
    with strategy.gradients.accumulate([objects["model"]], 0):
        strategy.gradients.backward(objects["model"](batch).mean())
    assert not strategy.gradients.sync
    with pytest.raises(StrategyError, match=r"step\(\) after 1 of 3 microbatches"):
        objects["optimizer"].step()
    with pytest.raises(StrategyError, match="step 0 ended after 1 of 3 microbatches"), \
            strategy.gradients.accumulate([objects["model"]], 1):  # fmt: skip
        pass


def test_gradients_that_run_backward_has_not_computed_are_refused() -> None:
    strategy, objects, batch = accumulating()
    with pytest.raises(StrategyError, match=r"call run.backward\(loss\)"):
        for _ in range(3):
            with strategy.gradients.accumulate([objects["model"]], 0):
                objects["model"](batch).mean().backward()
                objects["optimizer"].step()
    strategy = strategy_of(alone(), StrategySpec(mixed_precision="fp16"))
    objects = objects_of(strategy)
    objects["model"](batch).mean().backward()
    with pytest.raises(StrategyError, match=r"call run.backward\(loss\)"):
        objects["optimizer"].step()


def test_gradients_are_kept_wherever_zero_grad_is_called_in_a_microbatch() -> None:
    ends = []
    for first in (True, False):
        strategy, objects, batch = accumulating()
        for number in range(6):
            with strategy.gradients.accumulate([objects["model"]], number // 3):
                if first:
                    objects["optimizer"].zero_grad()
                strategy.gradients.backward(objects["model"](batch * number).square().mean())
                objects["optimizer"].step()
                if not first:
                    objects["optimizer"].zero_grad()
        ends.append([parameter.detach() for parameter in objects["model"].parameters()])
    assert all(map(torch.equal, *ends))


def test_a_copy_of_a_model_with_mixed_precision_computes_with_its_own_parameters() -> None:
    model = strategy_of(alone(), StrategySpec(mixed_precision="bf16")).parallelize(Net())
    twin = copy.deepcopy(model)
    torch.nn.init.zeros_(twin.head.weight)
    torch.nn.init.zeros_(twin.head.bias)
    assert twin(torch.ones(1, WIDTH)).count_nonzero() == 0
    assert model(torch.ones(1, WIDTH)).count_nonzero() > 0


def test_fp16_without_an_optimizer_that_knows_the_scale_is_refused() -> None:
    strategy = strategy_of(alone(), StrategySpec(mixed_precision="fp16"))
    strategy.parallelize(Net())
    with pytest.raises(StrategyError, match=r"make the optimizer with run.optimizer"):
        strategy.check_applied()
