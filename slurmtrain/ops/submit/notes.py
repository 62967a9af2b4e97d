"""Notes on what may go wrong with runs that are being submitted."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from slurmtrain.model.preflight.obsolete_variables import describe_obsolete
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.spec.plan import Plan
from slurmtrain.ops.shared.workspace import Workspace

_TEMPORARY = "/tmp"  # noqa: S108 (nothing is written there)
# File systems in memory: local to one machine.
_OWN_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})


def notes_on(workspace: Workspace, plan: Plan, executor: str) -> list[str]:
    """Notes on what may go wrong with runs of this plan, before any is created.

    Args:
        workspace: where the runs go.
        plan: the plan of the first run.
        executor: ``slurm`` or ``local``.
    """
    variables = {**os.environ, **plan.spec.env}
    return [
        *plan.launcher_notes(),
        *_other_python(plan),
        *(_not_shared(workspace.root.path) if executor == "slurm" else []),
        *(note.rstrip(".") for note in describe_obsolete(variables)),
    ]


def adopted_checkpoint(run: RunDir, plan: Plan) -> list[str]:
    """A note if a new run's checkpoint pattern already matches a checkpoint, maybe written by another run."""
    if plan.spec.checkpoint.glob is None:
        return []
    from slurmtrain.model.spec.checkpoint_formats import OWN
    from slurmtrain.runtime.checkpoint.external import Search, newest

    checkpoint = newest(Search.from_plan(plan, run))
    if checkpoint is None:
        return []
    handed = "may be found by" if plan.spec.checkpoint.format == OWN else "is handed to"
    return [
        f"{checkpoint.path} matches checkpoint.glob and {handed} this new run; "
        "begin the pattern with {checkpoint_dir} to keep runs apart"
    ]


def _other_python(plan: Plan) -> list[str]:
    """A note if ``python`` in the command, the one on PATH, is not the one that slurmtrain was installed for."""
    if plan.spec.command.split()[0] != "python" or Path(plan.python).parent == Path(sys.executable).parent:
        return []
    return [
        f"'python' in the command is {plan.python}, the first on PATH; slurmtrain itself runs on {sys.executable}: "
        "activate that environment if the script needs what is installed there"
    ]


def _not_shared(root: Path) -> list[str]:
    """A note if compute nodes cannot see the runs root: each machine has its own memory file systems and /tmp."""
    import psutil

    mounts = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    place = next((str(place) for place in (root, *root.parents) if str(place) in mounts), "/")
    if root.is_relative_to(_TEMPORARY):
        place = _TEMPORARY
    elif mounts.get(place) not in _OWN_FILESYSTEMS:
        return []
    return [
        f"the runs root {root} is on this machine's own {place}, which compute nodes usually do not see; choose a "
        "shared directory with --runs or SLURMTRAIN_RUNS"
    ]
