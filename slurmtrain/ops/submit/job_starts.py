"""Submitting the jobs of runs that have been created, and what is left of them if that fails."""

from __future__ import annotations

from collections.abc import Sequence

from slurmtrain.errors import RunCancelled, SlurmtrainError, SubmissionUncertain, SubmitFailed, SubmitInterrupted
from slurmtrain.ops.shared.arrays.grouping import pack_of_group, request_key, split_groups
from slurmtrain.ops.shared.arrays.start_array import Element, start_array
from slurmtrain.ops.shared.arrays.sweep_limits import SweepLimit, describe_excess, share_limit
from slurmtrain.ops.shared.interrupt import StopSignal
from slurmtrain.ops.shared.start import NewAttempt, secret_values, start
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.creation import Batch, NewRun, remove
from slurmtrain.ops.submit.notes import adopted_checkpoint

# How many runs a message names.
_NAMED = 10


class JobStarts:
    """The submissions of the jobs of new runs, one after the other; a job array is one submission.

    Args:
        workspace: where the runs are.
        batches: the runs of each spec.
        notes: what the user is to know already, to which it adds.
    """

    def __init__(
        self, workspace: Workspace, batches: Sequence[tuple[Batch, Sequence[NewRun]]], notes: list[str]
    ) -> None:
        self._workspace = workspace
        self._batches = batches
        self._runs = [run for _, runs in batches for run in runs]
        self._notes = notes
        self._submitted: set[str] = set()
        # The run that was started last.
        self._behind: str | None = None

    def start_all(self, stop: StopSignal) -> list[str]:
        """Submit the job of each run, until ``stop`` is raised; returns notes. Raises SlurmtrainError: what is left."""
        for batch, runs in self._batches:
            self._behind = None
            groups = self._groups(batch, runs)
            sizes = [len(group) for group in groups]
            limit, pack = batch.spec.parallel, batch.spec.pack
            if batch.executor == "slurm":
                self._note(describe_excess(limit, sizes, pack))
            for group, at_once in zip(groups, share_limit(limit, sizes, pack), strict=True):
                if stop.raised is not None:
                    raise self._give_up(SubmitInterrupted("interrupted"))
                self._start_group(batch, group, at_once)
        if stop.raised is not None:
            raise self._give_up(SubmitInterrupted("interrupted"))
        return self._notes

    def _start_group(self, batch: Batch, group: Sequence[NewRun], at_once: int | None) -> None:
        """Submit runs that share a submission."""
        try:
            self._start(batch, group[0]) if len(group) == 1 else self._start_array(batch, group, at_once)
        except RunCancelled as error:
            # The run is there, as the user wants it; the others of its sweep were not cancelled.
            self._notes.append(str(error))
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (whatever it is, it says what exists)
            failure = self._give_up(error, group)
            raise failure from (None if failure is error else error)
        self._submitted |= {run.id for run in group}

    def _groups(self, batch: Batch, runs: Sequence[NewRun]) -> Sequence[Sequence[NewRun]]:
        """The runs of a spec that share a submission, in the order of the first of each."""
        if batch.executor != "slurm" or len(runs) == 1:
            return [[run] for run in runs]
        keyed = [(request_key(run.planned.plan, self._secrets(run), run.upstreams), run) for run in runs]
        size = batch.spec.pack.runs if batch.spec.pack is not None else 1
        return split_groups(keyed, self._workspace.scheduler.max_array_size(), size)

    def _ids(self) -> list[str]:
        """The ids of the runs that have been submitted, in the order of the sweep."""
        return [run.id for run in self._runs if run.id in self._submitted]

    def _start(self, batch: Batch, run: NewRun) -> None:
        notes = start(self._workspace, run.directory, run.lock, self._attempt(batch, run), command="submit")
        self._behind = run.id
        self._note([*notes, *adopted_checkpoint(run.directory, run.planned.plan)])

    def _start_array(self, batch: Batch, runs: Sequence[NewRun], at_once: int | None) -> None:
        elements = [Element(run.directory, run.lock, self._attempt(batch, run)) for run in runs]
        pack = pack_of_group(batch.spec.pack, len(elements))
        self._note(start_array(self._workspace, elements, command="submit", at_once=at_once, pack=pack))
        for run in runs:
            self._note(adopted_checkpoint(run.directory, run.planned.plan))

    def _attempt(self, batch: Batch, run: NewRun) -> NewAttempt:
        limit = SweepLimit(batch.sweep, batch.spec.parallel, batch.spec.pack)
        return NewAttempt(
            plan=run.planned.plan,
            executor=batch.executor,
            number=1,
            secrets=self._secrets(run),
            is_as_created=True,
            turn=limit.turn(batch.executor, self._behind),
        )

    @staticmethod
    def _secrets(run: NewRun) -> dict[str, str]:
        return secret_values(run.planned.plan, run.planned.secrets)

    def _note(self, notes: Sequence[str]) -> None:
        self._notes += [note for note in notes if note not in self._notes]

    def _give_up(self, error: BaseException, failed: Sequence[NewRun] = ()) -> SlurmtrainError:
        """Remove the runs that have no job, and describe what is left.

        Args:
            error: why.
            failed: the runs that could not be started.
        """
        # If a run's job may exist, its directory must stay: 'sync' adopts the job.
        uncertain = [] if _has_no_job(error) else [run.id for run in failed]
        rest = [run.directory for run in self._runs if run.id not in self._submitted and run.id not in uncertain]
        without_job = [directory.id for directory in remove(self._workspace, rest)]
        if not (self._submitted or uncertain or without_job):
            return _nothing_left(error)
        removed = len(rest) - len(without_job)
        return describe_failure(error, self._ids(), removed, uncertain=uncertain, without_job=without_job)


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
