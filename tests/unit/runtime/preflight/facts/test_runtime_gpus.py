"""What NVML, the kernel log and a matrix product say of GPUs, told by stand-ins: there may be no GPU here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.site import PATIENCE_S, until
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.runtime.preflight.facts import gpus
from slurmtrain.runtime.preflight.facts.gpus import (
    driver_version,
    find_xids,
    inspect_gpus,
    parse_gemm_output,
    run_gemm,
    visible_devices,
)

NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, LOST = 3, 4, 9, 15


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


@dataclass
class Device:
    """A GPU of the stand-in for NVML; an answer that is an exception is raised."""

    uuid: str
    bus: str
    answers: dict[str, Any] = field(default_factory=dict)

    def answer(self, query: str, default: Any) -> Any:
        answer = self.answers.get(query, default)
        if isinstance(answer, Exception):
            raise answer
        return answer


class FakeNvml:
    """As much of pynvml as is used, with these devices; ``broken`` is raised when it is opened."""

    NVMLError = NVMLError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    def __init__(self, *devices: Device, broken: NVMLError | None = None) -> None:
        self.devices = devices
        self.broken = broken
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken is not None:
            raise self.broken
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "570.86.15"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        assert self.open
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:  # noqa: N802
        device = self.devices[index]
        device.answer("handle", None)
        return device

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Device:  # noqa: N802
        return next(device for device in self.devices if device.answers.get("part") == uuid)

    def nvmlDeviceGetUUID(self, device: Device) -> str:  # noqa: N802
        return device.uuid

    def nvmlDeviceGetName(self, device: Device) -> bytes:  # noqa: N802
        return b"NVIDIA H100"

    def nvmlDeviceGetPciInfo(self, device: Device) -> Any:  # noqa: N802
        return SimpleNamespace(busId=device.bus)

    def nvmlDeviceGetMemoryInfo(self, device: Device) -> Any:  # noqa: N802
        return SimpleNamespace(used=device.answer("used", 600_000_000), total=80 << 30)

    def nvmlDeviceGetTotalEccErrors(self, device: Device, kind: int, counter: int) -> Any:  # noqa: N802
        assert (kind, counter) == (self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.NVML_VOLATILE_ECC)
        return device.answer("ecc", 0)

    def nvmlDeviceGetRemappedRows(self, device: Device) -> Any:  # noqa: N802
        return device.answer("rows", (0, 0, 0, 0))

    def nvmlDeviceGetRetiredPagesPendingStatus(self, device: Device) -> Any:  # noqa: N802
        return device.answer("pages", 0)


def device(number: int, **answers: Any) -> Device:
    return Device(f"GPU-{number}{number}{number}-ab", f"00000000:{number + 1}B:00.0", answers)


@pytest.fixture
def _one_good_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the child: these tests are of NVML."""
    answer = {"count": 1, "gpus": [{"gpu": 0, "name": "Fake", "ms": 0.2, "tflops": 600.0}]}
    monkeypatch.setattr(gpus, "run_gemm", lambda environ, limit_s: answer)
    monkeypatch.setattr(gpus, "KERNEL_LOG", Path("/nonexistent/kmsg"))


# --- CUDA_VISIBLE_DEVICES ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("0,1", [0, 1]),
        (" 2 , 1", [2, 1]),
        ("0,2,-1,1", [0, 2]),
        ("0,4,1", [0]),
        ("NoDevFiles", []),
        ("1,1", []),
        ("0,\u0661", [0]),
        ("GPU-8932f937,GPU-1", ["GPU-8932f937", "GPU-1"]),
        ("MIG-5c5ba4f2-0000", ["MIG-5c5ba4f2-0000"]),
    ],
)
def test_what_a_job_may_see_is_read_as_cuda_reads_it(value: str | None, expected: list[int | str]) -> None:
    assert visible_devices(value, 4) == expected


@settings(deadline=None)
@given(st.text(alphabet="0123456789,-GPUMI abx"), st.integers(0, 8))
def test_a_job_never_sees_a_gpu_twice_or_one_that_is_not_there(value: str, count: int) -> None:
    thread_counts = visible_devices(value, count)
    assert len(set(thread_counts)) == len(thread_counts)
    assert all(entry < count for entry in thread_counts if isinstance(entry, int))


