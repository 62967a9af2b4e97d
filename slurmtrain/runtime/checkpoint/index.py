"""Reading what ranks wrote, without running anything that somebody may have put there.

Tensors are read by torch.distributed.checkpoint, resharded as needed. Its index, ``.metadata``, is a pickle: here only
the classes that it consists of are allowed. Values load with ``weights_only=True``.
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
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorStorageMetadata

from slurmtrain.errors import CheckpointError

INDEX = ".metadata"
_CLASSES: Mapping[tuple[str, str], Any] = {
    (known.__module__, known.__qualname__): known
    for known in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        _StorageInfo,
        torch.Size,
        collections.OrderedDict,
    )
}


def _member(enumeration: Any, name: str) -> Any:
    """Stands for getattr, by which some versions of Python pickle the members of an enumeration."""
    if enumeration is not metadata._MEM_FORMAT_ENCODING or name not in enumeration.__members__:
        raise pickle.UnpicklingError("builtins.getattr has no place in it, but for one enumeration")
    return enumeration[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _CLASSES.get((module, name))
        if known is not None:
            return known
        if (module, name) == ("builtins", "getattr"):
            return _member
        # Types and layouts of tensors are pickled as attributes of torch, or through a function that looks them up.
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype | torch.layout):
            return value
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")


class Index:
    """Which tensor, or value, of a checkpoint lies where."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError where there is no index that can be read safely."""
        self.directory = directory
        self.metadata = _read(directory / INDEX)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, by name."""
        known = self.metadata.state_dict_metadata
        return {name: tuple(it.size) for name, it in known.items() if isinstance(it, TensorStorageMetadata)}

    def value(self, name: str) -> Any:
        """Something that is no tensor. Raises KeyError where there is no such, whatever torch.load raises, OSError."""
        info = self.metadata.storage_data[MetadataIndex(name)]
        with (self.directory / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            return torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)

    def empty(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors on the CPU for what is to be read, as a whole."""
        known = self.metadata.state_dict_metadata
        found = {name: it for name in names if isinstance(it := known[name], TensorStorageMetadata)}
        return {name: torch.empty(it.size, dtype=it.properties.dtype) for name, it in found.items()}

    def read(self, tensors: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
        """Read into these tensors, each rank of the group its parts; called on all of them alike.

        Raises torch's CheckpointException, which has every rank's errors.
        """
        if not tensors and group is None:
            return
        with warnings.catch_warnings():
            # That one process reads alone is what is meant here.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(
                tensors,
                storage_reader=_Reader(self.directory, self.metadata),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=group is None,
            )


class _Reader(FileSystemReader):
    """Reads tensors by an index that was read before."""

    def __init__(self, directory: Path, known: Metadata) -> None:
        super().__init__(directory)
        self._known = known

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        if self._known.storage_meta is None:
            self._known.storage_meta = StorageMeta()
        self._known.storage_meta.load_id = self.load_id
        return self._known


def _read(path: Path) -> Metadata:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        found = _Unpickler(io.BytesIO(content)).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it is a {type(found).__name__}")
    except Exception as error:  # a pickle that is not what it should be raises anything
        raise CheckpointError(f"{path} is no index of a checkpoint: {error}") from error
    for info in (found.storage_data or {}).values():
        if Path(info.relative_path).name != info.relative_path:
            raise CheckpointError(f"{path} is no index of a checkpoint: it leads to {info.relative_path!r}")
    return found
