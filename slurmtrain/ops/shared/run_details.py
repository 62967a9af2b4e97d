"""Everything known about one run, as in the JSON contract: attempts, checkpoints, environments, findings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import PathError
from slurmtrain.model.diagnosis.hang import RankState, find_culprits
from slurmtrain.model.environment import (
    Environment,
    Software,
    changes_in_words,
    compare_environments,
    kinds_of,
    package_changes,
)
from slurmtrain.model.experiment.sections import NSYS, TORCH
from slurmtrain.model.query.fields import iso
from slurmtrain.model.run.accounting import KINDS, summed
from slurmtrain.model.run.events.agent_events import EnvironmentNoted, HelperFailed, PreflightDone, WorkersStarted
from slurmtrain.model.run.events.rank_events import StepsTraced
from slurmtrain.model.run.layout import NSYS_REPORTS, RunDir, attempt_of, checkpoint_step, node_of
from slurmtrain.model.run.lineage import FORK
from slurmtrain.model.run.run import Attempt, Checkpoint, Run
from slurmtrain.ops.shared.node_use import usage_of
from slurmtrain.ops.shared.relatives import chain_json, lineage_json
from slurmtrain.ops.shared.run_costs import cost_of_run
from slurmtrain.ops.shared.run_measures import measures_json
from slurmtrain.ops.shared.views import SCHEMA, RunRecord, checkpoint_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.node import read_plan
from slurmtrain.system.journal_files import line_number
from slurmtrain.system.owned_files import read_checked

if TYPE_CHECKING:
    from slurmtrain.model.experiment.plan import Plan
    from slurmtrain.registry.rows import Listed


def show_json(workspace: Workspace, listed: Listed, run: Run) -> dict[str, Any]:
    """RUN with its attempts, what their time was spent on, and its checkpoints on disk.

    Args:
        workspace: Where the run is.
        listed: The run as shown in lists.
        run: The same run with all details.
    """
    directory = workspace.root.run(run.id)
    environments = describe_changes(workspace, run)
    # The CPUs that ranks were bound to last, by attempt and rank.
    bound: dict[str, dict[str, str]] = {}
    for event in workspace.store.events(run.id, WorkersStarted):
        bound.setdefault(attempt_of(event.source) or "", {}).update(event.payload.cpus or {})
    children = _children_of(workspace, run.id)
    plans = [_readable_plan(directory.submission(attempt.submission).plan) for attempt in run.attempts]
    # None: it runs what is in its working directory.
    plan = (plans[-1] if plans else None) or _readable_plan(directory.plan)
    snapshot: dict[str, Any] | None = None
    if plan is not None and (code := plan.code) is not None:
        # Where the run has its own copy.
        place = str(plan.working_directory(directory.code))
        snapshot = {"snapshot": code.hash, "root": code.root, "files": code.files, "bytes": code.bytes, "dir": place}
    record = RunRecord(workspace, listed)
    return {
        **record,
        "children": children,
        "lineage": lineage_json(workspace, run.id) if children or listed.parents else [],
        **chain_json(workspace, run.id),
        "seconds": _spent_json(summed(run.attempts)),
        "cost": cost_of_run(workspace, run, record.idleness),
        "usage": [each.to_dict() for each in usage_of(workspace, run, record["eta_seconds"])],
        "measures": measures_json(directory, run),
        "code": snapshot,
        "attempts": [
            {
                **attempt_json(attempt),
                "code": plan.code.hash if plan is not None and plan.code is not None else None,
                "environment_changes": environments.get(attempt.number, []),
                "cpus": dict(sorted(bound.get(attempt.key, {}).items(), key=lambda item: int(item[0]))),
            }
            for attempt, plan in zip(run.attempts, plans, strict=True)
        ],
        "checkpoints": [checkpoint_json(directory, checkpoint) for checkpoint in run.on_disk],
        "profiles": _profiles(workspace, directory, run),
        "garbage": [
            {
                "journal": garbage.source,
                "offset": garbage.offset,
                "number": line_number(directory.path / garbage.source, garbage.offset),
                "line": garbage.line[:200].decode(errors="replace"),
                "why": garbage.why,
            }
            for garbage in workspace.store.garbage(run.id)
        ],
    }


def _profiles(workspace: Workspace, directory: RunDir, run: Run) -> list[dict[str, Any]]:
    """What profilers have recorded of a run, by attempt."""
    profiles = []
    for event in workspace.store.events(run.id, StepsTraced):
        traced, key = event.payload, attempt_of(event.source)
        facts = {"tool": TORCH, "rank": traced.rank, "first": traced.first, "last": traced.last, "bytes": traced.bytes}
        path = None if traced.path is None else str(directory.path / traced.path)
        profiles.append((key, {**facts, "path": path, "why": traced.why, "problem": traced.problem or None}))
    unknown = dict.fromkeys(("rank", "first", "last", "problem"))
    for attempt in run.attempts:
        for report in sorted(directory.attempt(attempt.job_id, attempt.restart).profiles.glob(NSYS_REPORTS)):
            with contextlib.suppress(OSError):
                size = report.stat().st_size
                profiles.append((attempt.key, {"tool": NSYS, **unknown, "bytes": size, "path": str(report), "why": ""}))
    numbers = {attempt.key: attempt.number for attempt in run.attempts}
    return [{"attempt": numbers.get(key or ""), **facts} for key, facts in profiles]


def _children_of(workspace: Workspace, run_id: str) -> list[dict[str, Any]]:
    """The runs that come from a run, each with the relation and the step of its checkpoint."""
    return [
        {**parent, "run": child}
        for child, parents in workspace.store.children(run_id).items()
        for parent in parents
        if parent.get("run") == run_id
    ]


def find_forks(workspace: Workspace, run_id: str) -> dict[int | None, list[str]]:
    """The runs that have their own copy of a checkpoint of a run, by its step.

    Args:
        workspace: Where the runs are.
        run_id: The run that has saved it.
    """
    forks: dict[int | None, list[str]] = {}
    for child in _children_of(workspace, run_id):
        copy = next(workspace.root.run(child["run"]).start.glob("*"), None) if child["relation"] == FORK else None
        if copy is not None:
            # One that waited for this run was to begin with whichever step would be the last.
            step = checkpoint_step(copy.name) if child["step"] is None else child["step"]
            forks.setdefault(step, []).append(child["run"])
    return forks


def attempt_json(attempt: Attempt) -> dict[str, Any]:
    """ATTEMPT of the JSON contract."""
    # Of the networks, the elected one is named; before the election there is none.
    networks = [dict(network) for network in attempt.network.get("networks", ())]
    elected = attempt.network.get("elected")
    # The index is a journal's, which may hold any number.
    name = networks[elected].get("name") if isinstance(elected, int) and 0 <= elected < len(networks) else None
    excluded = [dict(interface) for interface in attempt.network.get("excluded", ())]
    return {
        "number": attempt.number,
        "job_id": attempt.job_id or None,
        "restart": attempt.restart,
        "state": attempt.state,
        "cause": attempt.cause,
        "reason": attempt.reason,
        "nodes": attempt.nodes,
        "partition": ",".join(sorted(set(attempt.partitions.values()))) or attempt.partition or None,
        "submitted_at": iso(attempt.submitted_at),
        "started_at": iso(attempt.started_at),
        "ended_at": iso(attempt.ended_at),
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "lost_steps": attempt.lost_steps,
        "seconds": _spent_json(attempt.spent),
        "master_addr": attempt.master_addr,
        "master_port": attempt.master_port,
        "interfaces": dict(attempt.interfaces),
        "network": {"elected": name, "networks": networks, "excluded": excluded} if attempt.network else None,
        "clock": {host: dict(clock) for host, clock in attempt.clock.items()},
        "checks": {host: [dict(finding) for finding in findings] for host, findings in attempt.checks.items()},
        "interval": dict(attempt.interval) or None,
        "shares": _moments(attempt.shares),
        "hardware": dict(attempt.hardware) or None,
        "save_problem": attempt.save_problem,
        "without": list(attempt.without),
        "inherited": dict(attempt.inherited),
        "pack": attempt.pack,
        "overrides": list(attempt.overrides),
        "failures": [dict(failure) for failure in attempt.failures],
        "restarts": _moments(attempt.restarts),
        "hangs": _hangs(attempt),
        "raised_limits": _moments(attempt.raised_limits),
        "stragglers": _moments(attempt.stragglers),
        "passed_over": [
            {name: value for name, value in moment.items() if name != "fingerprint"}
            for moment in _moments(attempt.passed_over)
        ],
        "evidence": dict(attempt.evidence),
    }


def _readable_plan(path: Path) -> Plan | None:
    with contextlib.suppress(PathError, OSError):
        return read_plan(path)
    return None


def _spent_json(spent: Mapping[str, float]) -> dict[str, float]:
    """Seconds by kind, in the order that an attempt goes through them, to the millisecond."""
    return {kind: round(spent[kind], 3) for kind in KINDS if kind in spent}


def _moments(moments: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What happened, with its time; leaves ``past`` out, which only the policy uses to weigh a run's history."""
    return [
        {name: iso(value) if name == "at" else value for name, value in moment.items() if name != "past"}
        for moment in moments
    ]


