"""Submitting a spec: its runs are created as a whole, then their jobs are submitted.

On Slurm, runs that request the same are the elements of one job array; other jobs are submitted one after the other.

Whatever fails after the first run is created, the error says which runs exist (:class:`SubmitFailed`). If none does, it
is the original one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slurmtrain.errors import (
    PathError,
    RunCancelled,
    SlurmtrainError,
    SubmissionUncertain,
    SubmitFailed,
    SubmitInterrupted,
)
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.lineage import AFTER, FORK, Parent, Upstream
from slurmtrain.ops.shared.next_attempts import HeldRun, NewAttempt, SweepLimit, check_executor, secret_values
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.shared_jobs import describe_excess, group_attempts
from slurmtrain.ops.shared.start import start
from slurmtrain.ops.shared.start_order import only_one
from slurmtrain.ops.shared.trackers import check_trackers
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.chained_runs import Chain, with_start_points
from slurmtrain.ops.submit.code_snapshots import with_snapshots
from slurmtrain.ops.submit.command_script import check_script, check_shell_script
from slurmtrain.ops.submit.creation import Batch, check_room, create, remove_runs
from slurmtrain.ops.submit.notes import adopted_checkpoint, notes_on, notes_on_pack
from slurmtrain.runtime.environment.process_limits import make_room
from slurmtrain.specfile import PlannedRun, SpecFile
from slurmtrain.system.process import StopSignal

if TYPE_CHECKING:
    from slurmtrain.ops.submit.entrances import HeldKey

# How many runs a message names.
_NAMED = 10


class Submission(NamedTuple):
    """What was submitted: the ids of the runs, in the order of the sweep, notes for the user, and the sweep's id."""

    run_ids: list[str]
    notes: list[str]
    sweep: str | None = None


