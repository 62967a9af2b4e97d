"""Which format a checkpoint has, and what is read of one of any format: contents, step, identity, checksums."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.errors import CheckpointError
from slurmtrain.model.experiment.checkpoint import AUTO, OWN
from slurmtrain.runtime.checkpoint.checkpoint_files import new_hasher
from slurmtrain.runtime.checkpoint.formats.deepspeed import DeepSpeed
from slurmtrain.runtime.checkpoint.formats.pickles import as_step, member
from slurmtrain.runtime.checkpoint.formats.plain_files import (
    INDEX,
    SHARD,
    DcpDirectory,
    Format,
    Other,
    SafetensorsFiles,
    TorchFiles,
    is_dcp,
    read_item,
    read_items,
)
from slurmtrain.runtime.checkpoint.formats.trainers import Accelerate, HuggingFace, Lightning
from slurmtrain.runtime.checkpoint.formats.trees import (
    METADATA,
    Contents,
    FileTree,
    checksum_problem,
    directory_of_archive,
    is_archive,
    list_tree,
    read_archive,
    read_header,
)
from slurmtrain.system.owned_files import open_readable, read_readable

OTHER = Other()
# Tried in this order: directories of trainers contain files of the simpler formats.
_FORMATS: tuple[Format, ...] = (
    HuggingFace(), Accelerate(), Lightning(), DeepSpeed(), DcpDirectory(), SafetensorsFiles(), TorchFiles(), OTHER,
)  # fmt: skip
# A larger JSON file holds no state of a trainer.
_LIMIT_BYTES = 1 << 24
_BY_NAME: Mapping[str, Format] = {each.NAME: each for each in _FORMATS}


def format_of(tree: FileTree, declared: str = AUTO) -> Format:
    """The format of a checkpoint: the ``declared`` one of ``checkpoint.format``, or else the one of its content.

    Raises OSError.
    """
    if declared not in (AUTO, OWN):
        return _BY_NAME[declared]
    return next(each for each in _FORMATS if each.recognizes(tree))


def find_modules(name: str, contents: Collection[str]) -> list[str]:
    """The prefixes of models' weights among the names in a checkpoint's ``contents``; ``name``: its format's."""
    return _BY_NAME[name].modules(contents)


def read_contents(path: Path, declared: str = AUTO) -> Contents:
    """How to read each tensor and plain value of the checkpoint at ``path``, by name, in the order of names.

    Only what training continues from: no random number states, paths, times or settings, so that two equal trainings
    have equal contents. A tensor is read when its function is called.

    Args:
        path: A file or directory.
        declared: Its format as in ``checkpoint.format``.

    Raises:
        CheckpointError: it cannot be read.
        OSError: a file cannot be read.
    """
    tree = list_tree(path)
    contents = format_of(tree, declared).contents(tree)
    return dict(sorted(contents.items()))


def step_by_key(tree: FileTree, names: Sequence[str]) -> int | None:
    """The whole number under a key of a checkpoint; None if no file has one.

    Files of torch.save, headers of safetensors, and JSON are searched, in the order of their names. Nothing in them is
    executed.

    Args:
        tree: The checkpoint.
        names: The names of the key, from the outermost dictionary inwards.
    """
    for name in sorted(tree.sizes):
        with contextlib.suppress(CheckpointError, OSError, ValueError, RecursionError):
            step = _as_number(_look_up(_read(tree.path / name, name or tree.path.name), names))
            if step is not None:
                return step
    return None


def _read(path: Path, name: str) -> Any:
    """The dictionary that a file holds; None if it holds none that can be read."""
    if name.endswith(".safetensors"):
        return (read_header(path)[0] or {}).get(METADATA)
    if name.endswith(".json"):
        with open_readable(path) as file:
            return json.loads(file.read(_LIMIT_BYTES))
    return read_archive(path, name) if is_archive(path) else None


def _look_up(value: Any, names: Sequence[str]) -> Any:
    """What stands under a key, whose names may have dots themselves."""
    for count in range(len(names), 0, -1):
        inner = member(value, ".".join(names[:count]))
        if inner is not None:
            return inner if count == len(names) else _look_up(inner, names[count:])
    return None


def _as_number(value: Any) -> int | None:
    """A step that may be written as text, as all metadata of safetensors is, or as a whole floating-point number."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return as_step(int(value) if isinstance(value, float) and value.is_integer() else value)


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
    """The identity of a checkpoint, in hex: equal for a copy, different for another save to the same place.

    Whole tensors are never read: a checkpoint may have hundreds of gigabytes. What is read of a file: all of it if it
    is small, else its beginning, its end and samples in between; and checksums where its format has some. Training
    changes almost every parameter, and with it the samples; where most parameters are frozen, checksums, the beginning
    of each tensor, and small files such as a trainer's state differ.

    Raises OSError.
    """
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


def find_damage(tree: FileTree) -> Iterator[str]:
    """What differs from what was written, as phrases; reads every file of the ``tree`` that has checksums.

    Archives, which ``torch.save`` writes, have a checksum for each tensor; files of torch.distributed.checkpoint are
    sequences of archives; safetensors files have no checksums. The checkpoint must be complete. Raises OSError.
    """
    for name in sorted(tree.sizes):
        path = tree.path / name
        if name.endswith(SHARD):
            continue
        if is_archive(path) and (problem := checksum_problem(path)):
            yield f"{name or tree.path.name}: {problem}"
    for folder in ("", *sorted({name.rpartition("/")[0] for name in tree.sizes if "/" in name})):
        part = tree.below(folder) if folder else tree
        if INDEX in part.top:
            yield from _damaged_items(part)


def _damaged_items(tree: FileTree) -> Iterator[str]:
    """The items of a directory of torch.distributed.checkpoint that differ from what was written."""
    try:
        items = read_items(tree)
    except CheckpointError as error:
        yield str(error)
        return
    for item in items:
        problem = checksum_problem(io.BytesIO(read_item(tree, item)))
        if problem:
            yield f"{item.name} in {item.file}: {problem}"
