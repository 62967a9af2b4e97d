"""The part of steps on GPUs that is communication, by what torch's profiler records of NCCL's kernels."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from helpers.gpu_figures import Figures
from helpers.ranks import Pair
from torch import nn

from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training.profiling import CommunicationSampler

SIZE = 4096


def shares(ranks: RankGroup, late_s: float) -> tuple[float | None, float]:
    """The share of a rank on its own GPU, the last of which begins late, and seconds for the profiler."""
    device = torch.device("cuda", ranks.rank)
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl")
    model = nn.parallel.DistributedDataParallel(nn.Linear(SIZE, SIZE).to(device), process_group=group)
    inputs = torch.ones(SIZE, SIZE, device=device)
    sampler = CommunicationSampler(device)
    plain = 0.0
    for number in range(8):
        began = time.perf_counter()
        sampler.begin_step()
        if ranks.rank == ranks.world_size - 1:
            time.sleep(late_s)
        model(inputs).mean().backward()
        torch.cuda.synchronize()
        if not sampler.end_step() and number > 2:
            plain += (time.perf_counter() - began) / 2
    dist.destroy_process_group(group)
    return sampler.share, sampler.seconds - sampler.steps * plain


@pytest.mark.usefixtures("two_gpus")
def test_waiting_for_a_late_gpu_is_communication(figures: Figures) -> None:
    ranks = Pair(2)
    try:
        (first, took_s), (last, _) = ranks.run(shares, 0.1)
    finally:
        ranks.close()
    assert first is not None
    assert last is not None
    assert 0.5 < first <= 1.0
    assert last < 0.5
    figures.add("profiler of three steps", took_s, "s")


def test_a_gpu_alone_has_no_communication_and_its_kernels_are_recorded(device: torch.device) -> None:
    sampler = CommunicationSampler(device)
    value = torch.ones(SIZE, SIZE, device=device)
    for _ in range(8):
        sampler.begin_step()
        value = value @ value
        sampler.end_step()
    sampler.close()
    assert sampler.steps == 3
    assert sampler.share is None
