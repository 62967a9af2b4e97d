"""Paths in a run's own copy of its code: which are its own, what a command names, and where results go.

Links in it lead to files of the user's. Whoever writes ``--output-dir out`` looks for ``out`` next to the code, and not
in the directory of the run: for such places there are links to where they are.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from slurmtrain.model.experiment.code import CodeSnapshot, path_in_word, relative_to_root
from slurmtrain.model.experiment.command_words import DIRECTORY, UNKNOWN, paths_written, result_places
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.layout import RunDir
from slurmtrain.system.inherited import PRIVATE, umask_of_ranks


def is_own_directory(tree: Path, path: str) -> bool:
    """Whether a path is a directory of a copy, and does not lead out of it.

    Args:
        tree: The copy.
        path: Relative to it; empty for the copy itself.
    """
    place = os.path.normpath(f"{os.path.realpath(tree)}/{path}")
    return os.path.realpath(place) == place and os.path.isdir(place)  # noqa: PTH112 (fast)


def translate_command(plan: Plan, run: RunDir, argv: Sequence[str]) -> list[str]:
    """A filled-in command, with absolute paths of code as the run has it.

    Paths that the command writes to stay as they are, and so does the interpreter, which finds its environment by its
    path.

    Args:
        plan: The run's plan.
        run: The run, which has its own copy of its code if the plan has a snapshot.
        argv: The command.
    """
    if plan.code is None:
        return list(argv)
    written = {named.path for named in paths_written(argv)}
    copy = CodeCopy(plan.code, run)
    return [word if word == plan.python else copy.translate_word(word, written) for word in argv]


class CodeCopy:
    """A run's own copy of a repository."""

    def __init__(self, snapshot: CodeSnapshot, run: RunDir) -> None:
        """The copy of this snapshot in a run, which has been made."""
        self.tree = snapshot.tree(run.code)
        """Where it is."""
        self._root = snapshot.root
        self._real = Path(os.path.realpath(self.tree))

    def translate(self, path: str) -> str:
        """An absolute path in the repository as one in the copy, if the copy holds it; else unchanged."""
        relative = relative_to_root(path, self._root)
        if relative is None:
            return path
        place = self.tree / relative
        # What the snapshot does not hold are links to where it is.
        held = os.path.lexists(place) and Path(os.path.realpath(place)).is_relative_to(self._real)
        return str(place) if held else path

    def translate_word(self, word: str, written: set[str]) -> str:
        """A word of a command; ``written``: paths that the command writes to."""
        for before, path in path_in_word(word):
            if path not in written and (place := self.translate(path)) != path:
                return before + place
        return word


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
        parts = PurePosixPath(place.path).parts
        # A link leads to the repository already; a directory of the code is the run's own.
        paths = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        path = next((path for path in paths if not (tree / path).is_dir() or (tree / path).is_symlink()), None)
        # Something may be there already, such as the link of an earlier attempt.
        if path is None or os.path.lexists(tree / path):
            continue
        is_directory = path != paths[-1] or place.kind == DIRECTORY
        if not is_directory and place.kind == UNKNOWN:
            continue  # whichever of the two it is made, the script may need the other
        source = Path(plan.code.root, path)
        with contextlib.suppress(OSError):
            if is_directory and not source.is_dir():
                # With the rights that it would have if a script of the run made it.
                source.mkdir()
                source.chmod(stat.S_IMODE(source.stat().st_mode) | PRIVATE & ~umask_of_ranks())
            (tree / path).symlink_to(source)
