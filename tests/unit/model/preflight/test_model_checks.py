"""What the facts of each check say of each node, and which nodes are to blame."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.node_facts import GOOD, GPU, GPUS, HOSTS, ROOM, VERSIONS, judge_check, judge_node, limits, spec_with
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.kinds import Section, keys_of
from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.experiment.sections import LEVELS, PreflightSpec
from slurmtrain.model.experiment.spec import NetworkSpec, Spec
from slurmtrain.model.preflight.checks import (
    FATAL_XIDS,
    STATUSES,
    Finding,
    apply_level,
    blamed_nodes,
    judge_checks,
    judge_hardware,
    worst_status,
)

PAGE = Path(__file__).resolve().parents[4] / "docs" / "preflight.md"
OWN = ["shared", "versions", "gpu", "hardware", "disk", "tmp", "shm", "limits", "dns", "straggler", "environment"]


# --- all checks -------------------------------------------------------------------------------------------------


def test_a_good_node_passes_every_check_in_the_order_of_the_spec() -> None:
    findings = judge_checks({0: {**GOOD, "shared": {"write_ms": 3.0, "read_ms": 4.0}}}, Spec(), HOSTS)
    assert [(finding.check, finding.status) for finding in findings[0]] == [(check, "pass") for check in OWN]


def test_every_check_of_the_spec_is_judged_here_or_with_the_network() -> None:
    elsewhere = {"clock", "network", "port", "bandwidth"}
    checks = {name for name, key in keys_of(PreflightSpec).items() if isinstance(key.kind, Section)}
    assert set(OWN) | elsewhere == checks


@pytest.mark.parametrize("check", [*OWN, "a-plug-in", "plugins"])
def test_a_check_that_does_not_apply_or_could_not_be_made_or_did_not_end_in_time(check: str) -> None:
    if check in OWN:
        skipped = judge_node(check, {"skip": "there is one node only"})
        assert (skipped.status, skipped.summary) == ("skip", "there is one node only")
        assert judge_node(check, {"timeout": 30.0}, spec_with(**{check: {"level": "warn"}})).status == "warn"
    error = judge_node(check, {"error": "OSError: no"})
    assert (error.status, error.summary) == ("warn", "could not be measured: OSError: no")
    if check != "plugins":
        spec = spec_with(**{check: {"level": "fail"}}) if check in OWN else Spec()
        finding = judge_node(check, {"timeout": 30.0}, spec)
        assert (finding.status, finding.summary) == ("fail", "no answer within 30 s")
        assert finding.evidence == {"timeout_s": 30.0}


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
    assert findings[0].summary.startswith("its result cannot be evaluated: ")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


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


# --- shared -----------------------------------------------------------------------------------------------------


WROTE = {"write_ms": 3.2, "read_ms": 3.4}
READ = {"read_ms": 12.1}
UNSEEN = {"unseen": True}


def blamed_for(findings: dict[int, Finding]) -> set[int]:
    return blamed_nodes({node: [finding] for node, finding in findings.items()})


@pytest.mark.parametrize(
    ("facts", "statuses", "blamed", "summary"),
    [
        ([WROTE, READ], "pass pass", set(), "read after 12 ms"),
        ([WROTE, READ, UNSEEN], "pass pass fail", {2}, "a file that node0 wrote did not appear within 10 s"),
        # If no other node sees the file of node 0, no node is blamed.
        ([WROTE, UNSEEN, UNSEEN], "pass fail fail", set(), "a file that node0 wrote did not appear within 10 s"),
        ([WROTE, {"refused": "permission denied"}], "pass fail", {1}, "cannot be written: permission denied"),
        ([{"write_ms": 1.0, "unseen": True}, UNSEEN], None, {0}, None),
    ],
)
def test_a_node_that_does_not_see_what_another_has_written_is_to_blame(
    facts: list[dict[str, Any]], statuses: str | None, blamed: set[int], summary: str | None
) -> None:
    findings = judge_check("shared", dict(enumerate(facts)))
    if statuses is not None:
        assert [finding.status for finding in findings.values()] == statuses.split()
        assert findings[0].summary == "written in 3.2 ms, read after 3.4 ms"
        assert findings[len(facts) - 1].summary == summary
    assert blamed_for(findings) == blamed


@pytest.mark.parametrize("of_node_0", [{"refused": "no space left on the device"}, {"timeout": 10.0}, {"error": "no"}])
def test_where_node_0_wrote_nothing_the_others_are_not_judged(of_node_0: dict[str, Any]) -> None:
    findings = judge_check("shared", {0: of_node_0, 1: UNSEEN, 2: UNSEEN})
    assert [findings[node].status for node in (1, 2)] == ["skip", "skip"]
    assert findings[1].summary == "node0 could not write a file for this test"


# --- versions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("differing", "failed", "blamed", "summaries"),
    [
        # What differs on which node, of as many as there are in all.
        ([{}, {"torch": "2.12.0"}, {}, {}], {1}, {1}, {1: "torch 2.12.0, but 2.13.0 on node0, node2, node3"}),
        ([{}, {"driver": None}, {}], {1}, {1}, {1: "driver none, but 570.86 on node0, node2"}),
        # Many nodes are counted, not listed.
        ([*[{}] * 7, {"python": "3.12.1"}], {7}, {7},
         {7: "Python 3.12.1, but 3.11.7 on node0, node1, node2 and 4 more"}),
        # Without a majority all nodes fail, and none is to blame.
        ([{}, {"torch": "2.12.0"}], {0, 1}, set(),
         {0: "torch 2.13.0, but 2.12.0 on node1", 1: "torch 2.12.0, but 2.13.0 on node0"}),
        ([{}, {"torch": "2.12.0"}, {"torch": "2.11.0"}], {0, 1, 2}, set(), {}),
        ([{}, {}, {"torch": "2.12.0"}, {"torch": "2.12.0"}], {0, 1, 2, 3}, set(), {}),
        # One in a minority is to blame although something else is undecided.
        ([{"nccl": "2.27"}, {"nccl": "2.27"}, {}, {"torch": "2.12.0"}], {0, 1, 2, 3}, {3}, {}),
    ],
)  # fmt: skip
def test_the_minority_fails_with_the_versions_of_the_others(
    differing: list[dict[str, Any]], failed: set[int], blamed: set[int], summaries: dict[int, str]
) -> None:
    findings = judge_check("versions", {node: {**VERSIONS, **more} for node, more in enumerate(differing)})
    assert {node for node, finding in findings.items() if finding.status == "fail"} == failed
    assert {finding.status for node, finding in findings.items() if node not in failed} <= {"pass"}
    assert {node: findings[node].summary for node in summaries} == summaries
    assert blamed_for(findings) == blamed


# --- room -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", ["disk", "tmp", "shm"])
@pytest.mark.parametrize(
    ("facts", "status", "summary"),
    [
        (ROOM, "pass", "412 GB free"),
        ({**ROOM, "free": 10**9}, "pass", "1 GB free"),
        ({**ROOM, "free": 10**9 - 10**7}, "fail", "0.99 GB free (limit 1 GB)"),
        ({**ROOM, "inodes": None}, "pass", "412 GB free"),
        ({**ROOM, "inodes": 0}, "fail", "no more files can be created: no inodes are free"),
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


def over(profile: str | None, **limits_of_spec: Any) -> Spec:
    return replace(spec_with(limits={"level": "fail", **limits_of_spec}), network=NetworkSpec(profile=profile))


RDMA = ("mlx5_0",)


@pytest.mark.parametrize(
    ("facts", "spec", "status"),
    [
        *(({"nofile": files}, over(None), status)
          for files, status in ((4095, "fail"), (4096, "pass"), (None, "pass"))),
        # Networks with RDMA need locked memory without a limit, others do with any amount.
        *(({"rdma": RDMA}, over(profile), "fail") for profile in ("infiniband", "roce", "efa")),
        *(({"rdma": RDMA, "memlock": None}, over(profile), "pass") for profile in ("infiniband", "roce", "efa")),
        *(({"rdma": rdma}, over(profile), "pass")
          for profile, rdma in ((None, RDMA), ("tcp", RDMA), ("infiniband", ()))),
        # A limit in the spec decides alone.
        *(({"rdma": RDMA, "memlock": memlock}, over("infiniband", min_memlock_gb=2), status)
          for memlock, status in ((10**9, "fail"), (2 * 10**9, "pass"), (None, "pass"))),
    ],
)  # fmt: skip
def test_open_files_and_locked_memory_must_reach_their_limits(facts: dict[str, Any], spec: Spec, status: str) -> None:
    finding = judge_node("limits", limits(**facts), spec)
    assert finding.status == status
    if facts == {"nofile": 4095}:
        assert finding.summary == "4095 open files (limit 4096), 0.00839 GB of locked memory"
    elif facts == {"rdma": RDMA} and status == "fail":
        assert finding.summary.endswith("0.00839 GB of locked memory (RDMA over mlx5_0 needs any amount)")


# --- DNS, environment -------------------------------------------------------------------------------------------


def test_the_slowest_look_up_decides_and_sentences_about_the_environment_are_the_summary() -> None:
    spec = spec_with(dns={"level": "fail"})
    slow = judge_node("dns", {"10.0.0.5": 3.0, "10.1.0.5": 5012.0}, spec)
    assert (slow.status, slow.summary) == ("fail", "5012 ms for 10.1.0.5 (limit 1000 ms)")
    quick = judge_node("dns", {"10.0.0.5": 3.0, "10.1.0.5": 1000.0}, spec)
    assert (quick.status, quick.summary) == ("pass", "1000 ms for 10.1.0.5")
    finding = judge_node("environment", {"said": ["A is obsolete", "B undoes it"]})
    assert (finding.status, finding.summary) == ("warn", "A is obsolete; B undoes it")


# --- plug-ins ---------------------------------------------------------------------------------------------------


SUMMARIES = {"status": "fail", "summary": "no licence left", "evidence": {"left": 0}}


def test_a_plug_in_speaks_for_itself_after_the_checks_of_the_spec() -> None:
    # Only some nodes may have it.
    facts = {0: GOOD, 1: {"licence": SUMMARIES, **GOOD}}
    findings = judge_checks(facts, Spec(), HOSTS)
    assert [finding.check for finding in findings[0]] == OWN
    assert findings[1][-1] == Finding("licence", "fail", "no licence left", {"left": 0})
    off = judge_checks(facts, spec_with(plugins={"licence": "off"}), HOSTS)
    assert [finding.check for finding in off[1]] == OWN


@pytest.mark.parametrize(("level", "status"), [("fail", "fail"), ("warn", "warn")])
def test_a_plug_in_has_the_level_that_the_spec_gives_it(level: str, status: str) -> None:
    assert judge_node("licence", SUMMARIES, spec_with(plugins={"licence": level})).status == status


# --- blame ------------------------------------------------------------------------------------------------------


def failed(check: str, **evidence: Any) -> Finding:
    return Finding(check, "fail", "it failed", evidence)


DISK_FAILED, GPU_FAILED = failed("disk"), failed("gpu")


@pytest.mark.parametrize(
    ("findings", "blamed"),
    [
        ([[], [DISK_FAILED], []], {1}),
        ([[DISK_FAILED]], {0}),
        ([[DISK_FAILED], [DISK_FAILED, GPU_FAILED]], {1}),
        ([[DISK_FAILED], [GPU_FAILED]], {0, 1}),
        # What all nodes share, is ambiguous, or is no failure, is no node's fault.
        ([[DISK_FAILED], [DISK_FAILED]], set()),
        ([[failed("versions", ambiguous=True)], []], set()),
        *(([[Finding("disk", status, "")], []], set()) for status in ("skip", "pass", "warn")),
    ],
)
def test_a_node_that_fails_more_than_the_others_do_is_to_blame_for_that(
    findings: list[list[Finding]], blamed: set[int]
) -> None:
    assert blamed_nodes(dict(enumerate(findings))) == blamed


# --- the page ---------------------------------------------------------------------------------------------------


def rows() -> dict[str, tuple[str, str]]:
    """The table of checks in the page: level and limits by name."""
    findings = re.findall(r"^\| `(\w+)` \| .* \| (\w+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (level, limits) for name, level, limits in findings}


def test_the_page_names_every_check_with_its_level_and_limits() -> None:
    expected = {}
    for name, check in keys_of(PreflightSpec).items():
        if isinstance(check.kind, Section):
            keys = {inner: key for inner, key in keys_of(check.kind.cls).items() if inner != "level"}
            summary = ", ".join(f"`{inner}: {plain(key.default)}`" for inner, key in keys.items())
            expected[name] = (check.default.level, summary)
    assert rows() == expected


def plain(value: object) -> str:
    return "null" if value is None else f"{value:g}"


def test_the_page_names_the_keys_that_hold_for_all_checks_and_their_levels() -> None:
    text = PAGE.read_text()
    for name, key in keys_of(PreflightSpec).items():
        if not isinstance(key.kind, Section):
            assert f"`preflight.{name}`" in text
    assert f"{PreflightSpec().timeout_s:g} s" in text
    assert [code for code in sorted(FATAL_XIDS) if str(code) not in text] == []
    assert [level for level in LEVELS if f"| `{level}` |" not in text] == []


# --- whether the nodes of a job have the same hardware ------------------------------------------------------------

A100 = {"name": "NVIDIA A100-SXM4-80GB", "memory": 85_095_874_560}
RTX = {"name": "NVIDIA GeForce RTX 3090", "memory": 25_446_645_760}


def gpus(*each: dict[str, Any]) -> dict[str, Any]:
    return {"gpus": list(each)}


def cpus(model: str, count: float) -> dict[str, Any]:
    return {"cpu": model, "cpus": count}


def test_different_gpus_are_refused_with_the_nodes_and_the_types() -> None:
    judged = judge_hardware({0: gpus(A100), 1: gpus(RTX), 2: gpus(A100)}, Spec(), HOSTS)
    status, summary, evidence = judged[2]
    assert status == "fail"
    assert summary == (
        "GPUs differ (node0, node2: 1 x NVIDIA A100-SXM4-80GB, 79 GiB; node1: 1 x NVIDIA GeForce RTX 3090, 24 GiB): "
        "set 'resources.mixed: true', or request one type"
    )
    assert evidence["ambiguous"]


@pytest.mark.parametrize("other", [cpus("EPYC 7402", 8.0), cpus("Xeon 6248", 2.0)])
def test_different_cpus_are_a_warning(other: dict[str, Any]) -> None:
    status, summary, _ = judge_hardware({0: cpus("Xeon 6248", 8.0), 1: other}, Spec(), HOSTS)[0]
    assert status == "warn"
    assert "node0: 8 x Xeon 6248; node1:" in summary


def test_a_refused_mixture_puts_no_node_in_the_ledger() -> None:
    facts = {node: {"hardware": gpus(gpu)} for node, gpu in enumerate((A100, A100, RTX))}
    findings = judge_checks(facts, Spec(resources=ResourcesSpec(gpus_per_node=1)), HOSTS)
    hardware = {
        node: [each.status for each in of_node if each.check == "hardware"] for node, of_node in findings.items()
    }
    assert hardware == {0: ["fail"], 1: ["fail"], 2: ["fail"]}
    assert not blamed_nodes(findings)
    allowed = replace(Spec(), resources=ResourcesSpec(gpus_per_node=1, mixed=True))
    statuses = {each.status for of_node in judge_checks(facts, allowed, HOSTS).values() for each in of_node}
    assert "fail" not in statuses


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
         "memory errors were not checked: nvidia-ml-py is not installed"),
        ({**GPUS, "gemm": {"skip": "torch is built without CUDA"}}, "pass",
         "no matrix product was measured: torch is built without CUDA"),
    ],
)  # fmt: skip
def test_a_gpu_that_is_not_as_it_should_be_fails_with_figures(facts: dict[str, Any], status: str, summary: str) -> None:
    finding = judge_node("gpu", facts)
    assert finding.status == status
    assert summary == finding.summary if status == "fail" else summary in finding.summary


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


# --- findings: as they are journaled, at a level, and added up ----------------------------------------------------


def finding(status: str) -> Finding:
    return Finding("disk", status, "412 GB free")


@pytest.mark.parametrize("status", STATUSES)
def test_at_a_level_of_warn_a_failure_is_a_warning_and_all_else_stays(status: str) -> None:
    assert apply_level(finding(status), "warn") == finding("warn" if status == "fail" else status)
    assert apply_level(finding(status), "fail") == finding(status)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([], "pass"),
        (["skip"], "pass"),
        (["skip", "pass"], "pass"),
        (["pass", "warn", "skip"], "warn"),
        (["fail", "warn", "pass"], "fail"),
    ],
)
def test_the_worst_status_counts_and_skipped_checks_do_not(statuses: list[str], expected: str) -> None:
    assert worst_status(finding(status) for status in statuses) == expected
