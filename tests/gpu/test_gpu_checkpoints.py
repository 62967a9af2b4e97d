"""Checkpoints of what lies on a GPU: the bits of the moment, copied into pinned memory while training goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from helpers.gpu_figures import Figures
from helpers.ranks import Attempt
from torch import nn

from slurmtrain.runtime.checkpoint import rng
from slurmtrain.runtime.job.process_group import RankGroup

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
LARGE_BYTES = 2**30


class Buffers(nn.Module):
    """Tensors of many types and layouts on a GPU, filled from its generator."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        for dtype in DTYPES:
            noise = torch.randint(0, 2, (129, 65), device=device) if dtype is torch.bool else (
                torch.randn(129, 65, device=device) * 50
            )  # fmt: skip
            self.register_buffer("of_" + str(dtype).removeprefix("torch."), noise.to(dtype))
        self.register_buffer("transposed", torch.randn(33, 17, device=device).t())
        self.register_buffer("strided", torch.randn(64, 64, device=device)[::2, ::3])
        self.register_buffer("scalar", torch.randn((), device=device))
        self.register_buffer("empty", torch.empty(0, 4, device=device))

    def bits(self) -> dict[str, bytes]:
        return {name: bits_of(buffer) for name, buffer in self.named_buffers()}


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def alone(device: torch.device) -> RankGroup:
    return RankGroup(0, 1, device)


def test_the_bits_of_the_moment_are_saved_while_the_gpu_overwrites_them(tmp_path: Path, device: torch.device) -> None:
    module = Buffers(device)
    before = module.bits()
    with Attempt(tmp_path, alone(device), {"module": module}) as attempt:
        assert attempt.begin(1) is None
        for buffer in module.buffers():
            buffer.zero_()
        outcome = attempt.saver.finish()
        assert outcome is not None
        assert outcome.problem == ""
    assert module.bits() != before

    restored = Buffers(device)
    with Attempt(tmp_path, alone(device), {"module": restored}, restart=1) as attempt:
        assert attempt.restore() is not None
    assert restored.bits() == before


def test_copies_go_into_pinned_memory_and_the_writer_never_loads_cuda(tmp_path: Path, device: torch.device) -> None:
    small = nn.Linear(64, 64, device=device)
    with Attempt(tmp_path, alone(device), {"module": small}) as attempt:
        assert attempt.save(1) == ""
        writer = attempt.saver._writer
        assert writer._memory is not None
        assert writer._memory.is_pinned()
        assert writer._process is not None
        assert "libcuda" not in Path(f"/proc/{writer._process.pid}/maps").read_text()
        # Memory that grows is pinned again, at its new place.
        small.register_buffer("more", torch.ones(2**24, device=device))
        assert attempt.save(2) == ""
        assert writer.memory_bytes > 4 * 2**24
        assert writer._memory.is_pinned()


def test_the_generator_of_the_gpu_continues_where_it_was_saved(tmp_path: Path, device: torch.device) -> None:
    module = nn.Linear(2, 2, device=device)
    torch.cuda.manual_seed(7)
    torch.rand(1000, device=device)
    with Attempt(tmp_path, alone(device), {"module": module}) as attempt:
        assert attempt.save(1) == ""
    drawn = [bits_of(torch.rand(1000, device=device)), bits_of(nn.functional.dropout(torch.ones(5000, device=device)))]

    torch.cuda.manual_seed(8)
    with Attempt(tmp_path, alone(device), {"module": module}, restart=1) as attempt:
        restored = attempt.restore()
    assert restored is not None
    assert restored.rng is not None
    rng.restore(restored.rng, device)
    again = [bits_of(torch.rand(1000, device=device)), bits_of(nn.functional.dropout(torch.ones(5000, device=device)))]
    assert again == drawn


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"capturable": True}], ids=str)
def test_an_optimizer_on_the_gpu_takes_the_same_steps_after_a_restore(
    tmp_path: Path, device: torch.device, options: dict[str, bool]
) -> None:
    def training() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)).to(device)
        return module, torch.optim.AdamW(module.parameters(), lr=0.01, **options)

    def steps(module: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            torch.manual_seed(step)
            optimizer.zero_grad()
            module(torch.randn(16, 32, device=device)).square().mean().backward()
            optimizer.step()

    module, optimizer = training()
    steps(module, optimizer, 0, 4)
    with Attempt(tmp_path, alone(device), {"module": module, "optimizer": optimizer}) as attempt:
        assert attempt.save(4) == ""
    steps(module, optimizer, 4, 8)

    other, others = training()
    with Attempt(tmp_path, alone(device), {"module": other, "optimizer": others}, restart=1) as attempt:
        assert attempt.restore() is not None
    steps(other, others, 4, 8)
    assert [bits_of(value) for value in other.parameters()] == [bits_of(value) for value in module.parameters()]


def test_a_copy_to_pinned_memory_is_measured(tmp_path: Path, device: torch.device, figures: Figures) -> None:
    module = nn.Module()
    module.register_buffer("large", torch.ones(LARGE_BYTES // 4, device=device))
    stalls = []
    with Attempt(tmp_path, alone(device), {"module": module}) as attempt:
        for number in range(4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            assert attempt.begin(number) is None
            stalls.append(time.perf_counter() - began)
            outcome = attempt.saver.finish()
            assert outcome is not None
            assert outcome.problem == ""
    # The first one allocates and pins the memory.
    assert min(stalls[1:]) < stalls[0]
    figures.add("stall of the first save of 1 GiB on a GPU, with memory to allocate and pin", stalls[0], "s")
    figures.add("stall of a later save of 1 GiB on a GPU", sorted(stalls[1:])[1], "s")
    figures.add("of that, the rate of the copy", LARGE_BYTES / sorted(stalls[1:])[1] / 1e9, "GB/s")
