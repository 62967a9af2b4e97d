"""Runs as the JSON contract has them, and what lists show beside it."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from slurmtrain.errors import PlaceError
from slurmtrain.model.diagnosis.hang import RankState, find_culprits
from slurmtrain.model.preflight.node_ledger import LedgerEntry
from slurmtrain.model.run.accounting import KINDS, summed
from slurmtrain.model.run.layout import RunDir, attempt_of, node_of
from slurmtrain.model.run.progress import steps_per_second
from slurmtrain.model.run.run import Attempt, Checkpoint, Run
from slurmtrain.ops.shared import node_ledger
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry.store import Listed

SCHEMA = 1
# The rate is that of the last lines of the metrics: this much of the file.
_TAIL_BYTES = 16_384


def iso(seconds: float | None) -> str | None:
    """A time as ISO 8601 in UTC, to the millisecond."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def run_json(workspace: Workspace, listed: Listed) -> dict[str, Any]:
    """RUN of the JSON contract. ``steps_per_second`` and ``eta_seconds`` are null unless the run trains right now."""
    row, directory = listed.row, workspace.root.run(listed.id)
    rate = _rate(directory, listed) if listed.state == "running" else None
    return {
        "id": listed.id,
        "name": listed.name,
        "state": listed.state,
        "reason": _reason(listed),
        "executor": row["executor"],
        "job_id": listed.job_id,
        "attempt": listed.attempt,
        "step": row["step"],
        "total_steps": row["total_steps"],
        "metrics": {name: _finite(value) for name, value in listed.metrics.items()},
        "submitted_at": iso(row["submitted_at"]),
        "started_at": iso(row["started_at"]),
        "ended_at": iso(row["ended_at"]),
        "checkpoint": checkpoint_json(directory, listed.checkpoint) if listed.checkpoint else None,
        "lost_steps": row["lost_steps"],
        "goodput": None if row["goodput"] is None else round(row["goodput"], 4),
        "mlflow_run_id": row["mlflow_run_id"],
        "dir": str(directory.path),
        "plan_hash": row["plan_hash"],
        "git": listed.git,
        "pending": _pending(listed),
        "steps_per_second": round(rate, 4) if rate else None,
        "eta_seconds": _eta(row, rate),
    }


def _reason(listed: Listed) -> str:
    """What is known of the run, and, for one that has not begun to train, what Slurm says of its job.

    A run that trains says if it cannot save.
    """
    reason, live = listed.reason, listed.live
    if listed.state == "running":
        return "; ".join(filter(None, (reason, listed.row["save_problem"])))
    if live is None or listed.state not in ("pending", "requeued"):
        return reason
    starts = f"; estimated start {iso(live.starts_at)}" if live.starts_at and live.state == "PENDING" else ""
    said = live.reason + (f" on {live.nodes}" if live.nodes else "") + starts
    return f"{reason}; {said}" if reason else said


def _pending(listed: Listed) -> dict[str, Any] | None:
    """Why a job waits, and until when, as far as Slurm says."""
    live = listed.live
    if live is None or listed.state not in ("pending", "requeued"):
        return None
    return {
        "state": live.state,
        "code": live.code,
        "reason": live.reason,
        "estimated_start": iso(live.starts_at) if live.state == "PENDING" else None,
        "priority": live.priority,
    }


def show_json(workspace: Workspace, listed: Listed, run: Run) -> dict[str, Any]:
    """RUN with its attempts, what their time was spent on, and its checkpoints that are on disk."""
    directory = workspace.root.run(run.id)
    return {
        **run_json(workspace, listed),
        "seconds": _seconds(summed(run.attempts)),
        "attempts": [attempt_json(attempt) for attempt in run.attempts],
        "checkpoints": [checkpoint_json(directory, checkpoint) for checkpoint in run.on_disk],
        "garbage": [
            {"journal": bad.source, "offset": bad.offset, "line": bad.line[:200].decode(errors="replace")}
            for bad in workspace.store.garbage(run.id)
        ],
    }


def attempt_json(attempt: Attempt) -> dict[str, Any]:
    """ATTEMPT of the JSON contract."""
    return {
        "number": attempt.number,
        "job_id": attempt.job_id or None,
        "restart": attempt.restart,
        "state": attempt.state,
        "cause": attempt.cause,
        "reason": attempt.reason,
        "nodes": [attempt.hosts[node] for node in sorted(attempt.hosts, key=int)],
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
        "clock": {host: dict(said) for host, said in attempt.clock.items()},
        "checks": {host: [dict(finding) for finding in found] for host, found in attempt.checks.items()},
        "interval": dict(attempt.interval) or None,
        "save_problem": attempt.save_problem,
        "without": list(attempt.without),
        "overrides": list(attempt.overrides),
        "failures": [dict(failure) for failure in attempt.failures],
        "restarts": _moments(attempt.restarts),
        "hangs": _hangs(attempt),
        "stragglers": _moments(attempt.stragglers),
        "evidence": dict(attempt.evidence),
    }


def _seconds(spent: Mapping[str, float]) -> dict[str, float]:
    """Seconds by kind, in the order in which an attempt comes to them, to the millisecond."""
    return {kind: round(spent[kind], 3) for kind in KINDS if kind in spent}


