"""Which runs the runs of a submission start after, and the checkpoints of other runs that they begin with.

They start after runs of the same submission, by the names of its specs, or after runs that exist already. Of the
checkpoint of another run, a run has its own copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import CheckpointError, NoCheckpoint, NotAvailable, RunNotFound, UserError
from slurmtrain.model.experiment.chain import Dependency, creation_order, dependencies_of, find_cycle, references_of
from slurmtrain.model.experiment.checkpoint import BEST, OWN, WEIGHTS, StartFromSpec
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.slurm_options import is_singleton
from slurmtrain.model.run.layout import RunDir, checkpoint_step
from slurmtrain.model.run.lineage import FORK, RERUN, Parent, Upstream, describe_failure
from slurmtrain.ops.shared.find import choose_all
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.start_order import active_namesakes
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.specfile import PlannedRun, SpecFile, write_assignments

if TYPE_CHECKING:
    from slurmtrain.registry.rows import Listed

# A run of the same submission: the number of its spec, and its own in that spec.
_Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Target:
    """What a dependency stands for. ``places``: runs that are about to be created; ``ids``: runs that exist."""

    dependency: Dependency
    places: Sequence[_Place] = ()
    ids: Sequence[str] = ()


class Chain:
    """The specs of a submission, and what their runs start after."""

    def __init__(self, workspace: Workspace, specs: Sequence[SpecFile], executor: str) -> None:
        """Nothing is looked up before :meth:`resolve`.

        Args:
            workspace: Where the runs go.
            specs: The specs.
            executor: What starts their runs.
        """
        self._workspace = workspace
        self._specs = specs
        self._executor = executor
        self._names = [{run.plan.spec.name for run in spec.runs} for spec in specs]
        self._targets: dict[_Place, list[_Target]] = {}
        self._listed: dict[str, Listed] = {}

    def order(self) -> list[int]:
        """The numbers of the specs in the order of their creation. Raises UserError for a cycle."""
        after = {
            number: [
                other
                for other, names in enumerate(self._names)
                # What a repeated run starts after is decided: other runs, whatever has got their names since.
                if any(
                    dependency.name in names and dependency.name not in planned.upstreams
                    for planned in spec.runs
                    for dependency in dependencies_of(planned.plan.spec)
                )
            ]
            for number, spec in enumerate(self._specs)
        }
        cycle = find_cycle(after)
        if cycle:
            if len(set(cycle)) == 1:
                raise UserError(
                    f"{self._file(cycle[0])}: after: the run would wait for itself; to start it after an earlier run "
                    "of its name, write that run's id"
                )
            raise UserError(f"after: these would wait for each other: {' -> '.join(map(self._file, cycle))}")
        return creation_order(after)

    def resolve(self, numbers: Sequence[int]) -> None:
        """Find out which runs the runs of some specs start after.

        Args:
            numbers: The specs' numbers.

        Raises:
            UserError: There is no such run, or it cannot be started after.
        """
        observed: Observed | None = None
        for number in numbers:
            for index, planned in enumerate(self._specs[number].runs):
                targets = []
                for dependency in dependencies_of(planned.plan.spec):
                    decided = planned.upstreams.get(dependency.name, ())
                    places = [] if decided else self._places(dependency.name)
                    ids: list[str] = []
                    if not places:
                        observed = observed or observe(self._workspace)
                        ids = self._existing(number, dependency, observed, decided)
                    targets.append(_Target(dependency, places, ids))
                if is_singleton(planned.plan.spec.slurm):
                    # Last: a condition in 'after' also holds for a run of this name. Observed once, and only if
                    # something is looked up, since most submissions name no earlier run.
                    observed = observed or observe(self._workspace)
                    targets.append(self._namesakes(number, planned, observed))
                if targets and self._specs[number].pack is not None and self._executor == "slurm":
                    raise UserError(
                        f"{self._file(number)}: runs that start after others cannot share a job; remove 'pack' or "
                        "'after'"
                    )
                if any(target.places or target.ids for target in targets):
                    self._check_references(number, planned, targets)
                    self._targets[number, index] = targets

    def upstreams(self, place: _Place, ids: Sequence[Sequence[str]]) -> list[Upstream]:
        """What a run starts after.

        Args:
            place: Which run.
            ids: The ids of the runs of each spec that have been created.
        """
        upstreams: dict[str, Upstream] = {}
        for target in self._targets.get(place, ()):
            name, any_end = target.dependency.name, target.dependency.any
            for run_id in [*(ids[spec][index] for spec, index in target.places), *target.ids]:
                upstreams.setdefault(run_id, Upstream(run_id, name, any_end))
        return list(upstreams.values())

    def _places(self, name: str) -> list[_Place]:
        places = [
            (number, index)
            for number, spec in enumerate(self._specs)
            for index, planned in enumerate(spec.runs)
            if planned.plan.spec.name == name
        ]
        files = list(dict.fromkeys(number for number, _ in places))
        if len(files) > 1:
            raise UserError(
                f"after: {name!r} is the name of several specs: {', '.join(map(self._file, files))}; give them "
                "different names"
            )
        return places

    def _existing(self, number: int, dependency: Dependency, observed: Observed, decided: Sequence[str]) -> list[str]:
        """The ids of the runs that exist and that a dependency stands for: those ``decided``, if there are any."""
        where = f"{self._file(number)}: after"
        ids = list(decided) or self._find(where, dependency, observed)
        for run_id in ids:
            if not self._workspace.root.run(run_id).path.is_dir():
                cure = "; 'rerun RUN after=[...]' names other runs, and 'after=[]' none" if decided else ""
                raise UserError(f"{where}: the directory of run {Upstream(run_id, dependency.name)} was deleted{cure}")
        listed_runs = observed.runs.fetch(ids)
        named = {each.sweep for each in listed_runs.values() if len(listed_runs) > 1 or each.sweep == dependency.name}
        for sweep in filter(None, named):
            if (self._workspace.root.searches / f"{sweep}.json").exists():
                raise UserError(
                    f"{where}: search {dependency.name!r} has not ended and may still add runs; 'slurmtrain wait "
                    f"{sweep}' waits for all of them"
                )
        for run_id, listed in listed_runs.items():
            self._listed[run_id] = listed
            if problem := self._problem(Upstream(run_id, dependency.name, dependency.any), listed):
                raise UserError(f"{where}: {problem}")
        return ids

    def _namesakes(self, number: int, planned: PlannedRun, observed: Observed) -> _Target:
        """The runs of its name that one is not to run beside; runs of its own sweep run one at a time anyway.

        Raises UserError: one of them is on another executor.
        """
        name = planned.plan.spec.name
        before = [other for other in self.order()[: self.order().index(number)] if name in self._names[other]]
        places = [(other, index) for other in before for index in range(len(self._specs[other].runs))]
        ids = active_namesakes(observed.runs, name)
        for run_id, listed in observed.runs.fetch(ids).items():
            if problem := self._problem(Upstream(run_id, name, any=True), listed):
                raise UserError(f"{self._file(number)}: slurm.dependency: singleton: {problem}")
        return _Target(Dependency(name, any=True), places, ids)

    def _find(self, where: str, dependency: Dependency, observed: Observed) -> list[str]:
        """The ids of the runs that a name stands for now. ``where``: it is, for messages. Raises RunNotFound."""
        try:
            return choose_all(self._workspace, observed.runs, [dependency.name])
        except RunNotFound as error:
            raise RunNotFound(f"{where}: {error}") from error

    def _problem(self, upstream: Upstream, listed: Listed) -> str:
        """Why nothing can start after a run; empty if it can."""
        if listed.unreadable:
            return f"run {upstream} cannot be read: {listed.reason}"
        if listed.ended:
            if listed.state == "completed" or upstream.any:
                return ""
            failure = describe_failure(upstream, listed.state, listed.reason)
            again = f"'slurmtrain resume {upstream.run}' starts it again"
            return f"{failure}; {again}, and 'afterany:{upstream.name}' accepts any end"
        if listed.row["executor"] != self._executor:
            return (
                f"run {upstream} is on {listed.row['executor']} and this one would be on {self._executor}, so it "
                f"cannot start after it; wait for it with 'slurmtrain wait {upstream.run}'"
            )
        return ""

    def _check_references(self, number: int, planned: PlannedRun, targets: Sequence[_Target]) -> None:
        by_name = {target.dependency.name: target for target in targets}
        for reference in references_of(planned.plan.spec):
            target = by_name[reference.run]
            count = len(target.places) + len(target.ids)
            if count > 1:
                raise UserError(
                    f"{self._file(number)}: {reference}: {reference.run!r} stands for {count} runs; name one of them "
                    "by its id"
                )
            upstream = self._listed[target.ids[0]] if target.ids else None
            if reference.field == "checkpoint" and upstream and upstream.ended and upstream.checkpoint is None:
                raise UserError(f"{self._file(number)}: {reference}: run {upstream.id} has no checkpoint")

    def _file(self, number: int) -> str:
        spec = self._specs[number]
        return spec.path.name if spec.path is not None else str(min(self._names[number]))


# --- checkpoints to begin with ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartPoint:
    """A checkpoint that runs begin with.

    ``start_from``: the run by its id, and the step. ``path``: where it is. ``of_script``: a script has written it.
    """

    start_from: StartFromSpec
    path: Path
    of_script: bool

    def take_over(self, run: RunDir) -> None:
        """Let a ``run`` that is being created begin with it. Raises NoCheckpoint; OSError."""
        from slurmtrain.runtime.checkpoint.checkpoint_files import copy_checkpoint, link_checkpoint

        try:
            # A script may write to its files again, through any link; published checkpoints never change.
            (copy_checkpoint if self.of_script else link_checkpoint)(self.path, run)
        except FileNotFoundError as error:
            raise NoCheckpoint(f"{self.path} was deleted a moment ago; submit again, or name another step") from error
        except CheckpointError as error:
            raise NoCheckpoint(f"no run can begin with {self.path}: {error}") from error


StartPoints = Mapping[StartFromSpec, StartPoint]


def start_overrides(run: str, *, weights_only: bool) -> list[str]:
    """The overrides with which runs begin with a checkpoint of another one.

    Args:
        run: ``RUN``, ``RUN:STEP`` or ``RUN:best``.
        weights_only: Begin at step 0, with its weights.
    """
    if not weights_only:
        return write_assignments({"start_from": run})
    name, _, step = run.partition(":")
    return write_assignments({"start_from": {"run": name, "step": step or None, "load": WEIGHTS}})


def with_start_points(workspace: Workspace, runs: Sequence[PlannedRun]) -> tuple[list[PlannedRun], StartPoints]:
    """Runs whose plans name checkpoints that exist, and these checkpoints by what names them then.

    The runs that have saved them become the parents of the runs.

    Args:
        workspace: where runs are looked for.
        runs: the runs of a submission.

    Raises:
        RunNotFound: a run does not exist.
        NoCheckpoint: it has no such checkpoint.
        UserError: it cannot be used for what the spec asks for.
    """
    points: dict[StartFromSpec, StartPoint] = {}
    resolved = []
    for planned in runs:
        request = planned.plan.spec.start_from
        point = None if request is None else _of_first_run(workspace, planned)
        is_awaited = request is not None and request.run in {each.name for each in dependencies_of(planned.plan.spec)}
        if request is None or (point is None and is_awaited):
            # It is found once that run has ended.
            if request is not None and request.step == BEST:
                raise UserError(
                    f"'start_from: {request}' is not available for a run that has not ended; name a step, or leave "
                    "the step out"
                )
            resolved.append(planned)
            continue
        if point is None:
            point = points.setdefault(request, points.get(request) or find_start_point(workspace, request))
        points[point.start_from] = point
        _check_formats(planned.plan, point)
        start_from = point.start_from
        plan = replace(planned.plan, spec=replace(planned.plan.spec, start_from=start_from))
        step = start_from.step if isinstance(start_from.step, int) else None
        parents = [*planned.parents, Parent(start_from.run, FORK, step)]
        resolved.append(replace(planned, plan=plan, parents=parents))
    return resolved, {point.start_from: point for point in points.values()}


def _of_first_run(workspace: Workspace, planned: PlannedRun) -> StartPoint | None:
    """What a run that is repeated began with: its own copy, as the run that has saved it may have pruned it.

    None if there is none, or the run that repeats it is to begin with something else.
    """
    from slurmtrain.runtime.checkpoint.checkpoint_files import start_point
    from slurmtrain.runtime.environment.node import read_plan

    request = planned.plan.spec.start_from
    first = next((parent.run for parent in planned.parents if parent.relation == RERUN), None)
    path = start_point(workspace.root.run(first)) if first is not None else None
    if first is None or path is None or request is None:
        return None
    plan = read_plan(workspace.root.run(first).plan)
    if plan is None or plan.spec.start_from != request:
        return None
    # Which checkpoint was to be awaited is decided by now.
    ids = planned.upstreams.get(request.run, [request.run])
    return StartPoint(replace(request, run=ids[0], step=checkpoint_step(path.name)), path, of_script=False)


def find_start_point(workspace: Workspace, request: StartFromSpec) -> StartPoint:
    """The checkpoint that a spec asks for.

    Args:
        workspace: where runs are looked for.
        request: the run, by any of its names, and the step.

    Raises:
        RunNotFound: there is no such run.
        NoCheckpoint: it has no such checkpoint.
        UserError: it has none that can be the best.
    """
    from slurmtrain.model.experiment.checkpoint import Saved, best_steps
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.shared.next_attempts import current_plan
    from slurmtrain.ops.shared.readable_checkpoints import choose_checkpoints, choose_own, find_own
    from slurmtrain.runtime.checkpoint.checkpoint_files import read_manifest

    [run_id], _ = find(workspace, [request.run], ask_slurm=False)
    run = workspace.store.load(run_id)
    assert run is not None
    directory = workspace.root.run(run_id)
    if run.deleted_at is not None:
        raise NoCheckpoint(f"the files of run {run_id} were deleted, its checkpoints too")
    own, step = find_own(directory, run), request.step if isinstance(request.step, int) else None
    if own is not None:
        if request.step == BEST:
            raise UserError(
                f"the script of run {run_id} writes its own checkpoints, so slurmtrain cannot tell which "
                "is the best; name a step"
            )
        chosen = next((each for each in choose_own(run, own, step, to="begin with") if each.complete), None)
        if chosen is None:
            raise NoCheckpoint(f"run {run_id} has no complete checkpoint to begin with")
        return StartPoint(replace(request, run=run_id, step=chosen.step), chosen.path, of_script=True)
    published = choose_checkpoints(workspace, run, step, to="begin with")
    path = published[0]
    if request.step == BEST:
        best = current_plan(directory, run).spec.checkpoint.keep.best
        if best is None:
            raise UserError(
                f"run {run_id} has no 'checkpoint.keep.best', so its best checkpoint is unknown; name a step "
                f"('slurmtrain checkpoints {run_id}' lists them)"
            )
        manifests = {path: read_manifest(path) for path in published}
        steps = best_steps([Saved(manifest.step, manifest.metrics) for manifest in manifests.values()], best)
        if not steps:
            raise UserError(f"no checkpoint of run {run_id} has a value of {best.metric!r}; name a step")
        path = next(path for path, manifest in manifests.items() if manifest.step == next(iter(steps)))
    return StartPoint(replace(request, run=run_id, step=checkpoint_step(path.name)), path, of_script=False)


def _check_formats(plan: Plan, point: StartPoint) -> None:
    """Raise UserError if a run cannot read the checkpoint that it is to begin with."""
    checkpoint = plan.spec.checkpoint
    if point.of_script and checkpoint.glob is None:
        raise UserError(
            f"{point.path} was written by a script, and slurmtrain passes such a checkpoint only to a script with "
            f"'checkpoint.glob', as {{resume_from}}; name its path in a parameter instead"
        )
    if not point.of_script and checkpoint.glob is not None:
        raise UserError(
            f"only slurmtrain.session() can read {point.path}, and this spec has 'checkpoint.glob'; write its weights "
            "to a file with 'slurmtrain export', and name that file in a parameter"
        )
    if point.of_script and point.start_from.load == WEIGHTS:
        raise NotAvailable(
            "'start_from.load: weights' is not available for checkpoints that a script writes: only the script knows "
            "which parts are weights; name the path in a parameter instead"
        )
    if checkpoint.format == OWN:
        raise NotAvailable(
            "'start_from' is not available with 'checkpoint.format: own': the script finds its checkpoints itself"
        )
