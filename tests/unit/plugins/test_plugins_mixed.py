"""The shares of a batch follow the speeds of the ranks, and no noise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from random import Random
from statistics import median
from typing import Any

import pytest
import torch
from helpers.ranks import CPU, Pair
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from slurmtrain.errors import DataError, StrategyError
from slurmtrain.model.batches import equal_shares
from slurmtrain.model.experiment.strategy import StrategySpec
from slurmtrain.model.run.events.rank_events import SharesChosen
from slurmtrain.model.run.run import Attempt
from slurmtrain.plugins.mixed import (
    Balancer,
    ComputeTime,
    RecordedShares,
    SampleMemory,
    recorded_shares,
    samples_that_fit,
)
from slurmtrain.plugins.paces import (
    Pace,
    ShareAdvice,
    Speed,
    balance,
    fit_speed,
    judge,
    pace_of,
    since_change,
    slowest_s,
)
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training.parallel import ParallelTraining, Shares
from slurmtrain.runtime.training.strategy_interface import Strategy

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
    return Shares(rank, ranks, CPU, **options)


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


def test_shares_of_a_checkpoint_are_those_of_the_next_step() -> None:
    before, after = make_shares(1, 3), make_shares(1, 3)
    before.change((4, 12, 8))
    after.load_state_dict(before.state_dict())
    assert after.part_of([range(BATCH)]) == [range(4, 16)]
    assert after.weight == 1.5
    other = make_shares(1, 2)
    other.reshard_state_dict([before.state_dict()], 1, 2)
    assert other.part_of([range(BATCH)]) == [range(12, 24)]


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


LARGE, NOISE = 64, 0.3
# The seconds of a sample on a rank in a step.
SampleS = Callable[[int, int], float]


class SetClock(ComputeTime):
    """Says what it is told, of the steps that are measured."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.is_measuring = False
        self.seconds = 0.0

    def begin(self) -> None:
        self.is_measuring = True

    def end(self) -> float | None:
        was, self.is_measuring = self.is_measuring, False
        return self.seconds if was else None


class SetMemory(SampleMemory):
    """Has place for so many samples at once."""

    def __init__(self, most: int | None) -> None:
        super().__init__(CPU)
        self.most = most


class Simulation:
    """Ranks in a single process, which vote after each step, or after each of ``gap`` steps."""

    def __init__(
        self, sample_s: SampleS, ranks: int, *, seed: int = 0, noise: float = NOISE, fixed_s: float = 0.0, gap: int = 1
    ) -> None:
        self.sample_s, self.noise, self.fixed_s, self.gap = sample_s, noise, fixed_s, gap
        self.numbers = Random(seed)
        self.accumulates = False
        self.shares = [Shares(rank, ranks, CPU, differ=True) for rank in range(ranks)]
        self.balancers = [Balancer(shares, RankGroup(rank, 1, CPU)) for rank, shares in enumerate(self.shares)]
        for balancer in self.balancers:
            balancer._clock = SetClock()
        self.history: list[tuple[int, ...]] = []
        self.chosen: list[SharesChosen] = []

    def limit(self, limits: Sequence[int | None]) -> None:
        for balancer, most in zip(self.balancers, limits, strict=True):
            balancer._memory = SetMemory(most)

    def run(self, steps: int) -> list[tuple[int, ...]]:
        """The shares of each step."""
        for step in range(steps):
            is_due = step % self.gap == 0
            self.history.append(self.shares[0].current or equal_shares(LARGE, len(self.shares)))
            for rank, (shares, balancer) in enumerate(zip(self.shares, self.balancers, strict=True)):
                balancer.begin(step, due=is_due)
                own = len(shares.part_of([range(LARGE)])[0])
                if self.accumulates:
                    shares.microbatches(own)
                clock = balancer._clock
                assert isinstance(clock, SetClock)
                disturbance = 2.718281828 ** self.numbers.gauss(0, self.noise)
                clock.seconds = (self.fixed_s + own * self.sample_s(rank, step)) * disturbance
                repeated = balancer.end(step + 1)
                self.chosen += [repeated] if repeated is not None and rank == 0 else []
            if is_due and any(balancer.calls for balancer in self.balancers):
                gathered = [balancer._measured() for balancer in self.balancers]
                events = [balancer._decide(step + 1, gathered) for balancer in self.balancers]
                self.chosen += [event for event in events[:1] if event is not None]
            assert len({shares.current for shares in self.shares}) == 1
        return self.history


@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_speeds_that_scatter_keep_equal_shares_or_come_back_to_them(ranks: int) -> None:
    unequal, ends = 0, 0
    for seed in range(8):
        history = Simulation(lambda *_: 0.01, ranks, seed=seed).run(300)
        unequal += sum(max(shares) > 1.15 * LARGE / ranks for shares in history)
        ends += max(history[-1]) > 1.15 * LARGE / ranks
    assert unequal <= 0.02 * 8 * 300
    assert ends <= 1


