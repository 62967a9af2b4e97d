"""Why a run is in its state: the one answer of ``why``, ``doctor RUN``, ``show``, ``top`` and Python."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import PathError, RunNotFound
from slurmtrain.model.diagnosis import answers
from slurmtrain.model.diagnosis.answers import (
    Activity,
    Alternative,
    StateAnswer,
    describe_alternative,
    describe_queue,
    sooner,
)
from slurmtrain.model.diagnosis.root_cause import diagnose_hits
from slurmtrain.model.experiment.values import parse_duration
from slurmtrain.model.query.fields import iso
from slurmtrain.model.run.events.agent_events import RanksStopping
from slurmtrain.model.run.events.command_events import JobObserved
from slurmtrain.model.run.job_state import HELD, SUSPENDED
from slurmtrain.model.run.layout import attempt_of
from slurmtrain.model.run.run import ENDED, Attempt, Run
from slurmtrain.ops.diagnose import AttemptDiagnosis, diagnose, suspended
from slurmtrain.ops.shared.relatives import WAITING, open_upstreams
from slurmtrain.ops.shared.views import RunRecord
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.owned_files import user_name

if TYPE_CHECKING:
    from slurmtrain.ops.shared.observe import ListedRuns

# How long Slurm may take for everything that is asked about one run, squeue included.
PATIENCE_S = 5.0
_LEAST_S = 1.0
# These ends are explained by logs and journals.
_EXPLAINED = frozenset({"failed", "lost"})
_PLAIN_ENDS = frozenset({None, "preempted", "timeout", "node_fail", "cancelled", "completed"})
# What Slurm's states of jobs in its queue are.
_QUEUED = HELD | {"PENDING"}
_CANCELLED_BY = re.compile(r"CANCELLED by (\d+)")
# So many runs that one waits for are described.
_UPSTREAMS = 3
# Of files that are appended to all the time, only this much is read, in bytes: some minutes.
_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a run is in its state.

    Attributes:
        headline: The answer in one sentence, without a full stop.
        details: What is known beside it, as sentences.
        advice: What to do, as sentences.
        diagnosis: What logs and journals say of the attempt.
        pending: What Slurm says of its job, as in RUN of the JSON contract; None if it does not wait.
        alternatives: Requests that would start sooner, the soonest first.
        unanswered: What Slurm did not answer, and why; empty if it did.
    """

    headline: str
    details: Sequence[str] = ()
    advice: Sequence[str] = ()
    diagnosis: AttemptDiagnosis
    pending: Mapping[str, Any] | None = None
    alternatives: Sequence[Alternative] = ()
    unanswered: str = ""

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.details, *(f"-> {line}" for line in self.advice)])

    def to_dict(self) -> dict[str, Any]:
        """What ``why RUN --json`` prints."""
        return {
            **self.diagnosis.to_dict(),
            "name": self.diagnosis.run.name,
            "headline": self.headline,
            "details": list(self.details),
            "advice": list(self.advice),
            "pending": self.pending,
            "sooner": [each.to_dict() for each in self.alternatives],
            "unanswered": self.unanswered or None,
        }


def shown_json(
    workspace: Workspace, runs: ListedRuns, run_id: str, explanation: Explanation | None = None
) -> dict[str, Any]:
    """RUN as ``show --json`` prints it: all details, and why it is in its state.

    Args:
        workspace: Where the run is.
        runs: The runs as they were just observed.
        run_id: The run.
        explanation: Why it is in its state, if that is known already.

    Raises:
        RunNotFound: Its directory was deleted.
    """
    # Imported here: the answer alone needs none of it.
    from slurmtrain.ops.shared.run_details import show_json

    run = workspace.store.load(run_id)
    if run is None:
        raise _gone(run_id)
    facts = show_json(workspace, runs[run_id], run)
    return {**facts, "why": (explanation or explain(workspace, runs, run_id, ask=False)).headline}


def _gone(run_id: str) -> RunNotFound:
    return RunNotFound(f"run {run_id} is gone: its directory was deleted")


