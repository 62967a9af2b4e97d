"""What a format can say about a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from slurmtrain.model.spec.checkpoint import step_in_name
from slurmtrain.runtime.checkpoint.formats.trees import FileTree

Contents = dict[str, Callable[[], Any]]
"""How to read each tensor and plain value of a checkpoint, by name."""


class Format(ABC):
    """One format. All methods but :meth:`contents` work without torch; methods that look into files raise OSError."""

    NAME: ClassVar[str]
    """Its name in ``checkpoint.format``."""

    @abstractmethod
    def recognizes(self, tree: FileTree) -> bool:
        """Whether these files are of this format, complete or not."""

    @abstractmethod
    def problem(self, tree: FileTree, ranks: int) -> str | None:
        """Why it is not complete, as a phrase; None if it is.

        ``ranks``: the least number of ranks that have saved it, for formats with a file for each rank.
        """

    def step(self, _tree: FileTree) -> int | None:
        """The step that a complete checkpoint holds; None if it holds none. Raises CheckpointError."""
        return None

    def step_in_name(self, name: str) -> int | None:
        """The step in the ``name`` of a checkpoint; None if there is none."""
        return step_in_name(name)

    def optional_files(self, _tree: FileTree) -> set[str]:
        """Names of files that not every script saves, but each of its checkpoints then has."""
        return set()

    @abstractmethod
    def contents(self, tree: FileTree) -> Contents:
        """What training continues from, except random number states. Leaves out paths, times and settings.

        Raises CheckpointError.
        """

    def modules(self, _names: Collection[str]) -> list[str]:
        """The prefixes of models' weights among the names of its contents, without the dot at their end."""
        return []


def prefixes(names: Collection[str], candidates: Collection[str]) -> list[str]:
    """The candidates that are followed by a dot in one of the names."""
    return [each for each in candidates if any(name.startswith(f"{each}.") for name in names)]
