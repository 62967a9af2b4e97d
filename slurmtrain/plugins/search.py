"""Searches: submitting one, and taking it further with runs that a pruner ends, and the next ones.

A search has no state of its own but its record, with all that was submitted, in ``searches/`` of the runs root until
all of its trials have been asked for. Its trials, and their results, are read from the runs, which each carry the
number of its trial since the moment that it can be seen. All of this happens under the search's lock, so that no number
is given twice, and a command that is killed anywhere leaves a whole search: a run that it has created is started like
any other, and a run that it has not created is asked for again, with the same values.

The study in Optuna, an extra that nothing else uses, is made anew from the trials whenever something is asked. Its
sampler begins with a seed that follows from the search's and the number of the trial, so that the same trials lead to
the same next one.
"""

from __future__ import annotations

import contextlib
import inspect
import socket
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmtrain.errors import NotAvailable, PathError, SlurmtrainError, SubmitFailed, UserError
from slurmtrain.model.experiment.kinds import suggestion
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.sweep_values import Method, SearchSpec, is_same
from slurmtrain.model.run.lineage import ids_by_name
from slurmtrain.ops.cancel import finish_cancel, request_end
from slurmtrain.ops.query.trials import Advance, Trial, TrialRun, read_trials
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.start_order import upstreams_of
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.code_snapshots import with_snapshots
from slurmtrain.ops.submit.submission import Submission, submit_sweeps
from slurmtrain.slurm.slurm_commands import read_options
from slurmtrain.specfile import SpecFile, replan, write_assignments
from slurmtrain.system.files import describe_os_error, make_directory, read_json, write_json

# After so many trials without a value, none is asked for any more: the metric may not exist.
_WITHOUT_VALUE = 5


