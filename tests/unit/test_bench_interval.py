"""The simulation that compares the automatic interval with fixed ones: small traces whose answers are known."""

from __future__ import annotations

from argparse import Namespace
from types import ModuleType

import pytest
from helpers.script_modules import load_script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The benchmark, imported as scripts/bench does."""
    return load_script("benchmarks/interval.py")


def test_attempts_lie_between_interruptions_and_those_that_come_while_restarting_are_one(bench: ModuleType) -> None:
    attempts = bench.attempts_of([100.0, 130.0, 500.0, 2000.0], 1000.0)
    assert [(one.seconds, one.interrupted) for one in attempts] == [(100.0, True), (310.0, True), (440.0, False)]


@pytest.mark.parametrize(
    ("seconds", "interrupted", "lost"),
    [
        (100.0, True, 100.0),  # before the first save
        (112.0, True, 112.0),  # the first save is not published yet
        (121.0, True, 21.0),  # it is
        (233.0, True, 33.0),  # both are
        (233.0, False, 20.0),  # only their stalls are lost
    ],
)
def test_a_fixed_interval_loses_its_stalls_and_what_no_published_save_holds(
    bench: ModuleType, seconds: float, interrupted: bool, lost: float
) -> None:
    attempts = [bench.Attempt(seconds, interrupted)]
    assert bench.fixed(100.0, bench.Cost(10.0, 20.0), attempts) == pytest.approx(lost)


def test_saves_are_no_more_frequent_than_they_take(bench: ModuleType) -> None:
    attempts = [bench.Attempt(5000.0, True)]
    cost = bench.Cost(1.0, 101.0)
    assert bench.fixed(5.0, cost, attempts) == bench.fixed(100.0, cost, attempts)


def test_auto_loses_no_more_than_it_ran_and_no_less_than_its_stalls(bench: ModuleType) -> None:
    cost = bench.Cost(1.0, 5.0)
    attempts = [bench.Attempt(20.0, True), bench.Attempt(4000.0, True), bench.Attempt(4000.0, False)]
    lost, interval = bench.auto(cost, 4, attempts)
    stalls = sum(one.seconds for one in attempts) / interval * cost.stall_s
    assert stalls < lost < 8020.0
    assert bench.auto(cost, 4, attempts[:1])[0] == 20.0


def test_auto_comes_close_to_the_best_fixed_interval_where_interruptions_are_regular(bench: ModuleType) -> None:
    class Regular(bench.Recorded):  # type: ignore[name-defined, misc]
        def interruptions(self) -> list[float]:
            return [3600.0 * hour for hour in range(1, 300)]

    trace = Regular("regular", "", nodes=8, seconds=300 * 3600.0)
    result = bench.replay(trace, bench.Cost(2.0, 10.0), bench.intervals(1.1), variations=4)
    assert result.ratio < 1.05
    assert result.auto_interval_s == pytest.approx(bench.optimum(2.0, 3600.0), rel=0.1)


def test_the_traces_are_whole(bench: ModuleType) -> None:
    for trace in bench.RECORDED:
        times = trace.interruptions()
        assert len(times) > 30
        assert 0 <= times[0] <= times[-1] <= trace.seconds


def test_the_benchmark_reports_what_it_promises(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "RECORDED", bench.RECORDED[3:5])
    monkeypatch.setattr(bench, "COSTS", bench.COSTS[:1])
    report = bench.run(Namespace(quick=True, plot=None))
    assert "AWS p2 spot, 16 nodes, 0.2 s: auto/best" in report.ratios
    assert report.failures == []
    monkeypatch.setattr(bench, "AIM", 0.5)
    assert len(bench.run(Namespace(quick=True, plot=None)).failures) == 1
