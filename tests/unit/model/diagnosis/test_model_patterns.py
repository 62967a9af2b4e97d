"""The table of known log lines."""

from __future__ import annotations

import pytest
from helpers.loglines import BY_NAME, LINES

from slurmtrain.model.diagnosis.patterns import CASCADE, NOTE, PATTERNS, ROOT, XIDS, explain_xid


def test_every_pattern_has_a_line_here() -> None:
    assert {name for name, _, _ in LINES} == set(BY_NAME)
    assert len(BY_NAME) == len(PATTERNS)


def test_every_root_says_what_to_do() -> None:
    assert all(pattern.fix for pattern in PATTERNS if pattern.role in (ROOT, NOTE) and pattern.name != "xid")


@pytest.mark.parametrize("number", sorted(XIDS))
def test_an_xid_says_whose_fault_it_is(number: int) -> None:
    role, cause, fix = explain_xid(number, "0000:c1:00")
    assert cause.startswith(f"Xid {number} of GPU 0000:c1:00: ")
    gpu = {48, 63, 64, 74, 79, 92, 95, 119, 120}
    assert ("exclude the node" in fix) is (number in gpu)
    assert role == (CASCADE if number == 45 else ROOT)


def test_an_xid_that_is_not_known_is_named() -> None:
    assert explain_xid(9999)[1] == "Xid 9999: see NVIDIA's catalogue of Xid errors"
