"""Findings: as they are journaled, at a level, and added up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.preflight.finding import STATUSES, Finding, apply_level, worst_status


def finding(status: str) -> Finding:
    return Finding("disk", status, "412 GB free")


def test_a_finding_is_journaled_with_its_evidence_if_it_has_any() -> None:
    assert finding("pass").to_dict() == {"check": "disk", "status": "pass", "summary": "412 GB free"}
    with_evidence = Finding("disk", "fail", "0.2 GB free", {"free": 2e8})
    assert with_evidence.to_dict() == {
        "check": "disk",
        "status": "fail",
        "summary": "0.2 GB free",
        "evidence": {"free": 2e8},
    }


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


@given(st.lists(st.sampled_from(STATUSES)))
def test_the_order_of_findings_changes_nothing(statuses: list[str]) -> None:
    assert worst_status(map(finding, statuses)) == worst_status(map(finding, reversed(statuses)))
