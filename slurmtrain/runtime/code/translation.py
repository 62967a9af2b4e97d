"""What a command, or a variable of its environment, names of a repository: the run's own copy of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.spec.code import CodeSnapshot, path_in_word, relative_to_root
from slurmtrain.model.spec.command_files import paths_written
from slurmtrain.model.spec.plan import Plan


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
