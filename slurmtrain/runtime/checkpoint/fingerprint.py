"""The identity of a checkpoint by its content: equal for a copy, different for another save to the same place.

Whole tensors are never read: a checkpoint may have hundreds of gigabytes. What is read of a file: all of it if it is
small, else its beginning, its end and samples in between; and checksums where its format has some. Training changes
almost every parameter, and with it the samples; where most parameters are frozen, checksums, the beginning of each
tensor, and small files such as a trainer's state differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.files import new_hasher
from slurmtrain.runtime.checkpoint.formats.archives import directory_of_archive, is_archive
from slurmtrain.runtime.checkpoint.formats.dcp import INDEX, is_dcp, read_items
from slurmtrain.runtime.checkpoint.formats.safetensors_header import METADATA, read_header
from slurmtrain.runtime.checkpoint.formats.trees import FileTree
from slurmtrain.system.owned_files import open_readable, read_readable

# A file up to this size is read whole.
_SMALL = 1 << 18
_EDGE = 1 << 16
_SAMPLES = 16
_SAMPLE_BYTES = 1 << 12
# The beginning of each tensor, of at most so many.
_TENSOR_BYTES = 1 << 8
_TENSORS = 1024
_CHUNK = 1 << 22


def fingerprint(tree: FileTree) -> str:
    """The identity of a checkpoint, in hex. Raises OSError."""
    hasher = new_hasher()
    for name in sorted(tree.sizes):
        size = tree.sizes[name]
        hasher.update(f"{name}\0{size}\0".encode())
        if size <= _SMALL:
            hasher.update(read_readable(tree.path / name))
        else:
            _add_large(hasher, tree, name, size)
    return hasher.hexdigest()


def _add_large(hasher: Any, tree: FileTree, name: str, size: int) -> None:
    path = tree.path / name
    with open_readable(path) as file:
        for offset, length in _places(tree, name, size):
            # Offsets in a file that is not whole, or that somebody forged, may be any number.
            file.seek(min(max(0, offset), size))
            hasher.update(file.read(length))
    with contextlib.suppress(CheckpointError):
        if is_archive(path):
            hasher.update(directory_of_archive(path))


def _places(tree: FileTree, name: str, size: int) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of what is read of a large file."""
    yield 0, _EDGE
    yield size - _EDGE, _EDGE
    for number in range(_SAMPLES):
        yield size * (2 * number + 1) // (2 * _SAMPLES), _SAMPLE_BYTES
    if name.endswith(".safetensors"):
        yield from _tensor_places(tree.path / name)
    with contextlib.suppress(CheckpointError):
        yield from _item_places(tree, name)


def _tensor_places(path: Path) -> Iterator[tuple[int, int]]:
    header, begin = read_header(path)
    with contextlib.suppress(TypeError, LookupError, AttributeError, ValueError):
        entries = [entry for name, entry in (header or {}).items() if name != METADATA]
        for entry in _spread(entries):
            yield begin + int(entry["data_offsets"][0]), _TENSOR_BYTES


def _item_places(tree: FileTree, name: str) -> Iterator[tuple[int, int]]:
    """The ends of tensors in a file of torch.distributed.checkpoint: each is an archive, which ends with checksums."""
    folder, _, last = name.rpartition("/")
    place = tree.below(folder) if folder else tree
    if not is_dcp(place) or INDEX not in place.top:
        return
    for item in _spread([item for item in read_items(place) if item.file == last]):
        yield max(0, item.offset + item.length - 4 * _TENSOR_BYTES), 4 * _TENSOR_BYTES


def _spread(entries: list[Any]) -> list[Any]:
    """At most so many of them as are read, spread evenly."""
    return entries[:: max(1, -(-len(entries) // _TENSORS))]


def hash_file(path: Path) -> str:
    """The hash of a whole file, in hex. Raises OSError."""
    hasher = new_hasher()
    with open_readable(path) as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()
