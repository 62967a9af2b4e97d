"""The node ledger: which nodes failed the preflight of a run on Slurm, and for how long that counts against them. Pure.

Users forgive findings, not nodes: what later preflights find counts again. So pardons and findings need not be ordered
in time, which the clocks of two machines could get wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low

from slurmtrain.model.run.events.agent_events import AgentStarted, JobRequeue, PreflightDone
from slurmtrain.model.run.events.base import AnyEvent, select
from slurmtrain.model.run.events.command_events import NodeForgiven
from slurmtrain.model.run.layout import attempt_of, node_of
from slurmtrain.model.run.run import FindingKey, LedgerEntry


def ledger_entries(run_id: str, events: Iterable[AnyEvent], numbers: Mapping[str, int]) -> list[LedgerEntry]:
    """The nodes that failed the preflights of a run; none if it did not run on Slurm.

    Args:
        run_id: The run.
        events: All of its events.
        numbers: The numbers of its attempts, by the names of their directories.
    """
    attempts: dict[str, list[AnyEvent]] = {}
    for event in events:
        if isinstance(event.payload, AgentStarted | PreflightDone | JobRequeue) and node_of(event.source):
            attempts.setdefault(attempt_of(event.source), []).append(event)
    return [
        entry
        for key, own in sorted(attempts.items())
        for entry in _entries_of_attempt(run_id, key, numbers.get(key, 0), own)
    ]


def _entries_of_attempt(run_id: str, key: str, number: int, events: Sequence[AnyEvent]) -> list[LedgerEntry]:
    agents = list(select(events, AgentStarted))
    # A local run has no scheduler that could leave a node out.
    if not any(agent.payload.executor == "slurm" for agent in agents):
        return []
    hosts = {agent.source: agent.payload.host for agent in agents}
    ordered = sorted(select(events, PreflightDone), key=lambda event: event.order)
    preflights = {event.source: event for event in ordered}
    # Nodes that never reported have no event of their own: node 0 names them when it requeues the job without them.
    silent = {host: event for event in select(events, JobRequeue) for host in event.payload.exclude}
    blamed = {hosts[source]: event for source, event in preflights.items() if event.payload.blamed and source in hosts}
    # The preflight ended at the same time on all nodes; a blamed node may be blamed for its clock.
    trusted = [event.time for event in preflights.values() if not event.payload.blamed]
    trusted += [event.time for event in silent.values()]
    times = trusted or [event.time for event in preflights.values()]
    entries = []
    for host in sorted({*silent, *blamed}):
        preflight = blamed.get(host)
        findings = preflight.payload.findings if preflight is not None else ()
        failed = [finding for finding in findings if finding.get("status") == "fail"]
        reason = "; ".join(f"{finding.get('check')}: {finding.get('summary')}" for finding in failed)
        if preflight is None:
            reason = silent[host].payload.why
        entries.append(
            LedgerEntry(
                host=host,
                run_id=run_id,
                attempt_key=key,
                attempt=number,
                checks=tuple(str(finding.get("check")) for finding in failed),
                reason=reason,
                evidence={str(finding.get("check")): finding.get("evidence", {}) for finding in failed},
                seen_at=median_low(times),
            )
        )
    return entries


def forgiven_findings(events: Iterable[AnyEvent]) -> frozenset[FindingKey]:
    """The findings that users have forgiven."""
    return frozenset(
        (finding[0], finding[1], event.payload.host)
        for event in select(events, NodeForgiven)
        for finding in event.payload.findings
        # A journal may hold rows of any length.
        if len(finding) == 2
    )


def entry_state(entry: LedgerEntry, pardons: frozenset[FindingKey], now: float, expiry_s: float) -> str:
    """The state of an ``entry``: ``forgiven``, ``expired`` or ``active``.

    ``pardons`` are the findings that users have forgiven, ``now`` is in seconds since 1970, and a finding counts for
    ``expiry_s`` seconds.
    """
    if entry.key in pardons:
        return "forgiven"
    return "expired" if now >= entry.seen_at + expiry_s else "active"


def active_entries(
    entries: Iterable[LedgerEntry], pardons: frozenset[FindingKey], now: float, expiry_s: float
) -> dict[str, LedgerEntry]:
    """The newest active entry of each node by host, newest first.

    ``entries`` are in any order; ``pardons``, ``now`` and ``expiry_s`` are as for :func:`entry_state`.
    """
    active = [entry for entry in entries if entry_state(entry, pardons, now, expiry_s) == "active"]
    newest: dict[str, LedgerEntry] = {}
    for entry in sorted(active, key=lambda entry: (-entry.seen_at, entry.key)):
        newest.setdefault(entry.host, entry)
    return newest
