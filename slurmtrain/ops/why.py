"""Why a run is in its state: the one answer of ``why``, ``doctor RUN``, ``show``, ``top`` and Python."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import PathError
from slurmtrain.model.diagnosis import answers
from slurmtrain.model.diagnosis.answers import Activity, StateAnswer
from slurmtrain.model.diagnosis.root_cause import diagnose_hits
from slurmtrain.model.diagnosis.waits import Alternative, describe_alternative, describe_queue, sooner
from slurmtrain.model.run.job_state import SUSPENDED
from slurmtrain.model.run.run import ENDED, Attempt, Run
from slurmtrain.ops.diagnose import AttemptDiagnosis, diagnose
from slurmtrain.ops.shared.views import RunRecord
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.registry.rows import Listed

# How long Slurm may take for everything that is asked about one job.
_ASK_S = 4.0
_WAITING = frozenset({"created", "pending", "requeued"})
# These ends are explained by logs and journals.
_EXPLAINED = frozenset({"failed", "lost"})
_PLAIN_ENDS = frozenset({None, "preempted", "timeout", "node_fail", "cancelled", "completed"})
# Of files that are appended to all the time, only this much is read, in bytes: some minutes.
_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a run is in its state.

    Attributes:
        record: RUN of the JSON contract.
        answer: In words.
        diagnosis: What logs and journals say of the attempt.
        alternatives: Requests that would start sooner, the soonest first.
        unanswered: What Slurm did not answer, and why; empty if it did.
    """

    record: Mapping[str, Any]
    answer: StateAnswer
    diagnosis: AttemptDiagnosis
    alternatives: Sequence[Alternative] = ()
    unanswered: str = ""

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        return self.answer.headline

    @property
    def details(self) -> Sequence[str]:
        """What is known beside it, as sentences."""
        return self.answer.details

    @property
    def advice(self) -> Sequence[str]:
        """What to do, as sentences."""
        return self.answer.advice

    def to_dict(self) -> dict[str, Any]:
        """What ``why RUN --json`` prints."""
        return {
            **self.diagnosis.to_dict(),
            "name": self.record["name"],
            "headline": self.headline,
            "details": list(self.details),
            "advice": list(self.advice),
            "pending": self.record["pending"],
            "sooner": [each.to_dict() for each in self.alternatives],
            "unanswered": self.unanswered or None,
        }


def explain(workspace: Workspace, listed: Listed, number: int | None = None, *, ask: bool = True) -> Explanation:
    """Find out why a run is in its state.

    Args:
        workspace: Where the run is.
        listed: The run as it was just observed.
        number: The attempt to explain, counted from 1; None: the run as it is now.
        ask: Ask Slurm about a waiting job, for at most some seconds; otherwise only files of the run are read.

    Raises:
        RunNotFound: The run has no such attempt.
    """
    record = RunRecord(workspace, listed)
    run = workspace.store.load(listed.id)
    assert run is not None
    attempt = run.newest
    if number is not None and not (attempt is not None and attempt.number == number and not attempt.ended):
        diagnosis = diagnose(workspace, run.id, number, listed.live)
        return Explanation(record=record, answer=_of_attempt(diagnosis), diagnosis=diagnosis)
    nothing = AttemptDiagnosis(run=run, attempt=attempt, diagnosis=diagnose_hits(()), failing=None, read=0)
    if run.unreadable or record["deleted_at"] is not None:
        return Explanation(record=record, answer=answers.ended(record, run.attempts), diagnosis=nothing)
    if run.state in _WAITING:
        return _explain_waiting(workspace, record, run, nothing, ask=ask)
    if run.state in _EXPLAINED:
        diagnosis = diagnose(workspace, run.id, None, listed.live)
        return Explanation(record=record, answer=StateAnswer(headline=diagnosis.headline), diagnosis=diagnosis)
    if run.state in ENDED or attempt is None:
        diagnosis = diagnose(workspace, run.id, attempt.number if attempt else None) if attempt else nothing
        return Explanation(record=record, answer=answers.ended(record, run.attempts), diagnosis=diagnosis)
    diagnosis = diagnose(workspace, run.id, attempt.number, listed.live)
    if listed.live is not None and listed.live.state == SUSPENDED:
        return Explanation(record=record, answer=StateAnswer(headline=diagnosis.headline), diagnosis=diagnosis)
    activity = read_activity(workspace, run.id, attempt)
    answer = answers.running(record, attempt, activity, time.time(), cancelled=run.cancelled)
    return Explanation(record=record, answer=answer, diagnosis=diagnosis)


def _of_attempt(diagnosis: AttemptDiagnosis) -> StateAnswer:
    attempt = diagnosis.attempt
    assert attempt is not None
    return StateAnswer(headline=diagnosis.headline or f"attempt {attempt.number} is {attempt.state}")


def _explain_waiting(
    workspace: Workspace, record: RunRecord, run: Run, nothing: AttemptDiagnosis, *, ask: bool
) -> Explanation:
    """Why a run waits; with what Slurm says of its job, and what would start sooner."""
    answer, live, now = answers.waiting(record), record.listed.live, time.time()
    before = next((each for each in reversed(run.attempts) if each.ended), None)
    diagnosis = nothing
    if run.state == "requeued" and before is not None and before.cause not in _PLAIN_ENDS:
        diagnosis = diagnose(workspace, run.id, before.number)
    if not ask or live is None or run.newest is None or live.state == "RUNNING":
        return Explanation(record=record, answer=answer, diagnosis=diagnosis)
    from slurmtrain.slurm.queue_place import ask_queue

    facts = ask_queue(run.newest.job_id, live.code, _script_of(workspace, run), live.starts_at, _ASK_S)
    since = run.newest.submitted_at
    alternatives = sooner(facts, live.code, live.starts_at, now)
    names = {job.id: job.name for job in workspace.scheduler.queue().jobs.values()}
    details = describe_queue(facts, live.code, None if since is None else now - since)
    advice = [*answer.advice, *_advice_on(alternatives, record, now, names)]
    answer = StateAnswer(headline=answer.headline, details=[*answer.details, *details], advice=advice)
    return Explanation(
        record=record, answer=answer, diagnosis=diagnosis, alternatives=alternatives, unanswered=facts.unanswered
    )


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
