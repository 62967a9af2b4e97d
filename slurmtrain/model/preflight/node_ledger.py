"""The node ledger: which nodes failed the preflight of a run on Slurm, and for how long that counts against them. Pure.

A person forgives findings, not a node: what later preflights find of it counts again. So a pardon and a finding need
not be ordered in time, which the clocks of two machines could get wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.layout import attempt_of, node_of

# A finding by run, directory of the attempt, and host.
FindingKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """A node that failed the preflight of an attempt.

    Attributes:
        host: The node's name.
        run_id: The run.
        attempt_key: The name of the attempt's directory.
        attempt: The attempt's number.
        checks: Those that failed.
        reason: How they failed.
        evidence: What they measured, by check.
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


def ledger_entries(run_id: str, events: Iterable[AnyEvent], numbers: Mapping[str, int]) -> list[LedgerEntry]:
    """The nodes that failed the preflights of a run; none where it did not run on Slurm.

    Args:
        run_id: The run.
        events: All of its events.
        numbers: The numbers of its attempts, by the names of their directories.
    """
    attempts: dict[str, list[AnyEvent]] = {}
    for event in events:
        if event.kind in ("agent", "preflight", "requeue") and node_of(event.source):
            attempts.setdefault(attempt_of(event.source), []).append(event)
    return [
        entry
        for key, of_attempt in sorted(attempts.items())
        if any(event.kind == "agent" and event.data.get("executor") == "slurm" for event in of_attempt)
        for entry in _attempt_entries(run_id, key, numbers.get(key, 0), of_attempt)
    ]


def _attempt_entries(run_id: str, key: str, number: int, events: Sequence[AnyEvent]) -> list[LedgerEntry]:
    hosts = {event.source: str(event.data["host"]) for event in events if event.kind == "agent"}
    reports = {event.source: event for event in sorted(events, key=lambda e: e.order) if event.kind == "preflight"}
    # Nodes that never reported have no event of their own: node 0 names them when it requeues the job without them.
    silent = {str(host): event for event in events if event.kind == "requeue" for host in event.data.get("exclude", ())}
    blamed = {hosts[source]: event for source, event in reports.items() if event.data.get("blamed") and source in hosts}
    entries = []
    for host, event in sorted({**silent, **blamed}.items()):
        failed = [finding for finding in event.data.get("findings", ()) if finding.get("status") == "fail"]
        failures = "; ".join(f"{finding.get('check')}: {finding.get('summary')}" for finding in failed)
        entries.append(
            LedgerEntry(
                host=host,
                run_id=run_id,
                attempt_key=key,
                attempt=number,
                checks=tuple(str(finding.get("check")) for finding in failed),
                reason=failures or str(event.data.get("why", "")),
                evidence={str(finding.get("check")): finding.get("evidence", {}) for finding in failed},
                seen_at=_preflight_time([*reports.values(), *silent.values()]),
            )
        )
    return entries


def _preflight_time(events: Sequence[AnyEvent]) -> float:
    """When the preflight ended, which is at the same time on all nodes: not by the clock of a node that is blamed.

    That clock may be what the node is blamed for.
    """
    times = [event.time for event in events if not event.data.get("blamed")] or [event.time for event in events]
    return median_low(times)


def forgiven_findings(events: Iterable[AnyEvent]) -> frozenset[FindingKey]:
    """The findings that people have forgiven."""
    return frozenset(
        (str(run_id), str(attempt_key), str(event.data.get("host")))
        for event in events
        if event.kind == "forgiven"
        for run_id, attempt_key in event.data.get("findings", ())
    )


def entry_state(entry: LedgerEntry, pardons: frozenset[FindingKey], now: float, expiry_s: float) -> str:
    """The state of an ``entry``: ``forgiven``, ``expired`` or ``active``.

    ``pardons`` are the findings that people have forgiven, ``now`` is in seconds since 1970, and a finding counts for
    ``expiry_s`` seconds.
    """
    if entry.key in pardons:
        return "forgiven"
    return "expired" if now >= entry.seen_at + expiry_s else "active"


def active_entries(
    entries: Iterable[LedgerEntry], pardons: frozenset[FindingKey], now: float, expiry_s: float
) -> dict[str, LedgerEntry]:
    """By host, the newest active entry of each node, the newest one first.

    ``entries`` are in any order; ``pardons``, ``now`` and ``expiry_s`` are those of :func:`entry_state`.
    """
    active = [entry for entry in entries if entry_state(entry, pardons, now, expiry_s) == "active"]
    newest: dict[str, LedgerEntry] = {}
    for entry in sorted(active, key=lambda entry: (-entry.seen_at, entry.key)):
        newest.setdefault(entry.host, entry)
    return newest
