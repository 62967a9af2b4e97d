"""Taking searches further: runs that a pruner ends, and the next ones.

A search has no state of its own: its trials, and their results, are read from the runs, each of which carries the
number of its trial since the moment that it can be seen. All of this happens under the search's lock, so that no number
is given twice, and a command that is killed anywhere leaves a whole search: a run that it has created is started like
any other, and a run that it has not created is asked for again, with the same values.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurmtrain.errors import SlurmtrainError, SubmitFailed
from slurmtrain.model.run.chain.upstreams import ids_by_name
from slurmtrain.model.spec.sweep_values import SearchSpec
from slurmtrain.ops.cancel import finish_cancel, request_end
from slurmtrain.ops.search.record import SearchRecord, forget, lock_of, read, under_way
from slurmtrain.ops.search.study import Study
from slurmtrain.ops.search.trials import Trial, TrialRun, read_trials
from slurmtrain.ops.shared.chain.waiting import upstreams_of
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.submission import submit_sweeps
from slurmtrain.slurm.command import read_options
from slurmtrain.specfile import PlannedRun, SpecFile, replan, write_assignments

# After so many trials without a value, none is asked for any more: the metric may not exist.
_WITHOUT_VALUE = 5


@dataclass(slots=True)
class Advance:
    """The changes to searches, by run id.

    ``runs``: all runs of the searches that were looked at. ``created``: new runs. ``pruned``: runs that were pruned
    earlier; ``ending``: runs that are pruned from now on.
    """

    runs: list[str] = field(default_factory=list)
    created: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)
    ending: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


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
                if not is_ours:
                    continue
                record = read(workspace, sweep)
                if record is None:
                    # Another command has ended it meanwhile; taking the lock has made its file again.
                    forget(workspace, sweep)
                else:
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


def advance(workspace: Workspace, record: SearchRecord, advanced: Advance, *, is_new: bool = False) -> None:
    """End runs that are to be pruned, and submit the next ones. The caller holds the search's lock.

    Args:
        workspace: where the runs are.
        record: the search.
        advanced: receives what was done.
        is_new: whether it has no runs yet; without any run, another search is over.

    Raises:
        SlurmtrainError: as :func:`slurmtrain.ops.submit.submit_specs`; or Optuna is not installed.
    """
    search = record.search
    observe(workspace, ask_slurm=False)
    runs = read_trials(workspace, record.sweep, search.metric, with_curves=search.pruner.name != "none")
    if not (runs or is_new):
        # Its submission was killed before it had created a run, or a person has deleted all of them for good.
        forget(workspace, record.sweep)
        return
    advanced.runs += [each.run.id for each in runs]
    advanced.pruned += [each.run.id for each in runs if each.trial.state == "pruned"]
    number = max((each.trial.number for each in runs), default=-1) + 1
    open_runs = [each for each in runs if not each.run.ended]
    if number >= search.trials and not open_runs:
        forget(workspace, record.sweep)
        return
    if record.host not in (None, socket.gethostname()):
        advanced.notes.append(f"search {record.sweep} runs on {record.host}: 'slurmtrain sync' takes it further there")
        return
    count = min(search.parallel - len(open_runs), search.trials - number)
    if count <= 0 and not (open_runs and search.pruner.name != "none"):
        return  # before Optuna is imported, which takes a second
    study = Study(search, _without_gaps([each.trial for each in runs], number))
    _prune(workspace, study, open_runs, advanced)
    if count <= 0:
        return
    if _is_cancelled(runs):
        again = f"'slurmtrain resume {runs[-1].run.id}' continues it"
        advanced.notes.append(f"search {record.sweep} asks for no more runs: all that ran were cancelled; {again}")
        return
    if why := _why_hopeless(search, runs):
        advanced.problems.append(f"search {record.sweep} asks for no more runs: {why}")
        return
    # After the same runs as the first, whatever has got their names since.
    upstreams = ids_by_name(upstreams_of(workspace.root.run(runs[0].run.id))) if runs else {}
    chosen = [_plan(record, number + each, study.ask(), upstreams) for each in range(count)]
    submitted = _submit(workspace, record, chosen, advanced)
    advanced.created += submitted
    advanced.runs += submitted


def _has_any(workspace: Workspace, sweep: str, run_ids: Collection[str]) -> bool:
    return any(row.sweep == sweep for row in workspace.store.index(run_ids).values())


def _without_gaps(trials: Sequence[Trial], count: int) -> list[Trial]:
    """The trials by number; trials whose runs somebody has removed count as failed."""
    by_number = {trial.number: trial for trial in trials}
    return [by_number.get(number, Trial(number, {}, "failed")) for number in range(count)]


def _prune(workspace: Workspace, study: Study, runs: Sequence[TrialRun], advanced: Advance) -> None:
    """End the runs that the pruner would end.

    Args:
        workspace: where they are.
        study: the search.
        runs: its runs that have not ended.
        advanced: receives what was done.
    """
    pruned = []
    for each in runs:
        # One that was pruned and runs nevertheless was resumed by a person, who wants it to go on.
        is_left_alone = each.is_pruned or each.run.cancelled or each.run.state != "running"
        why = "" if is_left_alone else study.why_prune(each.trial)
        if why:
            request_end(workspace, each.run.id, why)
            advanced.notes.append(f"run {each.run.id} was {why}")
            pruned.append(each.run.id)
    finish_cancel(workspace, pruned)
    advanced.ending += pruned


def _is_cancelled(runs: Sequence[TrialRun]) -> bool:
    """Whether a person has cancelled all runs that ran last."""
    return bool(runs) and runs[-1].is_cancelled and all(each.run.ended or each.is_cancelled for each in runs)


def _why_hopeless(search: SearchSpec, runs: Sequence[TrialRun]) -> str:
    """Why the runs so far promise no value of the metric, as a phrase; empty if they do."""
    ended = [each for each in runs if each.run.ended and not each.is_cancelled]
    if len(ended) < _WITHOUT_VALUE or any(each.trial.state != "failed" for each in ended):
        return ""
    logged = sorted({name for each in ended for name in each.run.metrics})
    names = f"; they have logged {', '.join(logged)}" if logged else ""
    return f"none of its {len(ended)} runs that have ended has completed with a value of {search.metric!r}{names}"


def _submit(workspace: Workspace, record: SearchRecord, chosen: Sequence[PlannedRun], advanced: Advance) -> list[str]:
    """Submit the next trials; returns the ids of their runs."""
    file = Path(record.spec_file) if record.spec_file else None
    spec = SpecFile(text=record.text, runs=tuple(chosen), path=file, parallel=record.search.parallel)
    try:
        submission = submit_sweeps(workspace, [spec], [record.sweep], executor=record.executor)
    except SubmitFailed as error:
        advanced.problems.append(f"search {record.sweep}: {error}")
        return list(error.run_ids)
    advanced.notes += submission.notes
    return submission.run_ids


def _plan(
    record: SearchRecord, number: int, values: dict[str, object], upstreams: Mapping[str, Sequence[str]]
) -> PlannedRun:
    planned = replan(record.plan, write_assignments(values), read_options, renames=True)
    overrides = (*record.overrides, *planned.overrides)
    return replace(
        planned,
        overrides=overrides,
        upstreams=upstreams,
        varies=values,
        trial=number,
        search=record.search.objective,
        has_code=True,
    )