def _moments(told: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What happened at some time; ``past`` is for the policy, which weighs a run's history by it."""
    return [
        {name: iso(value) if name == "at" else value for name, value in one.items() if name != "past"} for one in told
    ]


def _hangs(attempt: Attempt) -> list[dict[str, Any]]:
    """Each time ranks hung, what all nodes saw of it, and who was to blame. Ranks hang at most once a round."""
    rounds: dict[int, list[Mapping[str, Any]]] = {}
    for hang in attempt.hangs:
        rounds.setdefault(sum(restart["at"] <= hang["at"] for restart in attempt.restarts), []).append(hang)
    found = []
    for number, told in rounds.items():
        states = [RankState.from_dict(plain) for hang in told for plain in hang.get("ranks", ())]
        states.sort(key=lambda state: state.rank)
        blamed, why = find_culprits(states)
        ranks = [state.to_dict() for state in states]
        at = iso(min(hang["at"] for hang in told))
        found.append({"at": at, "round": number, "culprits": blamed, "why": why, "ranks": ranks})
    return found


def _network(told: Mapping[str, Any]) -> dict[str, Any] | None:
    """The networks of an attempt, and the name of the elected one; null before it was elected."""
    if not told:
        return None
    networks = [dict(network) for network in told.get("networks", ())]
    elected = told.get("elected")
    name = networks[elected].get("name") if isinstance(elected, int) and elected < len(networks) else None
    return {"elected": name, "networks": networks, "excluded": [dict(one) for one in told.get("excluded", ())]}


def checkpoint_json(directory: RunDir, checkpoint: Checkpoint) -> dict[str, Any]:
    """CHECKPOINT of the JSON contract."""
    return {
        "step": checkpoint.step,
        "path": str(directory.path / checkpoint.path),
        "bytes": checkpoint.bytes,
        "complete": checkpoint.complete,
        "verified": checkpoint.verified,
        "saved_at": iso(checkpoint.saved_at),
        "seconds": checkpoint.seconds,
        "stall_s": checkpoint.stall_s,
        "why": checkpoint.why,
        "metrics": {name: _finite(value) for name, value in checkpoint.metrics.items()},
        "attempt": checkpoint.attempt,
        "pruned_at": iso(checkpoint.pruned_at),
    }


def checkpoints_json(workspace: Workspace, run: Run, *, everything: bool) -> dict[str, Any]:
    """What ``checkpoints`` prints: those on disk, or all that there ever were, each with ``kept``, why it stays.

    ``kept`` is null for what the next pruning deletes, and for what no pruning looks at: what is damaged, what a script
    of the user's own has saved, and what is deleted already.
    """
    directory = workspace.root.run(run.id)
    kept = _kept(directory, run)
    shown = run.checkpoints if everything else run.on_disk
    return {
        "schema": SCHEMA,
        "run_id": run.id,
        "checkpoints": [
            {**checkpoint_json(directory, one), "kept": kept.get((one.path, one.saved_at))} for one in shown
        ],
    }


def _kept(directory: RunDir, run: Run) -> dict[tuple[str, float], str]:
    """Why checkpoints stay, by path and time of the save; empty where there is no plan to tell."""
    from slurmtrain.model.run.retention import Saved, reasons
    from slurmtrain.ops.shared.current_plan import current_plan

    published = {one.step: one for one in run.on_disk if one.published and one.step is not None}
    try:
        keep = current_plan(directory, run).spec.checkpoint.keep
    except PlaceError:
        return {}
    why = reasons([Saved(step, one.metrics) for step, one in published.items()], keep)
    return {(published[step].path, published[step].saved_at): said for step, said in why.items()}


def nodes_json(workspace: Workspace, *, everything: bool) -> list[dict[str, Any]]:
    """Findings of the node ledger, the newest first: the last one of each node that counts, or every one."""
    expiry_s = node_ledger.expiry_s(workspace)
    if everything:
        return [_entry_json(entry, state, expiry_s) for entry, state in reversed(node_ledger.listed(workspace))]
    return [_entry_json(entry, "active", expiry_s) for entry in node_ledger.counting(workspace).values()]


def _entry_json(entry: LedgerEntry, state: str, expiry_s: float) -> dict[str, Any]:
    return {
        "host": entry.host,
        "state": state,
        "checks": list(entry.checks),
        "reason": entry.reason,
        "evidence": dict(entry.evidence),
        "run_id": entry.run_id,
        "attempt": entry.attempt,
        "seen_at": iso(entry.seen_at),
        "expires_at": iso(entry.seen_at + expiry_s),
    }


def findings_json(workspace: Workspace, run: Run) -> dict[str, list[dict[str, Any]]]:
    """Findings of the newest attempt's preflight, with their evidence, by host."""
    newest = run.newest
    if newest is None:
        return {}
    told = workspace.store.events(run.id, "preflight")
    mine = {node_of(event.source): event for event in told if attempt_of(event.source) == newest.key}
    ordered = sorted(mine, key=int)
    return {newest.hosts.get(node, node): list(mine[node].data.get("findings", ())) for node in ordered}


def runs_json(workspace: Workspace, runs: Mapping[str, Listed]) -> dict[str, Any]:
    """What ``submit``, ``resume`` and ``status`` print, ``as_of`` apart."""
    return {"schema": SCHEMA, "runs": [run_json(workspace, listed) for listed in runs.values()]}


def now_iso() -> str:
    """This moment."""
    return str(iso(time.time()))


def _rate(directory: RunDir, listed: Listed) -> float | None:
    if listed.job_id is None:
        return None
    records = []
    for folder in directory.attempts.glob(f"{listed.job_id}.*"):
        with contextlib.suppress(OSError), (folder / "metrics.jsonl").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            for line in file.read().splitlines():
                with contextlib.suppress(ValueError, AttributeError):
                    record = json.loads(line)
                    record["t"] = float(record.get("t"))
                    records.append(record)
    with contextlib.suppress(TypeError):
        return steps_per_second(records)
    return None


def _eta(row: Mapping[str, Any], rate: float | None) -> float | None:
    if not rate or row["step"] is None or row["total_steps"] is None:
        return None
    return round(max(0, int(row["total_steps"]) - int(row["step"])) / rate, 1)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
