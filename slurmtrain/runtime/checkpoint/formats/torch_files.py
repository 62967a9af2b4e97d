"""Files that ``torch.save`` wrote, alone or in a directory."""

from __future__ import annotations

from collections.abc import Collection

from slurmtrain.runtime.checkpoint.formats.archives import is_archive, read_archive
from slurmtrain.runtime.checkpoint.formats.base import Contents, Format, prefixes
from slurmtrain.runtime.checkpoint.formats.pickles import step_of
from slurmtrain.runtime.checkpoint.formats.trees import TORCH_SUFFIXES, FileTree, file_problem

# Keys under which scripts usually save a model's weights.
_MODULES = ("model", "model_state_dict", "state_dict", "module", "net", "network", "weights")


class TorchFiles(Format):
    """What a script wrote with ``torch.save``: usually a dictionary with the states of its objects."""

    NAME = "torch"

    def recognizes(self, tree: FileTree) -> bool:
        """Whether there is an archive, or a file with a usual ending."""
        return bool(_files(tree)) or (not tree.is_directory and is_archive(tree.path))

    def problem(self, tree: FileTree, _ranks: int) -> str | None:
        """Why one of its files is not whole."""
        if tree.is_directory and (name := tree.unfinished()):
            return f"{name} is still being written"
        names = _files(tree) if tree.is_directory else [""]
        problems = (file_problem(tree, name, by_torch=False) for name in names)
        return next(filter(None, problems), None) if names else "it has no file of torch.save"

    def step(self, tree: FileTree) -> int | None:
        """The number that the first file with one has under ``global_step``, ``step`` or the like."""
        paths = [tree.path / name for name in _files(tree) or [""]]
        steps = (step_of(read_archive(path, path.name)) for path in paths if path.is_file() and is_archive(path))
        return next((step for step in steps if step is not None), None)

    def contents(self, tree: FileTree) -> Contents:
        """Its tensors and values by dotted names, which in a directory begin with the file's name."""
        from slurmtrain.runtime.checkpoint.formats.values import leaves, read_torch

        if not tree.is_directory:
            return leaves(read_torch(tree.path))
        return {
            name: read
            for file in _files(tree)
            for name, read in leaves(read_torch(tree.path / file), file.rpartition(".")[0]).items()
        }

    def modules(self, names: Collection[str]) -> list[str]:
        """The parts that usually are weights."""
        return prefixes(names, _MODULES)


def _files(tree: FileTree) -> list[str]:
    if not tree.is_directory:
        return [""] if tree.path.name.endswith(TORCH_SUFFIXES) else []
    return sorted(name for name in tree.top if name.endswith(TORCH_SUFFIXES))
