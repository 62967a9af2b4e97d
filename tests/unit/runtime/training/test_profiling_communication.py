"""How much of a step is communication, by what torch's profiler has recorded."""

from __future__ import annotations

import pytest
import torch

from slurmtrain.model.metrics.step_figures import RecordedActivity, communication_share
from slurmtrain.runtime.job.torch_private import RecordedEvent
from slurmtrain.runtime.training import profiling
from slurmtrain.runtime.training.profiling import CommunicationSampler, activity_of

CPU = torch.device("cpu")
MARK = "slurmtrain step"


def on_gpu(name: str, begin: int, took: int, *, is_range: bool = False) -> RecordedEvent:
    return RecordedEvent(name, begin, took, on_gpu=True, is_range=is_range)


def test_of_a_gpu_the_kernels_count_and_not_the_ranges_and_copies_beside_them() -> None:
    events = [
        RecordedEvent(MARK, 0, 60, is_range=True),
        RecordedEvent("aten::addmm", 0, 5),
        on_gpu(MARK, 0, 100, is_range=True),
        on_gpu("Optimizer.step#AdamW.step", 0, 100, is_range=True),
        on_gpu("ampere_sgemm_128x64_tn", 10, 30),
        on_gpu("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 30, 30),
        on_gpu("nccl:all_reduce", 30, 30, is_range=True),
        on_gpu("Memcpy HtoD (Pinned -> Device)", 45, 10),
    ]
    activity = activity_of(events)
    assert activity == RecordedActivity([(30, 60)], [], [(10, 40)], [(0, 60)])
    assert communication_share(activity) == pytest.approx(20 / 60)


def test_on_cpus_gloo_counts_where_no_operator_runs() -> None:
    events = [
        RecordedEvent(MARK, 0, 100, is_range=True),
        RecordedEvent("DistributedDataParallel.forward", 0, 100),
        RecordedEvent("c10d::allreduce_", 20, 5),
        RecordedEvent("gloo:all_reduce", 20, 60),
        RecordedEvent("aten::mm", 10, 40),
        # The vote of the ranks.
        RecordedEvent("gloo:all_reduce", 110, 20),
    ]
    assert communication_share(activity_of(events)) == pytest.approx(30 / 100)


def test_gloo_beside_a_gpu_is_hidden_by_its_kernels_alone() -> None:
    events = [
        RecordedEvent(MARK, 0, 100, is_range=True),
        RecordedEvent("gloo:all_reduce", 20, 60),
        RecordedEvent("aten::mm", 0, 100),
        on_gpu("sgemm", 0, 40),
    ]
    assert communication_share(activity_of(events)) == pytest.approx(40 / 100)


def recorded(sampler: CommunicationSampler, steps: int) -> list[int]:
    """The numbers of the steps that were recorded, from 1."""
    numbers = []
    for number in range(1, steps + 1):
        sampler.begin_step()
        torch.ones(4).sum()
        if sampler.end_step():
            numbers.append(number)
    sampler.close()
    return numbers


def test_three_steps_are_recorded_and_again_after_four_times_as_many() -> None:
    sampler = CommunicationSampler(CPU)
    assert recorded(sampler, 30) == [6, 7, 8, 21, 22, 23]
    assert sampler.steps == 6
    assert sampler.seconds > 0
    # No rank has communicated.
    assert sampler.share is None


def test_a_rank_alone_communicates_with_nobody() -> None:
    sampler = CommunicationSampler(CPU, alone=True)
    assert recorded(sampler, 30) == []
    assert sampler.share == 0.0


def test_a_profiler_of_the_script_comes_first_and_an_end_within_recorded_steps_leaves_none() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert recorded(CommunicationSampler(CPU), 8) == []
    sampler = CommunicationSampler(CPU)
    assert recorded(sampler, 7) == [6, 7]
    assert sampler.share is None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        torch.ones(1)
    assert own.events()


def test_a_profiler_that_cannot_start_ends_the_measurement_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refused:
        def __init__(self, **_: object) -> None: ...

        def start(self) -> None:
            raise RuntimeError("CUPTI is in use")

    monkeypatch.setattr(profiling, "profile", Refused)
    assert recorded(CommunicationSampler(CPU), 30) == []
    assert caplog.text.count("CUPTI is in use") == 1