def submit_sweeps(
    workspace: Workspace,
    specs: Sequence[SpecFile],
    sweeps: Sequence[str | None],
    *,
    executor: str,
    ids: list[list[str | None]] | None = None,
    held: HeldKey | None = None,
) -> Submission:
    """Submit all runs of specs that have been read.

    Args:
        workspace: where the runs go.
        specs: the specs.
        sweeps: for each spec, the id that its runs share, also with earlier runs; None: they share none.
        executor: ``slurm`` or ``local``.
        ids: for each spec, the ids of its runs, None for one that is to be created; None: all are.
        held: the idempotency key, if there is one.

    Raises:
        SlurmtrainError: as :func:`submit_specs`.
    """
    ids = [[None] * len(spec.runs) for spec in specs] if ids is None else ids
    chain = Chain(workspace, specs, executor)
    order = [number for number in chain.order() if None in ids[number]]
    with only_one(workspace, [run.plan.spec for spec in specs for run in spec.runs]):
        chain.resolve(order)
        return _Work(
            workspace=workspace, specs=specs, executor=executor, chain=chain, order=order, sweeps=sweeps, ids=ids,
            held=held,
        ).submit()  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Work:
    """The runs of a submission that are to be created and started, spec by spec.

    ``chain``: the runs that they start after, resolved for the specs in ``order``: the numbers of the specs whose
    runs are to be created. ``sweeps``: for each spec, the id that its runs share, if they do. ``ids``: for each
    spec, the ids of its runs, None for one that is to be created. ``held``: the idempotency key, if there is one.
    ``created``: the runs that have been created. ``submitted``: the ids of the runs that have been submitted.
    ``notes``: for the user.
    """

    workspace: Workspace
    specs: Sequence[SpecFile]
    executor: str
    chain: Chain
    order: Sequence[int]
    sweeps: Sequence[str | None]
    ids: list[list[str | None]]
    held: HeldKey | None = None
    created: list[HeldRun] = field(default_factory=list)
    submitted: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def submit(self) -> Submission:
        """Create the missing runs, and submit their jobs; returns all runs. Raises as :func:`submit_specs`."""
        batches = [self._batch(number) for number in self.order]
        self._check(batches, [planned.plan for batch in batches for planned in batch.runs])
        if self.executor == "slurm":
            # Updates the node ledger: what the journals of other runs say about nodes by now.
            observe(self.workspace, ask_slurm=False)
        # After the checks, since it stores snapshots in the runs root.
        batches = [self._with_code(batch) for batch in batches]
        # Each run's lock is an open file until it is submitted.
        make_room(sum(len(batch.runs) for batch in batches))
        with ExitStack() as locks:
            # From here on something may exist: an interruption is carried out between two runs, and says what does.
            stop = locks.enter_context(StopSignal())
            for batch, runs in self._create(batches, locks):
                for group, limit in self._groups(batch, runs):
                    self._check_interrupted(stop)
                    self._start(group, limit)
            self._check_interrupted(stop)
        run_ids = [run_id for ids in self.ids for run_id in ids if run_id is not None]
        return Submission(run_ids, self.notes, self.sweeps[0] if len(self.specs) == 1 else None)

    def _batch(self, number: int) -> Batch:
        """The runs of a spec that are to be created, with the checkpoints of others that they are to begin with."""
        spec = self.specs[number]
        missing = [run for run, run_id in zip(spec.runs, self.ids[number], strict=True) if run_id is None]
        batch = Batch(spec=spec, runs=missing, executor=self.executor, sweep=self.sweeps[number])
        if all(planned.plan.spec.start_from is None for planned in missing):
            return batch
        runs, points = with_start_points(self.workspace, missing)
        return replace(batch, runs=runs, start_points=points)

    def _check(self, batches: Sequence[Batch], plans: Sequence[Plan]) -> None:
        """Check all that can be checked before anything is created. Raises SlurmtrainError."""
        for batch in batches:
            workdirs = sorted({planned.plan.workdir for planned in batch.runs})
            if missing := next((workdir for workdir in workdirs if not Path(workdir).is_dir()), None):
                raise PathError(f"the working directory {missing} does not exist; create it, or set 'workdir'")
            for planned in batch.runs:
                secret_values(planned.plan, planned.secrets)
            check_executor(self.workspace, self.executor, [run.plan for run in batch.runs], batch.spec.pack)
        check_trackers(plans)
        for plan in plans:
            # With a snapshot from before, the code in the working directory now is not the code that runs.
            if plan.code is None:
                check_script(plan, self.executor)
                check_shell_script(plan)
        # Last, as it makes the runs root: whatever is refused above leaves nothing.
        self.workspace.prepare()
        check_room(self.workspace, len(plans))

    def _with_code(self, batch: Batch) -> Batch:
        """The runs with the snapshots of the code that they are to execute; adds notes on them."""
        undecided = [planned.plan for planned in batch.runs if not planned.has_code]
        plans, about_code = with_snapshots(self.workspace, undecided, batch.spec.files)
        snapshotted = iter(plans)
        runs = [planned if planned.has_code else replace(planned, plan=next(snapshotted)) for planned in batch.runs]
        self._note([*map(str, batch.spec.warnings), *notes_on_pack(batch.spec.pack, self.executor)])
        # With a snapshot from before, the files in the working directory now are not those that the code has.
        self._note(notes_on(self.workspace, [planned.plan for planned in runs], self.executor, undecided))
        self._note(about_code)
        return replace(batch, runs=runs)

    def _create(self, batches: Sequence[Batch], locks: ExitStack) -> list[tuple[Batch, list[HeldRun]]]:
        """Create the runs of all batches, or none. Raises PathError."""
        created: list[tuple[Batch, list[HeldRun]]] = []
        try:
            for number, batch in zip(self.order, batches, strict=True):
                places = [index for index, run_id in enumerate(self.ids[number]) if run_id is None]
                # Specs before this one have been created by now.
                ids = [[run_id or "" for run_id in each] for each in self.ids]
                upstreams = [self.chain.upstreams((number, index), ids) for index in places]
                runs = [
                    replace(planned, parents=[*planned.parents, *_parents_after(planned, after)])
                    for planned, after in zip(batch.runs, upstreams, strict=True)
                ]

                def announce(run_ids: Sequence[str], number: int = number, places: Sequence[int] = places) -> None:
                    for index, run_id in zip(places, run_ids, strict=True):
                        self.ids[number][index] = run_id
                    if self.held is not None:
                        self.held.store([run_id or "" for ids in self.ids for run_id in ids], self.sweeps)

                batch = replace(batch, runs=runs, upstreams=upstreams)
                created.append((batch, create(self.workspace, batch, locks, announce=announce)))
        except BaseException:
            remove_runs(self.workspace, [run.directory for _, runs in created for run in runs])
            raise
        self.created = [run for _, runs in created for run in runs]
        return created

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
        groups = group_attempts(self.workspace, attempts, dict.fromkeys((run.id for run in runs), limit))
        self._note(describe_excess(limit.parallel, [len(group) for group, _ in groups], limit.pack))
        return groups

    def _start(self, group: Sequence[NewAttempt], limit: SweepLimit) -> None:
        """Submit attempts that share a submission. Raises SlurmtrainError: what is left."""
        try:
            self._note(start(self.workspace, group, command="submit", at_once=limit.parallel, pack=limit.pack))
            for each in group:
                self._note(adopted_checkpoint(each.run, each.plan))
        except RunCancelled as error:
            # The run is there, as the user wants it; the others of its sweep were not cancelled.
            self.notes.append(str(error))
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (whatever it is, it says what exists)
            failure = self._give_up(error, [each.run.id for each in group])
            raise failure from (None if failure is error else error)
        self.submitted |= {each.run.id for each in group}

    def _note(self, notes: Sequence[str]) -> None:
        self.notes += [note for note in dict.fromkeys(notes) if note not in self.notes]

    def _check_interrupted(self, stop: StopSignal) -> None:
        if stop.raised is not None:
            raise self._give_up(SubmitInterrupted("interrupted"))

    def _give_up(self, error: BaseException, failed: Sequence[str] = ()) -> SlurmtrainError:
        """Remove the runs that have no job, and describe what is left.

        Args:
            error: why.
            failed: the runs that could not be started.
        """
        # If a run's job may exist, its directory must stay: 'sync' adopts the job.
        is_without_job = isinstance(error, SlurmtrainError) and not isinstance(error, SubmissionUncertain)
        uncertain = [] if is_without_job else list(failed)
        rest = [run.directory for run in self.created if run.id not in self.submitted and run.id not in uncertain]
        without_job = [directory.id for directory in remove_runs(self.workspace, rest)]
        if not (self.submitted or uncertain or without_job):
            if isinstance(error, SubmitInterrupted):
                return SubmitInterrupted("interrupted; nothing was submitted")
            assert isinstance(error, SlurmtrainError)
            # Not a new one: some classes are made from more than a message.
            error.args = (f"{error}; nothing was created",)
            return error
        removed = len(rest) - len(without_job)
        submitted = [run.id for run in self.created if run.id in self.submitted]
        return describe_failed_submission(error, submitted, removed, uncertain=uncertain, without_job=without_job)


def _parents_after(planned: PlannedRun, after: Sequence[Upstream]) -> Iterator[Parent]:
    """How a run comes from those that it starts after: with the checkpoint of one it may begin, too."""
    start_from = planned.plan.spec.start_from
    is_forked = any(parent.relation == FORK for parent in planned.parents)
    for upstream in after:
        if start_from is not None and not is_forked and start_from.run in (upstream.name, upstream.run):
            yield Parent(upstream.run, FORK, start_from.step if isinstance(start_from.step, int) else None)
        yield Parent(upstream.run, AFTER)


def describe_failed_submission(
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
        f"perhaps submitted: {name_runs(uncertain)} ('slurmtrain sync' finds out, and submits them if they were not)"
        if uncertain
        else "",
        f"created, but neither submitted nor removed: {name_runs(without_job)} ('slurmtrain sync' submits them)"
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
