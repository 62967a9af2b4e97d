"""Scaling studies: submitting their runs, going on with an interrupted one, and reading what its runs measured.

A study has no state of its own. Its runs are a sweep, submitted with an idempotency key that follows from their plans:
the same command finds the same runs again, whatever was killed. A further study of the same plans has a key with the
next number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError, RunBusy, SlurmtrainError, SpecError, UserError
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.prices import Prices
from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.experiment.values import NAME_LIMIT, value_at
from slurmtrain.model.query.comparison import count_states
from slurmtrain.model.run.costs import add_up, charges_of
from slurmtrain.model.run.run import Run
from slurmtrain.ops.marks import add_tag
from slurmtrain.ops.query.performance import REASONS, measure_performance, unknown_figures
from slurmtrain.ops.resume import find_failed, resume_failed
from slurmtrain.ops.shared.find import choose_all
from slurmtrain.ops.shared.next_attempts import current_plan
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import load, submit_spec
from slurmtrain.ops.sync import sync
from slurmtrain.plugins.scale.scale_tables import RunSize, StudyRun, StudyTables, make_tables
from slurmtrain.plugins.scale.study_points import (
    PROCESS,
    BatchKey,
    StudyRequest,
    batch_size,
    describe_strategy,
    find_batch,
    hardware_kind,
    study_settings,
)
from slurmtrain.specfile import SpecFile
from slurmtrain.system.files import read_json
from slurmtrain.system.yaml_file import write_yaml

TAG = "scale"
COMMUNICATION = "measures.communication=true"
_SUFFIX = "-scale"
# Figures of ``compare --performance`` that no table of a study has.
_NOT_SHOWN = ("data_wait_share", "mfu")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySpec:
    """A study that has been read. ``spec``: all of its runs. ``key``: its idempotency key.

    ``runs``: the ids of the runs that were submitted with the key before; empty: it is new. ``complete``: whether all
    of them were.
    """

    spec: SpecFile
    executor: str
    key: str
    runs: Sequence[str] = ()
    complete: bool = False


@dataclass(slots=True)
class ScalingStudy:
    """A study whose runs exist.

    ``runs``: their ids, in order. ``name``: what a user may call it. ``resumed``: the runs that were started again.
    """

    runs: Sequence[str]
    name: str
    notes: list[str] = field(default_factory=list)
    resumed: Sequence[str] = ()

    def missing(self, tables: StudyTables) -> str:
        """What the ``tables`` lack, and the command that goes on, as a sentence without a full stop; empty: nothing.

        Raises SlurmtrainError if all runs have ended, and none says how fast it was.
        """
        states = [row.run.state for row in tables.rows]
        counts = f"{len(states)} {'run' if len(states) == 1 else 'runs'}: {count_states(states)}"
        if not all(row.run.ended for row in tables.rows):
            begin = f"study {self.name} is not complete ({counts})"
            return f"{begin}; 'slurmtrain scale {self.name} --wait' waits, and prints the tables"
        if not tables.is_measured:
            raise SlurmtrainError(
                f"{self.name}: no run has recorded its speed ({counts}); {REASONS['steps_per_second']}"
            )
        if tables.is_complete:
            return ""
        return f"{counts}; 'slurmtrain resume {self.name}' restarts runs that ended early"


def read_study(
    workspace: Workspace,
    path: Path,
    overrides: Sequence[str],
    request: StudyRequest,
    where: tuple[str, int | None],
    *,
    again: bool,
) -> StudySpec:
    """Read the runs of a study, and whether they were submitted before; nothing is created.

    Args:
        workspace: Where the runs go.
        path: The spec.
        overrides: ``KEY=VALUE`` for all runs.
        request: What to vary.
        where: ``slurm`` or ``local``, and how many runs may run at once; None: the spec says so.
        again: Whether it is a new study in any case.

    Raises:
        UserError: The request cannot be met, or a run of the study was deleted.
        SpecError: The spec is invalid, with what a run of the study sets or without.
        PathError: It cannot be read.
    """
    executor, parallel = where
    spec = _load_study(path, overrides, request, parallel, workspace.config.sweep_max_runs)
    content = "\n".join([executor, *(run.plan.hash for run in spec.runs)])
    key = f"scale-{hashlib.sha256(content.encode()).hexdigest()[:32]}"
    number = 1
    while _submission(workspace, f"{key}-{number + 1}"):
        number += 1
    record = _submission(workspace, f"{key}-{number}")
    if record and again:
        number, record = number + 1, {}
    named = [str(each) for each in record.get("runs") or () if each]
    runs = [each for each in named if workspace.root.run(each).path.exists()]
    complete = bool(named and record.get("complete"))
    # A command that was killed may have named runs that it has not created.
    if complete and (gone := [each for each in named if each not in runs]):
        raise UserError(f"run {gone[0]} of this study was deleted: --again submits a new study")
    return StudySpec(spec=spec, executor=executor, key=f"{key}-{number}", runs=runs, complete=complete)


def _load_study(
    path: Path, overrides: Sequence[str], request: StudyRequest, parallel: int | None, max_runs: int
) -> SpecFile:
    """The spec with all runs of a study. Raises UserError, PathError."""
    base = load(path, overrides, ())
    if base.search is not None:
        raise UserError(f"{path} has a search, which chooses its own runs: leave 'sweep.search' out")
    written = base.inputs.document.data.get("sweep") if base.inputs is not None else None
    if isinstance(written, dict) and written.get("points") is not None:
        raise UserError(f"{path} has 'sweep.points', which a study sets itself: vary these keys in another way")
    plan = base.runs[0].plan
    settings = study_settings(plan.spec, plan.content, request)
    points = write_yaml([dict(each) for each in settings], flow=True).splitlines()[0]
    # The share of communication is one of the figures of a study, unless somebody has said otherwise.
    measured = [] if value_at(plan.template, ("measures", "communication")) is not None else [COMMUNICATION]
    named = [*overrides, *measured, f"name={plan.spec.name[: NAME_LIMIT - len(_SUFFIX)]}{_SUFFIX}"]
    sweep = [f"points={points}", *([] if parallel is None else [f"parallel={parallel}"])]
    try:
        return load(path, named, sweep, max_runs=max_runs)
    except SpecError as error:
        # The settings of a study are generated, and too long to read.
        mistakes = [
            replace(each, where="a run of the study") if "(points=[" in each.where else each for each in error.mistakes
        ]
        raise SpecError(mistakes) from error


def _submission(workspace: Workspace, key: str) -> dict[str, Any]:
    """What was submitted with a key; empty: nothing."""
    with suppress(PathError):
        return dict(read_json(workspace.root.submission_key(key)) or {})
    return {}


def continue_study(workspace: Workspace, study: StudySpec) -> ScalingStudy:
    """Submit the runs of a study that do not exist, and start those again that failed, were lost or were cancelled.

    Args:
        workspace: Where the runs go.
        study: The study.

    Raises:
        SlurmtrainError: As :func:`slurmtrain.ops.submit.submit_spec`.
    """
    if study.complete:
        synced = sync(workspace, list(study.runs), track=False)
        begun = ScalingStudy(study.runs, "", [*synced.notes, *synced.problems, *synced.observed.problems])
    else:
        submitted = submit_spec(workspace, study.spec, executor=study.executor, key=study.key)
        begun = ScalingStudy(submitted.run_ids, "", list(submitted.notes))
    rows = workspace.store.index(begun.runs)
    begun.name = next((row.sweep for row in rows.values() if row.sweep), begun.runs[0])
    add_tag(workspace, begun.runs, TAG)
    if not study.runs:
        return begun
    with suppress(RunBusy):
        failed = find_failed(workspace, begun.runs, cancelled=True)
        try:
            resumed = resume_failed(workspace, failed)
        except SlurmtrainError as error:
            # The others of the study go on, and their tables are worth having.
            begun.notes.append(f"runs that ended early cannot be restarted now: {error}")
        else:
            begun.resumed = resumed.run_ids
            begun.notes += [*resumed.notes, *resumed.problems]
    return begun


def find_study(workspace: Workspace, name: str) -> ScalingStudy:
    """The runs that a user names: a study, or any others to compare.

    Args:
        workspace: Where the runs are.
        name: A sweep, a name or a pattern.

    Raises:
        RunNotFound: It refers to no run.
    """
    observed = observe(workspace)
    runs = choose_all(workspace, observed.runs, [name], widely=True)
    return ScalingStudy(runs, name, list(observed.warnings()))


def read_tables(workspace: Workspace, study: ScalingStudy, batch_key: str | None, batch_of: str | None) -> StudyTables:
    """The tables of a study. Its notes receive what is unknown, and why.

    Args:
        workspace: Where the runs are, which have been observed.
        study: The study.
        batch_key: The key of the batch size; None: it is looked for.
        batch_of: ``total`` or ``process``; None: the key's name says so.

    Raises:
        UserError: The key cannot be the batch size.
    """
    loaded = workspace.store.load_all(study.runs)
    plans = {run_id: current_plan(workspace.root.run(run_id), run) for run_id, run in loaded.items()}
    batch = _batch_of(plans[study.runs[0]].spec.params, batch_key, batch_of, study.notes)
    prices = workspace.config.prices
    hour_prices = _prices(prices, loaded, study.notes)
    runs = []
    for run_id in study.runs:
        run, plan = loaded[run_id], plans[run_id]
        runs.append(
            StudyRun(
                performance=measure_performance(workspace, run, study.notes),
                strategy=describe_strategy(plan.spec.strategy),
                hardware=hardware_kind(plan.spec.resources),
                params=run.params,
                batch=_own_batch(plan, batch, is_named=batch_key is not None),
                batch_of_each=batch is not None and batch.counts == PROCESS,
                requested=_requested(plan.spec.resources),
                hour_price=hour_prices.get(run_id),
                ended=run.ended,
                reason=run.reason if run.state != "completed" else "",
            )
        )
    study.notes += unknown_figures([run.performance for run in runs if run.ended], without=_NOT_SHOWN)
    made = make_tables(runs, batch, prices.currency if prices else None)
    study.notes += filter(None, [made.batch_problem(batch)])
    return made


def _requested(resources: ResourcesSpec) -> RunSize:
    return RunSize(resources.nodes.max, resources.most_ranks.world_size, resources.most_gpus)


def _batch_of(params: Any, key: str | None, counts: str | None, notes: list[str]) -> BatchKey | None:
    """The key of the batch; if it is not certain, and was not named, a note."""
    try:
        return find_batch(params, key, counts)
    except UserError as error:
        notes.append(str(error))
        return None


def _prices(prices: Prices | None, runs: Mapping[str, Run], notes: list[str]) -> dict[str, float]:
    """What an hour on the nodes of each run has cost, where prices are known; notes on prices that are missing."""
    if prices is None:
        return {}
    charged = {run_id: add_up(charges_of(run.attempts, run.executor, prices)) for run_id, run in runs.items()}
    notes += dict.fromkeys(each.problem for each in charged.values() if each.problem)
    return {
        run_id: sum(each.money.values()) / each.hours for run_id, each in charged.items() if each.money and each.hours
    }


def _own_batch(plan: Plan, batch: BatchKey | None, *, is_named: bool) -> int | None:
    """The batch of a run. Raises UserError if a user has named a key that is not there."""
    if batch is None:
        return None
    try:
        return batch_size(plan.content, batch)
    except UserError:
        # Runs of another script may have no such parameter.
        if is_named:
            raise
        return None
