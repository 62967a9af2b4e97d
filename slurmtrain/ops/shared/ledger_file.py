"""The node ledger of one runs root: its entries, forgiving them, and the nodes that a submission excludes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import LaunchError, PathError, RequestRefused, SlurmDown, UserError
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.hostlist import expand_hostlist
from slurmtrain.model.query.fields import iso
from slurmtrain.model.run.events.command_events import NodeForgiven
from slurmtrain.ops.shared.workspace import Workspace, person
from slurmtrain.system.files import describe_os_error, make_directory
from slurmtrain.system.journal import command_journal
from slurmtrain.system.owned_files import read_checked

# What reads entries and pardons is imported where there are any: every submission looks, and most ledgers are empty.
if TYPE_CHECKING:
    from slurmtrain.model.run.run import FindingKey, LedgerEntry

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Nodes that a submission excludes, and notes on that for the user."""

    nodes: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)


def listed(workspace: Workspace) -> list[tuple[LedgerEntry, str]]:
    """Every entry with its state (``active``, ``expired``, ``forgiven``), oldest first."""
    from slurmtrain.model.preflight.node_ledger import entry_state

    pardons, now = _pardons(workspace), time.time()
    return [(entry, entry_state(entry, pardons, now, expiry_s(workspace))) for entry in _ledger_entries(workspace)]


def counting(workspace: Workspace) -> dict[str, LedgerEntry]:
    """The newest finding of each node that must not be used now, by host, newest first."""
    entries = _ledger_entries(workspace)
    if not entries:
        return {}
    from slurmtrain.model.preflight.node_ledger import active_entries

    return active_entries(entries, _pardons(workspace), time.time(), expiry_s(workspace))


def nodes_json(workspace: Workspace, *, inactive_too: bool) -> list[dict[str, Any]]:
    """Findings in the node ledger, newest first: the last that counts for each node, or all if ``inactive_too``."""
    counts_for_s = expiry_s(workspace)
    if inactive_too:
        return [_entry_json(entry, state, counts_for_s) for entry, state in reversed(listed(workspace))]
    return [_entry_json(entry, "active", counts_for_s) for entry in counting(workspace).values()]


def _entry_json(entry: LedgerEntry, state: str, counts_for_s: float) -> dict[str, Any]:
    return {
        "host": entry.host,
        "state": state,
        "checks": list(entry.checks),
        "reason": entry.reason,
        "evidence": dict(entry.evidence),
        "run_id": entry.run_id,
        "attempt": entry.attempt,
        "seen_at": iso(entry.seen_at),
        "expires_at": iso(entry.seen_at + counts_for_s),
    }


def expiry_s(workspace: Workspace) -> float:
    """How many seconds an entry counts for."""
    return workspace.config.node_expiry_hours * _HOUR_S


def forgive(workspace: Workspace, names: Sequence[str]) -> list[str]:
    """Forgive the findings against these nodes, or lists of nodes; returns them. Later findings count again.

    Raises UserError, with nothing changed, if a node has no finding that counts; PathError if nothing can be written.
    """
    active = counting(workspace)
    try:
        hosts = list(dict.fromkeys(host for name in names for host in expand_hostlist(name)))
    except ValueError as error:
        raise UserError(str(error)) from error
    unknown = [host for host in hosts if host not in active]
    if unknown:
        held = f"it lists {', '.join(sorted(active))}" if active else "it is empty"
        raise UserError(f"the node ledger does not list {', '.join(unknown)}; {held}")
    entries, pardons = _ledger_entries(workspace), _pardons(workspace)
    make_directory(workspace.root.nodes)
    try:
        with command_journal(workspace.root.nodes, "forgive") as journal:
            for host in hosts:
                # By run and attempt, not by time: clocks differ, and whatever is found later must count again.
                findings = [entry.key[:2] for entry in entries if entry.host == host and entry.key not in pardons]
                journal.write(NodeForgiven(host=host, by=person(), findings=findings))
    except OSError as error:
        raise PathError(f"cannot write to {workspace.root.nodes}: {describe_os_error(error)}") from error
    return hosts


def exclusions(workspace: Workspace, plan: Plan, must: Sequence[str], *, slurm: bool) -> Exclusions:
    """Which nodes a submission excludes: nodes that it must not get, and nodes in the ledger that it can do without.

    If it needs some of the latter, the ones with the oldest findings are used. If the plan switches exclusion off, none
    of them is excluded. Slurm is asked only if there is any such node.

    Args:
        workspace: Where the ledger is.
        plan: What will be submitted.
        must: Nodes that it must not get.
        slurm: Whether it is submitted to Slurm; otherwise nothing is excluded.

    Raises:
        RequestRefused: It needs nodes that it must not get.
        LaunchError: Slurm does not answer.
    """
    if not slurm:
        return Exclusions()
    against = counting(workspace) if plan.spec.preflight.exclude else {}
    if not against and not must:
        return Exclusions()
    from slurmtrain.slurm.site import choose_nodes

    try:
        partitions, nodes = workspace.scheduler.partitions(), workspace.scheduler.nodes()
    except SlurmDown as error:
        # A preflight of this run has failed on these nodes: without the exclusion, it could get them again.
        if must:
            raise LaunchError(f"Slurm does not answer; try again later ({error})") from error
        return Exclusions(notes=[f"{error}; nodes that failed a preflight may be used"])
    choice = choose_nodes(plan, partitions, nodes, [*must, *against])
    if not choice.is_decidable:  # the job itself has already asked Slurm whether it can do without these nodes
        return Exclusions(tuple(must), _notes([], against, choice.needed))
    lacking = [host for host in must if host in choice.needed]
    if lacking:
        raise RequestRefused(f"{', '.join(lacking)} cannot be excluded: {choice.needed[lacking[0]]}")
    return Exclusions(tuple(choice.excluded), _notes(choice.excluded, against, choice.needed))


def _notes(left_out: Iterable[str], against: Mapping[str, LedgerEntry], needed: Mapping[str, str]) -> list[str]:
    without = [f"{host} ({_describe_finding(against[host])})" for host in left_out if host in against]
    notes = [f"excluded, because a preflight failed there: {', '.join(without)}; 'slurmtrain nodes' shows more"]
    kept = [
        f"{host} is in the node ledger ({_describe_finding(against[host])}), but is used, because the request cannot "
        f"be met without it ({why})"
        for host, why in needed.items()
        if host in against
    ]
    return [*(notes if without else []), *kept]


def _describe_finding(entry: LedgerEntry) -> str:
    """A finding in words, with its age."""
    minutes = max(0, int(time.time() - entry.seen_at)) // 60
    ago = f"{minutes} min" if minutes < 60 else f"{minutes // 60} h"
    return f"{entry.reason}, {ago if minutes < 48 * 60 else f'{minutes // (24 * 60)} days'} ago"


def _ledger_entries(workspace: Workspace) -> list[LedgerEntry]:
    """All entries; none if there is no registry yet, and none is created for this."""
    return workspace.store.ledger() if workspace.has_registry else []


def _pardons(workspace: Workspace) -> frozenset[FindingKey]:
    """What users have said about nodes: few and short files, read again each time."""
    from slurmtrain.model.preflight.node_ledger import forgiven_findings
    from slurmtrain.model.run.journal_lines import events_of, read_lines

    paths = sorted(workspace.root.nodes.glob("*.jsonl"))
    read = [events_of(read_lines(read_checked(path), 0, path.name), path.name) for path in paths]
    return forgiven_findings(event for events, _ in read for event in events)
