"""Taking searches further: runs that a pruner ends, and the next ones.

A search has no state of its own: which trials there are, and what they have reached, is read from the runs, each of
which carries the number of its trial since the moment that it can be seen. All of this happens under the search's lock,
so that no number is given twice, and a command that is killed anywhere leaves a whole search: a run that it has created
is started like any other, and one that it has not is asked for again, with the same values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurmtrain.errors import PathError, SlurmtrainError, SubmitFailed
from slurmtrain.model.run.events.command import CancelRequested, RunCreated
from slurmtrain.model.run.run import Run
from slurmtrain.model.spec.sweep.search import SearchSpec
from slurmtrain.ops.cancel import finish_cancel, request_end
from slurmtrain.ops.history import read_history
from slurmtrain.ops.search.record import SearchRecord, forget, lock_of, read, under_way
from slurmtrain.ops.search.study import Study, Trial
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.submission import submit_sweeps
from slurmtrain.slurm.command_options import read_options
from slurmtrain.specfile import PlannedRun, SpecFile, replan, write_assignments

# After so many trials of which none has a value, none is asked for any more: the metric may not exist.
_WITHOUT_VALUE = 5


@dataclass(slots=True)
class Advance:
    """What was done to searches, by run id.

    ``runs``: all runs of those that were looked at. ``created``: those that are new. ``pruned``: those that were
    pruned earlier; ``ending``: those that are from now on.
    """

    runs: list[str] = field(default_factory=list)
    created: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)
    ending: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _TrialRun:
    """A trial, its run, and whether a person has cancelled it."""

    trial: Trial
    run: Run
    is_cancelled: bool


def advance_all(workspace: Workspace, only: Collection[str] | None = None) -> Advance:
    """Take all searches further that are not over; another command's turn is left to it, unless ``only`` names runs.

    Args:
        workspace: where they are.
        only: only the searches that have one of these runs.
    """
    advanced = Advance()
    for sweep in under_way(workspace):
        if only is not None and not _has_any(workspace, sweep, only):
            continue
        try:
            with locked_search(workspace, sweep, wait=only is not None) as is_ours:
                if is_ours and (record := read(workspace, sweep)) is not None:
                    advance(workspace, record, advanced)
        except (SlurmtrainError, OSError) as error:
            advanced.problems.append(f"search {sweep} cannot go on: {error}")
    return advanced


@contextlib.contextmanager
def locked_search(workspace: Workspace, sweep: str, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of a search; yields whether it is held, which is always so with ``wait``.

    Args:
        workspace: where the runs are.
        sweep: the sweep's id.
        wait: whether to wait for another command that holds it.
    """
    from slurmtrain.system.locks import locked

    with locked(lock_of(workspace, sweep), wait=wait) as lock:
        yield lock is not None


def advance(workspace: Workspace, record: SearchRecord, advanced: Advance) -> None:
    """End runs that are to be pruned, and submit the next ones. The caller holds the search's lock.

    Args:
        workspace: where the runs are.
        record: the search.
        advanced: receives what was done.

    Raises:
        SlurmtrainError: as :func:`slurmtrain.ops.submit.submit_specs`; or Optuna is not installed.
    """
    search = record.search
    runs = _read_trials(workspace, record)
    advanced.runs += [each.run.id for each in runs]
    advanced.pruned += [each.run.id for each in runs if each.trial.state == "pruned"]
    number = max((each.trial.number for each in runs), default=-1) + 1
    open_runs = [each for each in runs if not each.run.ended]
    if number >= search.trials and not open_runs:
        forget(workspace, record.sweep)
        return
    study = Study(search, _without_gaps([each.trial for each in runs], number))
    advanced.ending += _prune(workspace, study, open_runs)
    count = min(search.parallel - len(open_runs), search.trials - number)
    if count <= 0:
        return
    if why := _why_over(search, runs):
        advanced.problems.append(f"search {record.sweep} asks for no more runs: {why}")
        return
    chosen = [(number + each, study.ask()) for each in range(count)]
    submitted = _submit(workspace, record, chosen, advanced)
    advanced.created += submitted
    advanced.runs += submitted


def _has_any(workspace: Workspace, sweep: str, run_ids: Collection[str]) -> bool:
    return any(row.sweep == sweep for row in workspace.store.index(run_ids).values())


