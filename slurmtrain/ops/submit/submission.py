"""Submitting a spec: its runs are created as a whole, then their jobs are submitted.

On Slurm, runs that request the same are the elements of one job array; other jobs are submitted one after the other.

Whatever fails after the first run is created, the error says which runs exist (:class:`SubmitFailed`). If none does, it
is the original one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from slurmtrain.errors import (
    PathError,
)
from slurmtrain.model.run.chain.upstreams import Upstream
from slurmtrain.model.run.lineage import AFTER, FORK, Parent
from slurmtrain.model.spec.plan import Plan
from slurmtrain.model.spec.spec import Spec
from slurmtrain.ops.shared.attempts import HeldRun, secret_values
from slurmtrain.ops.shared.chain.alone import only_one
from slurmtrain.ops.shared.interrupt import StopSignal
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.start import check_executor
from slurmtrain.ops.shared.trackers import check_trackers
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.chain import Chain
from slurmtrain.ops.submit.code import with_snapshots
from slurmtrain.ops.submit.creation import Batch, check_room, create, remove
from slurmtrain.ops.submit.job_starts import JobStarts
from slurmtrain.ops.submit.notes import notes_on, notes_on_pack
from slurmtrain.ops.submit.script import check_script
from slurmtrain.ops.submit.shell_scripts import check_shell_script
from slurmtrain.ops.submit.start_points import with_start_points
from slurmtrain.ops.submit.submitted_before import HeldKey
from slurmtrain.runtime.environment.limits import make_room
from slurmtrain.specfile import PlannedRun, SpecFile


class Submission(NamedTuple):
    """What was submitted: the ids of the runs, in the order of the sweep, notes for the user, and the sweep's id."""

    run_ids: list[str]
    notes: list[str]
    sweep: str | None = None


def submit_sweeps(
    workspace: Workspace, specs: Sequence[SpecFile], sweeps: Sequence[str | None], *, executor: str
) -> Submission:
    """Submit all runs of specs that have been read.

    Args:
        workspace: where the runs go.
        specs: the specs.
        sweeps: for each spec, the id that its runs share, which may be that of earlier runs; None: they share none.
        executor: ``slurm`` or ``local``.

    Raises:
        SlurmtrainError: as :func:`submit_specs`.
    """
    chain = Chain(workspace, specs, executor)
    order = chain.order()
    ids: list[list[str | None]] = [[None] * len(spec.runs) for spec in specs]
    with only_one(workspace, specs_of(specs)):
        chain.resolve(order)
        return Work(
            workspace=workspace, specs=specs, executor=executor, chain=chain, order=order, sweeps=sweeps, ids=ids
        ).submit()


def specs_of(files: Sequence[SpecFile]) -> list[Spec]:
    """The spec of each run of these files, in order."""
    return [run.plan.spec for file in files for run in file.runs]


