"""What would be submitted: plans and scripts, without side effects."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from slurmtrain.errors import NotAvailable
from slurmtrain.local import check_here
from slurmtrain.model.experiment.code import CodeSnapshot
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import load
from slurmtrain.ops.submit.code_snapshots import with_snapshots
from slurmtrain.ops.submit.previews import Preview, preview
from slurmtrain.runtime.environment.setup_script import local_script
from slurmtrain.slurm import outer_variables
from slurmtrain.slurm.request import make_request
from slurmtrain.specfile import ValueSource

# A placeholder for the id that a run gets when it is submitted.
RUN_ID = "RUN-ID"


@dataclass(frozen=True, slots=True)
class Rendered:
    """One run as it would be submitted.

    ``overrides``: ``KEY=VALUE``, with the sweep's. ``script``: for sbatch, or what this machine does. ``code``: the
    snapshot that would be taken, without a hash; None if the run would execute what is in the plan's ``workdir``.
    ``directory``: where it would run.
    ``find_sources``: finds where each value of the plan comes from.
    """

    plan: Plan
    overrides: Sequence[str]
    script: str
    code: CodeSnapshot | None
    directory: Path
    find_sources: Callable[[], list[ValueSource]]


class Rendering(NamedTuple):
    """All runs of a spec, and a preview of them together; ``notes``: the notes that submit would print too."""

    runs: list[Rendered]
    preview: Preview
    notes: Sequence[str]


def render(
    workspace: Workspace,
    path: Path,
    overrides: Sequence[str],
    sweep: Sequence[str],
    *,
    executor: str,
    script_for: str = "slurm",
) -> Rendering:
    """The plan and the script of each run of a spec.

    Args:
        workspace: where the runs would be.
        path: the spec's file.
        overrides: ``KEY=VALUE`` for all runs.
        sweep: ``KEY=VALUE,VALUE``: a run for each value.
        executor: what would start them, for the notes.
        script_for: the executor whose script it is.

    Raises:
        SpecError: the spec is invalid.
        PathError: it cannot be read.
        UserError: the snapshot of code that it asks for cannot be taken.
    """
    spec = load(path, overrides, sweep, max_runs=workspace.config.sweep_max_runs)
    plans = [planned.plan for planned in spec.runs]
    with_code, notes = plans, list[str]()
    # 'submit' would refuse a missing directory; a preview shows the rest nevertheless.
    if all(Path(plan.workdir).is_dir() for plan in plans):
        with_code, notes = with_snapshots(workspace, plans, spec.files, preview=True)
    if script_for == "slurm" and executor != script_for:
        notes += outer_variables.notes(plans)
    notes += outer_variables.notes_on_ranks(plans)
    run = workspace.root.run(RUN_ID)
    rendered = []
    for planned, plan in zip(spec.runs, with_code, strict=True):
        if script_for == "local":
            # As lines of shell: its setup, then the command.
            resources, words = plan.spec.resources, plan.words
            each = 1 if plan.spec.per_node else resources.local_world_size
            times = f"{each} {'process' if each == 1 else 'processes'}"
            if resources.allocated.max > 1:
                times += f" for each of {resources.allocated} nodes, all on this machine"
            program = plan.python if words[0] == "python" else words[0]
            setup = local_script(plan, run.submission(1), "JOB-ID") if plan.spec.setup else "# no setup\n"
            place = shlex.quote(str(plan.working_directory(run.code)))
            script = f"{setup}# {times}:\ncd {place}\n{shlex.join([program, *words[1:]])}\n"
            try:
                check_here(plan)
            except NotAvailable as error:
                notes.append(str(error))
        else:
            script = make_request(outer_variables.placed(planned.plan), run.submission(1)).script
        directory, sources = plan.working_directory(run.code), partial(spec.sources, planned)
        rendered.append(Rendered(planned.plan, planned.overrides, script, plan.code, directory, sources))
    before = preview(workspace, spec, executor, script_for)
    return Rendering(rendered, before, [*before.notes, *dict.fromkeys(notes)])
