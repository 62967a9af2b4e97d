"""Multiplying matrices on each GPU, and comparing what comes out."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.site import PATIENCE_S, until
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.runtime.preflight.facts import matmul
from slurmtrain.runtime.preflight.facts.gpus import parse_gemm_output, run_gemm

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
    command = [sys.executable, "-P", matmul.__file__, "0.5"]
    child = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
    assert child.wait(60) == -14


@settings(deadline=None)
@given(st.text(), st.text())
def test_any_output_can_be_read(output: str, ending: str) -> None:
    facts = parse_gemm_output(output, ending)
    assert facts.keys() & {"error", "skip", "gpus"}


@settings(deadline=None)
@given(st.integers(0, 200))
def test_truncated_output_leaves_no_gpu_without_figures_or_an_error(length: int) -> None:
    whole = (
        '{"count": 2, "built_for": "12.8"}\n{"gpu": 0, "name": "H", "ms": 1, "tflops": 2}\n{"gpu": 1, "error": "no"}\n'
    )
    facts = parse_gemm_output(whole[:length], "signal 9")
    if "count" in facts:
        assert [gpu["gpu"] for gpu in facts["gpus"]] == [0, 1]
        assert all("name" in gpu or gpu["error"] in ("no", "signal 9") for gpu in facts["gpus"])
    else:
        assert facts == {"error": "signal 9"}


def test_a_product_is_timed_on_any_device_of_torch() -> None:
    began = time.perf_counter()
    seconds = matmul.multiply("cpu", "float32", 64, rounds=3, batch=2)
    assert 0 < seconds <= time.perf_counter() - began


def test_a_device_that_torch_does_not_have_is_an_error() -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        matmul.multiply("cuda:99", "float32", 64, rounds=1, batch=1)
