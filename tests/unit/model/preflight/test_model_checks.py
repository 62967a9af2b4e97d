"""What the facts of each check say of each node, and which nodes are to blame."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.node_facts import GOOD, HOSTS, ROOM, VERSIONS, judge_check, judge_node, limits, spec_with
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.model.experiment.kinds import Section, keys_of
from slurmtrain.model.experiment.sections import LEVELS, PreflightSpec
from slurmtrain.model.experiment.spec import NetworkSpec, Spec
from slurmtrain.model.preflight.checks import FATAL_XIDS, blamed_nodes, judge_checks
from slurmtrain.model.preflight.finding import Finding

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
    assert findings[0].summary.startswith("its facts cannot be judged: ")


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


def test_findings_can_be_written_as_json() -> None:
    findings = judge_checks(dict.fromkeys(range(3), GOOD), Spec(), HOSTS)
    for finding in (finding for its in findings.values() for finding in its):
        assert json.loads(json.dumps(finding.to_dict()))["check"] == finding.check


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
        ([WROTE, READ, UNSEEN], "pass pass fail", {2}, "what node0 wrote was not seen within 10 s"),
        # If no other node sees the file of node 0, no node is blamed.
        ([WROTE, UNSEEN, UNSEEN], "pass fail fail", set(), "what node0 wrote was not seen within 10 s"),
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
    assert findings[1].summary == "node0 wrote nothing that could be seen"


# --- versions ---------------------------------------------------------------------------------------------------


def test_equal_versions_pass_and_are_named() -> None:
    finding = judge_node("versions", {**VERSIONS, "driver": None})
    assert finding.status == "pass"
    assert finding.summary == "Python 3.11.7, torch 2.13.0, CUDA 12.8, NCCL 2.28.3, slurmtrain 0.1.0"


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


DISK, GPU = failed("disk"), failed("gpu")


@pytest.mark.parametrize(
    ("findings", "blamed"),
    [
        ([[], [DISK], []], {1}),
        ([[DISK]], {0}),
        ([[DISK], [DISK, GPU]], {1}),
        ([[DISK], [GPU]], {0, 1}),
        # What all nodes share, is ambiguous, or is no failure, is no node's fault.
        ([[DISK], [DISK]], set()),
        ([[failed("versions", ambiguous=True)], []], set()),
        *(([[Finding("disk", status, "")], []], set()) for status in ("skip", "pass", "warn")),
    ],
)
def test_a_node_that_fails_more_than_the_others_do_is_to_blame_for_that(
    findings: list[list[Finding]], blamed: set[int]
) -> None:
    assert blamed_nodes(dict(enumerate(findings))) == blamed


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