# --- NVML -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_one_good_gpu")
def test_gpus_are_inspected_with_all_their_figures() -> None:
    nvml = FakeNvml(device(0), device(1, ecc=3, rows=(0, 2, 1, 0), used=5_000_000_000))
    facts = inspect_gpus(2, {}, 10, nvml)
    assert (facts["asked"], facts["count"], facts["nvml"], facts["mig"]) == (2, 2, None, False)
    good = {
        "name": "NVIDIA H100",
        "bus": "00000000:1B:00.0",
        "uncorrected": 0,
        "pending": False,
        "used_mb": 600,
        "memory": 80 << 30,
    }
    assert facts["gpus"] == [
        good,
        {**good, "bus": "00000000:2B:00.0", "uncorrected": 3, "pending": True, "used_mb": 5000},
    ]
    assert nvml.open == 0
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.usefixtures("_one_good_gpu")
@pytest.mark.parametrize(
    ("value", "buses"),
    [
        ("1", ["00000000:2B:00.0"]),
        ("GPU-111-ab", ["00000000:2B:00.0"]),
        ("GPU-1", ["00000000:2B:00.0"]),
        ("GPU-9", []),
        ("", []),
    ],
)
def test_only_gpus_of_this_job_are_inspected(value: str, buses: list[str]) -> None:
    facts = inspect_gpus(1, {"CUDA_VISIBLE_DEVICES": value}, 10, FakeNvml(device(0), device(1)))
    assert [gpu["bus"] for gpu in facts["gpus"]] == buses
    assert facts["count"] == len(buses)


@pytest.mark.usefixtures("_one_good_gpu")
def test_a_mig_instance_is_found_by_its_uuid() -> None:
    facts = inspect_gpus(1, {"CUDA_VISIBLE_DEVICES": "MIG-7"}, 10, FakeNvml(device(0), device(1, part="MIG-7")))
    assert (facts["mig"], [gpu["bus"] for gpu in facts["gpus"]]) == (True, ["00000000:2B:00.0"])


@pytest.mark.usefixtures("_one_good_gpu")
@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION])
def test_a_figure_that_a_gpu_does_not_have_is_none(code: int) -> None:
    no = NVMLError(code)
    facts = inspect_gpus(1, {}, 10, FakeNvml(device(0, ecc=no, rows=no, pages=no)))
    assert facts["gpus"][0]["uncorrected"] is None
    assert facts["gpus"][0]["pending"] is None
    assert facts["gpus"][0]["used_mb"] == 600


@pytest.mark.usefixtures("_one_good_gpu")
@pytest.mark.parametrize("query", ["handle", "ecc", "used"])
def test_a_gpu_that_does_not_answer_is_an_error_and_the_others_are_inspected(query: str) -> None:
    facts = inspect_gpus(2, {}, 10, FakeNvml(device(0, **{query: NVMLError(LOST)}), device(1)))
    assert facts["gpus"][0] == {"error": "error 15"}
    assert facts["gpus"][1]["uncorrected"] == 0


@pytest.mark.usefixtures("_one_good_gpu")
@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (None, "nvidia-ml-py is not installed"),
        (FakeNvml(device(0), broken=NVMLError(DRIVER_NOT_LOADED)), "NVML: error 9"),
    ],
)
def test_without_nvml_torch_counts(nvml: FakeNvml | None, reason: str) -> None:
    facts = inspect_gpus(1, {}, 10, nvml)
    assert (facts["nvml"], facts["count"], facts["gpus"]) == (reason, 1, [])


def test_without_nvml_and_cuda_the_check_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "run_gemm", lambda environ, limit_s: {"skip": "torch is built without CUDA"})
    assert inspect_gpus(1, {}, 10, None) == {
        "skip": "GPUs cannot be inspected: nvidia-ml-py is not installed, and torch is built without CUDA"
    }