def _read_trials(workspace: Workspace, record: SearchRecord) -> list[_TrialRun]:
    """The trials that there are, in the order of their numbers."""
    observe(workspace, ask_slurm=False)
    run_ids = [run_id for run_id, row in workspace.store.index().items() if row.sweep == record.sweep]
    created = workspace.store.events_of(run_ids, RunCreated)
    ends = workspace.store.events_of(run_ids, CancelRequested)
    trials = []
    for run_id, run in workspace.store.load_all(run_ids).items():
        origin = created[run_id][0].payload if created.get(run_id) else RunCreated()
        if origin.trial is None:
            continue
        is_pruned = any(event.payload.reason for event in ends.get(run_id, ()))
        trial = Trial(
            number=origin.trial,
            values=origin.varies,
            state=_state(run, record.search, is_pruned=is_pruned),
            value=run.metrics.get(record.search.metric),
            curve=_curve(workspace, run, record.search),
        )
        trials.append(_TrialRun(trial, run, run.cancelled and not is_pruned))
    return sorted(trials, key=lambda each: each.trial.number)


def _state(run: Run, search: SearchSpec, *, is_pruned: bool) -> str:
    if not run.ended:
        return "running"
    if run.state == "cancelled" and is_pruned:
        return "pruned"
    value = run.metrics.get(search.metric)
    return "complete" if run.state == "completed" and value is not None and math.isfinite(value) else "failed"


def _curve(workspace: Workspace, run: Run, search: SearchSpec) -> dict[int, float]:
    """The metric by step, if the pruner needs it."""
    if search.pruner.name == "none":
        return {}
    try:
        curve = read_history(run, workspace.root.run(run.id), [search.metric]).curves.get(search.metric)
    except PathError:
        return {}
    points = zip(curve.kept.steps, curve.kept.values, strict=True) if curve else ()
    return {int(step): value for step, value in points if math.isfinite(value)}


def _without_gaps(trials: Sequence[Trial], count: int) -> list[Trial]:
    """The trials by number; those whose runs somebody has removed count as failed."""
    by_number = {trial.number: trial for trial in trials}
    return [by_number.get(number, Trial(number, {}, "failed")) for number in range(count)]


def _prune(workspace: Workspace, study: Study, runs: Sequence[_TrialRun]) -> list[str]:
    """End the runs that the pruner would end; returns their ids."""
    pruned = []
    for each in runs:
        why = "" if each.run.cancelled or each.run.state != "running" else study.why_prune(each.trial)
        if why:
            request_end(workspace, each.run.id, why)
            pruned.append(each.run.id)
    finish_cancel(workspace, pruned)
    return pruned


def _why_over(search: SearchSpec, runs: Sequence[_TrialRun]) -> str:
    """Why a search that has trials left asks for no more, as a phrase; empty if it does."""
    if runs and runs[-1].is_cancelled and all(each.run.ended or each.is_cancelled for each in runs):
        return f"all that ran were cancelled; 'slurmtrain resume {runs[-1].run.id}' continues it"
    ended = [each for each in runs if each.run.ended and not each.is_cancelled]
    if len(ended) >= _WITHOUT_VALUE and all(each.trial.state == "failed" for each in ended):
        logged = sorted({name for each in ended for name in each.run.metrics})
        names = f"; they have logged {', '.join(logged)}" if logged else ""
        return f"none of its {len(ended)} runs that have ended has completed with a value of {search.metric!r}{names}"
    return ""


def _submit(
    workspace: Workspace, record: SearchRecord, chosen: Sequence[tuple[int, dict[str, object]]], advanced: Advance
) -> list[str]:
    """Submit the next trials; returns the ids of their runs."""
    planned = [_plan(record, number, values) for number, values in chosen]
    file = Path(record.spec_file) if record.spec_file else None
    spec = SpecFile(text=record.text, runs=tuple(planned), path=file, parallel=record.search.parallel)
    try:
        submission = submit_sweeps(workspace, [spec], [record.sweep], executor=record.executor)
    except SubmitFailed as error:
        advanced.problems.append(f"search {record.sweep}: {error}")
        return list(error.run_ids)
    advanced.notes += submission.notes
    return submission.run_ids


def _plan(record: SearchRecord, number: int, values: dict[str, object]) -> PlannedRun:
    planned = replan(record.plan, write_assignments(values), read_options, renames=True)
    overrides = (*record.overrides, *planned.overrides)
    return replace(planned, overrides=overrides, varies=values, trial=number, has_code=True)
