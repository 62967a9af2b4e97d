"""Places for results that a command names by relative paths: in a run's own copy of its code, links to where they are.

Whoever writes ``--output-dir out`` looks for ``out`` next to the code, and not in the directory of the run.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path, PurePosixPath

from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.spec.command_files import DIRECTORY, UNKNOWN, ResultPlace, result_places
from slurmtrain.model.spec.plan import Plan
from slurmtrain.system.inherited import PRIVATE, umask_of_ranks


def link_results(plan: Plan, run: RunDir) -> None:
    """Link from a run's copy of its code to the places in the repository that its command writes to.

    Directories are made in the repository. Where that is not possible, what is written stays in the copy.

    Args:
        plan: The run's plan.
        run: The run, whose copy has been made if its plan has a snapshot.
    """
    if plan.code is None:
        return
    tree = plan.code.tree(run.code)
    for place in result_places(plan.words, plan.spec.checkpoint.glob, plan.workdir, plan.code.root):
        with contextlib.suppress(OSError):
            _link(place, Path(plan.code.root), tree)


def _link(place: ResultPlace, root: Path, tree: Path) -> None:
    parts = PurePosixPath(place.path).parts
    for depth in range(1, len(parts) + 1):
        relative = "/".join(parts[:depth])
        # A link leads to the repository already; a directory of the code is the run's own.
        if (tree / relative).is_dir() and not (tree / relative).is_symlink():
            continue
        if not os.path.lexists(tree / relative):
            if depth < len(parts) or place.kind == DIRECTORY:
                _make_directory(root / relative)
            elif place.kind == UNKNOWN:
                return  # whichever of the two it is made, the script may need the other
            (tree / relative).symlink_to(root / relative)
        return


def _make_directory(path: Path) -> None:
    """Make a directory unless it exists, with the rights that it would have if a script of the run made it."""
    if not path.is_dir():
        path.mkdir()
        path.chmod(stat.S_IMODE(path.stat().st_mode) | PRIVATE & ~umask_of_ranks())
