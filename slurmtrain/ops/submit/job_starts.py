"""Submitting the jobs of runs that have been created, and what is left of them if that fails."""

from __future__ import annotations

from collections.abc import Sequence

from slurmtrain.errors import RunCancelled, SlurmtrainError, SubmissionUncertain, SubmitFailed, SubmitInterrupted
from slurmtrain.ops.shared.attempts import (
    HeldRun,
    NewAttempt,
    SweepLimit,
    describe_excess,
    group_attempts,
    secret_values,
)
from slurmtrain.ops.shared.interrupt import StopSignal
from slurmtrain.ops.shared.start import start
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.creation import Batch, remove
from slurmtrain.ops.submit.notes import adopted_checkpoint

# How many runs a message names.
_NAMED = 10


class JobStarts:
    """The submissions of the jobs of new runs, one after the other; a job array is one submission.

    Args:
        workspace: where the runs are.
        batches: the runs of each spec, which have been created.
        notes: what the user is to know already, to which it adds.
    """

    def __init__(
        self, workspace: Workspace, batches: Sequence[tuple[Batch, Sequence[HeldRun]]], notes: list[str]
    ) -> None:
        self._workspace = workspace
        self._batches = batches
        self._runs = [run for _, runs in batches for run in runs]
        self._notes = notes
        self._submitted: set[str] = set()

    def start_all(self, stop: StopSignal) -> list[str]:
        """Submit the job of each run, until ``stop`` is raised; returns notes. Raises SlurmtrainError: what is left."""
        for batch, runs in self._batches:
            for group, limit in self._groups(batch, runs):
                if stop.raised is not None:
                    raise self._give_up(SubmitInterrupted("interrupted"))
                self._start(group, limit)
        if stop.raised is not None:
            raise self._give_up(SubmitInterrupted("interrupted"))
        return self._notes

    def _groups(self, batch: Batch, runs: Sequence[HeldRun]) -> Sequence[tuple[Sequence[NewAttempt], SweepLimit]]:
        """The attempts of a spec that share a submission, in the order of the first of each."""
        limit = SweepLimit(batch.sweep, batch.spec.parallel, batch.spec.pack)
        # Local runs of a sweep begin one behind the other.
        before = [None, *(run.id for run in runs)]
        attempts = [
            NewAttempt(
                held=run,
                plan=planned.plan,
                executor=batch.executor,
                number=1,
                secrets=secret_values(planned.plan, planned.secrets),
                is_as_created=True,
                turn=limit.turn(batch.executor, behind),
            )
            for run, planned, behind in zip(runs, batch.runs, before, strict=False)
        ]
        if batch.executor != "slurm":
            return [([each], SweepLimit()) for each in attempts]
        groups = group_attempts(self._workspace, attempts, dict.fromkeys((run.id for run in runs), limit))
        self._note(describe_excess(limit.parallel, [len(group) for group, _ in groups], limit.pack))
        return groups

    def _start(self, group: Sequence[NewAttempt], limit: SweepLimit) -> None:
        """Submit attempts that share a submission."""
        try:
            self._note(start(self._workspace, group, command="submit", at_once=limit.parallel, pack=limit.pack))
            for each in group:
                self._note(adopted_checkpoint(each.run, each.plan))
        except RunCancelled as error:
            # The run is there, as the user wants it; the others of its sweep were not cancelled.
            self._notes.append(str(error))
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (whatever it is, it says what exists)
            failure = self._give_up(error, [each.run.id for each in group])
            raise failure from (None if failure is error else error)
        self._submitted |= {each.run.id for each in group}

    def _note(self, notes: Sequence[str]) -> None:
        self._notes += [note for note in notes if note not in self._notes]

    def _give_up(self, error: BaseException, failed: Sequence[str] = ()) -> SlurmtrainError:
        """Remove the runs that have no job, and describe what is left.

        Args:
            error: why.
            failed: the runs that could not be started.
        """
        # If a run's job may exist, its directory must stay: 'sync' adopts the job.
        uncertain = [] if _has_no_job(error) else list(failed)
        rest = [run.directory for run in self._runs if run.id not in self._submitted and run.id not in uncertain]
        without_job = [directory.id for directory in remove(self._workspace, rest)]
        if not (self._submitted or uncertain or without_job):
            return _nothing_left(error)
        removed = len(rest) - len(without_job)
        submitted = [run.id for run in self._runs if run.id in self._submitted]
        return describe_failure(error, submitted, removed, uncertain=uncertain, without_job=without_job)


def _has_no_job(error: BaseException) -> bool:
    """Whether a start that failed like this has certainly submitted no job."""
    return isinstance(error, SlurmtrainError) and not isinstance(error, SubmissionUncertain)


def _nothing_left(error: BaseException) -> SlurmtrainError:
    if isinstance(error, SubmitInterrupted):
        return SubmitInterrupted("interrupted; nothing was submitted")
    assert isinstance(error, SlurmtrainError)
    # Not a new one: some classes are made from more than a message.
    error.args = (f"{error}; nothing was created",)
    return error


def describe_failure(
    error: BaseException,
    submitted: Sequence[str],
    removed: int,
    *,
    uncertain: Sequence[str] = (),
    without_job: Sequence[str] = (),
) -> SubmitFailed:
    """The error for a submission that failed and has left runs.

    Args:
        error: why it failed.
        submitted: runs whose jobs were submitted.
        removed: how many runs do not exist.
        uncertain: runs whose jobs may have been submitted.
        without_job: runs that have no job, and could not be removed.
    """
    parts = [
        f"submitted: {name_runs(submitted)}" if submitted else "",
        f"perhaps submitted: {name_runs(uncertain)} ('slurmtrain sync' finds out, and submits what was not)"
        if uncertain
        else "",
        f"created, but not submitted, and not removable: {name_runs(without_job)} ('slurmtrain sync' submits what "
        "is left of it)"
        if without_job
        else "",
        f"not created: {removed} run(s)" if removed else "",
    ]
    why = str(error) if isinstance(error, SlurmtrainError) else f"{type(error).__name__}: {error}".removesuffix(": ")
    interrupted = isinstance(error, KeyboardInterrupt | SubmitInterrupted)
    message = f"{'interrupted' if interrupted else why}; {'; '.join(part for part in parts if part)}"
    kind = SubmitInterrupted if interrupted else SubmitFailed
    return kind(message, [*submitted, *uncertain, *without_job])


def name_runs(run_ids: Sequence[str]) -> str:
    """Runs in a message: a few of them, since a sweep may have thousands."""
    more = len(run_ids) - _NAMED
    return ", ".join(run_ids[:_NAMED]) + (f" and {more} more" if more > 0 else "")