def _hangs(attempt: Attempt) -> list[dict[str, Any]]:
    """Each hang: what all nodes saw, and which ranks were to blame. Ranks hang at most once a round."""
    rounds: dict[int, list[Mapping[str, Any]]] = {}
    for hang in attempt.hangs:
        rounds.setdefault(sum(restart["at"] <= hang["at"] for restart in attempt.restarts), []).append(hang)
    hangs = []
    for number, observed in rounds.items():
        states: list[RankState] = []
        for record in (record for hang in observed for record in hang.get("ranks", ())):
            # A journal may not say enough about a rank.
            with contextlib.suppress(KeyError, ValueError):
                states.append(RankState.from_dict(record))
        states.sort(key=lambda state: state.rank)
        blamed, why = find_culprits(states)
        ranks = [state.to_dict() for state in states]
        at = iso(min(hang["at"] for hang in observed))
        hangs.append({"at": at, "round": number, "culprits": blamed, "why": why, "ranks": ranks})
    return hangs


def checkpoints_json(workspace: Workspace, run: Run, *, deleted_too: bool) -> dict[str, Any]:
    """What ``checkpoints`` prints: each checkpoint with ``kept``, the reason it is kept.

    Checkpoints of a script that saves by itself are listed as they are on disk, also incomplete ones, with the
    ``problem``.

    ``kept`` is null for what the next pruning deletes, and for what pruning ignores: checkpoints that are damaged,
    already deleted, or saved by the user's script itself. ``forks``: runs that began with a checkpoint and have a copy.

    Args:
        workspace: Where the run is.
        run: The run.
        deleted_too: Include deleted ones, not only those on disk.
    """
    from slurmtrain.ops.shared.readable_checkpoints import as_checkpoints, find_own

    directory = workspace.root.run(run.id)
    own = find_own(directory, run)
    kept = _kept(directory, run)
    forks = find_forks(workspace, run.id)
    problems = {str(each.path): each.problem for each in own or ()}
    checkpoints = run.checkpoints if own is None else as_checkpoints(run, own)
    return {
        "schema": SCHEMA,
        "run_id": run.id,
        "checkpoints": [
            {
                **checkpoint_json(directory, checkpoint),
                "kept": kept.get((checkpoint.path, checkpoint.saved_at)),
                "problem": problems.get(checkpoint.path),
                "forks": [] if _is_start(directory, checkpoint) else forks.get(checkpoint.step, []),
            }
            for checkpoint in checkpoints
            if deleted_too or checkpoint.on_disk
        ],
    }


