"""Notes on what may go wrong with runs that are being submitted."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from slurmtrain.errors import PathError
from slurmtrain.model.preflight.obsolete_variables import describe_obsolete
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.spec.kinds import suggestion
from slurmtrain.model.spec.plan import Plan
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.locking.mounts import mount_of

_PYTHON = re.compile(r"python[\d.]*")
# Options of Python that take no value.
_FLAGS = frozenset({"-u", "-O", "-OO", "-B", "-E", "-I", "-s", "-S", "-b", "-bb", "-q", "-v"})
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


def check_script(plan: Plan) -> None:
    """Raise PathError if the command is ``python SCRIPT``, and there is no such script.

    Lines of setup may change the directory, or make the script: if there are any, nothing is checked.
    """
    script = _script(plan.words)
    workdir = Path(plan.workdir)
    if script is None or plan.spec.setup or not workdir.is_dir() or (workdir / script).exists():
        return
    path = workdir / script
    scripts = [each.name for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
    hint = suggestion(path.name, scripts) or (
        "; paths in 'command' are relative to 'workdir', by default the directory that submit is called from"
    )
    raise PathError(f"there is no script {path}{hint}")


def _script(words: Sequence[str]) -> str | None:
    """The script that Python is to run; None if that cannot be told."""
    if not _PYTHON.fullmatch(Path(words[0]).name):
        return None
    for word in words[1:]:
        if not word.startswith("-"):
            return word if word.endswith(".py") and "{" not in word else None
        if word not in _FLAGS:
            return None
    return None


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
    mount = mount_of(root.stat().st_dev)
    if root.is_relative_to(_TEMPORARY):
        place = _TEMPORARY
    elif mount is not None and mount.kind in _OWN_FILESYSTEMS:
        place = mount.point
    else:
        return []
    return [
        f"the runs root {root} is on this machine's own {place}, which compute nodes usually do not see; choose a "
        "shared directory with --runs or SLURMTRAIN_RUNS"
    ]
