"""Ranks that differ in speed, and the shares of a batch that they choose."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.ranks import CPU, Pair
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from slurmtrain.errors import DataError, StrategyError
from slurmtrain.model.spec.strategy import StrategySpec
from slurmtrain.runtime.data.loader import DataRank
from slurmtrain.runtime.data.loaders import Loaders
from slurmtrain.runtime.data.shares import Shares
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.strategies.strategy import Strategy
from slurmtrain.runtime.training.balancer import Balancer
from slurmtrain.runtime.training.compute_time import ComputeTime
from slurmtrain.runtime.training.parallel import ParallelTraining

BATCH = 24


@pytest.fixture(scope="module")
def three() -> Iterator[Pair]:
    ranks = Pair(3)
    yield ranks
    ranks.close()


class SampleClock(ComputeTime):
    """Says of each step what it would take on a rank that needs so many seconds for each sample."""

    def __init__(self, shares: Shares, sample_s: float) -> None:
        super().__init__(CPU)
        self.shares = shares
        self.sample_s = sample_s

    def end(self) -> float | None:
        seconds, samples = super().end(), self.shares.samples_taken
        return None if seconds is None or samples is None else 0.001 + self.sample_s * samples[0]


def make_layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def make_shares(rank: int, ranks: int, **options: Any) -> Shares:
    return Shares(rank, ranks, Loaders(DataRank(rank, ranks, CPU, lambda: None), 0), **options)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 4, generator=numbers), torch.randn(BATCH, 2, generator=numbers)


def train(model: nn.Module, steps: range, shares: Shares, balancer: Balancer | None = None) -> list[dict[str, Any]]:
    """Train as a script does, with a vote after each step. Returns the events of shares."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    events = []
    for step in steps:
        if balancer is not None:
            balancer.begin(step, due=True)
        inputs, targets = shares.part_of(batch_of(step))
        optimizer.zero_grad()
        (shares.weight * nn.functional.mse_loss(model(inputs), targets)).backward()
        optimizer.step()
        if balancer is not None:
            balancer.end(step + 1)
            if max(balancer._ranks.gather(balancer.calls)):
                event = balancer.choose(step + 1)
                events += [] if event is None else [event.to_json()]
    return events


def train_balanced(ranks: RankGroup, seconds: list[float], steps: int) -> Any:
    model = DistributedDataParallel(make_layer())
    shares = make_shares(ranks.rank, ranks.world_size)
    balancer = Balancer(shares, ranks)
    balancer._clock = clock = SampleClock(shares, seconds[ranks.rank])
    balancer.watch(model.parameters())
    events = train(model, range(steps), shares, balancer)
    clock.sample_s = seconds[-1]
    events += train(model, range(steps, steps + 30), shares, balancer)
    balancer.close()
    return events, shares.current


def train_with(ranks: RankGroup, shares: tuple[int, ...], steps: int) -> list[Tensor]:
    layer = make_layer()
    own = make_shares(ranks.rank, ranks.world_size)
    own.change(shares)
    train(DistributedDataParallel(layer), range(steps), own)
    return [each.detach().clone() for each in layer.parameters()]


def of_one_process(steps: int) -> list[Tensor]:
    layer = make_layer()
    train(layer, range(steps), make_shares(0, 1))
    return list(layer.parameters())


