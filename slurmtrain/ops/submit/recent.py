"""Runs of the same plan that were submitted a moment ago: submitting it again may be a mistake."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from slurmtrain.errors import PathError
from slurmtrain.model.run.ids import created_ms
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.specfile import SpecFile
from slurmtrain.system.files import read_json

_RECENT_S = 60.0


@dataclass(frozen=True, slots=True)
class RecentRun:
    """A run that was submitted ``seconds`` ago."""

    id: str
    seconds: float

    def __str__(self) -> str:
        return f"the same plan was submitted {self.seconds:.0f} s ago as run {self.id}, which has not ended"


def find_recent(workspace: Workspace, spec: SpecFile) -> RecentRun | None:
    """The newest run of a plan of ``spec`` that was submitted within the last minute and has not ended."""
    hashes = {planned.plan.hash for planned in spec.runs}
    same = [run for run in _recent(workspace) if _plan_hash(workspace, run.id) in hashes]
    if not same:
        return None
    runs = observe(workspace, [run.id for run in same], ask_slurm=False).runs
    return next((run for run in same if run.id in runs and not runs[run.id].ended), None)


def _recent(workspace: Workspace) -> Iterator[RecentRun]:
    """Runs of the last minute, the newest first, by the times in their ids."""
    now = time.time()
    for run_id in reversed(workspace.run_ids()):
        seconds = now - created_ms(run_id) / 1000
        if seconds > _RECENT_S:
            return
        # An id from the future is from before the clock was set back, or from another machine.
        if seconds > -_RECENT_S:
            yield RecentRun(run_id, max(0.0, seconds))


def _plan_hash(workspace: Workspace, run_id: str) -> str | None:
    with contextlib.suppress(PathError):
        return (read_json(workspace.root.run(run_id).plan) or {}).get("hash")
    return None
