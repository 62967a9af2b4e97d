"""What would be submitted: plans and batch scripts, with no effect at all."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.model.spec.plan import Plan
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import load
from slurmtrain.slurm.request import agent_command, make_request

# Stands for the id that a run gets when it is submitted.
RUN_ID = "RUN-ID"


@dataclass(frozen=True, slots=True)
class Rendered:
    """One run to be."""

    plan: Plan
    overrides: Sequence[str]
    script: str


def render(workspace: Workspace, path: Path, overrides: Sequence[str], sweep: Sequence[str]) -> list[Rendered]:
    """The plan and the batch script of each run of a spec. Raises SpecError and PlaceError as ``submit`` does."""
    rendered = []
    for planned in load(path, overrides, sweep).runs:
        request = make_request(planned.plan, workspace.root.run(RUN_ID).submission(1))
        script = request.script(agent_command(sys.executable, request.folder))
        rendered.append(Rendered(planned.plan, planned.overrides, script))
    return rendered
