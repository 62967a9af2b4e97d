"""What the checks make of GPUs, and of nodes that are slower than others."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.node_facts import GPU, GPUS, judge_check, judge_node, spec_with

from slurmtrain.model.preflight.checks import FATAL_XIDS

# --- GPUs -------------------------------------------------------------------------------------------------------


def with_gpu(**facts: Any) -> dict[str, Any]:
    """The facts of two GPUs of which the second one is like this."""
    return {**GPUS, "gpus": [GPU, {**GPU, **facts}]}


SPEED = "2 GPUs, H100, 612 to 640 TFLOP/s"
ONE_USED = {"count": 1, "gpus": GPUS["gemm"]["gpus"][:1]}


def xid(code: int, times: int) -> dict[str, Any]:
    return {**GPUS, "xids": [{"bus": "0000:3b:00", "code": code, "times": times, "line": "NVRM"}]}


@pytest.mark.parametrize(
    ("facts", "status", "summary"),
    [
        (GPUS, "pass", SPEED),
        ({**GPUS, "count": 1}, "fail", "1 of 2 GPUs"),
        ({**GPUS, "gemm": ONE_USED}, "fail", "torch can use 1 of 2 GPUs"),
        # Of the parts of a divided one torch need use but one.
        ({**GPUS, "mig": True, "gemm": ONE_USED}, "pass", "2 GPUs, H100"),
        (with_gpu(uncorrected=1), "fail", "GPU 1 has 1 uncorrected memory error"),
        (with_gpu(uncorrected=7), "fail", "GPU 1 has 7 uncorrected memory errors"),
        (with_gpu(pending=True), "fail", "GPU 1 must be reset to replace memory that failed"),
        (with_gpu(used_mb=30512), "fail", "GPU 1 has 30512 MB in use (limit 2048 MB)"),
        # Figures that a GPU does not have, and a kernel log that cannot be read, are no failure.
        (with_gpu(uncorrected=None, pending=None, used_mb=None), "pass", SPEED),
        ({**GPUS, "xids": None, "kernel_log": "operation not permitted"}, "pass", SPEED),
        ({**GPUS, "gpus": [GPU, {"error": "GPU is lost"}]}, "fail", "GPU 1: GPU is lost"),
        ({**GPUS, "gemm": {"error": "signal 11"}}, "fail", "cannot multiply: signal 11"),
        ({**GPUS, "gemm": {"count": 2, "gpus": [GPUS["gemm"]["gpus"][0], {"gpu": 1, "error": "no answer"}]}}, "fail",
         "GPU 1 cannot multiply: no answer"),
        (xid(79, 2), "fail", "2 x Xid 79 of 0000:3b:00 in the kernel log"),
        # This one is no sign of broken hardware, and that one is caused by programs.
        (xid(63, 1), "warn", "1 x Xid 63 of 0000:3b:00 in the kernel log"),
        (xid(31, 9), "pass", SPEED),
        ({**GPUS, "nvml": "nvidia-ml-py is not installed", "gpus": []}, "pass",
         "memory errors not checked: nvidia-ml-py is not installed"),
        ({**GPUS, "gemm": {"skip": "torch is built without CUDA"}}, "pass",
         "no matrix product: torch is built without CUDA"),
    ],
)  # fmt: skip
def test_a_gpu_that_is_not_as_it_should_be_fails_with_figures(facts: dict[str, Any], status: str, summary: str) -> None:
    finding = judge_node("gpu", facts)
    assert finding.status == status
    assert summary == finding.summary if status == "fail" else summary in finding.summary


def test_a_summary_has_every_problem_of_the_gpus() -> None:
    facts = {**with_gpu(uncorrected=1, pending=True), "count": 1}
    assert judge_node("gpu", facts).summary.count(";") == 2
    assert 63 not in FATAL_XIDS


# --- stragglers -------------------------------------------------------------------------------------------------


def times(*seconds: float) -> dict[int, dict[str, float]]:
    return {node: {"seconds": each} for node, each in enumerate(seconds)}


@pytest.mark.parametrize(
    ("facts", "statuses", "summaries"),
    [
        (times(0.001, 0.0011, 0.0034), "pass pass fail", {2: "3.4 ms, 3.1 times the median (limit 2)"}),
        (times(0.001, 0.001, 0.002), "pass pass pass", {}),
        # If half of them are slow, the quick ones are the measure. Of fewer than three none is a straggler.
        (times(0.001, 0.001, 0.005, 0.005), "pass pass fail fail", {}),
        (times(0.001), "pass", {0: "1 ms"}),
        (times(0.001, 0.9), "pass pass", {0: "1 ms"}),
        # Those that were not timed are not counted.
        ({**times(0.001, 0.9), 2: {"error": "RuntimeError: no"}}, "pass pass warn", {}),
    ],
)
def test_a_node_that_takes_more_than_twice_the_median_is_a_straggler(
    facts: dict[int, dict[str, Any]], statuses: str, summaries: dict[int, str]
) -> None:
    findings = judge_check("straggler", facts, spec_with(straggler={"level": "fail"}))
    assert [finding.status for finding in findings.values()] == statuses.split()
    assert {node: findings[node].summary for node in summaries} == summaries
