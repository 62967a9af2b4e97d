"""What no machine without a GPU can test. Each test is skipped, with the reason, where torch sees no CUDA device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.gpu_figures import Figures
from helpers.site import Site

from slurmtrain.runtime.preflight.facts.gpus import KERNEL_LOG, read_kernel_log

# Where scripts/gpu-check has figures written; without it they are only asserted on.
FIGURES = os.environ.get("TEST_GPU_FIGURES")


@pytest.fixture(autouse=True)
def gpu_count() -> int:
    """How many GPUs torch can use; a test without any is skipped."""
    if not torch.cuda.is_available():
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}" if torch.version.cuda else (
            f"torch {torch.__version__} is built without CUDA"
        )  # fmt: skip
        pytest.skip(f"no CUDA device: {built}")
    return torch.cuda.device_count()


@pytest.fixture
def two_gpus(gpu_count: int) -> None:
    """Skip a test that needs two GPUs on a machine with one."""
    if gpu_count < 2:
        pytest.skip("needs two CUDA devices: NCCL has no two ranks on one")


@pytest.fixture
def faults(gpu_count: int) -> None:
    """Skip a test that lets the GPU fault where nothing could be seen of it, or where that is not wanted."""
    if os.environ.get("TEST_GPU_FAULTS") == "0":
        pytest.skip("TEST_GPU_FAULTS=0: no GPU is made to fault")
    try:
        read_kernel_log(KERNEL_LOG)
    except OSError as error:
        pytest.skip(f"the kernel log cannot be read, so an Xid would not be seen: {error.strerror}")


@pytest.fixture
def device(gpu_count: int) -> Iterator[torch.device]:
    """The first GPU, whose memory is given back afterwards: runs that follow expect it unused."""
    yield torch.device("cuda", 0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture
def site(tmp_path: Path, gpu_count: int) -> Iterator[Site]:
    """A fresh runs root; whatever still runs in it at the end is ended."""
    place = Site(tmp_path)
    place.scripts = Path(__file__).resolve().parent / "scripts"
    yield place
    place.end_all()


@pytest.fixture(scope="session")
def figures() -> Iterator[Figures]:
    """The figures of all tests, which are written to $TEST_GPU_FIGURES at the end."""
    collected = Figures()
    yield collected
    if FIGURES is not None:
        collected.write(Path(FIGURES))
