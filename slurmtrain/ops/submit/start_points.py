"""Which checkpoints of other runs new runs begin with, and the new runs' own copies of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import CheckpointError, NoCheckpoint, NotAvailable, UserError
from slurmtrain.model.experiment.chain import dependencies_of
from slurmtrain.model.experiment.checkpoint import BEST, OWN, WEIGHTS, StartFromSpec
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.layout import RunDir, checkpoint_step
from slurmtrain.model.run.lineage import FORK, RERUN, Parent
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.specfile import PlannedRun, write_assignments

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run


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
        if request is None or (point is None and _is_awaited(planned.plan, request)):
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


def _is_awaited(plan: Plan, start_from: StartFromSpec) -> bool:
    """Whether this run starts after the one that it begins with: its checkpoint is found then. Raises UserError."""
    if start_from.run not in {dependency.name for dependency in dependencies_of(plan.spec)}:
        return False
    if start_from.step == BEST:
        raise UserError(
            f"'start_from: {start_from}' is not available for a run that has yet to end; name a step, or none"
        )
    return True


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
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.shared.readable_checkpoints import choose_own, find_own

    [run_id], _ = find(workspace, [request.run], ask_slurm=False)
    run = workspace.store.load(run_id)
    assert run is not None
    directory = workspace.root.run(run_id)
    if run.deleted_at is not None:
        raise NoCheckpoint(f"the files of run {run_id} were deleted, its checkpoints too")
    own = find_own(directory, run)
    if own is None:
        path = _published(workspace, directory, run, request.step)
        return StartPoint(replace(request, run=run_id, step=checkpoint_step(path.name)), path, of_script=False)
    if request.step == BEST:
        raise UserError(f"'best' is unknown of the checkpoints that the script of run {run_id} writes; name a step")
    step = request.step if isinstance(request.step, int) else None
    chosen = next((each for each in choose_own(run, own, step, to="begin with") if each.complete), None)
    if chosen is None:
        raise NoCheckpoint(f"run {run_id} has no complete checkpoint to begin with")
    return StartPoint(replace(request, run=run_id, step=chosen.step), chosen.path, of_script=True)


def _published(workspace: Workspace, directory: RunDir, run: Run, step: int | str | None) -> Path:
    """A published checkpoint of a run: of a step, the best, or the newest. Raises NoCheckpoint; UserError."""
    from slurmtrain.ops.shared.readable_checkpoints import choose_checkpoints

    if step == BEST:
        return _best(directory, choose_checkpoints(workspace, run, None, to="begin with"), run)
    return choose_checkpoints(workspace, run, step if isinstance(step, int) else None, to="begin with")[0]


def _best(directory: RunDir, published: Sequence[Path], run: Run) -> Path:
    from slurmtrain.model.run.checkpoints import Saved, best_steps
    from slurmtrain.ops.shared.current_plan import current_plan
    from slurmtrain.runtime.checkpoint.checkpoint_files import read_manifest

    best = current_plan(directory, run).spec.checkpoint.keep.best
    if best is None:
        raise UserError(
            f"run {run.id} does not say which checkpoint is its best: it has no 'checkpoint.keep.best'; name a step, "
            f"'slurmtrain checkpoints {run.id}' lists them"
        )
    manifests = {path: read_manifest(path) for path in published}
    steps = best_steps([Saved(manifest.step, manifest.metrics) for manifest in manifests.values()], best)
    if not steps:
        raise UserError(f"no checkpoint of run {run.id} has a value of {best.metric!r}; name a step")
    return next(path for path, manifest in manifests.items() if manifest.step == next(iter(steps)))


def _check_formats(plan: Plan, point: StartPoint) -> None:
    """Raise UserError if a run cannot read the checkpoint that it is to begin with."""
    checkpoint = plan.spec.checkpoint
    if point.of_script and checkpoint.glob is None:
        raise UserError(
            f"{point.path} was written by a script, and only a script with 'checkpoint.glob' gets such a checkpoint, "
            "as {resume_from}; name its path in a parameter instead"
        )
    if not point.of_script and checkpoint.glob is not None:
        raise UserError(
            f"{point.path} can be read by slurmtrain.session() only, and this spec has 'checkpoint.glob'; "
            "'slurmtrain export' writes its weights to a file, which a parameter can name"
        )
    if point.of_script and point.start_from.load == WEIGHTS:
        raise NotAvailable(
            "'start_from.load: weights' is not available for checkpoints that a script writes: only the script knows "
            "which of it are weights; name the path in a parameter instead"
        )
    if checkpoint.format == OWN:
        raise NotAvailable(
            "'start_from' is not available with 'checkpoint.format: own': the script finds its checkpoints itself"
        )