def explain(
    workspace: Workspace, runs: ListedRuns, run_id: str, number: int | None = None, *, ask: bool = True
) -> Explanation:
    """Find out why a run is in its state.

    Args:
        workspace: Where the run is.
        runs: The runs as they were just observed.
        run_id: The run.
        number: The attempt to explain, counted from 1; None: the run as it is now.
        ask: Ask Slurm about a waiting job, for at most some seconds, and read the logs of a run that has not failed;
            otherwise only what the one sentence needs is read.

    Raises:
        RunNotFound: The run has no such attempt, or its directory was deleted.
    """
    listed = runs.fetch([run_id]).get(run_id)
    run = workspace.store.load(run_id)
    if listed is None or run is None:
        raise _gone(run_id)
    record, attempt, live = RunRecord(workspace, listed), run.newest, listed.live
    if number is not None and not (attempt is not None and attempt.number == number and not attempt.ended):
        diagnosis = diagnose(workspace, run_id, number, live)
        assert diagnosis.attempt is not None
        ended = diagnosis.attempt.cause or diagnosis.attempt.state
        return Explanation(headline=diagnosis.headline or f"attempt {number}: {ended}", diagnosis=diagnosis)
    nothing = AttemptDiagnosis(run=run, attempt=attempt, diagnosis=diagnose_hits(()), failing=None, read=0)
    is_readable = not run.unreadable and record["deleted_at"] is None
    if is_readable and run.state in WAITING:
        return _explain_waiting(workspace, runs, record, run, nothing, ask=ask)
    is_suspended = live is not None and live.state == SUSPENDED
    needs_logs = is_readable and (run.state in _EXPLAINED or (ask and run.state != "cancelled"))
    diagnosis = nothing
    if needs_logs and attempt is not None:
        diagnosis = diagnose(workspace, run_id, attempt.number, live)
    if run.state in _EXPLAINED and is_readable:
        return Explanation(headline=diagnosis.headline or run.reason, diagnosis=diagnosis)
    if is_suspended and live is not None:
        stop = suspended(live.reason, listed.job_id)
        return Explanation(headline=stop.cause, advice=[stop.fix], diagnosis=diagnosis)
    if run.state in ENDED or not is_readable or attempt is None:
        canceller = "" if run.cancelled or run.state != "cancelled" else _canceller(workspace, run)
        answer = answers.ended(record, run.attempts, canceller)
    else:
        activity = replace(read_activity(workspace, run_id, attempt), limit_at=_limit_at(workspace, record, attempt))
        answer = answers.running(record, attempt, activity, time.time(), _stopping(workspace, run, attempt))
    return Explanation(**asdict(answer), diagnosis=diagnosis)


def _limit_at(workspace: Workspace, record: RunRecord, attempt: Attempt) -> float | None:
    """When an attempt reaches its time limit, in seconds since 1970; None: it has none, or that is unknown."""
    if record.listed.live is not None and (job := workspace.scheduler.queue().job(attempt.job_id)) is not None:
        return job.ends_at
    with contextlib.suppress(ValueError):
        if attempt.started_at is not None:
            return attempt.started_at + parse_duration(record["resources"].get("time"))
    return None


def _stopping(workspace: Workspace, run: Run, attempt: Attempt) -> str:
    """Why the ranks of a running attempt were told to stop; empty: they were not, or have been started again since."""
    if run.cancelled:
        return "it was cancelled"
    since = max((restart["at"] for restart in attempt.restarts), default=0.0)
    stops = [
        event.payload.why
        for event in workspace.store.events(run.id, RanksStopping)
        if attempt_of(event.source) == attempt.key and event.time > since
    ]
    return stops[-1] if stops else ""


def _canceller(workspace: Workspace, run: Run) -> str:
    """Who cancelled the job of a run in Slurm, if accounting says so: ``CANCELLED by 1001``."""
    states = [event.payload.state or "" for event in workspace.store.events(run.id, JobObserved)]
    cancelled = [match for match in map(_CANCELLED_BY.fullmatch, states) if match]
    return user_name(int(cancelled[-1][1])) if cancelled else ""


