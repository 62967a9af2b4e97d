"""Anything else: files of a format that is not known here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from slurmtrain.runtime.checkpoint.formats.base import Contents, Format
from slurmtrain.runtime.checkpoint.formats.trees import FileTree, file_problem


class Other(Format):
    """Complete if nothing says otherwise."""

    NAME = "other"

    def recognizes(self, _tree: FileTree) -> bool:
        """Always: this is the last one to be asked."""
        return True

    def problem(self, tree: FileTree, _ranks: int) -> str | None:
        """Why it is empty, or still being written, or has a damaged archive."""
        return next(_problems(tree), None)

    def contents(self, tree: FileTree) -> Contents:
        """The hash of each file."""
        from slurmtrain.runtime.checkpoint.fingerprint import hash_file

        return {name or tree.path.name: partial(hash_file, tree.path / name) for name in sorted(tree.sizes)}


def _problems(tree: FileTree) -> Iterator[str]:
    if not tree.bytes:
        yield "it is empty"
    if tree.is_directory and (name := tree.unfinished()):
        yield f"{name} is still being written"
    for name in sorted(tree.sizes):
        # Empty files are markers or locks.
        if tree.sizes[name] and (problem := file_problem(tree, name, by_torch=False)):
            yield problem
