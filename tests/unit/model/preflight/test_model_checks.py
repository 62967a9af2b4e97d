"""What the facts of each check say of each node, and which nodes are to blame."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.model.preflight.checks import FATAL_XIDS, blamed_nodes, judge_checks
from slurmtrain.model.preflight.finding import Finding
from slurmtrain.model.spec.kinds import LevelSection, default_of
from slurmtrain.model.spec.preflight_checks import LEVELS, PreflightSpec
from slurmtrain.model.spec.spec import NetworkSpec, Spec

PAGE = Path(__file__).resolve().parents[4] / "docs" / "preflight.md"
HOSTS = {node: f"node{node}" for node in range(8)}
OWN = ["shared", "versions", "gpu", "disk", "tmp", "shm", "limits", "dns", "straggler", "environment"]

VERSIONS = {
    "python": "3.11.7",
    "torch": "2.13.0",
    "cuda": "12.8",
    "nccl": "2.28.3",
    "driver": "570.86",
    "slurmtrain": "0.1.0",
}
ROOM = {"path": "/scratch", "free": 412 * 10**9, "inodes": 1000, "writable": True}
GPU = {"name": "H100", "bus": "0000:3B:00.0", "uncorrected": 0, "pending": False, "used_mb": 600}
GPUS = {
    "asked": 2,
    "count": 2,
    "nvml": None,
    "mig": False,
    "gpus": [GPU, {**GPU, "bus": "0000:4C:00.0"}],
    "xids": [],
    "kernel_log": None,
    "gemm": {
        "count": 2,
        "gpus": [
            {"gpu": 0, "name": "H100", "ms": 0.2, "tflops": 612.0},
            {"gpu": 1, "name": "H100", "ms": 0.21, "tflops": 640.0},
        ],
    },
}
GOOD: dict[str, Any] = {
    "shared": {"read_ms": 12.0},
    "versions": VERSIONS,
    "gpu": GPUS,
    "disk": ROOM,
    "tmp": ROOM,
    "shm": ROOM,
    "limits": {"nofile": 65536, "memlock": None, "rdma": []},
    "dns": {"10.0.0.5": 3.0},
    "straggler": {"seconds": 0.0004},
    "environment": {"said": []},
}


def spec_with(**sections: Any) -> Spec:
    """A spec whose sections of preflight have these values."""
    base = PreflightSpec()
    changed = {
        name: replace(getattr(base, name), **values) if isinstance(values, dict) and name != "plugins" else values
        for name, values in sections.items()
    }
    return Spec(preflight=replace(base, **changed))


def judge_check(check: str, facts: Mapping[int, Mapping[str, Any]], spec: Spec | None = None) -> dict[int, Finding]:
    """The finding of one check on each node, all else being well."""
    findings = judge_checks({node: {**GOOD, check: its} for node, its in facts.items()}, spec or Spec(), HOSTS)
    return {node: next(finding for finding in its if finding.check == check) for node, its in findings.items()}


def judge_node(check: str, facts: Mapping[str, Any], spec: Spec | None = None) -> Finding:
    """The finding of one check on a node that is alone."""
    return judge_check(check, {0: facts}, spec)[0]


# --- all checks -------------------------------------------------------------------------------------------------


def test_a_good_node_passes_every_check_in_the_order_of_the_spec() -> None:
    findings = judge_checks({0: {**GOOD, "shared": {"write_ms": 3.0, "read_ms": 4.0}}}, Spec(), HOSTS)
    assert [(finding.check, finding.status) for finding in findings[0]] == [(check, "pass") for check in OWN]


def test_every_check_of_the_spec_is_judged_here_or_with_the_network() -> None:
    elsewhere = {"clock", "network", "port", "bandwidth"}
    checks = {field.name for field in fields(PreflightSpec) if isinstance(field.metadata["kind"], LevelSection)}
    assert set(OWN) | elsewhere == checks


@pytest.mark.parametrize("check", OWN)
def test_a_check_that_does_not_apply_is_skipped_with_its_reason(check: str) -> None:
    finding = judge_node(check, {"skip": "there is one node only"})
    assert (finding.status, finding.summary) == ("skip", "there is one node only")


@pytest.mark.parametrize("check", [*OWN, "a-plug-in", "plugins"])
def test_a_check_that_could_not_be_made_is_a_warning(check: str) -> None:
    finding = judge_node(check, {"error": "OSError: no"})
    assert (finding.status, finding.summary) == ("warn", "could not be measured: OSError: no")


@pytest.mark.parametrize("check", [*OWN, "a-plug-in"])
def test_a_check_that_did_not_end_in_time_is_a_failure(check: str) -> None:
    spec = spec_with(**{check: {"level": "fail"}}) if check in OWN else Spec()
    finding = judge_node(check, {"timeout": 30.0}, spec)
    assert (finding.status, finding.summary, finding.evidence) == (
        "fail", "no answer within 30 s", {"timeout_s": 30.0},
    )  # fmt: skip


@pytest.mark.parametrize("check", OWN)
def test_a_check_that_only_warns_makes_a_failure_a_warning(check: str) -> None:
    assert judge_node(check, {"timeout": 30.0}, spec_with(**{check: {"level": "warn"}})).status == "warn"


@pytest.mark.parametrize("check", OWN)
def test_a_check_that_is_off_has_no_finding(check: str) -> None:
    findings = judge_checks({0: {**GOOD, check: {"timeout": 1.0}}}, spec_with(**{check: {"level": "off"}}), HOSTS)
    assert [finding.check for finding in findings[0]] == [name for name in OWN if name != check]


def test_a_check_that_a_node_did_not_make_is_a_warning() -> None:
    findings = judge_checks({0: GOOD, 1: {k: v for k, v in GOOD.items() if k != "disk"}}, Spec(), HOSTS)
    disk = next(finding for finding in findings[1] if finding.check == "disk")
    assert (disk.status, disk.summary) == ("warn", "it was not measured")


@pytest.mark.parametrize(
    ("check", "facts"),
    [("limits", {"open_files": 3}), ("straggler", {"seconds": 0}), ("dns", {"10.0.0.5": None}), ("gpu", {"gpus": 3})],
)
def test_facts_of_another_version_are_a_warning(check: str, facts: dict[str, Any]) -> None:
    findings = judge_check(check, dict.fromkeys(range(3), facts))
    assert {finding.status for finding in findings.values()} == {"warn"}
    assert findings[0].summary.startswith("its facts cannot be judged: ")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(
        st.integers(0, 3),
        st.dictionaries(
            st.sampled_from(OWN),
            st.dictionaries(
                st.sampled_from(["said", "seconds", "free", "gpus", "gemm", "torch", "count", "read_ms"]), _JSON
            ),
        ),
    )
)
def test_any_facts_give_a_finding_of_every_check(facts: dict[int, Any]) -> None:
    findings = judge_checks(facts, Spec(), HOSTS)
    assert all([finding.check for finding in its] == OWN for its in findings.values())
    assert findings.keys() == facts.keys()


def test_findings_can_be_written_as_json() -> None:
    findings = judge_checks(dict.fromkeys(range(3), GOOD), Spec(), HOSTS)
    for finding in (finding for its in findings.values() for finding in its):
        assert json.loads(json.dumps(finding.to_dict()))["check"] == finding.check


# --- shared -----------------------------------------------------------------------------------------------------

WROTE = {"write_ms": 3.2, "read_ms": 3.4}
READ = {"read_ms": 12.1}
UNSEEN = {"unseen": True}


def test_a_shared_directory_that_all_see_passes_with_times() -> None:
    findings = judge_check("shared", {0: WROTE, 1: READ})
    assert [findings[node].status for node in (0, 1)] == ["pass", "pass"]
    assert findings[0].summary == "written in 3.2 ms, read after 3.4 ms"
    assert findings[1].summary == "read after 12 ms"


def test_a_node_that_does_not_see_what_another_sees_is_to_blame() -> None:
    findings = judge_check("shared", {0: WROTE, 1: READ, 2: UNSEEN})
    assert findings[2].status == "fail"
    assert findings[2].summary == "what node0 wrote was not seen within 10 s"
    assert blamed_nodes({node: [finding] for node, finding in findings.items()}) == {2}


def test_if_no_other_node_sees_the_file_of_node_0_no_node_is_blamed() -> None:
    findings = judge_check("shared", {0: WROTE, 1: UNSEEN, 2: UNSEEN})
    assert [finding.status for finding in findings.values()] == ["pass", "fail", "fail"]
    assert blamed_nodes({node: [finding] for node, finding in findings.items()}) == set()


@pytest.mark.parametrize("of_node_0", [{"refused": "no space left on the device"}, {"timeout": 10.0}, {"error": "no"}])
def test_where_node_0_wrote_nothing_the_others_are_not_judged(of_node_0: dict[str, Any]) -> None:
    findings = judge_check("shared", {0: of_node_0, 1: UNSEEN, 2: UNSEEN})
    assert [findings[node].status for node in (1, 2)] == ["skip", "skip"]
    assert findings[1].summary == "node0 wrote nothing that could be seen"


def test_a_node_that_cannot_write_is_to_blame() -> None:
    findings = judge_check("shared", {0: WROTE, 1: {"refused": "permission denied"}})
    assert (findings[1].status, findings[1].summary) == ("fail", "cannot be written: permission denied")
    assert blamed_nodes({node: [finding] for node, finding in findings.items()}) == {1}


def test_node_0_that_does_not_see_its_own_file_is_to_blame() -> None:
    findings = judge_check("shared", {0: {"write_ms": 1.0, "unseen": True}, 1: UNSEEN})
    assert blamed_nodes({node: [finding] for node, finding in findings.items()}) == {0}


# --- versions ---------------------------------------------------------------------------------------------------


def test_equal_versions_pass_and_are_named() -> None:
    finding = judge_node("versions", {**VERSIONS, "driver": None})
    assert finding.status == "pass"
    assert finding.summary == "Python 3.11.7, torch 2.13.0, CUDA 12.8, NCCL 2.28.3, slurmtrain 0.1.0"


def test_the_minority_fails_with_the_versions_of_the_others() -> None:
    findings = judge_check("versions", {0: VERSIONS, 1: {**VERSIONS, "torch": "2.12.0"}, 2: VERSIONS, 3: VERSIONS})
    assert [finding.status for finding in findings.values()] == ["pass", "fail", "pass", "pass"]
    assert findings[1].summary == "torch 2.12.0, but 2.13.0 on node0, node2, node3"
    assert blamed_nodes({node: [finding] for node, finding in findings.items()}) == {1}


def test_what_only_one_node_lacks_is_a_difference_too() -> None:
    findings = judge_check("versions", {0: VERSIONS, 1: {**VERSIONS, "driver": None}, 2: VERSIONS})
    assert findings[1].summary == "driver none, but 570.86 on node0, node2"


def test_many_nodes_are_counted_not_listed() -> None:
    facts = dict.fromkeys(range(7), VERSIONS) | {7: {**VERSIONS, "python": "3.12.1"}}
    assert judge_check("versions", facts)[7].summary == "Python 3.12.1, but 3.11.7 on node0, node1, node2 and 4 more"


@pytest.mark.parametrize("others", [["2.12.0"], ["2.12.0", "2.11.0"], ["2.13.0", "2.12.0", "2.12.0"]])
def test_without_a_majority_all_nodes_fail_and_none_is_to_blame(others: list[str]) -> None:
    facts = {0: VERSIONS} | {node: {**VERSIONS, "torch": torch} for node, torch in enumerate(others, 1)}
    findings = judge_check("versions", facts)
    assert {finding.status for finding in findings.values()} == {"fail"}
    assert blamed_nodes({node: [finding] for node, finding in findings.items()}) == set()


def test_two_nodes_that_differ_both_fail_with_the_versions_of_the_other() -> None:
    findings = judge_check("versions", {0: VERSIONS, 1: {**VERSIONS, "torch": "2.12.0"}})
    assert findings[0].summary == "torch 2.13.0, but 2.12.0 on node1"
    assert findings[1].summary == "torch 2.12.0, but 2.13.0 on node0"


def test_a_node_in_a_minority_is_to_blame_although_something_else_is_undecided() -> None:
    facts = {
        0: {**VERSIONS, "nccl": "2.27"},
        1: {**VERSIONS, "nccl": "2.27"},
        2: VERSIONS,
        3: {**VERSIONS, "torch": "2.12.0"},
    }
    findings = judge_check("versions", facts)
    assert {finding.status for finding in findings.values()} == {"fail"}
    assert blamed_nodes({node: [finding] for node, finding in findings.items()}) == {3}


def test_a_node_without_versions_does_not_count_for_the_majority() -> None:
    findings = judge_check("versions", {0: VERSIONS, 1: {"error": "ImportError: torch"}, 2: VERSIONS})
    assert [finding.status for finding in findings.values()] == ["pass", "warn", "pass"]


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
    assert finding.summary.endswith("memory errors not looked for: nvidia-ml-py is not installed")


def test_a_torch_without_cuda_does_not_fail_gpus_that_nvml_sees() -> None:
    finding = judge_node("gpu", {**GPUS, "gemm": {"skip": "torch is built without CUDA"}})
    assert finding.status == "pass"
    assert "not made to multiply: torch is built without CUDA" in finding.summary


def test_of_the_parts_of_a_divided_gpu_torch_need_use_but_one() -> None:
    facts = {**GPUS, "mig": True, "gemm": {"count": 1, "gpus": GPUS["gemm"]["gpus"][:1]}}
    assert judge_node("gpu", facts).status == "pass"


# --- room -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", ["disk", "tmp", "shm"])
@pytest.mark.parametrize(
    ("facts", "status", "summary"),
    [
        (ROOM, "pass", "412 GB free"),
        ({**ROOM, "free": 10**9}, "pass", "1 GB free"),
        ({**ROOM, "free": 10**9 - 10**7}, "fail", "0.99 GB free (limit 1 GB)"),
        ({**ROOM, "inodes": None}, "pass", "412 GB free"),
        ({**ROOM, "inodes": 0}, "fail", "no more files can be created: no inode is free"),
        ({**ROOM, "writable": False}, "fail", "/scratch cannot be written"),
        ({"path": "/scratch", "missing": True}, "fail", "there is no /scratch"),
    ],
)
def test_free_space_is_shown_in_gb_and_must_reach_the_limit(
    check: str, facts: dict[str, Any], status: str, summary: str
) -> None:
    finding = judge_node(check, facts, spec_with(**{check: {"level": "fail", "min_gb": 1}}))
    assert (finding.status, finding.summary) == (status, summary)


# --- limits of a process ----------------------------------------------------------------------------------------


def limits(nofile: int | None = 65536, memlock: int | None = 8 * 2**20, rdma: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"nofile": nofile, "memlock": memlock, "rdma": list(rdma)}


def over(profile: str | None, **limits_of_spec: Any) -> Spec:
    return replace(spec_with(limits={"level": "fail", **limits_of_spec}), network=NetworkSpec(profile=profile))


@pytest.mark.parametrize(("nofile", "status"), [(4095, "fail"), (4096, "pass"), (None, "pass")])
def test_open_files_must_reach_the_limit(nofile: int | None, status: str) -> None:
    assert judge_node("limits", limits(nofile=nofile), over(None)).status == status


def test_too_few_open_files_fail_with_the_limit() -> None:
    summary = judge_node("limits", limits(nofile=1024), over(None)).summary
    assert summary == "1024 open files (limit 4096), 0.00839 GB of locked memory"


@pytest.mark.parametrize("profile", ["infiniband", "roce", "efa"])
def test_networks_with_rdma_want_locked_memory_without_a_limit(profile: str) -> None:
    bad = judge_node("limits", limits(rdma=("mlx5_0",)), over(profile))
    assert bad.status == "fail"
    assert bad.summary.endswith("0.00839 GB of locked memory (RDMA over mlx5_0 needs any amount)")
    assert judge_node("limits", limits(memlock=None, rdma=("mlx5_0",)), over(profile)).status == "pass"


@pytest.mark.parametrize(("profile", "rdma"), [(None, ("mlx5_0",)), ("tcp", ("mlx5_0",)), ("infiniband", ())])
def test_elsewhere_any_amount_of_locked_memory_will_do(profile: str | None, rdma: tuple[str, ...]) -> None:
    assert judge_node("limits", limits(rdma=rdma), over(profile)).status == "pass"


@pytest.mark.parametrize(("memlock", "status"), [(10**9, "fail"), (2 * 10**9, "pass"), (None, "pass")])
def test_a_limit_of_locked_memory_in_the_spec_decides_alone(memlock: int | None, status: str) -> None:
    facts = limits(memlock=memlock, rdma=("mlx5_0",))
    assert judge_node("limits", facts, over("infiniband", min_memlock_gb=2)).status == status


# --- DNS, environment -------------------------------------------------------------------------------------------


def test_the_slowest_look_up_decides() -> None:
    spec = spec_with(dns={"level": "fail"})
    slow = judge_node("dns", {"10.0.0.5": 3.0, "10.1.0.5": 5012.0}, spec)
    assert (slow.status, slow.summary) == ("fail", "5012 ms for 10.1.0.5 (limit 1000 ms)")
    quick = judge_node("dns", {"10.0.0.5": 3.0, "10.1.0.5": 1000.0}, spec)
    assert (quick.status, quick.summary) == ("pass", "1000 ms for 10.1.0.5")


def test_the_sentences_about_the_environment_are_the_summary() -> None:
    finding = judge_node("environment", {"said": ["A is obsolete", "B undoes it"]})
    assert (finding.status, finding.summary) == ("warn", "A is obsolete; B undoes it")


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


# --- plug-ins ---------------------------------------------------------------------------------------------------

SUMMARIES = {"status": "fail", "summary": "no licence left", "evidence": {"left": 0}}


def test_a_plug_in_speaks_for_itself_after_the_checks_of_the_spec() -> None:
    findings = judge_checks({0: {"licence": SUMMARIES, **GOOD}}, Spec(), HOSTS)
    assert findings[0][-1] == Finding("licence", "fail", "no licence left", {"left": 0})


@pytest.mark.parametrize(("level", "status"), [("fail", "fail"), ("warn", "warn")])
def test_a_plug_in_has_the_level_that_the_spec_gives_it(level: str, status: str) -> None:
    assert judge_node("licence", SUMMARIES, spec_with(plugins={"licence": level})).status == status


def test_a_plug_in_that_is_off_has_no_finding() -> None:
    findings = judge_checks({0: {**GOOD, "licence": SUMMARIES}}, spec_with(plugins={"licence": "off"}), HOSTS)
    assert [finding.check for finding in findings[0]] == OWN


def test_a_plug_in_that_only_some_nodes_have_is_judged_on_those() -> None:
    findings = judge_checks({0: GOOD, 1: {**GOOD, "licence": SUMMARIES}}, Spec(), HOSTS)
    assert [len(its) for its in findings.values()] == [len(OWN), len(OWN) + 1]


# --- blame ------------------------------------------------------------------------------------------------------


def failed(check: str, **evidence: Any) -> Finding:
    return Finding(check, "fail", "it failed", evidence)


def test_a_node_that_failed_alone_is_to_blame() -> None:
    assert blamed_nodes({0: [], 1: [failed("disk")], 2: []}) == {1}


@pytest.mark.parametrize("status", ["skip", "pass", "warn"])
def test_nothing_but_a_failure_is_to_blame(status: str) -> None:
    assert blamed_nodes({0: [Finding("disk", status, "")], 1: []}) == set()


def test_what_all_nodes_share_is_no_nodes_fault() -> None:
    assert blamed_nodes({0: [failed("disk")], 1: [failed("disk")]}) == set()


def test_a_node_that_fails_more_than_the_others_do_is_to_blame_for_that() -> None:
    assert blamed_nodes({0: [failed("disk")], 1: [failed("disk"), failed("gpu")]}) == {1}


def test_nodes_may_each_be_to_blame_for_something_of_their_own() -> None:
    assert blamed_nodes({0: [failed("tmp")], 1: [failed("gpu")]}) == {0, 1}


def test_a_node_that_is_alone_is_to_blame_for_its_failure() -> None:
    assert blamed_nodes({0: [failed("disk")]}) == {0}


def test_no_node_is_blamed_for_an_ambiguous_failure() -> None:
    assert blamed_nodes({0: [failed("versions", ambiguous=True)], 1: []}) == set()


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, 5), st.lists(st.sampled_from(["disk", "gpu"]), unique=True), min_size=2))
def test_of_one_check_alone_some_node_is_always_left(failures: dict[int, list[str]]) -> None:
    for check in ("disk", "gpu"):
        only = {node: [failed(finding) for finding in its if finding == check] for node, its in failures.items()}
        assert blamed_nodes(only) < failures.keys()


# --- the page ---------------------------------------------------------------------------------------------------


def rows() -> dict[str, tuple[str, str]]:
    """The table of checks in the page: level and limits by name."""
    findings = re.findall(r"^\| `(\w+)` \| .* \| (\w+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (level, limits) for name, level, limits in findings}


def test_the_page_names_every_check_with_its_level_and_limits() -> None:
    expected = {}
    for field in fields(PreflightSpec):
        if isinstance(field.metadata["kind"], LevelSection):
            keys = [inner for inner in fields(field.metadata["kind"].cls) if inner.name != "level"]
            summary = ", ".join(f"`{inner.name}: {plain(default_of(inner))}`" for inner in keys)
            expected[field.name] = (default_of(field).level, summary)
    assert rows() == expected


def plain(value: object) -> str:
    return "null" if value is None else f"{value:g}"


def test_the_page_names_the_keys_that_hold_for_all_checks() -> None:
    text = PAGE.read_text()
    for field in fields(PreflightSpec):
        if not isinstance(field.metadata["kind"], LevelSection):
            assert f"`preflight.{field.name}`" in text
    assert f"{default_of(next(f for f in fields(PreflightSpec) if f.name == 'timeout_s')):g} s" in text
    assert [code for code in sorted(FATAL_XIDS) if str(code) not in text] == []


def test_the_levels_of_the_page_are_those_of_the_spec() -> None:
    text = PAGE.read_text()
    assert [level for level in LEVELS if f"| `{level}` |" not in text] == []
