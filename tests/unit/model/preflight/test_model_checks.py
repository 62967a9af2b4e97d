"""What the facts of each check say of each node, and which nodes are to blame."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.node_facts import GOOD, HOSTS, ROOM, VERSIONS, judge_check, judge_node, limits, spec_with
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.model.preflight.checks import FATAL_XIDS, blamed_nodes, judge_checks
from slurmtrain.model.preflight.finding import Finding
from slurmtrain.model.spec.kinds import LevelSection, default_of
from slurmtrain.model.spec.preflight_checks import LEVELS, PreflightSpec
from slurmtrain.model.spec.spec import NetworkSpec, Spec

PAGE = Path(__file__).resolve().parents[4] / "docs" / "preflight.md"
OWN = ["shared", "versions", "gpu", "hardware", "disk", "tmp", "shm", "limits", "dns", "straggler", "environment"]


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
