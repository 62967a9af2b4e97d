"""Nodes that take part in a preflight, and their outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from helpers.simulated_preflight import SimulatedPreflight
from slurmtrain.model.preflight.finding import Finding
from slurmtrain.runtime.preflight.participant import PreflightOutcome


def require_outcomes(outcomes: Sequence[PreflightOutcome | BaseException]) -> list[PreflightOutcome]:
    """The outcomes of all nodes. Raises the first exception, if there is one."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, PreflightOutcome)]


def run_all(preflight: SimulatedPreflight) -> list[PreflightOutcome]:
    return require_outcomes(preflight.run())


def finding(outcome: PreflightOutcome, check: str) -> Finding:
    [matching] = [outcome for outcome in outcome.findings if outcome.check == check]
    return matching


def statuses(outcomes: Sequence[PreflightOutcome], check: str) -> list[str]:
    return [finding(outcome, check).status for outcome in outcomes]


def election(outcome: PreflightOutcome) -> Mapping[str, Any]:
    assert outcome.election is not None
    return outcome.election.to_json()
