"""Figures of a step: quantiles of many durations, the part that is communication, and what GPUs could compute."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.metrics.step_figures import (
    PRECISIONS,
    Durations,
    Interval,
    RecordedActivity,
    communication_share,
    merge_intervals,
    peak_flops,
    quantile,
    subtract,
    within,
)


def test_quantiles_of_few_durations_are_exact() -> None:
    durations = Durations()
    assert durations.quantile(0.5) is None
    assert durations.mean is None
    for number in range(1, 101):
        durations.add(float(number))
    assert (durations.quantile(0.5), durations.quantile(0.95), durations.quantile(1.0)) == (51.0, 96.0, 100.0)
    assert (durations.mean, durations.count) == (50.5, 100)


def test_of_very_many_durations_a_part_is_kept_that_is_spread_evenly() -> None:
    durations = Durations()
    for number in range(100_000):
        durations.add(number / 100_000)
    assert durations.count == 100_000
    assert durations.mean == pytest.approx(0.5, abs=1e-4)
    for share in (0.05, 0.5, 0.95):
        assert durations.quantile(share) == pytest.approx(share, abs=0.001)


def test_nothing_has_no_quantile() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3.0], 0.95) == 3.0


# --- communication ----------------------------------------------------------------------------------------------------

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def moments(intervals: list[Interval]) -> set[int]:
    return {moment for begin, end in intervals for moment in range(int(begin), int(end))}


@given(intervals, intervals)
def test_intervals_are_sets_of_moments(some: list[Interval], others: list[Interval]) -> None:
    first, second = merge_intervals(some), merge_intervals(others)
    assert moments(first) == moments(some)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(first))
    assert moments(subtract(first, second)) == moments(some) - moments(others)
    assert moments(within(first, second)) == moments(some) & moments(others)


def test_communication_that_work_hides_costs_no_time() -> None:
    activity = RecordedActivity([(10, 30)], [], [(0, 20), (40, 50)], [(0, 50)])
    assert communication_share(activity) == pytest.approx(10 / 50)
    hidden = RecordedActivity([(10, 30)], [], [(0, 50)], [(0, 50)])
    assert communication_share(hidden) == 0.0


def test_collectives_of_several_streams_at_once_count_once() -> None:
    activity = RecordedActivity([(10, 30), (20, 40)], [], [(0, 10)], [(0, 40)])
    assert communication_share(activity) == pytest.approx(30 / 40)


def test_kernels_of_a_gpu_count_after_the_process_has_gone_on_and_gloo_between_steps_does_not() -> None:
    steps = [(0, 50), (60, 110)]
    on_gpu = RecordedActivity([(95, 110)], [], [(0, 95)], steps)
    assert communication_share(on_gpu) == pytest.approx(15 / 100)
    by_gloo = RecordedActivity([], [(40, 60)], [(0, 40)], steps)
    assert communication_share(by_gloo) == pytest.approx(10 / 100)


def test_without_collectives_or_steps_the_share_is_unknown() -> None:
    assert communication_share(RecordedActivity([], [], [(0, 40)], [(0, 50)])) is None
    assert communication_share(RecordedActivity([(0, 1)], [], [], [])) is None


# --- what GPUs could compute ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("A100-SXM4-40GB", "tf32", 156),
        ("NVIDIA A10", "fp16", 125),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA GeForce RTX 3090", "fp16", 71),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("Tesla T4", "fp16", 65),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_the_peak_of_known_gpus_is_found_by_their_names(name: str, precision: str, tflops: float) -> None:
    assert peak_flops(name, precision) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("CPU", "fp32"),
        ("NVIDIA RTX A1000", "bf16"),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),
        ("NVIDIA A10G", "bf16"),
        ("Tesla V100-SXM2-32GB", "bf16"),
        ("Tesla T4", "tf32"),
    ],
)
def test_what_is_not_known_has_no_peak(name: str, precision: str) -> None:
    assert precision in PRECISIONS
    assert peak_flops(name, precision) is None
