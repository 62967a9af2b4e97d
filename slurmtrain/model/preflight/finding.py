"""What a check found on a node, and the worst of several findings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# From best to worst; a check that was skipped says nothing about the node.
STATUSES = ("skip", "pass", "warn", "fail")


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
