"""Reading checkpoint files without executing code that may have been planted in them.

Tensors are read by torch.distributed.checkpoint, resharded as needed. Its index, ``.metadata``, is a pickle: only the
classes that an index consists of are allowed here. Values are loaded with ``weights_only=True``.
"""

from __future__ import annotations

import collections
import io
import pickle
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata, metadata
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorStorageMetadata

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.job.torch_private import find_in_index, index_classes, memory_formats

INDEX = ".metadata"
_CLASSES: Mapping[tuple[str, str], Any] = {
    (allowed.__module__, allowed.__qualname__): allowed
    for allowed in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        *index_classes(),
        torch.Size,
        collections.OrderedDict,
    )
}


def _member(enumeration: Any, name: str) -> Any:
    """Replaces getattr, with which some versions of Python pickle the members of an enumeration."""
    if enumeration is not memory_formats() or name not in enumeration.__members__:
        raise pickle.UnpicklingError("builtins.getattr is not allowed in it, except for one enumeration")
    return enumeration[name]


def _forget_path(*_: Any) -> None:
    """Replaces classes of paths: some writers keep where a checkpoint was, which nothing needs."""


class _Unpickler(pickle.Unpickler):
    """Loads an index and nothing else: a pickle can name any function and have it called."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = _CLASSES.get((module, name)) or find_in_index(module, name)
        if allowed is not None:
            return allowed
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "PurePosixPath"):
            return _forget_path
        # Types and layouts of tensors are pickled as attributes of torch, or through a function that looks them up.
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype | torch.layout):
            return value
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in it")


class Index:
    """Where each tensor or value of a checkpoint is stored."""

    def __init__(self, directory: Path) -> None:
        """Read the index in ``directory``. Raises CheckpointError if it is missing or cannot be read safely."""
        self.directory = directory
        self.metadata = _read(directory / INDEX)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, by name."""
        entries = self.metadata.state_dict_metadata
        return {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def value(self, name: str) -> Any:
        """The value called ``name``, not a tensor. Raises KeyError, OSError, and whatever torch.load raises."""
        info = self.metadata.storage_data[MetadataIndex(name)]
        with (self.directory / info.relative_path).open("rb") as file:
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

    def read(self, tensors: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
        """Read into these ``tensors``; each rank of the ``group`` reads its parts. Call it on all of its ranks.

        Raises torch's CheckpointException, which carries every rank's errors.
        """
        if not tensors and group is None:
            return
        with warnings.catch_warnings():
            # Reading with a single process is intended here.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(
                tensors,
                storage_reader=_Reader(self.directory, self.metadata),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=group is None,
            )


class _Reader(FileSystemReader):
    """Reads tensors using an index that has already been read."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def _read(path: Path) -> Metadata:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        index = _Unpickler(io.BytesIO(content)).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"it is a {type(index).__name__}")
    except Exception as error:  # a malformed pickle can raise anything
        raise CheckpointError(f"{path} is no index of a checkpoint: {error}") from error
    for info in (index.storage_data or {}).values():
        if Path(info.relative_path).name != info.relative_path:
            raise CheckpointError(f"{path} is no index of a checkpoint: it leads to {info.relative_path!r}")
    return index
