"""The entrances to submitting: of specs, of searches, and with an idempotency key.

They stand above what :mod:`slurmtrain.ops.sync` needs itself, since what a killed submission left undone is finished by
a sync, which in turn submits the next runs of searches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from slurmtrain.errors import SlurmtrainError, SubmitFailed, UserError
from slurmtrain.ops.shared.chain.alone import only_one
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.chain import Chain
from slurmtrain.ops.submit.creation import new_sweep
from slurmtrain.ops.submit.job_starts import describe_failure, name_runs
from slurmtrain.ops.submit.specs import load
from slurmtrain.ops.submit.submission import Submission, Work, specs_of, submit_sweeps
from slurmtrain.ops.submit.submitted_before import HeldKey, held_key
from slurmtrain.specfile import SpecFile


def submit(
    workspace: Workspace, path: Path, overrides: Sequence[str] = (), sweep: Sequence[str] = (), *, executor: str
) -> Submission:
    """Read a spec and submit all of its runs. On this machine the runs of a sweep start one after the other.

    Args:
        workspace: where the runs go.
        path: the spec's file.
        overrides: ``KEY=VALUE`` for all runs.
        sweep: ``KEY=VALUE,VALUE``: a run for each value.
        executor: ``slurm`` or ``local``.

    Raises:
        SlurmtrainError: as :func:`submit_spec`, or something is wrong with the spec.
    """
    return submit_spec(
        workspace, load(path, overrides, sweep, max_runs=workspace.config.sweep_max_runs), executor=executor
    )


def submit_spec(workspace: Workspace, spec: SpecFile, *, executor: str, key: str | None = None) -> Submission:
    """Submit all runs of a ``spec`` that has been read: :func:`submit_specs` with one spec.

    ``workspace``: where the runs go. ``executor``: ``slurm`` or ``local``. ``key``: an idempotency key.
    """
    return submit_specs(workspace, [spec], executor=executor, key=key)


def submit_specs(
    workspace: Workspace, specs: Sequence[SpecFile], *, executor: str, key: str | None = None
) -> Submission:
    """Submit all runs of specs that have been read, each after those that its runs start after.

    Args:
        workspace: where the runs go.
        specs: the specs, in any order.
        executor: ``slurm`` or ``local``.
        key: an idempotency key: if something was submitted with it before, those runs are returned, and what a killed
            command left undone is done.

    Returns:
        The runs in the order of the specs; a sweep only of a single spec.

    Raises:
        UserError: something is wrong with the input; nothing was created.
        LaunchError: the job could not be submitted; nothing is left.
        SubmitFailed: as above, or something else failed, but runs exist; it names them.
        SubmitInterrupted: the same after SIGINT or SIGTERM.
    """
    if any(spec.search is not None for spec in specs):
        from slurmtrain.ops.search.begin import begin

        if key is not None or len(specs) > 1:
            manner = "with --idempotency-key" if key is not None else "together with other specs"
            raise UserError(f"a search cannot be submitted {manner}; nothing was created")
        return begin(workspace, specs[0], executor)
    if key is None:
        return submit_sweeps(workspace, specs, [_new_sweep(workspace, spec) for spec in specs], executor=executor)
    chain = Chain(workspace, specs, executor)
    order = chain.order()
    workspace.prepare()
    with held_key(workspace, key, [run.plan.hash for spec in specs for run in spec.runs], executor) as held:
        return _submit_with_key(workspace, specs, executor, held, chain, order)


def _submit_with_key(
    workspace: Workspace, specs: Sequence[SpecFile], executor: str, held: HeldKey, chain: Chain, order: Sequence[int]
) -> Submission:
    existing = held.existing(workspace)
    present = [run_id for run_id in existing if run_id is not None]
    notes = _complete(workspace, present)
    recorded = held.record.sweeps or [None] * len(specs)
    sweeps = [sweep or _new_sweep(workspace, spec) for sweep, spec in zip(recorded, specs, strict=True)]
    rest = iter(existing)
    ids = [[next(rest) for _ in spec.runs] for spec in specs]
    run_ids = present
    if None in existing:
        missing = [number for number in order if None in ids[number]]
        work = Work(
            workspace=workspace, specs=specs, executor=executor, chain=chain, order=missing, sweeps=sweeps, ids=ids,
            held=held,
        )  # fmt: skip
        try:
            with only_one(workspace, specs_of(specs)):
                chain.resolve(missing)
                submitted = work.submit()
        except SlurmtrainError as error:
            if not present and not isinstance(error, SubmitFailed):
                held.forget()
            raise _with_earlier(error, present, existing.count(None)) from error
        run_ids, notes = submitted.run_ids, [*notes, *submitted.notes]
    if not held.record.complete:
        # If that fails, the runs are found all the same, only not missed if they are deleted.
        with contextlib.suppress(OSError):
            held.store(run_ids, sweeps, complete=True)
    return Submission(run_ids, notes, held.record.sweeps[0] if len(specs) == 1 else None)


def _new_sweep(workspace: Workspace, spec: SpecFile) -> str | None:
    return new_sweep(workspace) if len(spec.runs) > 1 else None


def _with_earlier(error: SlurmtrainError, present: Sequence[str], missing: int) -> SlurmtrainError:
    """The error for runs that cannot be submitted beside those that are ``present`` from an earlier submission."""
    if not present:
        return error
    if isinstance(error, SubmitFailed):
        return type(error)(f"{error}; submitted earlier: {name_runs(present)}", [*present, *error.run_ids])
    return describe_failure(error, present, missing)


def _complete(workspace: Workspace, run_ids: Sequence[str]) -> list[str]:
    """Finish what a killed submission of these runs left undone; returns notes."""
    if not run_ids:
        return []
    from slurmtrain.ops.sync import sync

    synced = sync(workspace, run_ids, track=False)
    return [
        f"the idempotency key was used before, for {name_runs(run_ids)}",
        *synced.notes,
        *synced.problems,
        *synced.observed.problems,
    ]
