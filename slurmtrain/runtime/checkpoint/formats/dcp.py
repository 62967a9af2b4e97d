"""Directories of torch.distributed.checkpoint: files of all ranks, and ``.metadata``, which is written last."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.formats.archives import read_archive
from slurmtrain.runtime.checkpoint.formats.base import Contents, Format, prefixes
from slurmtrain.runtime.checkpoint.formats.pickles import STEP_NAMES, as_step, member, read_plain
from slurmtrain.runtime.checkpoint.formats.trees import FileTree
from slurmtrain.system.owned_files import open_readable, read_readable

INDEX = ".metadata"
SHARD = ".distcp"
_MODULES = ("model", "state_dict", "module", "app.model", "net")


class StoredItem(NamedTuple):
    """A tensor, a part of one, or a value: its name, its file, and its place there in bytes."""

    name: str
    file: str
    offset: int
    length: int


class DcpDirectory(Format):
    """What ``torch.distributed.checkpoint.save`` wrote."""

    NAME = "dcp"

    def recognizes(self, tree: FileTree) -> bool:
        """Whether there is an index or a file of a rank."""
        return is_dcp(tree)

    def problem(self, tree: FileTree, _ranks: int) -> str | None:
        """Why the index, or a file that it names, is missing."""
        return dcp_problem(tree)

    def step(self, tree: FileTree) -> int | None:
        """The whole number saved under ``global_step``, ``step`` or the like."""
        values = {item.name: item for item in read_items(tree)}
        by_name = (values[name] for name in STEP_NAMES if name in values)
        return next((step for item in by_name if (step := as_step(_value(tree, item))) is not None), None)

    def contents(self, tree: FileTree) -> Contents:
        """Its tensors and values."""
        return dcp_contents(tree)

    def modules(self, names: Collection[str]) -> list[str]:
        """The parts that usually are weights."""
        return prefixes(names, _MODULES)


def is_dcp(tree: FileTree) -> bool:
    """Whether a directory has files of torch.distributed.checkpoint."""
    return tree.is_directory and (INDEX in tree.top or any(name.endswith(SHARD) for name in tree.top))


def dcp_problem(tree: FileTree) -> str | None:
    """Why the directory is not complete, as a phrase; None if it is. Raises OSError."""
    if INDEX not in tree.top:
        return f"it has no {INDEX}"
    try:
        items = read_items(tree)
    except CheckpointError as error:
        return f"{INDEX} is not whole: {error}"
    ends: dict[str, int] = {}
    lengths: Counter[str] = Counter()
    for item in items:
        ends[item.file] = max(ends.get(item.file, 0), item.offset + item.length)
        lengths[item.file] += item.length
    if not ends:
        return f"{INDEX} names no file"
    for name, end in sorted(ends.items()):
        size = tree.sizes.get(name)
        if size is None:
            return f"{name} is missing"
        if size < end:
            return f"{name} has {size} bytes, and {INDEX} says at least {end}"
        # Whoever reads all of them would read the file again and again.
        if size < lengths[name]:
            return f"{INDEX} says that what is in {name} overlaps"
    return None


def read_items(tree: FileTree) -> list[StoredItem]:
    """Where everything is, according to the index. Raises CheckpointError, OSError."""
    index = read_plain(read_readable(tree.path / INDEX), INDEX)
    stored = member(index, "storage_data")
    if not isinstance(stored, Mapping):
        raise CheckpointError(f"{INDEX} is no index of torch.distributed.checkpoint")
    return list(_items(stored))


def _items(stored: Mapping[Any, Any]) -> Iterator[StoredItem]:
    for place, info in stored.items():
        name, file = member(place, "fqn"), member(info, "relative_path")
        offset, length = as_step(member(info, "offset")), as_step(member(info, "length"))
        if not isinstance(name, str) or not isinstance(file, str) or offset is None or length is None:
            raise CheckpointError(f"{INDEX} has an entry that this version cannot read")
        yield StoredItem(name, file, offset, length)


def _value(tree: FileTree, item: StoredItem) -> Any:
    """A plain value; an inert object for a tensor. Raises CheckpointError, OSError."""
    return read_archive(io.BytesIO(read_item(tree, item)), item.name)


def read_item(tree: FileTree, item: StoredItem) -> bytes:
    """The bytes of a item. Raises OSError."""
    with open_readable(tree.path / item.file) as file:
        file.seek(item.offset)
        return file.read(item.length)


def dcp_contents(tree: FileTree) -> Contents:
    """The tensors and values of the directory. Raises CheckpointError, OSError."""
    from slurmtrain.runtime.checkpoint.formats.values import leaves, read_torch
    from slurmtrain.runtime.checkpoint.index import Index

    index = Index(tree.path)
    shapes = index.shapes()
    contents: Contents = {name: partial(_tensor, index, name) for name in shapes}
    for item in read_items(tree):
        if item.name not in shapes:
            contents |= leaves(read_torch(io.BytesIO(read_item(tree, item))), item.name)
    return contents


def _tensor(index: Any, name: str) -> Any:
    tensors = index.empty([name])
    index.read(tensors)
    return tensors[name]