@pytest.mark.parametrize(
    ("nvml", "version"),
    [(FakeNvml(), "570.86.15"), (None, None), (FakeNvml(broken=NVMLError(DRIVER_NOT_LOADED)), None)],
)
def test_the_version_of_the_driver_comes_from_nvml(nvml: FakeNvml | None, version: str | None) -> None:
    assert driver_version(nvml) == version


# --- the kernel log ---------------------------------------------------------------------------------------------


LOG = """\
6,1001,5000000,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module
4,1002,6000000,-;NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
4,1003,6000001,-;NVRM: Xid (PCI:0000:2b:00): 31, pid=77, name=python, Ch 00000008
 SUBSYSTEM=pci
4,1004,7000000,-;NVRM: Xid (PCI:0000:2b:00): 31, pid=78, name=python, Ch 00000009
4,1005,8000000,-;NVRM: Xid (0000:2b:00): 48, Double Bit Error
"""


def test_messages_of_the_driver_are_counted_by_gpu_and_kind() -> None:
    xids = find_xids(LOG, set())
    assert [(xid["bus"], xid["code"], xid["times"]) for xid in xids] == [
        ("0000:1b:00", 79, 1),
        ("0000:2b:00", 31, 2),
        ("0000:2b:00", 48, 1),
    ]
    assert xids[1]["line"] == "NVRM: Xid (PCI:0000:2b:00): 31, pid=78, name=python, Ch 00000009"


def test_messages_about_gpus_of_other_jobs_are_ignored() -> None:
    assert [xid["code"] for xid in find_xids(LOG, {"00000000:1B:00.0"})] == [79]
    assert find_xids(LOG, {"00000000:3B:00.0"}) == []


@settings(deadline=None)
@given(st.text() | st.text().map(lambda text: f"NVRM: Xid (PCI:{text}): 79, {text}"), st.sets(st.text(), max_size=2))
def test_any_kernel_log_can_be_read(text: str, buses: set[str]) -> None:
    assert all(xid["times"] > 0 for xid in find_xids(text, buses))


@pytest.mark.usefixtures("_one_good_gpu")
def test_a_kernel_log_that_cannot_be_read_is_noted() -> None:
    facts = inspect_gpus(1, {}, 10, FakeNvml(device(0)))
    assert (facts["xids"], facts["kernel_log"]) == (None, "no such file or directory")


def test_a_kernel_log_that_has_no_more_for_now_is_at_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "kmsg"
    os.mkfifo(pipe)
    keep = os.open(pipe, os.O_RDWR)
    try:
        os.write(keep, LOG.encode())
        assert gpus.read_kernel_log(pipe) == LOG
    finally:
        os.close(keep)


# --- multiplying matrices on each GPU, and comparing what comes out -----------------------------------------------

FakeTorch = Callable[[str], dict[str, str]]


@pytest.fixture
def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """Let children import a module called torch with these lines about GPUs, and return an environment for them."""

    def write(lines: str) -> dict[str, str]:
        package = tmp_path / "fake" / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(FAKE_TORCH + lines)
        monkeypatch.syspath_prepend(str(package.parent))
        return dict(os.environ)

    return write


FAKE_TORCH = """
import os, sys, time
from types import SimpleNamespace
float16 = "float16"
version = SimpleNamespace(cuda="12.8", hip=None)
GOOD = lambda: None
GPUS = []
class Tensor:
    is_cuda = True
    right = True
    def __init__(self, device):
        self.device = device
    def __matmul__(self, other):
        return self
    def __eq__(self, other):
        return self
    def all(self):
        return self.right
def ones(rows, columns, dtype, device):
    GPUS[int(device.removeprefix("cuda:"))]()
    return Tensor(device)
def mm(a, b, out):
    pass
cuda = SimpleNamespace(
    device_count=lambda: len(GPUS), synchronize=lambda device: None,
    get_device_properties=lambda index: SimpleNamespace(name="Fake", total_memory=80 << 30),
)
def broken():
    raise RuntimeError("CUDA error: unspecified launch failure\\nmore lines")
def hangs():
    time.sleep(600)
def dies():
    os.kill(os.getpid(), 11)
    hangs()
"""


# --- the product ------------------------------------------------------------------------------------------------


