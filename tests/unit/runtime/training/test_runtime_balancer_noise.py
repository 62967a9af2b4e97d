"""Shares of simulated ranks whose times scatter: noise must not move them, and other speeds must, soon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from statistics import median

import pytest
import torch

from slurmtrain.model.data.batches import equal_shares
from slurmtrain.model.interruption.recorded_shares import RecordedShares
from slurmtrain.model.run.events.rank import SharesChosen
from slurmtrain.runtime.data.loader import DataRank
from slurmtrain.runtime.data.loaders import Loaders
from slurmtrain.runtime.data.shares import Shares
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training.balancer import Balancer
from slurmtrain.runtime.training.compute_time import ComputeTime
from slurmtrain.runtime.training.sample_memory import SampleMemory

CPU = torch.device("cpu")
BATCH, NOISE = 64, 0.3
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
        self._most = most


class Simulation:
    """Ranks in a single process, which vote after each step, or after each of ``gap`` steps."""

    def __init__(
        self, sample_s: SampleS, ranks: int, *, seed: int = 0, noise: float = NOISE, fixed_s: float = 0.0, gap: int = 1
    ) -> None:
        self.sample_s, self.noise, self.fixed_s, self.gap = sample_s, noise, fixed_s, gap
        self.numbers = Random(seed)
        self.accumulates = False
        self.shares = [
            Shares(rank, ranks, Loaders(DataRank(rank, ranks, CPU, lambda: None), 0), differ=True)
            for rank in range(ranks)
        ]
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
            self.history.append(self.shares[0].current or equal_shares(BATCH, len(self.shares)))
            for rank, (shares, balancer) in enumerate(zip(self.shares, self.balancers, strict=True)):
                balancer.begin(step, due=is_due)
                own = len(shares.part_of([range(BATCH)])[0])
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
        unequal += sum(max(shares) > 1.15 * BATCH / ranks for shares in history)
        ends += max(history[-1]) > 1.15 * BATCH / ranks
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
        ideal = BATCH / (1 + slower)
        met = next((step for step, shares in enumerate(history[100:]) if shares[1] < (BATCH / 2 + ideal) / 2), 10_000)
        late.append(met)
        off.append(abs(history[-1][1] - ideal) / ideal)
    assert max(late) <= 70 * gap
    assert median(late) <= 45 * gap
    assert median(off) < 0.2


def test_a_rank_that_is_slower_from_the_beginning_gets_less_after_few_steps() -> None:
    history = Simulation(lambda rank, _: 0.01 * (2 if rank else 1), 2, noise=0.02).run(40)
    assert abs(history[10][1] - BATCH / 3) < 3
    assert abs(history[-1][1] - BATCH / 3) < 2


def test_a_fixed_part_of_the_time_is_learned() -> None:
    simulation = Simulation(lambda rank, _: 0.01 * (4 if rank else 1), 2, noise=0.02, fixed_s=0.3)
    # 0.3 + 0.04 n = 0.3 + 0.01 (64 - n).
    assert abs(simulation.run(60)[-1][1] - 12.8) < 1.5


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


def test_a_choice_is_told_once() -> None:
    simulation = Simulation(lambda *_: 0.01, 2, noise=0.05)
    simulation.run(200)
    assert len(simulation.chosen) == 1