def _kept(directory: RunDir, run: Run) -> dict[tuple[str, float], str]:
    """Why checkpoints are kept, by path and time of the save; empty if there is no plan that says so."""
    from slurmtrain.model.experiment.checkpoint import Saved, reasons_to_keep
    from slurmtrain.ops.shared.next_attempts import current_plan

    published = {c.step: c for c in run.on_disk if c.published and c.step is not None}
    try:
        keep = current_plan(directory, run).spec.checkpoint.keep
    except PathError:
        return {}
    why = reasons_to_keep([Saved(step, checkpoint.metrics) for step, checkpoint in published.items()], keep)
    kept = {(published[step].path, published[step].saved_at): reason for step, reason in why.items()}
    begun_with = [each for each in run.on_disk if _is_start(directory, each)]
    return {**kept, **{(each.path, each.saved_at): "the run began with it" for each in begun_with}}


def _is_start(directory: RunDir, checkpoint: Checkpoint) -> bool:
    """Whether it is the copy of another run's checkpoint that a run began with."""
    return checkpoint.path.startswith(f"{directory.start.name}/")


def findings_json(workspace: Workspace, run: Run) -> dict[str, list[dict[str, Any]]]:
    """Findings of the newest attempt's preflight, with their evidence, by host."""
    newest = run.newest
    if newest is None:
        return {}
    events = workspace.store.events(run.id, PreflightDone)
    by_node = {node_of(event.source): event for event in events if attempt_of(event.source) == newest.key}
    ordered = sorted(by_node, key=int)
    return {
        newest.hosts.get(node, node): [dict(finding) for finding in by_node[node].payload.findings] for node in ordered
    }


