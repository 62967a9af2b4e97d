"""Submitting a run, or all runs of a sweep, again: the same plan and the same code, as new runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurmtrain.errors import PathError, RunBusy, UserError
from slurmtrain.model.environment import Environment, changes_in_words, compare_environments
from slurmtrain.model.experiment.code import CodeSnapshot
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.sweep import Pack, packing_problem
from slurmtrain.model.run.events.command_events import RunCreated
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.lineage import RERUN, Parent, ids_by_name
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.find import find_all, is_pattern
from slurmtrain.ops.shared.next_attempts import current_plan
from slurmtrain.ops.shared.observe import check_readable
from slurmtrain.ops.shared.run_details import submitted_software
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import Submission, submit_spec, which_python
from slurmtrain.ops.submit.code_snapshots import describe_git, describe_revision, with_code_of_now
from slurmtrain.runtime.code.packages import read_software
from slurmtrain.runtime.upstreams import read_upstreams
from slurmtrain.slurm.slurm_commands import read_options
from slurmtrain.specfile import PlannedRun, SpecFile, replan
from slurmtrain.system.owned_files import read_checked

# How a copy of a spec ends, see ops.submit.creation.
_OVERRIDE = "# override: "


@dataclass(frozen=True, slots=True)
class Repetition:
    """What is to be submitted again.

    ``spec``: the new runs. ``executor``: what started the old ones. ``notes``: what will differ from these.
    """

    spec: SpecFile
    executor: str
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Original:
    """A run that is submitted again: its directory, what is known of it, and how it was created."""

    directory: RunDir
    run: Run
    created: RunCreated
    plan: Plan

    @classmethod
    def load(cls, workspace: Workspace, run_id: str) -> _Original:
        """A run of the workspace. Raises RunBusy, RunUnreadable, PathError."""
        run = workspace.store.load(run_id)
        created = [event.payload for event in workspace.store.events(run_id, RunCreated)]
        if run is None or not created:
            raise RunBusy(f"run {run_id} has only just been created; try again in a moment")
        check_readable(run)
        directory = workspace.root.run(run_id)
        return cls(directory, run, created[0], current_plan(directory, run))

    @property
    def later_overrides(self) -> list[str]:
        """The overrides with which the run was resumed: its newest attempt had all of them."""
        return list(dict.fromkeys(override for attempt in self.run.attempts for override in attempt.overrides))


def rerun(
    workspace: Workspace,
    name: str,
    overrides: Sequence[str] = (),
    *,
    executor: str | None = None,
    code_of_now: bool = False,
) -> Submission:
    """Submit a run, or the runs of a sweep, again.

    Args:
        workspace: Where they are.
        name: The run, by id, a prefix of it, name or ``@last``; or the id of a sweep.
        overrides: ``KEY=VALUE`` for all of the new runs.
        executor: ``slurm`` or ``local``; None: as the old ones.
        code_of_now: Execute the code as it is now, and not as it was then.

    Raises:
        SlurmtrainError: As :func:`plan_again` and :func:`slurmtrain.ops.submit.submit_spec`.
    """
    again = plan_again(workspace, name, overrides, code_of_now=code_of_now)
    submission = submit_spec(workspace, again.spec, executor=executor or again.executor)
    return submission._replace(notes=[*again.notes, *submission.notes])


def plan_again(
    workspace: Workspace, name: str, overrides: Sequence[str] = (), *, code_of_now: bool = False
) -> Repetition:
    """Plan the same runs again; nothing is created yet.

    Args:
        workspace: Where they are.
        name: As for :func:`rerun`.
        overrides: ``KEY=VALUE`` for all of the new runs.
        code_of_now: Execute the code as it is now, and not as it was then.

    Raises:
        RunNotFound: There is no such run.
        PathError: A plan, or a snapshot of code, is missing or damaged.
        SpecError: An override is wrong.
    """
    if is_pattern(name):
        raise UserError(f"{name!r} is a pattern; name a run, or the id of a sweep")
    originals = [_Original.load(workspace, run_id) for run_id in find_all(workspace, [name])[0]]
    first = originals[0]
    notes = list(_differences(first))
    codes: dict[tuple[str, str], CodeSnapshot | None] = {}
    runs = []
    for original in originals:
        planned = _planned_again(original, overrides)
        plan = planned.plan
        # The runs of a sweep mostly share it.
        key = (plan.workdir, plan.code.hash if plan.code is not None else "")
        if key not in codes:
            newer, more = _with_code(workspace, original, plan, code_of_now=code_of_now)
            codes[key] = newer.code
            notes += more
        runs.append(replace(planned, plan=plan.with_code(codes[key])))
    # The runs share jobs as the old ones did.
    pack = Pack.from_dict(first.created.pack) if first.created.pack is not None else None
    if pack is not None and len(runs) >= pack.runs:
        specs = [run.plan.spec for run in runs]
        problem = next(filter(None, (packing_problem(spec.resources, pack, spec.slurm) for spec in specs)), None)
        if problem:
            raise UserError(f"the runs were packed, {pack.runs} to a job, and that is no longer possible: {problem}")
    else:
        pack = None
    text = ""
    with contextlib.suppress(OSError):
        # As written, without the overrides, which the copy lists at its end.
        lines = read_checked(first.directory.spec).decode(errors="replace").splitlines(keepends=True)
        text = "".join(line for line in lines if not line.startswith(_OVERRIDE))
    file = Path(first.created.spec_file) if first.created.spec_file else None
    spec_file = SpecFile(
        text=text,
        runs=tuple(runs),
        path=file,
        parallel=first.created.parallel if len(runs) > 1 else None,
        pack=pack,
    )
    return Repetition(spec_file, first.run.executor, list(dict.fromkeys(notes)))


def _planned_again(original: _Original, overrides: Sequence[str]) -> PlannedRun:
    """The plan of a run that is the same again, with overrides."""
    plan = original.plan
    if not Path(plan.python).exists():
        plan = replace(plan, python=which_python())
    planned = replan(plan, overrides, read_options, renames=True)
    # With none of its own, what an override demands is taken at submission.
    takes_code = plan.code is None and _changes(overrides, "code")
    return replace(
        planned,
        overrides=(*original.created.overrides, *original.later_overrides, *planned.overrides),
        varies=original.created.varies,
        parents=(Parent(original.run.id, RERUN),),
        upstreams={} if _changes(overrides, "after") else ids_by_name(read_upstreams(original.directory)),
        has_code=not takes_code,
    )


def _changes(overrides: Sequence[str], section: str) -> bool:
    """Whether an override is of a key of the spec, or of one in it."""
    keys = (override.lstrip("+").partition("=")[0] for override in overrides)
    return any(key.partition(".")[0] == section for key in keys)


def _with_code(workspace: Workspace, original: _Original, plan: Plan, *, code_of_now: bool) -> tuple[Plan, list[str]]:
    """The plan with the code that the new run executes, and notes on it. Raises PathError if it is damaged."""
    directory, run_id = original.directory, original.run.id
    if code_of_now:
        return with_code_of_now(workspace, directory, plan)
    if plan.code is not None:
        from slurmtrain.runtime.code.code_copy import read_code

        try:
            # To its end: each file's hash is compared only when it is read.
            for _ in read_code(directory, plan.code.hash):
                pass
        except PathError as error:
            why = str(error).partition("; ")[0]
            raise PathError(f"{why}; nothing was submitted; '--code now' uses the code as it is now") from error
        return plan, []
    was, now = describe_revision(original.created.git), describe_git(Path(plan.workdir))
    if was and was == now and not (original.created.git or {}).get("dirty"):
        return plan, []
    revisions = f"{was or 'no revision'} then, {now or 'no revision'} now"
    return plan, [f"run {run_id} had no snapshot, so its code may have been different: {revisions}"]


def _differences(original: _Original) -> Iterator[str]:
    """How new runs will differ from an earlier one: its overrides, its seed, and Python with its packages."""
    python, run_id = original.plan.python, original.run.id
    if original.later_overrides:
        yield f"includes the overrides of the last resume of run {run_id}: {' '.join(original.later_overrides)}"
    if original.plan.spec.seed is None:
        yield f"run {run_id} has no 'seed', so random numbers repeat only if its script seeds them"
    if not Path(python).exists():
        yield f"the Python of run {run_id}, {python}, is gone; this run uses {which_python()}"
        python = which_python()
    earlier = submitted_software(original.directory)
    if earlier is None:
        yield f"the packages of run {run_id} are unknown, because its environment.txt is missing"
        return
    now = read_software(Path(python))
    if earlier.version != now.version:
        yield f"run {run_id} had Python {earlier.version}; this run has {now.version}"
    changes = compare_environments(Environment(software=earlier), Environment(software=now))
    if "packages" in changes:
        yield f"the packages differ from run {run_id}: {changes_in_words(changes['packages'])}"