@pytest.mark.parametrize("slower", [2.0, 4.0])
@pytest.mark.parametrize("gap", [1, 3])
def test_a_slower_rank_gets_what_suits_it_within_tens_of_steps(slower: float, gap: int) -> None:
    late, off = [], []
    for seed in range(8):
        simulation = Simulation(lambda rank, step: 0.01 * (slower if rank == 1 and step >= 100 else 1), 2, seed=seed)
        simulation.gap = gap
        history = simulation.run(100 + 80 * gap)
        ideal = LARGE / (1 + slower)
        met = next((step for step, shares in enumerate(history[100:]) if shares[1] < (LARGE / 2 + ideal) / 2), 10_000)
        late.append(met)
        off.append(abs(history[-1][1] - ideal) / ideal)
    assert max(late) <= 70 * gap
    assert median(late) <= 45 * gap
    assert median(off) < 0.2


def test_a_share_stays_within_memory_if_the_script_has_no_microbatches() -> None:
    simulation = Simulation(lambda rank, _: 0.01 * (2 if rank else 1), 2, noise=0.02)
    simulation.limit([36, None])
    assert simulation.run(40)[-1] == (36, 28)


def test_what_does_not_fit_is_divided_into_more_microbatches() -> None:
    simulation = Simulation(lambda rank, _: 0.01 * (2 if rank else 1), 2, noise=0.02)
    simulation.accumulates = True
    simulation.limit([20, None])
    fast, slow = simulation.run(40)[-1]
    assert 40 <= fast <= 46
    sizes = simulation.shares[0].microbatches(fast)
    assert (sum(sizes), len(sizes)) == (fast, 3)
    assert simulation.shares[1].microbatches(slow) == (slow,)


def test_shares_are_repeated_at_their_steps_and_then_measured_again() -> None:
    first = Simulation(lambda rank, _: 0.01 * (2 if rank else 1), 2, noise=0.05)
    history = first.run(30)
    assert len(first.chosen) > 1
    again = Simulation(lambda rank, _: 0.01 * (1 if rank else 2), 2, noise=0.05)
    for balancer in again.balancers:
        balancer._recorded = RecordedShares({each.step or 0: each for each in first.chosen}, until=30)
    assert again.run(60)[:30] == history
    assert again.chosen[: len(first.chosen)] == first.chosen
    assert again.history[-1][0] < again.history[29][0]


# --- speeds, and shares that suit them --------------------------------------------------------------------------------


def noisy(seed: int, count: int, seconds: float = 1.0, noise: float = 0.3, alike: float = 0.0) -> list[float]:
    """Times of steps, each of which a part ``alike`` of the disturbance of the one before disturbs, too."""
    numbers, times, shift = Random(seed), [], 0.0
    for _ in range(count):
        shift = alike * shift + (1 - alike**2) ** 0.5 * numbers.gauss(0, noise)
        times.append(seconds * 2.718281828**shift)
    return times


@pytest.mark.parametrize("alike", [0.0, 0.5])
@pytest.mark.parametrize("count", [5, 10, 20, 40])
def test_a_pace_is_off_by_about_its_error(count: int, alike: float) -> None:
    paces = [pace_of(noisy(seed, count, alike=alike)) for seed in range(300)]
    outside = sum(abs(pace.seconds - 1) > 3 * pace.error * pace.seconds for pace in paces)
    assert outside <= 15
    # And not by far less, or nothing would ever be sure.
    assert sum(abs(pace.seconds - 1) > 0.3 * pace.error for pace in paces) > 60


@pytest.mark.parametrize(("slower", "noise"), [(0.25, 0.3), (4.0, 0.3), (2.0, 0.1), (1.2, 0.02)])
def test_times_before_a_change_are_left_out_soon(slower: float, noise: float) -> None:
    left_out = 0
    for seed in range(50):
        times = noisy(seed, 35, noise=noise)
        for count, seconds in enumerate(noisy(1000 + seed, 15, slower, noise), start=1):
            times = since_change([*times, seconds][-40:])
            if len(times) <= count + 2:
                left_out += 1
                break
    assert left_out >= 40


SPEEDS = st.builds(Speed, st.floats(0, 5), st.floats(0.01, 5))


@pytest.mark.parametrize(
    ("speeds", "batch", "most", "shares"),
    [
        ([Speed(0, 3.0), Speed(0, 1.0)], 16, [], (4, 12)),
        # A fixed time counts; a share stays within memory; a batch smaller than the ranks has none.
        ([Speed(6.0, 1.0), Speed(0.0, 1.0)], 16, [], (5, 11)),
        ([Speed(0, 3.0), Speed(0, 1.0)], 16, [None, 10], (6, 10)),
        ([Speed(0, 3.0), Speed(0, 1.0)], 16, [5, 10], None),
        ([Speed(0, 1.0)] * 3, 2, [], None),
    ],
)
def test_faster_ranks_get_more_samples(
    speeds: list[Speed], batch: int, most: list[int | None], shares: tuple[int, ...] | None
) -> None:
    assert balance(speeds, batch, most=most) == shares


