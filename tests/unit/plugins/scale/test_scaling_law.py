"""The law that is fitted to the points of a study."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from slurmtrain.plugins.scale.scaling_law import MeasuredPoint, ScalingFit, is_weak


def points(
    counts: Sequence[int], law: tuple[float, ...], *, weak: bool = False, noise: float = 0.0,
    error: float | None = None, measures_communication: bool = False,
) -> list[MeasuredPoint]:  # fmt: skip
    """Points of a law with a batch of 64 on the first of these counts."""
    scatter = random.Random(0)
    first = counts[0]
    serial, work, latency, ring = (*law, 0.0)[:4]
    measured = []
    for workers in counts:
        batch = workers / first if weak else 1.0
        communication = latency * math.log2(workers) + ring * (workers - 1) / workers
        step_s = serial + work * batch * first / workers + communication
        factor = math.exp(noise * scatter.gauss(0, 1))
        share = communication / step_s if measures_communication else None
        measured.append(MeasuredPoint(workers, step_s * factor, 64 * batch, error, share))
    return measured


@pytest.mark.parametrize("law", [(0.1, 1.0, 0.02), (0.0, 1.0, 0.0), (0.2, 0.5, 0.0), (0.0, 1.0, 0.1)])
@pytest.mark.parametrize("counts", [(1, 2, 4), (2, 4, 8, 16), (3, 5, 12)])
@pytest.mark.parametrize("measures_communication", [False, True])
def test_the_law_of_exact_points_is_found(
    law: tuple[float, float, float], counts: tuple[int, ...], measures_communication: bool
) -> None:
    fit = ScalingFit(points(counts, law, measures_communication=measures_communication))
    assert fit.coefficients == pytest.approx([*law, 0.0], abs=1e-6)
    assert fit.deviation == pytest.approx(0.0, abs=1e-6)
    most = counts[-1]
    factor = most / counts[0]
    last = law[0] + law[1] / factor + law[2] * math.log2(most)
    speedup = (law[0] + law[1] + law[2] * math.log2(counts[0])) / last
    assert fit.speedup(most).value == pytest.approx(speedup)
    assert fit.efficiency(most).value == pytest.approx(speedup / factor)
    assert fit.communication(most).value == pytest.approx(law[2] * math.log2(most) / last, abs=1e-6)


def test_measured_communication_tells_a_ring_from_what_is_serial() -> None:
    law = (0.1, 1.0, 0.02, 0.3)
    split = ScalingFit(points((1, 2, 4, 8), law, measures_communication=True))
    assert split.coefficients == pytest.approx(law)
    assert split.communication(8).value == pytest.approx((0.02 * 3 + 0.3 * 7 / 8) / (0.1 + 0.125 + 0.06 + 0.2625))
    # By times alone the ring is a part of both other terms.
    assert ScalingFit(points((1, 2, 4, 8), law)).coefficients == pytest.approx([0.4, 0.7, 0.02, 0.0])
    # With two sizes, there is one number of communication, which counts as growing.
    assert ScalingFit(points((1, 2), law, measures_communication=True)).coefficients == pytest.approx(
        [0.1, 1.0, 0.17, 0]
    )
    weak = ScalingFit(points((1, 2, 4), law, weak=True, measures_communication=True))
    assert weak.coefficients == pytest.approx([0.0, 1.1, 0.02, 0.3])
    # What one run has not measured is not assumed.
    assert not ScalingFit([*points((1, 2), law, measures_communication=True), *points((4,), law)]).is_split


def test_weak_scaling_is_known_by_the_batch_and_has_one_term_of_work() -> None:
    measured = points((1, 2, 4), (0.1, 0.9, 0.05), weak=True)
    assert is_weak(measured)
    fit = ScalingFit(measured)
    # What is serial, and what is not, takes equally long in all sizes.
    assert fit.coefficients == pytest.approx([0.0, 1.0, 0.05, 0.0])
    assert fit.efficiency(4).value == pytest.approx(1 / 1.1)
    assert fit.speedup(4).value == pytest.approx(4 / 1.1)
    assert not is_weak(points((1, 2, 4), (0.1, 0.9, 0.05)))
    assert not is_weak([MeasuredPoint(1, 1.0), MeasuredPoint(2, 1.0)])


def test_two_sizes_have_amdahls_law_alone() -> None:
    fit = ScalingFit(points((1, 4), (0.1, 1.0, 0.0)))
    assert (fit.terms, fit.coefficients) == ((0, 1), pytest.approx([0.1, 1.0, 0.0, 0.0]))
    # The range is unknown, since nothing says how much points scatter.
    assert (fit.error, fit.efficiency(4).low) == (None, None)


def test_no_term_is_negative() -> None:
    # Faster than the ideal, as from a cache that the share of a process fits into.
    fit = ScalingFit([MeasuredPoint(1, 1.0), MeasuredPoint(2, 0.45), MeasuredPoint(4, 0.2)])
    assert min(fit.coefficients) == 0.0
    assert fit.efficiency(4).value == pytest.approx(1.0)


def test_the_range_covers_the_truth_and_grows_with_the_scatter_of_steps() -> None:
    law = (0.05, 1.0, 0.01)
    widths = []
    for noise in (0.01, 0.05):
        fit = ScalingFit(points((1, 2, 4, 8, 16), law, noise=noise, error=noise))
        efficiency = fit.efficiency(16)
        truth = ScalingFit(points((1, 2, 4, 8, 16), law)).efficiency(16).value
        assert efficiency.low is not None
        assert efficiency.high is not None
        assert efficiency.low < truth < efficiency.high
        widths.append(efficiency.high - efficiency.low)
        # The same points have the same ranges.
        assert ScalingFit(points((1, 2, 4, 8, 16), law, noise=noise, error=noise)).efficiency(16) == efficiency
    assert widths[1] > 2 * widths[0]


def test_points_off_the_law_are_as_uncertain_as_they_deviate() -> None:
    fit = ScalingFit([MeasuredPoint(n, t, 64, 0.001) for n, t in ((1, 1.0), (2, 0.6), (4, 0.25), (8, 0.2), (16, 0.15))])
    assert fit.error is not None
    assert fit.error > 0.05
    assert fit.deviation > 0.03


@pytest.mark.parametrize(
    ("law", "most"),
    [
        # 1, 0.5, 0.25, ...: each doubling costs nothing.
        ((0.0, 1.0, 0.0), 16),
        # Amdahl: 1.1, 0.6, 0.35, 0.225, which is 0.64 of it; 0.1625 is 0.72 of that.
        ((0.1, 1.0, 0.0), 8),
        ((1.0, 1.0, 0.0), 1),
    ],
)
def test_doublings_are_worthwhile_that_save_a_larger_part_than_they_cost(
    law: tuple[float, float, float], most: int
) -> None:
    fit = ScalingFit(points((1, 2, 4), law, error=0.0))
    assert fit.limit == 16
    assert fit.worthwhile().value == most


def test_the_curve_goes_from_the_first_size_to_twice_the_last() -> None:
    curve = ScalingFit(points((2, 4, 8), (0.1, 1.0, 0.01))).curve()
    assert curve[0] == (2, pytest.approx(1.0))
    assert curve[-1][0] == 16
    assert [workers for workers, _ in curve] == sorted({workers for workers, _ in curve})
