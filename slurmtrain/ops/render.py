"""What would be submitted: plans and batch scripts, without side effects."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from slurmtrain.model.spec.code.snapshot import CodeSnapshot
from slurmtrain.model.spec.plan import Plan
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import load
from slurmtrain.ops.submit.code import with_snapshots
from slurmtrain.ops.submit.preview import Preview, preview
from slurmtrain.slurm.request import agent_command, make_request
from slurmtrain.specfile import ValueSource

# A placeholder for the id that a run gets when it is submitted.
RUN_ID = "RUN-ID"


@dataclass(frozen=True, slots=True)
class Rendered:
    """One run as it would be submitted.

    ``overrides``: ``KEY=VALUE``, with the sweep's. ``script``: for sbatch. ``code``: the snapshot that would be taken,
    without a hash; None if the run would execute what is in the plan's ``workdir``. ``directory``: where it would run.
    ``find_sources``: finds where each value of the plan comes from.
    """

    plan: Plan
    overrides: Sequence[str]
    script: str
    code: CodeSnapshot | None
    directory: Path
    find_sources: Callable[[], list[ValueSource]]


class Rendering(NamedTuple):
    """All runs of a spec, and what they are together; ``notes``: what submit would print too."""

    runs: list[Rendered]
    preview: Preview
    notes: Sequence[str]


def render(
    workspace: Workspace, path: Path, overrides: Sequence[str], sweep: Sequence[str], *, executor: str
) -> Rendering:
    """The plan and the batch script of each run of a spec.

    Args:
        workspace: where the runs would be.
        path: the spec's file.
        overrides: ``KEY=VALUE`` for all runs.
        sweep: ``KEY=VALUE,VALUE``: a run for each value.
        executor: what would start them, for the notes.

    Raises:
        SpecError: the spec is invalid.
        PathError: it cannot be read.
        UserError: the snapshot of code that it asks for cannot be taken.
    """
    spec = load(path, overrides, sweep, max_runs=workspace.config.sweep_max_runs)
    plans = [planned.plan for planned in spec.runs]
    with_code, notes = plans, list[str]()
    if all(Path(plan.workdir).is_dir() for plan in plans):
        with_code, notes = with_snapshots(workspace, plans, spec.files, preview=True)
    run = workspace.root.run(RUN_ID)
    rendered = []
    for planned, plan in zip(spec.runs, with_code, strict=True):
        request = make_request(planned.plan, run.submission(1))
        script = request.script(agent_command(sys.executable, request.folder))
        directory, sources = plan.working_directory(run.code), partial(spec.sources, planned)
        rendered.append(Rendered(planned.plan, planned.overrides, script, plan.code, directory, sources))
    before = preview(spec, executor)
    return Rendering(rendered, before, [*before.notes, *notes])
