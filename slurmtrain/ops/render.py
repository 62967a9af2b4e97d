"""What would be submitted: plans and batch scripts, without side effects."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from slurmtrain.model.spec.plan import Plan
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import load
from slurmtrain.ops.submit.preview import Preview, preview
from slurmtrain.slurm.request import agent_command, make_request
from slurmtrain.specfile import ValueSource

# A placeholder for the id that a run gets when it is submitted.
RUN_ID = "RUN-ID"


@dataclass(frozen=True, slots=True)
class Rendered:
    """One run as it would be submitted.

    ``overrides``: ``KEY=VALUE``, with the sweep's. ``script``: for sbatch. ``find_sources``: finds where each value of
    the plan comes from.
    """

    plan: Plan
    overrides: Sequence[str]
    script: str
    find_sources: Callable[[], list[ValueSource]]


class Rendering(NamedTuple):
    """All runs of a spec, and what they are together, with the notes that submit would print too."""

    runs: list[Rendered]
    preview: Preview


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
    """
    rendered = []
    spec = load(path, overrides, sweep, max_runs=workspace.config.sweep_max_runs)
    for planned in spec.runs:
        request = make_request(planned.plan, workspace.root.run(RUN_ID).submission(1))
        script = request.script(agent_command(sys.executable, request.folder))
        rendered.append(Rendered(planned.plan, planned.overrides, script, partial(spec.sources, planned)))
    return Rendering(rendered, preview(spec, executor))