@dataclass(slots=True, kw_only=True)
class Work:
    """The runs of a submission that are to be created and started, spec by spec.

    ``chain``: what they start after, resolved for the specs in ``order``: the numbers of those of which runs are to be
    created. ``sweeps``: for each spec, the id that its runs share, if they do. ``ids``: for each spec, the ids of its
    runs, None for one that is to be created. ``held``: the idempotency key, if there is one.
    """

    workspace: Workspace
    specs: Sequence[SpecFile]
    executor: str
    chain: Chain
    order: Sequence[int]
    sweeps: Sequence[str | None]
    ids: list[list[str | None]]
    held: HeldKey | None = None

    def submit(self) -> Submission:
        """Create the missing runs, and submit their jobs; returns all runs. Raises as :func:`submit_specs`."""
        workspace, executor = self.workspace, self.executor
        batches = [_with_start_points(workspace, self._batch(number)) for number in self.order]
        plans = [planned.plan for batch in batches for planned in batch.runs]
        self._check(batches, plans)
        if executor == "slurm":
            # Updates the node ledger: what the journals of other runs say about nodes by now.
            observe(workspace, ask_slurm=False)
        notes: list[str] = []
        for index, batch in enumerate(batches):
            batches[index], about_code = _with_code(workspace, batch)
            plans = [planned.plan for planned in batches[index].runs]
            notes += [
                *map(str, batch.spec.warnings),
                *notes_on_pack(batch.spec.pack, executor),
                *notes_on(workspace, plans, executor),
                *about_code,
            ]
        make_room(sum(len(batch.runs) for batch in batches))
        with ExitStack() as locks:
            # From here on something may exist: an interruption is carried out between two runs, and says what does.
            stop = locks.enter_context(StopSignal())
            runs = self._create(batches, locks)
            created = list(zip(batches, runs, strict=True))
            notes = JobStarts(workspace, created, list(dict.fromkeys(notes))).start_all(stop)
        run_ids = [run_id for ids in self.ids for run_id in ids if run_id is not None]
        return Submission(run_ids, notes, self.sweeps[0] if len(self.specs) == 1 else None)

    def _batch(self, number: int) -> Batch:
        """The runs of a spec that are to be created."""
        spec = self.specs[number]
        missing = [run for run, run_id in zip(spec.runs, self.ids[number], strict=True) if run_id is None]
        return Batch(spec=spec, runs=missing, executor=self.executor, sweep=self.sweeps[number])

    def _check(self, batches: Sequence[Batch], plans: Sequence[Plan]) -> None:
        """Check all that can be checked before anything is created. Raises SlurmtrainError."""
        for batch in batches:
            _check_workdirs({planned.plan.workdir for planned in batch.runs})
            for planned in batch.runs:
                secret_values(planned.plan, planned.secrets)
            check_executor(self.workspace, self.executor, [run.plan for run in batch.runs], batch.spec.pack)
        check_trackers(plans)
        for plan in plans:
            # With a snapshot from before, what is in the working directory now is not what it runs.
            if plan.code is None:
                check_script(plan, self.executor)
                check_shell_script(plan)
        self.workspace.prepare()
        check_room(self.workspace, len(plans))

    def _create(self, batches: Sequence[Batch], locks: ExitStack) -> list[list[HeldRun]]:
        """Create the runs of all batches, or none. Raises PathError."""
        created: list[list[HeldRun]] = []
        try:
            for number, batch in zip(self.order, batches, strict=True):
                places = [index for index, run_id in enumerate(self.ids[number]) if run_id is None]
                linked = _linked(batch, self._upstreams(number, places))

                def announce(run_ids: Sequence[str], number: int = number, places: Sequence[int] = places) -> None:
                    for index, run_id in zip(places, run_ids, strict=True):
                        self.ids[number][index] = run_id
                    if self.held is not None:
                        self.held.store([run_id or "" for ids in self.ids for run_id in ids], self.sweeps)

                created.append(create(self.workspace, linked, locks, announce=announce))
        except BaseException:
            remove(self.workspace, [run.directory for batch in created for run in batch])
            raise
        return created

    def _upstreams(self, number: int, places: Sequence[int]) -> list[list[Upstream]]:
        # Specs before this one have been created by now.
        ids = [[run_id or "" for run_id in each] for each in self.ids]
        return [self.chain.upstreams((number, index), ids) for index in places]


def _linked(batch: Batch, upstreams: Sequence[Sequence[Upstream]]) -> Batch:
    """The runs with those that they start after, which they come from."""
    runs = [
        replace(planned, parents=[*planned.parents, *_parents(planned, after)])
        for planned, after in zip(batch.runs, upstreams, strict=True)
    ]
    return replace(batch, runs=runs, upstreams=upstreams)


def _parents(planned: PlannedRun, after: Sequence[Upstream]) -> Iterator[Parent]:
    """How a run comes from those that it starts after: with the checkpoint of one it may begin, too."""
    start_from = planned.plan.spec.start_from
    is_forked = any(parent.relation == FORK for parent in planned.parents)
    for upstream in after:
        if start_from is not None and not is_forked and start_from.run in (upstream.name, upstream.run):
            yield Parent(upstream.run, FORK, start_from.step if isinstance(start_from.step, int) else None)
        yield Parent(upstream.run, AFTER)


def _with_start_points(workspace: Workspace, batch: Batch) -> Batch:
    """The runs with the checkpoints of other runs that they are to begin with."""
    if all(planned.plan.spec.start_from is None for planned in batch.runs):
        return batch
    runs, points = with_start_points(workspace, batch.runs)
    return replace(batch, runs=runs, start_points=points)


def _with_code(workspace: Workspace, batch: Batch) -> tuple[Batch, list[str]]:
    """The runs with the snapshots of the code that they are to execute, and notes."""
    undecided = [planned for planned in batch.runs if not planned.has_code]
    plans, notes = with_snapshots(workspace, [planned.plan for planned in undecided], batch.spec.files)
    snapshotted = iter(plans)
    runs = [planned if planned.has_code else replace(planned, plan=next(snapshotted)) for planned in batch.runs]
    return replace(batch, runs=runs), notes


def _check_workdirs(workdirs: Collection[str]) -> None:
    missing = next((workdir for workdir in sorted(workdirs) if not Path(workdir).is_dir()), None)
    if missing is not None:
        raise PathError(f"the working directory {missing} does not exist; create it, or set 'workdir'")