# --- environments ----------------------------------------------------------------------------------------------------


def submitted_software(directory: RunDir) -> Software | None:
    """Python and its packages when a run was submitted; None if that is not known.

    Args:
        directory: The run.
    """
    with contextlib.suppress(OSError):
        return Software.from_text(read_checked(directory.environment).decode(errors="replace"))
    return None


def environments_of(workspace: Workspace, run: Run) -> dict[int, Environment]:
    """The environments of a run's attempts, by their numbers; attempts without a record of any node are left out.

    Args:
        workspace: Where the run is.
        run: The run.
    """
    notes = _environment_notes(workspace, run)
    directory = workspace.root.run(run.id)
    return {number: _environment(directory, by_node) for number, by_node in notes.items()}


def newest_environment(workspace: Workspace, run: Run) -> Environment:
    """The environment of a run's newest attempt with a known one, else the environment of its submission.

    Args:
        workspace: Where the run is.
        run: The run.
    """
    of_attempts = environments_of(workspace, run)
    if of_attempts:
        return of_attempts[max(of_attempts)]
    return Environment(software=submitted_software(workspace.root.run(run.id)))


def describe_changes(workspace: Workspace, run: Run) -> dict[int, list[str]]:
    """How the environments of attempts differ from the first one's, and within each among its nodes, in words.

    Also which Python they had if ``setup`` chose it, and which commands beside the ranks failed on nodes.

    Args:
        workspace: Where the run is.
        run: The run.
    """
    notes = _environment_notes(workspace, run)
    directory = workspace.root.run(run.id)
    lines: dict[int, list[str]] = {}
    first: Environment | None = None
    for number, by_node in notes.items():
        environment = _environment(directory, by_node)
        first = first or environment
        changes = compare_environments(first, environment)
        interpreter = next(iter(by_node.values())).interpreter
        of_setup = [f"'setup' makes python {interpreter}"] if interpreter else []
        parts = [
            f"{kind} differ from the first attempt: {changes_in_words(of_kind)}" for kind, of_kind in changes.items()
        ]
        lines[number] = [*of_setup, *parts]
        [(first_node, noted), *others] = by_node.items()
        for node, note in others:
            own = _read_packages(directory, note.software) if note.software != noted.software else None
            if own and environment.software:
                differ = changes_in_words(package_changes(environment.software, own))
                lines[number].append(f"packages on node {node} differ from node {first_node}: {differ}")
    # What nodes ran beside their ranks, and failed.
    numbers = {attempt.key: attempt.number for attempt in run.attempts}
    for event in workspace.store.events(run.id, HelperFailed):
        if (failed := numbers.get(attempt_of(event.source))) is not None:
            lines.setdefault(failed, []).append(f"{event.payload.why}, on node {event.payload.node}")
    return {number: lines[number] for number in sorted(lines) if lines[number]}


def _environment_notes(workspace: Workspace, run: Run) -> dict[int, dict[int, EnvironmentNoted]]:
    """What nodes have noted, by attempt and node, in their order."""
    numbers = {attempt.key: attempt.number for attempt in run.attempts}
    notes: dict[int, dict[int, EnvironmentNoted]] = {}
    for event in workspace.store.events(run.id, EnvironmentNoted):
        if (number := numbers.get(attempt_of(event.source))) is not None:
            notes.setdefault(number, {})[event.payload.node] = event.payload
    return {number: dict(sorted(notes[number].items())) for number in sorted(notes)}


def _environment(directory: RunDir, by_node: Mapping[int, EnvironmentNoted]) -> Environment:
    first = next(iter(by_node.values()))
    return Environment(
        software=_read_packages(directory, first.software),
        versions=first.versions,
        machines=kinds_of(note.machine for note in by_node.values()),
        variables=first.variables,
    )


def _read_packages(directory: RunDir, name: str) -> Software | None:
    """A list of packages; None if it is missing, or its name is none."""
    # It comes from a journal and becomes part of a path, which must not lead elsewhere.
    if not (name.isalnum() and name.isascii()):
        return None
    with contextlib.suppress(OSError):
        return Software.from_text(read_checked(directory.software(name)).decode(errors="replace"))
    return None
