"""A rank's own time in a step, measured with CUDA events, without waiting for the GPU."""

from __future__ import annotations

import time

import torch
from torch import nn

from slurmtrain.runtime.training.module_watch import StepTime

SIZE = 4096


class Products(nn.Module):
    """A forward pass of this many matrix products."""

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__()
        self.count = count
        self.matrix = nn.Parameter(torch.eye(SIZE, device=device))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            value = value @ self.matrix
        return value


def seconds_on_gpu(module: nn.Module, value: torch.Tensor) -> float:
    """How long the GPU takes for a forward pass, by events of its own."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    module(value)
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3


@torch.no_grad()
def test_own_time_ends_with_the_forward_pass(device: torch.device) -> None:
    forward, backward = Products(20, device), Products(60, device)
    value = torch.ones(SIZE, SIZE, device=device)
    forward(value), backward(value)
    expected_s = seconds_on_gpu(forward, value)
    own = StepTime(device)
    own.watch([forward])
    for _ in range(30):
        own.begin()
        forward(value)
        backward(value)
        torch.cuda.synchronize()
    own.end()
    # What the backward pass takes would make it four times as long.
    assert 0.5 * expected_s < own.s < 2.5 * expected_s


@torch.no_grad()
def test_measuring_does_not_wait_for_the_gpu(device: torch.device) -> None:
    module = Products(1, device)
    busy = Products(400, device)
    value = torch.ones(SIZE, SIZE, device=device)
    module(value), busy(value)
    queued_s = seconds_on_gpu(busy, value)
    own = StepTime(device)
    own.watch([module])
    busy(value)
    began = time.perf_counter()
    for _ in range(5):
        own.begin()
        module(value)
    took_s = time.perf_counter() - began
    own.end()
    still_busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert still_busy
    assert took_s < queued_s


@torch.no_grad()
def test_a_forward_pass_in_a_cuda_graph_is_replayed_unmeasured(device: torch.device) -> None:
    module = Products(2, device)
    value = torch.ones(SIZE, SIZE, device=device)
    own = StepTime(device)
    own.watch([module])
    own.begin()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        module(value)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    own.begin()
    with torch.cuda.graph(graph):
        result = module(value)
    for _ in range(5):
        own.begin()
        graph.replay()
        torch.cuda.synchronize()
    own.end()
    assert torch.isfinite(result).all()