@given(speeds=st.lists(SPEEDS, min_size=1, max_size=3), batch=st.integers(1, 12), data=st.data())
def test_no_other_division_is_faster(speeds: list[Speed], batch: int, data: st.DataObject) -> None:
    limits = st.none() | st.integers(1, 12)
    most = data.draw(st.lists(limits, min_size=len(speeds), max_size=len(speeds)))
    possible = [
        shares
        for shares in product(range(1, batch + 1), repeat=len(speeds))
        if sum(shares) == batch
        and all(limit is None or share <= limit for share, limit in zip(shares, most, strict=True))
    ]
    shares = balance(speeds, batch, most=most)
    if not possible:
        assert shares is None
        return
    assert shares in possible
    assert slowest_s(speeds, shares) <= min(slowest_s(speeds, each) for each in possible) * (1 + 1e-12)


PACES = st.builds(Pace, st.floats(1e-6, 1e3), st.floats(0, 1))


@given(paces=st.dictionaries(st.integers(1, 1000), PACES, min_size=1, max_size=3))
def test_a_speed_is_positive_and_agrees_with_the_latest_time(paces: dict[int, Pace]) -> None:
    speed = fit_speed(paces)
    samples, pace = list(paces.items())[-1]
    assert speed.fixed_s >= -1e-9 * pace.seconds
    assert speed.sample_s > 0
    assert speed.seconds(samples) == pytest.approx(pace.seconds)


def test_a_gain_that_noise_may_be_is_waited_for() -> None:
    speeds, shares, equal = [Speed(0, 1.0), Speed(0, 2.0)], (43, 21), (32, 32)
    assert judge(speeds, (0.05, 0.05), shares, equal) is ShareAdvice.CHANGE
    assert judge(speeds, (0.5, 0.5), shares, equal) is ShareAdvice.WAIT
    # What is not known of the slowest rank counts more than what is not of others.
    three, shares, equal = [Speed(0, 1.0), Speed(0, 1.0), Speed(0, 2.0)], (26, 25, 13), (21, 21, 22)
    assert judge(three, (0.05, 0.05, 0.2), shares, equal) is ShareAdvice.WAIT
    assert judge(three, (0.2, 0.05, 0.05), shares, equal) is ShareAdvice.CHANGE


def test_as_many_samples_fit_as_their_memory_says() -> None:
    # 4 bytes a sample, beside 200.
    assert samples_that_fit(total=1000, before=200, peak=280, samples=20) == (850 - 200) // 4
    assert samples_that_fit(total=300, before=200, peak=280, samples=20) == 20
    assert samples_that_fit(total=1000, before=200, peak=200, samples=20) is None


# --- which shares the steps have that are repeated after a kill ---------------------------------------------------


def attempt(number: int, last_step: int | None, shares: dict[int, tuple[int, ...]], **keys: Any) -> Attempt:
    records = [{"at": 1e9 + step, "step": step, "shares": list(each)} for step, each in shares.items()]
    return Attempt(number=number, job_id="7", restart=number - 1, last_step=last_step, shares=records, **keys)


def choices(attempts: list[Attempt], step: int, ranks: int = 2) -> tuple[dict[int, tuple[int, ...]], int]:
    recorded = recorded_shares(attempts, step, ranks)
    return {at: tuple(chosen.shares) for at, chosen in recorded.choices.items()}, recorded.until


KILLED = attempt(1, 60, {10: (4, 4), 20: (6, 2), 50: (5, 3)})


def test_steps_after_the_checkpoint_are_repeated_up_to_the_last_one() -> None:
    assert choices([KILLED], 20) == ({50: (5, 3)}, 60)
    assert choices([KILLED], 0) == ({10: (4, 4), 20: (6, 2), 50: (5, 3)}, 60)
    assert choices([KILLED], 60) == ({}, 60)
    assert choices([], 0) == ({}, 0)


def test_an_attempt_that_was_killed_before_it_had_repeated_all_leaves_the_rest() -> None:
    second = attempt(2, 40, {20: (6, 2)})
    assert choices([KILLED, second], 10) == ({20: (6, 2), 50: (5, 3)}, 60)
    further = attempt(3, 90, {20: (6, 2), 50: (5, 3), 70: (7, 1)})
    assert choices([KILLED, second, further], 60) == ({70: (7, 1)}, 90)


def test_shares_of_other_numbers_of_ranks_and_of_what_was_given_up_do_not_count() -> None:
    three = attempt(2, 100, {30: (2, 3, 3)})
    assert choices([KILLED, three], 10) == ({}, 0)
    assert choices([KILLED, three], 10, ranks=3) == ({30: (2, 3, 3)}, 100)
    anew = attempt(2, 30, {15: (3, 5)}, from_start=True)
    assert choices([KILLED, anew], 0) == ({15: (3, 5)}, 30)
