"""What a check found on a node, the worst of several findings, and a node in the ledger. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# From best to worst; a check that was skipped says nothing about the node.
STATUSES = ("skip", "pass", "warn", "fail")
# A finding by run, directory of the attempt, and host.
FindingKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found on one node. ``summary``: a phrase with figures. ``evidence``: plain JSON types only."""

    check: str
    status: str
    summary: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The finding as journaled; empty evidence is omitted."""
        plain: dict[str, Any] = {"check": self.check, "status": self.status, "summary": self.summary}
        return {**plain, "evidence": dict(self.evidence)} if self.evidence else plain


def apply_level(finding: Finding, level: str) -> Finding:
    """The finding; a failure becomes a warning if the spec's ``level`` is ``warn``."""
    return replace(finding, status="warn") if finding.status == "fail" and level == "warn" else finding


def worst_status(findings: Iterable[Finding]) -> str:
    """The worst status among these; ``pass`` if there are none."""
    statuses = [finding.status for finding in findings]
    return max((status for status in statuses if status != "skip"), key=STATUSES.index, default="pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """A node that failed the preflight of an attempt.

    Attributes:
        host: The node's name.
        run_id: The run.
        attempt_key: The name of the attempt's directory.
        attempt: The attempt's number.
        checks: The checks that failed.
        reason: How they failed.
        evidence: The measurements, by check.
        seen_at: Seconds since 1970.
    """

    host: str
    run_id: str
    attempt_key: str
    attempt: int
    checks: Sequence[str]
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    seen_at: float

    @property
    def key(self) -> FindingKey:
        """What pardons refer to."""
        return (self.run_id, self.attempt_key, self.host)
