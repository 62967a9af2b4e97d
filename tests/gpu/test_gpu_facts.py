"""What the preflight and the agent learn about real GPUs: from NVML, a matrix product and the kernel log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gpu_figures import Figures
from helpers.site import until

from slurmtrain.model.experiment.spec import read_spec
from slurmtrain.runtime.agent.exits import KernelState
from slurmtrain.runtime.job.torch_private import torch_versions
from slurmtrain.runtime.preflight import ports
from slurmtrain.runtime.preflight.facts import gpus
from slurmtrain.runtime.preflight.facts.allreduce import measure_all_reduce
from slurmtrain.runtime.preflight.facts.gpus import multiply

LIMIT_S = 120.0


@pytest.fixture
def nvml() -> Any:
    module = gpus.load_nvml()
    if module is None:
        pytest.skip("nvidia-ml-py is not installed")
    return module


def bus_number(bus: str) -> int:
    """The bus of a PCI address, however many digits it has."""
    return int(bus.split(":")[1], 16)


def test_nvml_and_torch_see_the_same_gpus(nvml: Any, device: torch.device) -> None:
    facts = gpus.inspect_gpus(torch.cuda.device_count(), os.environ, LIMIT_S, nvml)
    assert facts["nvml"] is None
    assert facts["count"] == torch.cuda.device_count() == len(facts["gpus"])
    for index, gpu in enumerate(facts["gpus"]):
        properties = torch.cuda.get_device_properties(index)
        assert gpu["name"] == properties.name
        assert bus_number(gpu["bus"]) == properties.pci_bus_id
        assert 0 <= gpu["used_mb"] <= properties.total_memory / 1e6 + 1000
        assert gpu["uncorrected"] in (None, 0)
        assert gpu["pending"] in (None, False)


def test_memory_in_use_is_seen(nvml: Any, device: torch.device) -> None:
    def used_mb() -> int:
        return int(gpus._query_nvml(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))["gpus"][0]["used_mb"])

    torch.cuda.empty_cache()
    before = used_mb()
    held = torch.ones(2**30, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    assert used_mb() - before >= held.numel() / 1e6


def test_a_gpu_chosen_by_uuid_is_the_one_that_torch_uses(nvml: Any, device: torch.device) -> None:
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    [gpu] = gpus._query_nvml(nvml, uuid)["gpus"]
    assert bus_number(gpu["bus"]) == torch.cuda.get_device_properties(0).pci_bus_id
    assert gpus._query_nvml(nvml, "")["count"] == 0


def test_every_gpu_multiplies(gpu_count: int, figures: Figures, device: torch.device) -> None:
    facts = gpus.run_gemm(os.environ, LIMIT_S)
    assert facts["count"] == gpu_count
    assert sorted(gpu["gpu"] for gpu in facts["gpus"]) == list(range(gpu_count))
    for gpu in facts["gpus"]:
        assert gpu["ms"] > 0, gpu
        assert gpu["name"] == torch.cuda.get_device_name(gpu["gpu"])
    figures.add("matrix product of the preflight, 4096 x 4096, float16", facts["gpus"][0]["ms"], "ms")
    figures.add("its speed", facts["gpus"][0]["tflops"], "TFLOP/s")


def test_a_wrong_product_is_an_error(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda self, other: right(self, other) + 1)
    with pytest.raises(ArithmeticError, match="wrong"):
        multiply("cuda:0", "float16", 256, rounds=1, batch=1)


def test_versions_name_cuda_nccl_and_the_driver(nvml: Any) -> None:
    versions = torch_versions()
    assert versions["cuda"] == torch.version.cuda
    assert versions["nccl"]
    assert gpus.driver_version(nvml)


@pytest.mark.usefixtures("two_gpus")
def test_an_all_reduce_over_nccl_is_measured(gpu_count: int, figures: Figures) -> None:
    data = {"name": "x", "command": "true", "resources": {"gpus_per_node": gpu_count}}
    spec = read_spec(data, lambda at, message: pytest.fail(f"{at}: {message}"))
    with ports.listen_on_job_port("127.0.0.1", f"tests of {os.getpid()}", 0) as probe:
        port = int(probe.getsockname()[1])
    facts = measure_all_reduce(spec, 0, 1, "127.0.0.1", port, "lo")
    assert facts["backend"] == "nccl", facts
    assert facts["ranks"] == gpu_count
    figures.add(f"all-reduce of {facts['size_mb']:.0f} MB over {gpu_count} GPUs, NCCL", facts["busbw_gb_s"], "GB/s")


def test_a_fault_of_the_gpu_is_in_the_kernel_log(faults: None, device: torch.device) -> None:
    before = KernelState.now()
    script = Path(__file__).parent / "scripts" / "fault.py"
    faulty = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert faulty.returncode != 0
    assert "illegal" in faulty.stderr, faulty.stderr
    # The driver logs it on its own, perhaps after the process has ended.
    xids = until(lambda: before.changes().xids, "an Xid in the kernel log", patience_s=20.0)
    bus = torch.cuda.get_device_properties(0).pci_bus_id
    assert {(bus_number(xid["bus"]), xid["code"]) for xid in xids} & {(bus, 13), (bus, 31)}
