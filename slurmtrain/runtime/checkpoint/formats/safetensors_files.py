"""Files in the format of safetensors, alone or in a directory with the index of a sharded model."""

from __future__ import annotations

from collections.abc import Collection

from slurmtrain.runtime.checkpoint.formats.base import Contents, Format
from slurmtrain.runtime.checkpoint.formats.pickles import STEP_NAMES
from slurmtrain.runtime.checkpoint.formats.safetensors_header import METADATA, read_header
from slurmtrain.runtime.checkpoint.formats.trees import FileTree, file_problem
from slurmtrain.runtime.checkpoint.formats.weights import indexed_files, sharding_problem, tensors_of

SUFFIX = ".safetensors"


class SafetensorsFiles(Format):
    """Tensors alone: a file, or a directory of files."""

    NAME = "safetensors"

    def recognizes(self, tree: FileTree) -> bool:
        """Whether a name ends like the names of safetensors files."""
        return bool(_files(tree))

    def problem(self, tree: FileTree, _ranks: int) -> str | None:
        """Why one of its files is missing or not whole."""
        if not _files(tree):
            return "it has no .safetensors file"
        if not tree.is_directory:
            return file_problem(tree, "")
        if name := tree.unfinished():
            return f"{name} is still being written"
        names = sorted({*_files(tree), *indexed_files(tree)})
        return sharding_problem(tree) or next(filter(None, (file_problem(tree, name) for name in names)), None)

    def step(self, tree: FileTree) -> int | None:
        """The number in the metadata of its first file."""
        header, _ = read_header(tree.path / _files(tree)[0])
        metadata = (header or {}).get(METADATA) or {}
        values = (str(metadata[name]) for name in STEP_NAMES if name in metadata)
        return next((int(value) for value in values if value.isdecimal()), None)

    def contents(self, tree: FileTree) -> Contents:
        """Its tensors."""
        return {name: read for file in _files(tree) for name, read in tensors_of(tree.path / file).items()}

    def modules(self, _names: Collection[str]) -> list[str]:
        """All of it."""
        return [""]


def _files(tree: FileTree) -> list[str]:
    if not tree.is_directory:
        return [""] if tree.path.name.endswith(SUFFIX) else []
    return sorted(name for name in tree.top if name.endswith(SUFFIX))
