"""Which rank writes what of a state, and where in its file: by the planners of torch.distributed.checkpoint.

Planning is a conversation of all ranks. Its result depends on names, shapes and types alone, and is used again until
one of them changes.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from slurmtrain.runtime.checkpoint.torch_format import Frame, frame_of
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.job.torch_private import storage_info

if TYPE_CHECKING:
    from slurmtrain.runtime.job.torch_private import StorageInfo

# What data of a tensor is aligned to, in bytes: as torch.save does it within its own archives.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor, or a rank's part of one, in the rank's file. ``start`` counts bytes from the file's beginning."""

    item: WriteItem
    frame: Frame
    start: int

    @property
    def data(self) -> tuple[int, int]:
        """First byte of the tensor's data, and the one behind its last."""
        first = self.start + len(self.frame.prefix)
        return first, first + self.frame.size


@dataclass(frozen=True, slots=True)
class Sheet:
    """What this rank writes: tensors at fixed places; values come behind them, wherever their sizes put them."""

    places: Sequence[TensorSlot]
    tensor_bytes: int
    all_bytes: int
    """Of the tensors of all ranks."""


class Sharding:
    """The plan of an attempt's checkpoints; every method but those that say otherwise is called on all ranks alike."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._signature: object = None
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._metadata: Metadata | None = None
        self._fixed: dict[MetadataIndex, StorageInfo] = {}
        self._sheet: Sheet | None = None

    def is_new(self, state: Mapping[str, Any]) -> bool:
        """Whether this rank's state is other than what was planned; on this rank alone."""
        return self._sheet is None or _signature(state) != self._signature

    def plan(self, state: Mapping[str, Any]) -> None:
        """Agree on who writes what. Raises ValueError where the parts of a tensor do not make a whole."""
        ranks = self._ranks
        # What is raised below leaves no plan that would fit the state of before.
        self._sheet = None
        self._planner.set_up_planner(dict(state), is_coordinator=ranks.rank == 0)
        local_plan = ranks.at_first(self._planner.create_local_plan(), self._share_out)
        places, end = _lay_out(local_plan.items, self._planner)
        fixed = {place.item.index: _info(ranks.rank, place.start, place.frame.length) for place in places}
        parts = ranks.gather((fixed, end))
        self._fixed = {index: info for infos, _ in parts for index, info in infos.items()}
        self._sheet = Sheet(places, end, sum(size for _, size in parts))
        self._signature = _signature(state)

    def _share_out(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: what is the same on all ranks is written by one of them, each in turn by size."""
        shared, self._metadata = self._planner.create_global_plan(plans)
        return shared

    @property
    def sheet(self) -> Sheet:
        """What this rank writes, as planned last."""
        assert self._sheet is not None
        return self._sheet

    def places_of(self, values: Mapping[str, bytes]) -> dict[str, tuple[int, int]]:
        """(start, length) of values in this rank's file, one after the other behind its tensors; on this rank alone."""
        places, end = {}, self.sheet.tensor_bytes
        for name, content in values.items():
            places[name] = (end, len(content))
            end += len(content)
        return places

    def index(self, values: Mapping[str, tuple[int, int, int]]) -> bytes:
        """The content of ``.metadata``; on rank 0 alone. ``values``: (rank, start, length) of each, by name."""
        assert self._metadata is not None
        placed = {MetadataIndex(name): _info(*where) for name, where in values.items()}
        metadata = replace(self._metadata, storage_data={**self._fixed, **placed}, version=CURRENT_DCP_VERSION)
        return pickle.dumps(metadata)


def part_of(state: dict[str, Any], place: TensorSlot) -> torch.Tensor:
    """The part of a tensor of ``state`` that is written at ``place``."""
    part: torch.Tensor = find_state_dict_object(state, place.item.index)
    return part.detach()


def file_name(rank: int) -> str:
    """The name of a rank's file, as torch.distributed.checkpoint has it."""
    return f"__{rank}_0.distcp"


def meshes(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The device meshes that tensors of a state are sharded over."""
    used = {value.device_mesh for value in state.values() if isinstance(value, DTensor)}
    plain = [{"names": list(mesh.mesh_dim_names or ()), "shape": list(mesh.shape)} for mesh in used]
    return sorted(plain, key=str)


def _info(rank: int, start: int, length: int) -> StorageInfo:
    return storage_info(file_name(rank), start, length)


def _lay_out(items: Sequence[WriteItem], planner: DefaultSavePlanner) -> tuple[list[TensorSlot], int]:
    places, end = [], 0
    for item in items:
        if item.type is not WriteItemType.BYTE_IO:
            value = planner.lookup_object(item.index)
            place = TensorSlot(item, frame_of(value.dtype, value.shape), -(-end // _ALIGNMENT) * _ALIGNMENT)
            end = place.start + place.frame.length
            places.append(place)
    return places, end


def _signature(state: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [(name, *_shape(value)) for name, value in state.items()]


def _shape(value: Any) -> tuple[Any, ...]:
    if isinstance(value, DTensor):
        local = value.to_local()
        return (value.shape, local.shape, value.dtype, value.placements, value.device_mesh)
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else ()
