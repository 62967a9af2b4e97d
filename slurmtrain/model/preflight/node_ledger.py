"""The node ledger: which nodes failed the preflight of a run on Slurm, and for how long that counts against them. Pure.

A person forgives findings, not a node: what is found of it later counts again. So neither needs to be put in order with
the other, and no clock of a node has a say in it.
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

    ``attempt_key`` is the attempt's directory, ``attempt`` its number. ``checks`` are those that failed, ``reason``
    says how, ``evidence`` holds what each of them measured. ``seen_at``: seconds since 1970.
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
    def name(self) -> FindingKey:
        return (self.run_id, self.attempt_key, self.host)


def ledger_entries(run_id: str, events: Iterable[AnyEvent], numbers: Mapping[str, int]) -> list[LedgerEntry]:
    """What the preflights of a run say against nodes; nothing where it did not run on Slurm.

    ``numbers``: of the attempts, by their directories.
    """
    attempts: dict[str, list[AnyEvent]] = {}
    for event in events:
        if event.kind in ("agent", "preflight", "requeue") and node_of(event.source):
            attempts.setdefault(attempt_of(event.source), []).append(event)
    return [
        entry
        for key, said in sorted(attempts.items())
        if any(event.kind == "agent" and event.data.get("executor") == "slurm" for event in said)
        for entry in _of_attempt(run_id, key, numbers.get(key, 0), said)
    ]


def _of_attempt(run_id: str, key: str, number: int, events: Sequence[AnyEvent]) -> list[LedgerEntry]:
    hosts = {event.source: str(event.data["host"]) for event in events if event.kind == "agent"}
    told = {event.source: event for event in sorted(events, key=lambda e: e.order) if event.kind == "preflight"}
    silent = {str(host): event for event in events if event.kind == "requeue" for host in event.data.get("exclude", ())}
    blamed = {hosts[source]: event for source, event in told.items() if event.data.get("blamed") and source in hosts}
    found = []
    for host, event in sorted({**silent, **blamed}.items()):
        failed = [finding for finding in event.data.get("findings", ()) if finding.get("status") == "fail"]
        said = "; ".join(f"{finding.get('check')}: {finding.get('summary')}" for finding in failed)
        found.append(
            LedgerEntry(
                host=host,
                run_id=run_id,
                attempt_key=key,
                attempt=number,
                checks=tuple(str(finding.get("check")) for finding in failed),
                reason=said or str(event.data.get("why", "")),
                evidence={str(finding.get("check")): finding.get("evidence", {}) for finding in failed},
                seen_at=_when([*told.values(), *silent.values()]),
            )
        )
    return found


def _when(told: Sequence[AnyEvent]) -> float:
    """When these findings were made, which is at the same time on all nodes: not by a clock that is itself blamed."""
    times = [event.time for event in told if not event.data.get("blamed")] or [event.time for event in told]
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
    """``forgiven``, ``expired`` or ``active``; ``now`` in seconds since 1970."""
    if entry.name in pardons:
        return "forgiven"
    return "expired" if now >= entry.seen_at + expiry_s else "active"


def active_entries(
    found: Iterable[LedgerEntry], pardons: frozenset[FindingKey], now: float, expiry_s: float
) -> dict[str, LedgerEntry]:
    """By host, the newest finding of each node that is not to be used now; the newest one first."""
    counting = [entry for entry in found if entry_state(entry, pardons, now, expiry_s) == "active"]
    newest: dict[str, LedgerEntry] = {}
    for entry in sorted(counting, key=lambda e: (-e.seen_at, e.name)):
        newest.setdefault(entry.host, entry)
    return newest
