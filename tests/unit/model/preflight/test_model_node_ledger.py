"""The node ledger: what counts against a node, for how long, and what a person has forgiven."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.journal_events import event
from helpers.simulated_run import SimulatedRun

from slurmtrain.model.preflight.node_ledger import active_entries, entry_state, forgiven_findings, ledger_entries
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.run import LedgerEntry

DAY = 86_400.0
CLOCK = {"check": "clock", "status": "fail", "summary": "5 s ahead of n0 (limit 1 s)", "evidence": {"offset_ms": 5000}}
DISK = {"check": "disk", "status": "pass", "summary": "81 GB free"}


def ledger_of(sim: SimulatedRun) -> list[LedgerEntry]:
    return ledger_entries("RUN", sim.events, {attempt.key: attempt.number for attempt in sim.run.attempts})


def judged(sim: SimulatedRun, node: int, *findings: dict[str, Any], blamed: bool, restart: int = 0) -> SimulatedRun:
    return sim.node("preflight", node, restart, status="fail", seconds=1.0, findings=list(findings), blamed=blamed)


def make_entry(host: str = "n1", run: str = "RUN", seen_at: float = 0.0, key: str = "7.0") -> LedgerEntry:
    return LedgerEntry(
        host=host, run_id=run, attempt_key=key, attempt=1, checks=("clock",), reason="clock: x", seen_at=seen_at
    )


def pardon(*pardoned: LedgerEntry, at: float = 5.0) -> AnyEvent:
    fields = {"host": pardoned[0].host, "by": "me", "findings": [each.key[:2] for each in pardoned]}
    return event(at, "forgiven", fields, "f", 0)


# --- what counts --------------------------------------------------------------------------------------------------


def test_a_node_that_is_blamed_is_entered_with_what_it_failed_and_the_evidence() -> None:
    sim = judged(SimulatedRun().submitted().started(0, 2), 0, DISK, blamed=False)
    [entry] = ledger_of(judged(sim, 1, CLOCK, DISK, blamed=True))
    assert (entry.host, entry.run_id, entry.attempt_key, entry.attempt) == ("n1", "RUN", "7.0", 1)
    assert (entry.checks, entry.reason) == (("clock",), "clock: 5 s ahead of n0 (limit 1 s)")
    assert entry.evidence == {"clock": {"offset_ms": 5000}}


def test_a_node_that_failed_without_being_to_blame_or_is_this_machine_is_not_entered() -> None:
    assert ledger_of(judged(SimulatedRun().submitted().started(0, 2), 1, CLOCK, blamed=False)) == []
    sim = SimulatedRun().submitted()
    sim.node("agent", 1, node=1, nodes=2, host="vm/1", executor="local", submission=1, attempt=1)
    assert ledger_of(judged(sim, 1, CLOCK, blamed=True)) == []


def test_a_node_that_never_reported_is_entered_by_the_requeue_of_node_0() -> None:
    sim = judged(SimulatedRun().submitted().started(), 0, DISK, blamed=False)
    sim.node("requeue", 0, 0, exclude=["n1"], why="n1: agent: it did not come within 60 s")
    [entry] = ledger_of(sim)
    assert (entry.host, entry.reason) == ("n1", "n1: agent: it did not come within 60 s")
    assert entry.seen_at == sim.now - 1


def test_each_attempt_is_a_finding_of_its_own() -> None:
    sim = judged(SimulatedRun().submitted().started(0, 2), 1, CLOCK, blamed=True)
    # Two events name it.
    sim.node("requeue", 0, 0, exclude=["n1"], why="x")
    assert len(ledger_of(sim)) == 1
    judged(sim.started(1, 2), 1, CLOCK, blamed=True, restart=1)
    assert [(entry.attempt_key, entry.attempt) for entry in ledger_of(sim)] == [("7.0", 1), ("7.1", 2)]


@pytest.mark.parametrize("wrong_by", [-1e6, 1e6])
def test_the_time_of_an_entry_is_not_by_the_wrong_clock(wrong_by: float) -> None:
    sim = judged(SimulatedRun().submitted().started(0, 3), 0, DISK, blamed=False)
    right = sim.now
    judged(sim, 2, DISK, blamed=False)
    judged(sim.later(wrong_by), 1, CLOCK, blamed=True)
    [entry] = ledger_of(sim)
    assert right <= entry.seen_at <= right + 1


# --- for how long -------------------------------------------------------------------------------------------------


def test_a_finding_counts_until_it_expires() -> None:
    assert entry_state(make_entry(), frozenset(), DAY - 1, DAY) == "active"
    assert entry_state(make_entry(), frozenset(), DAY, DAY) == "expired"
    assert entry_state(make_entry(), frozenset(), 0.0, 0.0) == "expired"


def test_the_newest_finding_of_each_node_counts_the_newest_first() -> None:
    entries = [make_entry("n1", seen_at=1), make_entry("n2", "OTHER", seen_at=3), make_entry("n1", "LATER", seen_at=2)]
    assert [(entry.host, entry.run_id) for entry in active_entries(entries, frozenset(), 4, DAY).values()] == [
        ("n2", "OTHER"),
        ("n1", "LATER"),
    ]


# --- forgiving ----------------------------------------------------------------------------------------------------


def test_what_is_forgiven_counts_no_more_and_what_is_found_later_does() -> None:
    old = make_entry()
    assert active_entries([old], forgiven_findings([pardon(old)]), 10, DAY) == {}
    # Also if the clock that timed it is behind.
    for at, later in ((0, 9), (100, -1000)):
        old, new = make_entry(seen_at=at), make_entry(key="7.1", seen_at=later)
        assert active_entries([old, new], forgiven_findings([pardon(old, at=50)]), 10, DAY) == {"n1": new}
