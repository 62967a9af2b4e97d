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


def test_good_gpus_pass_with_their_name_and_speed() -> None:
    assert judge_node("gpu", GPUS).summary == "2 GPUs, H100, 612 to 640 TFLOP/s"


@pytest.mark.parametrize(
    ("facts", "summary"),
    [
        ({**GPUS, "count": 1}, "1 of 2 GPUs"),
        ({**GPUS, "gemm": {"count": 1, "gpus": GPUS["gemm"]["gpus"][:1]}}, "torch can use 1 of 2 GPUs"),
        (with_gpu(uncorrected=1), "GPU 1 has 1 uncorrected memory error"),
        (with_gpu(uncorrected=7), "GPU 1 has 7 uncorrected memory errors"),
        (with_gpu(pending=True), "GPU 1 must be reset to replace memory that failed"),
        (with_gpu(used_mb=30512), "GPU 1 has 30512 MB in use (limit 2048 MB)"),
        ({**GPUS, "gpus": [GPU, {"error": "GPU is lost"}]}, "GPU 1: GPU is lost"),
        ({**GPUS, "gemm": {"error": "signal 11"}}, "cannot multiply: signal 11"),
        (
            {**GPUS, "gemm": {"count": 2, "gpus": [GPUS["gemm"]["gpus"][0], {"gpu": 1, "error": "no answer"}]}},
            "GPU 1 cannot multiply: no answer",
        ),
        (
            {**GPUS, "xids": [{"bus": "0000:3b:00", "code": 79, "times": 2, "line": "NVRM"}]},
            "2 x Xid 79 of 0000:3b:00 in the kernel log",
        ),
    ],
)  # fmt: skip
def test_a_gpu_that_is_not_as_it_should_be_fails_with_figures(facts: dict[str, Any], summary: str) -> None:
    finding = judge_node("gpu", facts)
    assert (finding.status, finding.summary) == ("fail", summary)


def test_a_summary_has_every_problem_of_the_gpus() -> None:
    finding = judge_node("gpu", {**with_gpu(uncorrected=1, pending=True), "count": 1})
    assert finding.summary.count(";") == 2


def test_an_xid_that_is_no_sign_of_broken_hardware_only_warns() -> None:
    finding = judge_node("gpu", {**GPUS, "xids": [{"bus": "0000:3b:00", "code": 63, "times": 1, "line": "NVRM"}]})
    assert (finding.status, finding.summary) == ("warn", "1 x Xid 63 of 0000:3b:00 in the kernel log")
    assert 63 not in FATAL_XIDS


def test_an_xid_that_a_program_caused_in_itself_does_not_count() -> None:
    assert (
        judge_node("gpu", {**GPUS, "xids": [{"bus": "0000:3b:00", "code": 31, "times": 9, "line": "NVRM"}]}).status
        == "pass"
    )


def test_figures_that_a_gpu_does_not_have_are_no_failure() -> None:
    assert judge_node("gpu", with_gpu(uncorrected=None, pending=None, used_mb=None)).status == "pass"


def test_a_kernel_log_that_cannot_be_read_is_no_failure() -> None:
    assert judge_node("gpu", {**GPUS, "xids": None, "kernel_log": "operation not permitted"}).status == "pass"


def test_without_nvml_gpus_pass_by_the_product_and_the_summary_mentions_it() -> None:
    facts = {**GPUS, "nvml": "nvidia-ml-py is not installed", "gpus": []}
    finding = judge_node("gpu", facts)
    assert finding.status == "pass"
    assert finding.summary.endswith("memory errors not checked: nvidia-ml-py is not installed")


def test_a_torch_without_cuda_does_not_fail_gpus_that_nvml_sees() -> None:
    finding = judge_node("gpu", {**GPUS, "gemm": {"skip": "torch is built without CUDA"}})
    assert finding.status == "pass"
    assert "no matrix product: torch is built without CUDA" in finding.summary


def test_of_the_parts_of_a_divided_gpu_torch_need_use_but_one() -> None:
    facts = {**GPUS, "mig": True, "gemm": {"count": 1, "gpus": GPUS["gemm"]["gpus"][:1]}}
    assert judge_node("gpu", facts).status == "pass"


# --- stragglers -------------------------------------------------------------------------------------------------


def times(*seconds: float) -> dict[int, dict[str, float]]:
    return {node: {"seconds": each} for node, each in enumerate(seconds)}


def test_a_node_that_takes_more_than_twice_the_median_is_a_straggler() -> None:
    findings = judge_check("straggler", times(0.001, 0.0011, 0.0034), spec_with(straggler={"level": "fail"}))
    assert [finding.status for finding in findings.values()] == ["pass", "pass", "fail"]
    assert findings[2].summary == "3.4 ms, 3.1 times the median (limit 2)"


def test_a_node_at_the_limit_is_no_straggler() -> None:
    assert judge_check("straggler", times(0.001, 0.001, 0.002))[2].status == "pass"


def test_half_of_the_nodes_being_slow_does_not_make_the_quick_ones_the_measure() -> None:
    findings = judge_check("straggler", times(0.001, 0.001, 0.005, 0.005), spec_with(straggler={"level": "fail"}))
    assert [finding.status for finding in findings.values()] == ["pass", "pass", "fail", "fail"]


@pytest.mark.parametrize("seconds", [[0.001], [0.001, 0.9]])
def test_of_fewer_than_three_nodes_none_is_a_straggler(seconds: list[float]) -> None:
    findings = judge_check("straggler", times(*seconds), spec_with(straggler={"level": "fail"}))
    assert {finding.status for finding in findings.values()} == {"pass"}
    assert findings[0].summary == "1 ms"


def test_nodes_that_were_not_timed_are_not_counted() -> None:
    facts = {**times(0.001, 0.9), 2: {"error": "RuntimeError: no"}}
    findings = judge_check("straggler", facts, spec_with(straggler={"level": "fail"}))
    assert [finding.status for finding in findings.values()] == ["pass", "pass", "warn"]