# --- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """A search.

    ``sweep``: the id of its sweep. ``executor``: ``slurm`` or ``local``. ``plan``: plan of its runs, with examples of
    the values that are searched. ``overrides``: from the command line. ``text``: the spec, without secrets.
    ``spec_file``: its path, if it has one. ``host``: the machine of a search whose runs are local; None: any.
    """

    sweep: str
    search: SearchSpec
    executor: str
    plan: Plan
    overrides: Sequence[str]
    text: str
    spec_file: str | None
    host: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {
            "schema": 1,
            "sweep": self.sweep,
            "search": self.search.to_dict(),
            "executor": self.executor,
            "plan": self.plan.to_json(),
            "overrides": list(self.overrides),
            "text": self.text,
            "spec_file": self.spec_file,
            "host": self.host,
        }


def under_way(workspace: Workspace) -> list[str]:
    """The ids of the sweeps that search, in order of submission."""
    try:
        return sorted(path.stem for path in workspace.root.searches.iterdir() if path.suffix == ".json")
    except OSError:
        return []


def lock_of(workspace: Workspace, sweep: str) -> Path:
    """Held while the trials of a search are read, ended or asked for."""
    return workspace.root.searches / f"{sweep}.lock"


def store(workspace: Workspace, record: SearchRecord) -> None:
    """Write a record. Raises PathError."""
    try:
        make_directory(workspace.root.searches)
        write_json(_path(workspace, record.sweep), record.to_dict())
    except OSError as error:
        raise PathError(f"cannot write to {workspace.root.searches}: {describe_os_error(error)}") from error


def read(workspace: Workspace, sweep: str) -> SearchRecord | None:
    """The record of a search; None if it is over. Raises PathError if it cannot be read."""
    path = _path(workspace, sweep)
    data = read_json(path)
    if data is None:
        return None
    try:
        return SearchRecord(
            sweep=sweep,
            search=SearchSpec.from_dict(data["search"]),
            executor=str(data["executor"]),
            plan=Plan.from_json(data["plan"]),
            overrides=tuple(map(str, data["overrides"])),
            text=str(data["text"]),
            spec_file=data["spec_file"],
            host=data.get("host"),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise PathError(f"{path} is not a valid record of a search ({error}), so the search has ended") from error


def forget(workspace: Workspace, sweep: str) -> None:
    """Remove a record: nothing is asked any more. The caller holds the search's lock.

    Its file goes too: whoever has opened it and gets the lock finds no record, and does nothing.
    """
    with contextlib.suppress(OSError):
        _path(workspace, sweep).unlink(missing_ok=True)
        lock_of(workspace, sweep).unlink(missing_ok=True)


def _path(workspace: Workspace, sweep: str) -> Path:
    return workspace.root.searches / f"{sweep}.json"


# --- submitting ------------------------------------------------------------------------------------------------------


def begin_search(workspace: Workspace, spec: SpecFile, executor: str) -> Submission:
    """Submit a search. From the moment that its record is there, every ``sync`` takes it further.

    Args:
        workspace: where the runs go.
        spec: the spec, whose only run is an example.
        executor: ``slurm`` or ``local``.

    Raises:
        SlurmtrainError: as :func:`slurmtrain.ops.submit.submit_spec`; or Optuna is not installed.
    """
    assert spec.search is not None
    check_methods(spec.search)
    [example] = spec.runs
    workspace.prepare()
    [plan], notes = with_snapshots(workspace, [example.plan])
    record = SearchRecord(
        sweep=workspace.new_id(),
        search=spec.search,
        executor=executor,
        plan=plan,
        overrides=tuple(override.text for override in spec.inputs.overrides) if spec.inputs is not None else (),
        text=spec.text,
        spec_file=str(spec.path) if spec.path is not None else None,
        host=socket.gethostname() if executor == "local" else None,
    )
    # The lock is beside the record.
    make_directory(workspace.root.searches)
    advanced = Advance(notes=[*map(str, spec.warnings), *notes])
    with locked_search(workspace, record.sweep, wait=True):
        # Before any run: if this is killed, the next 'sync' takes the search further, or forgets it.
        store(workspace, record)
        try:
            advance(workspace, record, advanced, is_new=True)
        except BaseException as error:
            # Whoever created no run has submitted nothing.
            if not (advanced.runs or isinstance(error, SubmitFailed)):
                forget(workspace, record.sweep)
            raise
    if advanced.problems:
        raise SubmitFailed("; ".join(advanced.problems), advanced.runs)
    return Submission(advanced.runs, advanced.notes, record.sweep)


def advance_all(workspace: Workspace, only: Collection[str] | None = None) -> Advance:
    """Take all searches further that are not over; another command's turn is left to it, unless ``only`` names runs.

    Args:
        workspace: where they are.
        only: only the searches that have one of these runs.
    """
    advanced = Advance()
    for sweep in under_way(workspace):
        if only is not None and all(row.sweep != sweep for row in workspace.store.index(only).values()):
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
            advanced.problems.append(f"search {sweep} cannot continue: {error}")
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
        advanced.notes.append(
            f"search {record.sweep} runs on {record.host}: call 'slurmtrain sync' there to continue it"
        )
        return
    count = min(search.parallel - len(open_runs), search.trials - number)
    if count <= 0 and not (open_runs and search.pruner.name != "none"):
        return  # before Optuna is imported, which takes a second
    # Trials whose runs somebody has removed count as failed.
    by_number = {each.trial.number: each.trial for each in runs}
    study = Study(search, [by_number.get(each, Trial(each, {}, "failed")) for each in range(number)])
    _prune(workspace, study, open_runs, advanced)
    if count <= 0:
        return
    # A person has cancelled all runs that ran last.
    if runs and runs[-1].is_cancelled and all(each.run.ended or each.is_cancelled for each in runs):
        again = f"'slurmtrain resume {runs[-1].run.id}' continues it"
        advanced.notes.append(
            f"search {record.sweep} submits no more runs, because all that ran were cancelled; {again}"
        )
        return
    ended = [each for each in runs if each.run.ended and not each.is_cancelled]
    if len(ended) >= _WITHOUT_VALUE and all(each.trial.state == "failed" for each in ended):
        logged = sorted({name for each in ended for name in each.run.metrics})
        why = f"none of the {len(ended)} runs that ended completed with a value of {search.metric!r}"
        names = f"; they have logged {', '.join(logged)}" if logged else ""
        advanced.problems.append(f"search {record.sweep} submits no more runs: {why}{names}")
        return
    trials = [(number + each, study.ask()) for each in range(count)]
    _submit_trials(workspace, record, trials, runs, advanced)


def _submit_trials(
    workspace: Workspace,
    record: SearchRecord,
    trials: Sequence[tuple[int, dict[str, object]]],
    runs: Sequence[TrialRun],
    advanced: Advance,
) -> None:
    """Submit the runs of ``trials``, each a number and values, after the ``runs`` of earlier ones."""
    # After the same runs as the first, whatever has got their names since.
    upstreams = ids_by_name(upstreams_of(workspace.root.run(runs[0].run.id))) if runs else {}
    chosen, goal = [], record.search.objective
    for number, values in trials:
        run = replan(record.plan, write_assignments(values), read_options, renames=True)
        overrides = (*record.overrides, *run.overrides)
        chosen.append(
            replace(
                run, overrides=overrides, upstreams=upstreams, varies=values, trial=number, search=goal, has_code=True
            )
        )
    file = Path(record.spec_file) if record.spec_file else None
    spec = SpecFile(text=record.text, runs=tuple(chosen), path=file, parallel=record.search.parallel)
    try:
        submitted, notes, _ = submit_sweeps(workspace, [spec], [record.sweep], executor=record.executor)
        advanced.notes += notes
    except SubmitFailed as error:
        advanced.problems.append(f"search {record.sweep}: {error}")
        submitted = list(error.run_ids)
    advanced.created += submitted
    advanced.runs += submitted


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
    # After all requests, so that the runs end side by side.
    finish_cancel(workspace, pruned)
    advanced.ending += pruned


# --- the study in Optuna ---------------------------------------------------------------------------------------------

# What the search sets itself.
_OWN_SETTINGS = frozenset({"self", "seed", "constant_liar", "constraints_func", "gamma", "weights"})


def check_methods(search: SearchSpec) -> None:
    """Check that the sampler and the pruner can be made.

    Raises:
        NotAvailable: optuna is not installed.
        UserError: a setting does not exist, or has no such value.
    """
    _sampler(search, 0)
    _pruner(search)


class Study:
    """What the trials so far say about the next one."""

    def __init__(self, search: SearchSpec, trials: Sequence[Trial]) -> None:
        """The study of a search with these trials, in the order of their numbers.

        Raises NotAvailable or UserError as :func:`check_methods`.
        """
        optuna = _import_optuna()
        self._search = search
        distributions = optuna.distributions
        self._spaces: dict[str, Any] = {}
        for key, space in search.space.items():
            if space.values:
                # By their indices: Optuna takes only some types of values.
                self._spaces[key] = distributions.CategoricalDistribution(range(len(space.values)))
            elif space.step is not None:
                self._spaces[key] = distributions.IntDistribution(int(space.low), int(space.high), step=space.step)
            else:
                self._spaces[key] = distributions.FloatDistribution(space.low, space.high, log=space.log)
        self._count = len(trials)
        self._study = optuna.create_study(
            direction="maximize" if search.larger else "minimize",
            sampler=_sampler(search, self._count),
            pruner=_pruner(search),
        )
        # Pruners compare at the last steps of running trials. Optuna copies all that it has, again and again.
        compared = {max(trial.curve) for trial in trials if trial.state == "running" and trial.curve}
        for trial in trials:
            self._study.add_trial(self._frozen(trial, compared))

    def ask(self) -> dict[str, Any]:
        """The values of the next trial, which counts as running from now on."""
        self._study.sampler = _sampler(self._search, self._count)
        self._count += 1
        chosen = self._study.ask(self._spaces).params
        return {
            key: space.values[chosen[key]] if space.values else space.settle(chosen[key])
            for key, space in self._search.space.items()
        }

    def why_prune(self, trial: Trial) -> str:
        """Why a running trial is to end, as a phrase; empty if it is not."""
        if self._search.pruner.name == "none" or not trial.curve:
            return ""
        if not self._study.pruner.prune(self._study, self._study.trials[trial.number]):
            return ""
        return f"pruned by the {self._search.pruner.name} pruner at step {max(trial.curve)}"

    def _frozen(self, trial: Trial, compared: Collection[int]) -> Any:
        """A trial as Optuna has it; the curve of an ended trial has its last point and its points at some steps."""
        optuna = _import_optuna()
        states = optuna.trial.TrialState
        params: dict[str, Any] = {}
        for key, space in self._search.space.items():
            value = trial.values.get(key)
            choice: float | None = None
            if space.values:
                choice = next((index for index, each in enumerate(space.values) if is_same(each, value)), None)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                choice = value if space.low <= value <= space.high else None
            if choice is None:
                # It was resumed with other values, or the record of them is damaged: nothing can be learned from it.
                return optuna.trial.create_trial(state=states.FAIL)
            params[key] = choice
        curve = dict(trial.curve)
        if trial.state != "running" and curve:
            curve = {step: curve[step] for step in sorted({*compared, max(curve)}) if step in curve}
        state = {"running": states.RUNNING, "complete": states.COMPLETE, "pruned": states.PRUNED}
        return optuna.trial.create_trial(
            state=state.get(trial.state, states.FAIL),
            value=trial.value if trial.state == "complete" else None,
            params=params,
            distributions=self._spaces,
            intermediate_values=curve,
        )


def _import_optuna() -> Any:
    """The module. Raises NotAvailable if it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise NotAvailable(f"'search' needs Optuna ({error}): pip install 'slurmtrain[optuna]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _sampler(search: SearchSpec, number: int) -> Any:
    """The sampler that chooses the trial with this number."""
    samplers = _import_optuna().samplers
    # By the trial's number, so that it does not matter which command asks; NumPy's seeds have 32 bits. The factor keeps
    # neighbouring seeds apart for a million trials.
    seed = (search.seed * 1_000_003 + number) % 2**32
    if search.sampler.name == "random":
        return _make_method(samplers.RandomSampler, "sampler", search.sampler, seed=seed)
    # The trials that still run count as bad ones, so that no two look at the same place.
    return _make_method(samplers.TPESampler, "sampler", search.sampler, seed=seed, constant_liar=search.parallel > 1)


def _pruner(search: SearchSpec) -> Any:
    pruners = _import_optuna().pruners
    classes = {"none": pruners.NopPruner, "median": pruners.MedianPruner, "percentile": pruners.PercentilePruner}
    return _make_method(classes[search.pruner.name], "pruner", search.pruner)


def _make_method(cls: Any, role: str, method: Method, **own: Any) -> Any:
    """A sampler or a pruner. Raises UserError if a setting is wrong."""
    accepted = [name for name in inspect.signature(cls).parameters if name not in _OWN_SETTINGS]
    for name in method.settings:
        if name not in accepted:
            near = suggestion(name, accepted)
            raise UserError(f"sweep.search.{role}: {method.name} has no setting {name!r}{near}")
    try:
        with warnings.catch_warnings():
            # Settings that Optuna calls experimental are the user's choice.
            warnings.simplefilter("ignore")
            return cls(**method.settings, **own)
    except (TypeError, ValueError) as error:
        raise UserError(f"sweep.search.{role}: {method.name} does not accept these settings: {error}") from error
