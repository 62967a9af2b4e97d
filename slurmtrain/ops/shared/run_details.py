"""Everything known about one run, as in the JSON contract: attempts, checkpoints, findings of its preflight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import PathError
from slurmtrain.model.diagnosis.hang import RankState, find_culprits
from slurmtrain.model.query.fields import iso
from slurmtrain.model.run.accounting import KINDS, summed
from slurmtrain.model.run.events.agent_events import PreflightDone, WorkersStarted
from slurmtrain.model.run.layout import RunDir, attempt_of, checkpoint_step, node_of
from slurmtrain.model.run.lineage import FORK
from slurmtrain.model.run.run import Attempt, Checkpoint, Run
from slurmtrain.ops.shared.environments import describe_changes
from slurmtrain.ops.shared.family import chain_json, lineage_json
from slurmtrain.ops.shared.views import SCHEMA, checkpoint_json, run_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.node import read_plan
from slurmtrain.system.journal_files import line_number

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
    environments, bound = describe_changes(workspace, run), _bound(workspace, run)
    children = _children(workspace, run.id)
    return {
        **run_json(workspace, listed),
        "children": children,
        "lineage": lineage_json(workspace, run.id) if children or listed.parents else [],
        **chain_json(workspace, run.id),
        "seconds": _seconds(summed(run.attempts)),
        "code": _code(directory, run),
        "attempts": [
            {
                **attempt_json(attempt),
                "code": _snapshot(directory, attempt),
                "environment_changes": environments.get(attempt.number, []),
                "cpus": bound.get(attempt.key, {}),
            }
            for attempt in run.attempts
        ],
        "checkpoints": [checkpoint_json(directory, checkpoint) for checkpoint in run.on_disk],
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


def _bound(workspace: Workspace, run: Run) -> dict[str, dict[str, str]]:
    """The CPUs that ranks were bound to last, by attempt and rank."""
    bound: dict[str, dict[str, str]] = {}
    for event in workspace.store.events(run.id, WorkersStarted):
        if event.payload.cpus:
            bound.setdefault(attempt_of(event.source) or "", {}).update(event.payload.cpus)
    return {attempt: dict(sorted(cpus.items(), key=lambda item: int(item[0]))) for attempt, cpus in bound.items()}


def _children(workspace: Workspace, run_id: str) -> list[dict[str, Any]]:
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
    for child in _children(workspace, run_id):
        copy = next(workspace.root.run(child["run"]).start.glob("*"), None) if child["relation"] == FORK else None
        if copy is not None:
            # One that waited for this run was to begin with whichever step would be the last.
            step = checkpoint_step(copy.name) if child["step"] is None else child["step"]
            forks.setdefault(step, []).append(child["run"])
    return forks


def attempt_json(attempt: Attempt) -> dict[str, Any]:
    """ATTEMPT of the JSON contract."""
    return {
        "number": attempt.number,
        "job_id": attempt.job_id or None,
        "restart": attempt.restart,
        "state": attempt.state,
        "cause": attempt.cause,
        "reason": attempt.reason,
        "nodes": attempt.nodes,
        "submitted_at": iso(attempt.submitted_at),
        "started_at": iso(attempt.started_at),
        "ended_at": iso(attempt.ended_at),
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "lost_steps": attempt.lost_steps,
        "seconds": _seconds(attempt.spent),
        "master_addr": attempt.master_addr,
        "master_port": attempt.master_port,
        "interfaces": dict(attempt.interfaces),
        "network": _network(attempt.network),
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


def _code(directory: RunDir, run: Run) -> dict[str, Any] | None:
    """The code of the run: its snapshot, and where the run has its own copy; null if it runs what is in ``workdir``."""
    newest = run.newest
    plan = (_plan(directory.submission(newest.submission).plan) if newest else None) or _plan(directory.plan)
    if plan is None or plan.code is None:
        return None
    return {
        "snapshot": plan.code.hash,
        "root": plan.code.root,
        "files": plan.code.files,
        "bytes": plan.code.bytes,
        "dir": str(plan.working_directory(directory.code)),
    }


def _snapshot(directory: RunDir, attempt: Attempt) -> str | None:
    """The hash of the snapshot that an attempt ran."""
    plan = _plan(directory.submission(attempt.submission).plan)
    return plan.code.hash if plan is not None and plan.code is not None else None


def _plan(path: Path) -> Plan | None:
    with contextlib.suppress(PathError, OSError):
        return read_plan(path)
    return None


def _seconds(spent: Mapping[str, float]) -> dict[str, float]:
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
        states = list(_rank_states(observed))
        states.sort(key=lambda state: state.rank)
        blamed, why = find_culprits(states)
        ranks = [state.to_dict() for state in states]
        at = iso(min(hang["at"] for hang in observed))
        hangs.append({"at": at, "round": number, "culprits": blamed, "why": why, "ranks": ranks})
    return hangs


def _network(election: Mapping[str, Any]) -> dict[str, Any] | None:
    """The networks of an attempt, and the name of the elected one; null before the election."""
    if not election:
        return None
    networks = [dict(network) for network in election.get("networks", ())]
    elected = election.get("elected")
    name = networks[elected].get("name") if isinstance(elected, int) and 0 <= elected < len(networks) else None
    return {
        "elected": name,
        "networks": networks,
        "excluded": [dict(interface) for interface in election.get("excluded", ())],
    }


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
    from slurmtrain.model.run.checkpoints import Saved, reasons_to_keep
    from slurmtrain.ops.shared.current_plan import current_plan

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


def _rank_states(hangs: Iterable[Mapping[str, Any]]) -> Iterator[RankState]:
    """The ranks of these hangs, without ranks that a journal does not say enough about."""
    for hang in hangs:
        for record in hang.get("ranks", ()):
            with contextlib.suppress(KeyError, ValueError):
                yield RankState.from_dict(record)
