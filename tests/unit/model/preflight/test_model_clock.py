"""How far clocks are apart, and whose is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.sections import ClockCheck
from slurmtrain.model.preflight.checks import Finding
from slurmtrain.model.preflight.clock import ADVICE, ClockOffset, judge_clocks, offset_from_stamps

DISCIPLINE = {"disciplined": True, "source": "adjtimex", "description": "error at most 2 ms by the kernel"}
ASTRAY = {"disciplined": False, "source": "chrony", "description": "chrony follows no source"}
UNKNOWN = {"disciplined": None, "source": "none", "description": "no time service answers"}
LIMITS = ClockCheck()


def judged(
    *offsets: float | tuple[float, float] | None,
    disciplines: Mapping[int, Mapping[str, Any]] | None = None,
    limits: ClockCheck = LIMITS,
) -> list[Finding]:
    """Findings of nodes of which node 0 is the first and these are the others, with 0.2 ms for a bound."""
    measured: dict[int, ClockOffset | None] = {0: ClockOffset(0.0, 0.0, 0)}
    for node, offset in enumerate(offsets, 1):
        both = offset if isinstance(offset, tuple) else (offset, 0.0002)
        measured[node] = None if offset is None else ClockOffset(both[0], both[1], 32)
    facts = dict.fromkeys(measured, DISCIPLINE) | (disciplines or {})
    findings = judge_clocks(measured, facts, limits, {node: f"node{node}" for node in measured})
    assert list(findings) == list(measured)
    return list(findings.values())


def statuses(findings: list[Finding]) -> list[str]:
    return [finding.status for finding in findings]


# --- the offset -------------------------------------------------------------------------------------------------


def exchange(ahead: float, outward: float, answering: float, back: float, at: float = 1000.0) -> tuple[float, ...]:
    """The stamps of one exchange with a node whose clock is so far ahead; the way takes so long each way."""
    return at + ahead, at + outward, at + outward + answering, at + outward + answering + back + ahead


def test_a_node_whose_clock_is_ahead_has_a_positive_offset_and_one_behind_a_negative_one() -> None:
    offset = offset_from_stamps([(1005.0, 1000.1, 1000.2, 1005.3)])
    assert offset.offset_s == pytest.approx(5.0)
    assert offset.bound_s == pytest.approx(0.1)
    assert offset.samples == 1
    assert offset_from_stamps([(995.0, 1000.1, 1000.2, 995.3)]).offset_s == pytest.approx(-5.0)
    with pytest.raises(ValueError, match="no time stamps were exchanged"):
        offset_from_stamps([])


def test_the_sample_with_the_least_delay_decides() -> None:
    slow, quick = exchange(3.0, 0.5, 0.0, 0.1), exchange(3.0, 0.001, 0.2, 0.001)
    for samples in ([slow, quick], [quick, slow]):
        offset = offset_from_stamps(samples)
        assert offset.offset_s == pytest.approx(3.0)
        assert offset.bound_s == pytest.approx(0.001)
        assert offset.samples == 2


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=8),
)
def test_the_true_offset_is_within_the_bound(ahead: float, ways: list[tuple[float, float, float]]) -> None:
    samples = [exchange(ahead, outward, answering + 1e-6, back + 1e-6, 1.8e9) for outward, answering, back in ways]
    offset = offset_from_stamps(samples)
    # Seconds since 1970 are exact to a quarter of a microsecond in a float.
    assert abs(offset.offset_s - ahead) <= offset.bound_s + 1e-6


@pytest.mark.parametrize(
    "impossible",
    [
        pytest.param((1000.0, 1000.1, 1000.9, 1000.5), id="answered for longer than it was away"),
        pytest.param((1000.0, 1000.1, 1000.2, 990.0), id="node set back"),
        pytest.param((1000.0, 1000.1, 900.0, 1000.3), id="node 0 set back"),
        pytest.param((1000.0, float("nan"), 1000.2, 1000.3), id="no number"),
        pytest.param((1000.0, 1000.1, 1000.2, float("inf")), id="endless"),
    ],
)
def test_samples_that_a_clock_was_set_in_are_dropped(impossible: tuple[float, ...]) -> None:
    offset = offset_from_stamps([impossible, exchange(2.0, 0.1, 0.0, 0.1), impossible])
    assert offset.offset_s == pytest.approx(2.0)
    assert offset.samples == 1
    with pytest.raises(ValueError, match="a clock was changed during the measurement, so none of its 2 samples"):
        offset_from_stamps([impossible, impossible])


# --- verdicts ---------------------------------------------------------------------------------------------------


def test_a_clock_that_is_ahead_is_named_with_its_limit_and_what_to_do() -> None:
    findings = judged(0.0, 5.003, 0.0)
    assert statuses(findings) == ["pass", "pass", "fail", "pass"]
    assert findings[2].summary == "5.003 s ahead of node0 (± 0.2 ms, limit 1 s)"
    assert findings[2].evidence == {
        "offset_ms": 5003.0,
        "bound_ms": 0.2,
        "samples": 32,
        "disciplined": True,
        "source": "adjtimex",
        "said": "error at most 2 ms by the kernel",
        "advice": ADVICE,
    }


@pytest.mark.parametrize(
    ("offset", "status"),
    [((0.06, 0.009), "warn"), ((0.06, 0.011), "pass"), ((1.3, 0.25), "fail"), ((1.3, 0.35), "warn"),
     ((-1.3, 0.25), "fail"), ((-1.3, 0.35), "warn"), ((0.0, 1.5), "warn")],
)  # fmt: skip
def test_only_that_part_of_an_offset_counts_that_is_certain(offset: tuple[float, float], status: str) -> None:
    assert statuses(judged(offset)) == ["pass", status]


@pytest.mark.parametrize(
    ("offset", "summary"),
    [
        ((0.1, 0.2), "within 300 ms of node0"),
        ((5.0, 2.0), "5 s ahead of node0 (± 2 s, limit 1 s)"),
        ((-5.0, 0.5), "5 s behind node0 (± 500 ms, limit 1 s)"),
        ((1.0, 3.0), "within 4 s of node0 (too uncertain for a limit of 1 s)"),
        ((0.0, 0.001), "within 1 ms of node0"),
        ((0.0, 0.0), "within 0 ms of node0"),
        ((-0.06, 0.0002), "60 ms behind node0 (± 0.2 ms, warning from 50 ms)"),
        ((7200.0, 0.0002), "2.0 h ahead of node0 (± 0.2 ms, limit 1 s)"),
        ((-1.8e9, 0.0002), "20833 days behind node0 (± 0.2 ms, limit 1 s)"),
        ((0.9999, 0.00001), "1 s ahead of node0 (± 0.01 ms, warning from 50 ms)"),
    ],
)
def test_an_offset_is_shown_no_more_exactly_than_it_is_known(offset: tuple[float, float], summary: str) -> None:
    assert judged(offset)[1].summary == summary


# --- whose clock it is ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offsets", "expected", "summaries"),
    [
        # Where most nodes agree against node 0, it is node 0 that is named, and any other clock that differs.
        ((5.0, 5.001, 4.999), "fail pass pass pass",
         {0: "4.999 s behind the other 3 nodes (± 0.2 ms, limit 1 s)",
          2: "2 ms ahead of 2 of the other 3 nodes (± 0.4 ms)"}),
        ((5.0, 5.0, 5.0, 9.0), "fail pass pass pass fail",
         {0: "5 s behind 3 of the other 4 nodes (± 0.2 ms, limit 1 s)",
          4: "4 s ahead of 3 of the other 4 nodes (± 0.4 ms, limit 1 s)"}),
        ((0.2, 0.2), "warn pass pass", {0: "200 ms behind the other 2 nodes (± 0.2 ms, warning from 50 ms)"}),
        # Also where they agree within the limit, though not well.
        ((5.0, 5.3, 5.6, 5.9), "fail warn pass warn warn",
         {0: "5.3 s behind the other 4 nodes (± 0.2 ms, limit 1 s)"}),
        # Where no majority agrees, node 0 is the reference.
        ((5.0, 10.0), "pass fail fail", {}),
        ((0.001, 5.0, 5.001), "pass pass fail fail", {}),
        ((0.001, -5.0, -5.001), "pass pass fail fail", {}),
        # An uncertain offset takes no certainty from the others.
        (((0.0, 30.0), 5.0), "pass warn fail", {2: "5 s ahead of node0 (± 0.2 ms, limit 1 s)"}),
    ],
)  # fmt: skip
def test_whose_clock_is_wrong_is_what_most_nodes_agree_on(
    offsets: tuple[float | tuple[float, float], ...], expected: str, summaries: dict[int, str]
) -> None:
    findings = judged(*offsets)
    assert statuses(findings) == expected.split()
    assert {node: findings[node].summary for node in summaries} == summaries
    if summaries.get(0, "").startswith("4.999 s"):
        assert findings[0].evidence["offset_ms"] == -4999.0


@given(st.data())
def test_only_nodes_that_differ_from_an_agreeing_majority_fail(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(3, 12))
    wrong = data.draw(st.sets(st.integers(0, nodes - 1), max_size=(nodes - 1) // 2))
    apart = st.floats(2, 1e6).flatmap(lambda size: st.sampled_from([size, -size]))
    ahead = [data.draw(apart) if node in wrong else data.draw(st.floats(-0.01, 0.01)) for node in range(nodes)]
    findings = judged(*((each - ahead[0], 0.001) for each in ahead[1:]))
    assert {node for node, finding in enumerate(findings) if finding.status == "fail"} == wrong
    assert {finding.status for finding in findings} <= {"pass", "fail"}


@pytest.mark.parametrize(
    ("of_0", "of_1", "blamed"),
    [
        (DISCIPLINE, DISCIPLINE, 1), (ASTRAY, DISCIPLINE, 0), (DISCIPLINE, ASTRAY, 1), (ASTRAY, ASTRAY, 1),
        (ASTRAY, UNKNOWN, 0), (UNKNOWN, DISCIPLINE, 1), (UNKNOWN, ASTRAY, 1),
    ],
)  # fmt: skip
def test_of_two_clocks_the_one_that_is_not_synchronised_is_wrong_else_that_of_node_1(
    of_0: dict[str, Any], of_1: dict[str, Any], blamed: int
) -> None:
    findings = judged(5.0, disciplines={0: of_0, 1: of_1})
    assert [node for node, finding in enumerate(findings) if finding.status == "fail"] == [blamed]


def test_of_two_clocks_one_is_told_from_the_other() -> None:
    findings = judged(5.0, disciplines={0: ASTRAY})
    assert findings[0].summary == "5 s behind node1 (± 0.2 ms, limit 1 s); chrony follows no source"
    assert findings[1].summary == "node0 is compared with it"
    agree = judged(0.0, disciplines={0: ASTRAY})
    assert agree[0].summary == "node1 is compared with it; chrony follows no source"
    assert agree[1].summary == "within 0.2 ms of node0"


# --- what keeps a clock -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("facts", [ASTRAY, UNKNOWN])
def test_a_clock_that_nothing_keeps_is_a_warning_only(facts: dict[str, Any]) -> None:
    finding = judged(0.0, 0.0, disciplines={2: facts})[2]
    assert finding.status == "warn"
    assert finding.summary == f"within 0.2 ms of node0; {facts['description']}"
    assert finding.evidence["advice"] == ADVICE


def test_a_node_that_was_not_measured_is_judged_by_what_keeps_its_clock() -> None:
    findings = judged(None, None, 5.0, disciplines={2: ASTRAY})
    assert statuses(findings) == ["pass", "pass", "warn", "fail"]
    assert findings[1].summary == "not compared with node0; error at most 2 ms by the kernel"
    assert findings[2].summary == "not compared with node0; chrony follows no source"
    unmeasured = {"offset_ms": None, "bound_ms": None, "samples": 0}
    assert {key: findings[1].evidence[key] for key in unmeasured} == unmeasured
    assert judged(None)[0].summary == DISCIPLINE["description"]
    # Of a single node only what keeps its clock counts.
    for facts, status in ((DISCIPLINE, "pass"), (ASTRAY, "warn"), (UNKNOWN, "warn")):
        for alone in (None, ClockOffset(0.0, 0.0, 0)):
            finding = judge_clocks({0: alone}, {0: facts}, LIMITS, {0: "node0"})[0]
            assert (finding.status, finding.summary) == (status, facts["description"])