def test_every_gpu_multiplies_in_a_process_of_its_own(fake_torch: FakeTorch) -> None:
    facts = run_gemm(fake_torch("GPUS += [GOOD, GOOD]"), 60)
    assert facts["count"] == 2
    assert [(gpu["gpu"], gpu["name"], gpu["memory"]) for gpu in facts["gpus"]] == [
        (0, "Fake", 80 << 30), (1, "Fake", 80 << 30)
    ]  # fmt: skip
    assert all(gpu["ms"] >= 0 and gpu["tflops"] > 0 for gpu in facts["gpus"])


def test_the_product_sees_the_gpus_of_the_ranks_and_uses_neither_their_python_nor_modules_beside_it(
    fake_torch: FakeTorch,
) -> None:
    visible = "os.environ['CUDA_VISIBLE_DEVICES'].split(',')"
    environ = fake_torch(f"import profile\nGPUS += [GOOD] * len({visible}) * ('slurmtrain' not in profile.__file__)")
    environ |= {"PYTHONHOME": "/nonexistent", "PYTHONPATH": "/nonexistent", "CUDA_VISIBLE_DEVICES": "1,2,3"}
    assert run_gemm(environ, 60)["count"] == 3


def test_a_gpu_that_hangs_is_an_error_beside_the_others_figures_and_the_child_is_killed(
    fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    children = []
    popen = subprocess.Popen
    marker = tmp_path / "said"
    # The time counts from when the other GPU has answered, and the child does not end by itself before it is over.
    prelude = f"""
import builtins, signal
signal.alarm(0)
say = builtins.print
def print_and_say_so(line, **more):
    say(line, **more)
    if '"gpu": 1' in line:
        open({str(marker)!r}, "w").close()
builtins.print = print_and_say_so
"""

    def begin(*arguments: Any, **more: Any) -> Any:
        children.append(popen(*arguments, **more))
        until(marker.exists, "the answer of the other GPU")
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", begin)
    facts = run_gemm(fake_torch(f"{prelude}GPUS += [hangs, GOOD]"), 5)
    assert facts["gpus"][0] == {"gpu": 0, "error": "no answer within 5 s"}
    assert facts["gpus"][1]["name"] == "Fake"
    assert [child.wait(PATIENCE_S) for child in children] == [-9]


BROKEN = {"gpu": 0, "error": "RuntimeError: CUDA error: unspecified launch failure"}
WRONG = {"gpu": 0, "error": "ArithmeticError: the product of 4096 x 4096 ones is wrong"}


@pytest.mark.parametrize(
    ("lines", "facts"),
    [
        ("sys.exit('no driver')", {"error": "exit code 1: no driver"}),
        ("", {"error": "torch sees no GPU", "count": 0, "gpus": []}),
        ("version.cuda = None", {"skip": "torch is built without CUDA"}),
        ("GPUS += [dies]", {"gpus": [{"gpu": 0, "error": "signal 11"}]}),
        ("GPUS += [GOOD]\nTensor.right = False", {"gpus": [WRONG]}),
        ("GPUS += [broken, broken]", {"gpus": [BROKEN, {**BROKEN, "gpu": 1}]}),
    ],
    ids=["fails", "no GPU", "no CUDA", "dies", "wrong", "broken"],
)
def test_a_child_or_a_gpu_that_fails_is_told(fake_torch: FakeTorch, lines: str, facts: dict[str, Any]) -> None:
    assert run_gemm(fake_torch(lines), 60).items() >= facts.items()


def test_a_child_whose_parent_has_died_ends_by_itself(fake_torch: FakeTorch) -> None:
    environ = {**fake_torch("GPUS += [hangs]"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", gpus.__file__, "0.5"]
    child = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
    assert child.wait(60) == -14


@settings(deadline=None)
@given(st.text(), st.text())
def test_any_output_can_be_read(output: str, ending: str) -> None:
    facts = parse_gemm_output(output, ending)
    assert facts.keys() & {"error", "skip", "gpus"}


def test_a_product_is_timed_on_any_device_of_torch() -> None:
    began = time.perf_counter()
    seconds = gpus.multiply("cpu", "float32", 64, rounds=3, batch=2)
    assert 0 < seconds <= time.perf_counter() - began
