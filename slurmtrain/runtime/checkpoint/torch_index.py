"""Reading checkpoint files without executing code that may have been planted in them.

Tensors are read by torch.distributed.checkpoint, resharded as needed. Its index, ``.metadata``, is a pickle. Only plain
data are read from it here: the index is then built from these descriptions, with its own classes and fields. Values are
loaded with ``weights_only=True``.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.untrusted_files import Global, Inert, as_step, read_plain
from slurmtrain.runtime.job.torch_private import memory_formats, storage_info_class
from slurmtrain.system.interpreter import without_collection
from slurmtrain.system.owned_files import open_readable, read_readable

INDEX = ".metadata"


def _name_of(named: type) -> Global:
    return Global(named.__module__, named.__qualname__)


_SIZE = _name_of(torch.Size)
_MEMORY_FORMAT = _name_of(memory_formats())
# How some versions of Python pickle the members of an enumeration.
_GETATTR = Global("builtins", "getattr")
# How torch pickles layouts.
_GET_LAYOUT = Global("torch.serialization", "_get_layout")
_DATACLASSES: dict[Global | None, Any] = {
    _name_of(each): each
    for each in (BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata, storage_info_class())
}
_PROPERTIES = _name_of(TensorProperties)
_NAMES = frozenset(
    {
        *_DATACLASSES, _name_of(Metadata), _name_of(StorageMeta), _PROPERTIES, _SIZE, _MEMORY_FORMAT, _GETATTR,
        _GET_LAYOUT, Global("collections", "OrderedDict"),
    }
)  # fmt: skip
# Some writers keep where a checkpoint was.
_PATHS = ("PosixPath", "PurePosixPath")


class Index:
    """Where each tensor or value of a checkpoint is stored."""

    def __init__(self, directory: Path) -> None:
        """Read the index in ``directory``. Raises CheckpointError if it is missing or cannot be read safely."""
        self.directory = directory
        path = directory / INDEX
        try:
            content = read_readable(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        try:
            # Collecting garbage among so many objects would double the time.
            with without_collection():
                self.metadata = _index(read_plain(content, INDEX, _is_allowed))
        except (CheckpointError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{path} is not an index of a checkpoint: {error}") from error
        for info in self.metadata.storage_data.values():
            # A path with a directory in it could make any other file of the user a part of the checkpoint.
            if Path(info.relative_path).name != info.relative_path:
                raise CheckpointError(f"{path} is not an index of a checkpoint: it points to {info.relative_path!r}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, by name."""
        entries = self.metadata.state_dict_metadata
        return {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def value(self, name: str) -> Any:
        """The value called ``name``, not a tensor. Raises KeyError, OSError, and whatever torch.load raises."""
        info = self.metadata.storage_data[MetadataIndex(name)]
        with open_readable(self.directory / info.relative_path) as file:
            file.seek(info.offset)
            return torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)

    def empty(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Unsharded CPU tensors to read these ``names`` into. Raises KeyError for a name that is not in the index."""
        entries = self.metadata.state_dict_metadata
        return {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name in names
            if isinstance(entry := entries[name], TensorStorageMetadata)
        }

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor called ``name``. Raises KeyError, CheckpointException."""
        tensors = self.empty([name])
        self.read(tensors)
        return tensors[name]

    def read(self, tensors: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
        """Read into these ``tensors``; each rank of the ``group`` reads its parts. Call it on all of its ranks.

        Raises torch's CheckpointException, which carries every rank's errors.
        """
        # With a group every rank takes part in torch's collectives, even without a tensor of its own.
        if not tensors and group is None:
            return
        with warnings.catch_warnings():
            # Reading with a single process is intended here.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(
                tensors,
                storage_reader=_IndexedReader(self.directory, self.metadata),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=group is None,
            )


class _IndexedReader(FileSystemReader):
    """Reads tensors using an index that has already been read."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        # As torch's own reader does with an index that it has unpickled.
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


# --- from plain values to an index; for anything else: ValueError, TypeError, LookupError, AttributeError -------------


def _is_allowed(named: Global) -> bool:
    """Whether an index may contain this name."""
    return (
        named in _NAMES
        or (named.module.partition(".")[0] == "pathlib" and named.name in _PATHS)
        or (named.module == "torch" and isinstance(_attribute_of_torch(named.name), torch.dtype | torch.layout))
    )


def _attribute_of_torch(name: str) -> Any:
    """An attribute of torch, None if it has none; getattr() would import what is imported on first use."""
    return vars(torch).get(name)


def _index(plain: Any) -> Metadata:
    """The parts of an index that reading needs."""
    state = _state_of(plain, Metadata)
    stored, placed = state["state_dict_metadata"], state["storage_data"]
    if not isinstance(stored, dict) or not isinstance(placed, dict):
        raise TypeError("it has something other than a dictionary")
    index = Metadata(
        state_dict_metadata={name: _real(each) for name, each in stored.items()},
        storage_data={_real(place): _real(each) for place, each in placed.items()},
    )
    for name, entry in index.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            sizes = [entry.size, *(size for each in entry.chunks for size in (each.offsets, each.sizes))]
            is_valid = isinstance(entry.properties, TensorProperties) and all(isinstance(s, torch.Size) for s in sizes)
        else:
            is_valid = isinstance(entry, BytesStorageMetadata)
        if not isinstance(name, str) or not is_valid:
            raise TypeError("it has something other than a TensorStorageMetadata")
    for place, info in index.storage_data.items():
        offset, position = place.offset, place.index
        if not (offset is None or isinstance(offset, torch.Size)) or not (position is None or _is_whole(position)):
            raise TypeError("it has something other than the place of a tensor")
        if not isinstance(place.fqn, str) or not _is_whole(info.offset, info.length):
            raise TypeError("it has something other than a place in a file")
    return index


def _is_whole(*numbers: Any) -> bool:
    return all(as_step(number) is not None for number in numbers)


def _state_of(plain: Any, named: type) -> dict[str, Any]:
    """The attributes of an instance of a dataclass."""
    if not isinstance(plain, Inert) or plain.made_by != _name_of(named) or plain.arguments:
        raise ValueError(f"it has something other than a {named.__name__}")
    state = {} if plain.state is None else plain.state
    unknown = set(state) - {field.name for field in fields(named)}
    if not isinstance(state, dict) or unknown:
        raise ValueError(f"a {named.__name__} in it has other attributes: {sorted(map(str, unknown))}")
    return state


def _real(plain: Any) -> Any:
    """What a part of an index stands for: plain values, objects of torch, or lists of them."""
    if isinstance(plain, Global):
        value = _attribute_of_torch(plain.name) if plain.module == "torch" else None
        if not isinstance(value, torch.dtype | torch.layout):
            raise TypeError(f"it has something other than a value: {plain.name}")
        return value
    if isinstance(plain, list | tuple):
        return type(plain)(map(_real, plain))
    if not isinstance(plain, Inert):
        return plain
    named = _DATACLASSES.get(plain.made_by)
    if named is not None:
        return named(**{name: _real(value) for name, value in _state_of(plain, named).items()})
    if plain.made_by == _PROPERTIES:
        properties: Any = TensorProperties()
        # Its own inverse of how it is pickled, since memory formats cannot be.
        properties.__setstate__(tuple(map(_real, plain.state)))
        return properties
    if plain.made_by == _SIZE and _is_whole(*(plain.arguments[0])):
        return torch.Size(plain.arguments[0])
    if plain.made_by == _GET_LAYOUT:
        return _real(Global("torch", plain.arguments[0].removeprefix("torch.")))
    if plain.made_by == _MEMORY_FORMAT:
        return memory_formats()(plain.arguments[0])
    if plain.made_by == _GETATTR and plain.arguments[0] == _MEMORY_FORMAT:
        return memory_formats()[plain.arguments[1]]
    raise ValueError("it has something other than a part of an index")
