"""Why an attempt failed, judged by known patterns in its logs, by its journals, and by its state in Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.errors import RunNotFound
from slurmtrain.model.diagnosis.root_cause import Diagnosis, PatternMatch, diagnose_hits
from slurmtrain.model.query.fields import iso
from slurmtrain.model.run.run import SUSPENDED, Attempt, Live, Run
from slurmtrain.ops.diagnose.journals import AttemptJournals, FailedRank, suspended
from slurmtrain.ops.diagnose.log_evidence import AttemptLogs
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDiagnosis:
    """Why an attempt failed, as far as its files show.

    ``attempt``: None if the run was never started. ``read``: the number of logs that were read. ``partly``: paths of
    logs that were read only at their beginning and end. ``problems``: logs that could not be read, and why.
    """

    run: Run
    attempt: Attempt | None
    diagnosis: Diagnosis
    failing: FailedRank | None
    read: int
    partly: Sequence[str] = ()
    problems: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """What ``doctor RUN --json`` prints."""
        attempt, diagnosis = self.attempt, self.diagnosis
        laggard = diagnosis.laggard
        return {
            "schema": SCHEMA,
            "run_id": self.run.id,
            "state": self.run.state,
            "attempt": attempt.number if attempt else None,
            "cause": attempt.cause if attempt else None,
            "reason": attempt.reason if attempt else self.run.reason,
            "root": match_json(diagnosis.root) if diagnosis.root else None,
            "others": [match_json(match) for match in diagnosis.others],
            "laggard": {"ranks": list(laggard.ranks), "why": laggard.why} if laggard else None,
            "ordered": diagnosis.ordered,
            "inherited": dict(attempt.inherited) if attempt else {},
            "failing": self.failing.to_dict() if self.failing else None,
            "logs": {"read": self.read, "partly": list(self.partly), "problems": list(self.problems)},
        }


def match_json(match: PatternMatch) -> dict[str, Any]:
    """FOUND of the JSON contract. ``at_by``: whether ``at`` is the time of the line or of its process's end."""
    first = match.first
    return {
        "name": first.name,
        "role": first.role,
        "cause": first.cause,
        "fix": first.fix,
        "line": first.text,
        "log": first.origin,
        "rank": first.rank,
        "host": first.host,
        "at": iso(first.at),
        "at_by": None if first.at is None else "line" if first.exact else "exit",
        "count": match.count,
        "ranks": list(match.ranks),
    }


def diagnose(
    workspace: Workspace, run_id: str, number: int | None = None, live: Live | None = None
) -> AttemptDiagnosis:
    """Find out from its logs and journals why an attempt failed, or why it does not train.

    Args:
        workspace: Where the run is.
        run_id: The run.
        number: The attempt, counted from 1; None: the newest one if Slurm has suspended its job, else the last one
            that failed, else the newest one.
        live: What Slurm says of the run's job, if it is not over.

    Raises:
        RunNotFound: The run has no such attempt.
    """
    # The journals may have grown since the last sync. Slurm was already asked when the run was looked up.
    observe(workspace, [run_id], ask_slurm=False)
    run = workspace.store.load(run_id)
    assert run is not None
    is_suspended = live is not None and live.state == SUSPENDED
    attempt = run.newest if is_suspended and number is None else _choose_attempt(run, number)
    if attempt is None:
        return AttemptDiagnosis(run=run, attempt=None, diagnosis=diagnose_hits(()), failing=None, read=0)
    journals = AttemptJournals(workspace, run_id, attempt)
    logs = AttemptLogs(journals, run.attempts)
    hits = [*logs.hits(workspace, run_id, attempt), *journals.hits()]
    if live is not None and is_suspended and attempt is run.newest:
        hits.append(suspended(live.reason, attempt.job_id))
    return AttemptDiagnosis(
        run=run,
        attempt=attempt,
        diagnosis=diagnose_hits(hits, sorted(logs.ranks | set(journals.hosts))),
        failing=journals.failing(),
        read=logs.read,
        partly=logs.partly,
        problems=logs.problems,
    )


def _choose_attempt(run: Run, number: int | None) -> Attempt | None:
    if number is not None:
        chosen = next((attempt for attempt in run.attempts if attempt.number == number), None)
        if chosen is None:
            raise RunNotFound(f"run {run.id} has no attempt {number}; it has {len(run.attempts)}")
        return chosen
    # Not simply the newest: the question is not about an attempt that runs now, after a failure.
    failed = [attempt for attempt in run.attempts if attempt.ended and attempt.cause != "completed"]
    return failed[-1] if failed else run.newest