def losses_of_one_process(steps: int) -> list[float]:
    layer, losses = make_layer(), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        inputs, targets = batch_of(step)
        loss = nn.functional.mse_loss(layer(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def test_faster_ranks_get_more_samples_until_they_become_slower_and_the_gradients_are_those_of_one_process(
    three: Pair,
) -> None:
    # The last is the time of every rank afterwards, when shares are equal again.
    steps = 30
    results = three.run(train_balanced, [0.008, 0.002, 0.002, 0.004], steps)
    events, final = results[0]
    assert all(result == (events, final) for result in results)
    before = [event for event in events if event["step"] <= steps]
    slow, *fast = before[-1]["shares"]
    assert sum((slow, *fast)) == BATCH
    # 8 : 2 : 2 in speed is 2.7 : 10.7 : 10.7 in samples.
    assert (slow, *fast) in ((3, 11, 10), (3, 10, 11), (2, 11, 11))
    assert before[0]["step_s"] < before[0]["before_s"]
    assert final == (8, 8, 8)
    expected = of_one_process(10)
    weights = three.run(train_with, (2, 9, 13), 10)
    for parameters in weights:
        for parameter, whole in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter, whole, rtol=1e-5, atol=1e-7)
    again = three.run(train_with, (2, 9, 13), 10)
    assert all(torch.equal(*pair) for pair in zip(weights[0], again[0], strict=True))


class Training(ParallelTraining):
    """What a session does in a step, without one."""

    def __init__(self, ranks: RankGroup, shares: Shares, name: str, accumulation: int) -> None:
        self.accumulation, self.step = accumulation, 0
        self._strategy = Strategy(StrategySpec(name=name), ranks, 0, accumulation, mixed=True)
        self._shares = shares


def train_in_microbatches(
    ranks: RankGroup, name: str, shares: tuple[int, ...], limits: tuple[int | None, ...], least: int, at_once: bool
) -> tuple[list[Tensor], list[float], int]:
    """The weights after ten steps, the losses, and how many microbatches this rank had in the last one."""
    own = make_shares(ranks.rank, ranks.world_size, microbatches=least, differ=True)
    own.change(shares, limits)
    run = Training(ranks, own, name, least)
    layer = make_layer()
    model = run.parallelize(layer)
    optimizer = run.optimizer(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
    losses, count = [], 0
    for run.step in range(10):
        inputs, targets = run.share(*batch_of(run.step))
        mean, count = 0.0, 0
        if at_once:
            mean = run.forward_backward(model, nn.functional.mse_loss, inputs, targets).item()
            optimizer.step()
            optimizer.zero_grad()
        else:
            for x, y in run.microbatches(inputs, targets):
                with run.accumulate(model):
                    loss = nn.functional.mse_loss(model(x), y)
                    run.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                mean += loss.item() * len(x) / len(inputs)
                count += 1
        losses.append(mean * run.weight)
    return [each.detach().clone() for each in layer.parameters()], losses, count


@pytest.mark.parametrize("name", ["ddp", "zero1"])
def test_ranks_with_different_numbers_of_microbatches_compute_the_gradients_of_one_process(
    three: Pair, name: str
) -> None:
    expected, whole = of_one_process(10), losses_of_one_process(10)
    for shares, limits, least, counts in (
        ((2, 9, 13), (None, 4, 5), 1, [1, 3, 3]),
        ((1, 16, 7), (None, 3, None), 2, [1, 6, 2]),
    ):
        for at_once in (False, True):
            results = three.run(train_in_microbatches, name, shares, limits, least, at_once)
            assert at_once or [count for _, _, count in results] == counts
            for weights, *_ in results:
                for parameter, other in zip(weights, expected, strict=True):
                    torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-7)
            means = [sum(each) / 3 for each in zip(*(losses for _, losses, _ in results), strict=True)]
            assert means == pytest.approx(whole, rel=1e-5)


def test_microbatches_that_the_script_divides_itself_are_refused() -> None:
    shares = make_shares(0, 1, microbatches=2, differ=True)
    run = Training(RankGroup(0, 1, CPU), shares, "ddp", 2)
    model = run.parallelize(make_layer())
    with pytest.raises(StrategyError, match=r"take them from run\.microbatches"), run.accumulate(model):
        pass
    list(run.microbatches(torch.ones(4, 4)))
    with run.accumulate(model):
        run.backward(model(torch.ones(2, 4)).sum())
    with pytest.raises(StrategyError, match="ended after 1 of 2 microbatches"):
        run.microbatches(torch.ones(4, 4))


def test_samples_that_are_too_few_for_microbatches_are_refused() -> None:
    with pytest.raises(DataError, match="3 samples cannot be divided into 4 microbatches"):
        make_shares(0, 1, microbatches=4).microbatches(3)
    assert make_shares(0, 1, microbatches=4, differ=True).microbatches(3) == (1, 1, 1)


def test_equal_ranks_keep_equal_shares(three: Pair) -> None:
    events, shares = three.run(train_balanced, [0.004, 0.004, 0.004, 0.004], 12)[0]
    assert shares == ()
    assert [event["shares"] for event in events] == [[8, 8, 8]]


def test_shares_of_a_checkpoint_are_those_of_the_next_step() -> None:
    before, after = make_shares(1, 3), make_shares(1, 3)
    before.change((4, 12, 8))
    after.load_state_dict(before.state_dict())
    assert after.places(BATCH) == range(4, 16)
    assert after.weight == 1.5
    other = make_shares(1, 2)
    other.reshard_state_dict([before.state_dict()], 1, 2)
    assert other.places(BATCH) == range(12, 24)


def test_a_rank_without_a_sample_takes_part_with_the_weight_0() -> None:
    shares = make_shares(2, 3)
    [part] = shares.part_of([torch.arange(2)])
    assert (part.tolist(), shares.weight) == ([0], 0.0)


@pytest.mark.parametrize("parts", [([1, 2], [1]), ([],)])
def test_parts_that_are_not_of_one_batch_are_refused(parts: tuple[list[int], ...]) -> None:
    with pytest.raises(DataError, match="sample"):
        make_shares(0, 2).part_of(parts)


def test_a_script_that_takes_no_share_is_refused() -> None:
    model, shares = make_layer(), make_shares(0, 1)
    balancer = Balancer(shares, RankGroup(0, 1, CPU))
    balancer.watch(model.parameters())
    balancer.begin(0, due=True)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(StrategyError, match=r"run\.share\(batch\)"):
        balancer.end(1)


def test_waiting_after_the_last_gradient_does_not_count() -> None:
    model = make_layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = ComputeTime(CPU)
    clock.watch(model.parameters())
    clock.begin()
    model(torch.ones(10, 4)).sum().backward()
    time.sleep(0.5)
    optimizer.step()
    seconds = clock.end()
    assert seconds is not None
    assert 0 < seconds < 0.5
    clock.begin()
    assert clock.end() is None