def _explain_waiting(
    workspace: Workspace, runs: ListedRuns, record: RunRecord, run: Run, nothing: AttemptDiagnosis, *, ask: bool
) -> Explanation:
    """Why a run waits; with what Slurm says of its job, and what would start sooner."""
    answer, live, now = answers.waiting(record), record.listed.live, time.time()
    before = next((each for each in reversed(run.attempts) if each.ended), None)
    is_crashed = ask and run.state == "requeued" and before is not None and before.cause not in _PLAIN_ENDS
    diagnosis = diagnose(workspace, run.id, before.number) if is_crashed and before is not None else nothing
    details, advice = [*answer.details, *_upstreams(workspace, runs, run)], list(answer.advice)
    if run.newest is not None and run.newest.restarted_by == "sync":
        from slurmtrain.ops.doctor import is_watched

        advice += [] if is_watched(workspace.root) else ["no `slurmtrain watch` is running: `slurmtrain sync` does it"]
    alternatives: Sequence[Alternative] = ()
    unanswered = workspace.scheduler.problem if run.executor == "slurm" and live is None else ""
    if unanswered and run.newest is not None and not run.reason:
        at = iso(run.newest.submitted_at)
        answer = StateAnswer(
            headline=f"it waits: its job {run.newest.job_id} was submitted {at}, and Slurm does not answer"
        )
    if ask and live is not None and run.newest is not None and live.state in _QUEUED:
        from slurmtrain.slurm.queue_place import ask_queue

        patience_s = max(_LEAST_S, PATIENCE_S - workspace.scheduler.asked_for_s)
        facts = ask_queue(run.newest.job_id, live.code, _script_of(workspace, run), live.starts_at, patience_s)
        names = {job.id: job.name for job in workspace.scheduler.queue().jobs.values()}
        alternatives, unanswered = sooner(facts, live.code, live.starts_at, now), facts.unanswered
        since = before.ended_at if run.state == "requeued" and before is not None else run.newest.submitted_at
        details += describe_queue(facts, live.code, None if since is None else now - since, names)
        advice += _advice_on(alternatives, record, now, names)
    return Explanation(
        headline=answer.headline,
        details=details,
        advice=advice,
        diagnosis=diagnosis,
        pending=record["pending"],
        alternatives=alternatives,
        unanswered=unanswered,
    )


def _upstreams(workspace: Workspace, runs: ListedRuns, run: Run) -> Iterator[str]:
    """Why the runs that a run waits for have not ended."""
    listed = runs.fetch([run.id])
    for upstream in list(runs.fetch(open_upstreams(workspace, listed)).values())[:_UPSTREAMS]:
        reason = RunRecord(workspace, upstream).reason
        yield f"{upstream.name} ({upstream.id}) is {upstream.state}" + (f": {reason}" if reason else "")


def _advice_on(
    alternatives: Sequence[Alternative], record: Mapping[str, Any], now: float, names: Mapping[str, str]
) -> list[str]:
    """What would start sooner, and how to have it. ``names``: of this user's jobs, by id."""
    lines = [describe_alternative(each, now, names) for each in alternatives]
    if alternatives:
        again = "resume" + " --from-start" * (record["checkpoint"] is None)
        cancel, then = f"`slurmtrain cancel {record['id']}`", f"`slurmtrain {again} {record['id']}"
        lines.append(f"to change it: {cancel}, then {then} {alternatives[0].override}`")
    return lines


def _script_of(workspace: Workspace, run: Run) -> str:
    """The batch script of the newest job of a run; empty if it cannot be read, or is of several components."""
    from slurmtrain.runtime.environment.node import read_launch
    from slurmtrain.system.owned_files import read_checked

    assert run.newest is not None
    submission = workspace.root.run(run.id).submission(run.newest.submission)
    with contextlib.suppress(PathError, OSError):
        launch = read_launch(submission)
        array = launch.array if launch is not None else None
        folder = submission.submitit if array is None else workspace.root.array(array[0]).submitit
        for path in folder.glob("*_submission.sh"):
            text = read_checked(path).decode(errors="replace")
            return "" if "#SBATCH hetjob" in text else text
    return ""


def read_activity(workspace: Workspace, run_id: str, attempt: Attempt) -> Activity:
    """What the files of an attempt show of the last minutes.

    Args:
        workspace: Where the run is.
        run_id: Its id.
        attempt: The attempt.
    """
    from slurmtrain.model.run.layout import METRICS
    from slurmtrain.system.journal_files import last_points

    directory = workspace.root.run(run_id).attempt(attempt.job_id, attempt.restart)
    times = [point.time for point in last_points(directory.path / METRICS, _TAIL_BYTES)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    gpus: dict[str, float] = {}
    cpus: dict[str, float] = {}
    for node, host in attempt.hosts.items():
        used: dict[str, list[float]] = {}
        for point in last_points(directory.system_metrics(int(node)), _TAIL_BYTES):
            for name, value in point.metrics.items():
                used.setdefault(name, []).append(value)
        for name, values in used.items():
            if name.startswith("gpu_") and name.endswith("_utilization_percentage"):
                gpus[f"{host} GPU {name.split('_')[1]}"] = fmean(values)
            elif name == "cpu_utilization_percentage":
                cpus[host] = fmean(values)
    return Activity(
        last_step_at=times[-1] if times else None, widest_gap_s=max(gaps, default=None), gpus=gpus, cpus=cpus
    )
