"""Which rank writes which part of a state, and where in its file, using the planners of torch.distributed.checkpoint.

Planning is a collective operation. Its result depends only on names, shapes and types, and is reused until one of them
changes.

A file is a sequence of ``torch.save`` outputs. For a dense tensor that is a prefix, the tensor's bytes in row-major
order, and a suffix. Both depend only on its type and shape, except for checksums, which ``torch.load`` does not check
(here XXH3-128 of the whole file replaces them): all that remains to do for a save is to copy the bytes into place.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, cast

import torch
import xxhash
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from slurmtrain.errors import CheckpointError
from slurmtrain.model.interruption.policy import DIFFERENT_REPLICAS
from slurmtrain.runtime.checkpoint.checkpoint_files import Manifest
from slurmtrain.runtime.checkpoint.torch_index import Index
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.job.torch_private import index_version, storage_info

if TYPE_CHECKING:
    from slurmtrain.runtime.job.torch_private import StorageInfo


@dataclass(frozen=True, slots=True)
class Frame:
    """``prefix`` + ``size`` bytes of data + ``suffix`` is what ``torch.load`` reads as a tensor."""

    prefix: bytes
    size: int
    suffix: bytes

    @property
    def length(self) -> int:
        """The length of all three together, in bytes."""
        return len(self.prefix) + self.size + len(self.suffix)


def can_be_framed(value: object) -> bool:
    """Whether a value is a plain dense tensor; others (sparse, quantized, subclasses) go through ``torch.save``."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and cast(torch.Tensor, value).layout is torch.strided
        and not cast(torch.Tensor, value).is_quantized
    )


@functools.lru_cache(maxsize=4096)
def torch_frame(dtype: torch.dtype, shape: torch.Size) -> Frame:
    """The frame of a dense tensor on the CPU."""
    sink = _Sink()
    # Documented behaviour: instead of writing a tensor's bytes, it seeks forward past them.
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], sink))
    return Frame(bytes(sink.before), sink.skipped, bytes(sink.after))


class _Sink:
    """A file object that keeps what is written before and after a single gap."""

    def __init__(self) -> None:
        self.before = bytearray()
        self.skipped = 0
        self.after = bytearray()
        self._moved = False

    def write(self, data: Any) -> int:
        (self.after if self._moved else self.before).extend(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != 1 or self._moved:
            raise OSError("torch.save no longer writes a tensor as bytes between a prefix and a suffix")
        self._moved = True
        self.skipped = offset
        return len(self.before) + offset

    def flush(self) -> None:
        pass


# --- Whether tensors with the same name on several ranks are the same tensor ------------------------------------------
# Replicas are written once, so names must tell tensors apart: stages of a pipeline that all call their first layer "0"
# would lose all but one. A few elements of each parameter are compared: replicas may differ a little, by rounding or
# between two averagings, whereas different tensors have nothing in common.

_ELEMENTS = 8
# Two independent samples differ by 1.4 times their length, replicas by much less than one.
_DIFFERENT = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """Some elements of a tensor, or of a rank's part of one.

    ``where``: the offset of the part; ``shape`` of the whole and ``size`` of the part.
    """

    name: str
    where: tuple[int, ...]
    shape: tuple[int, ...]
    size: tuple[int, ...]
    values: tuple[float, ...]


def take_sample(name: str, where: Sequence[int], shape: Sequence[int], part: torch.Tensor) -> Sample:
    """A sample of ``part``, which begins at offset ``where`` of the tensor called ``name``, of this ``shape``."""
    count = part.numel()
    values: tuple[float, ...] = ()
    if count:
        flat = (torch.view_as_real(part) if part.is_complex() else part).detach().reshape(-1)
        # Evenly spread and without random numbers, so that all ranks compare the same elements.
        places = torch.linspace(0, flat.numel() - 1, min(_ELEMENTS, flat.numel()), device=flat.device).long()
        values = tuple(flat[places].to(torch.float32).tolist())
    return Sample(name, tuple(where), tuple(shape), tuple(part.shape), values)


def check_replicas(samples: Sequence[Sequence[Sample]]) -> None:
    """Raise CheckpointError if ranks have different tensors of the same name. ``samples``: of each rank."""
    first: dict[tuple[str, tuple[int, ...]], tuple[int, Sample]] = {}
    for rank, own in enumerate(samples):
        for each in own:
            other, earlier = first.setdefault((each.name, each.where), (rank, each))
            # Biases and the like are equal at first, and then differ by all that they have learned.
            differ = (earlier.shape, earlier.size) != (each.shape, each.size)
            if not differ and len(each.shape) > 1:
                distance = sum((a - b) ** 2 for a, b in zip(earlier.values, each.values, strict=True))
                length = max(sum(a * a for a in earlier.values), sum(b * b for b in each.values))
                differ = distance > _DIFFERENT**2 * length
            if differ:
                raise CheckpointError(
                    f"{each.name!r} {DIFFERENT_REPLICAS} {other} and {rank}: each trains a model of its own; "
                    "model = run.parallelize(model), or DistributedDataParallel (DDP), keeps replicas equal, and parts "
                    "of a model, such as the stages of a pipeline, need names that are unique in the whole model"
                )


# --- who writes what --------------------------------------------------------------------------------------------------

# Alignment of each tensor in the file, in bytes: the same as torch.save uses within its archives.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor, or a rank's part of one, in the rank's file. ``start`` counts bytes from the file's beginning."""

    item: WriteItem
    frame: Frame
    start: int

    @property
    def data(self) -> tuple[int, int]:
        """The range of the tensor's data: its first byte, and the byte after its last."""
        first = self.start + len(self.frame.prefix)
        return first, first + self.frame.size


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What this rank writes: tensors at fixed places, followed by values at places that depend on their sizes."""

    places: Sequence[TensorSlot]
    tensor_bytes: int
    all_bytes: int
    """The bytes of the tensors of all ranks."""


class Sharding:
    """The plan of an attempt's checkpoints. Unless its docstring says otherwise, call every method on all ranks."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._signature: object = None
        # The state is flat already, with a name for each tensor.
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._metadata: Metadata | None = None
        self._fixed: dict[MetadataIndex, StorageInfo] = {}
        self._layout: RankLayout | None = None

    def is_new(self, state: Mapping[str, Any]) -> bool:
        """Whether this rank's ``state`` differs from what was planned. Not collective."""
        return self._layout is None or _signature(state) != self._signature

    def plan(self, state: Mapping[str, Any], parameters: Collection[str] = ()) -> None:
        """Agree on the parts that each rank writes.

        Raises ValueError if the parts of a tensor do not add up to the whole, CheckpointError if ranks have different
        tensors with the same name among ``parameters``.
        """
        ranks = self._ranks
        # If an exception is raised below, no plan remains: the old one does not fit the new state.
        self._layout = None
        self._planner.set_up_planner(dict(state), is_coordinator=ranks.rank == 0)
        local_plan = self._planner.create_local_plan()
        tensors = dict(state)
        samples = [
            take_sample(
                item.index.fqn,
                tuple(item.index.offset or ()),
                tuple(item.tensor_data.size),
                find_state_dict_object(tensors, item.index),
            )
            for item in local_plan.items
            if ranks.world_size > 1 and item.tensor_data is not None and item.index.fqn in parameters
        ]

        def share_out(proposals: list[tuple[SavePlan, list[Sample]]]) -> list[tuple[SavePlan, list[Sample]]]:
            # What is the same on all ranks goes to one rank each, balanced by size.
            check_replicas([samples for _, samples in proposals])
            shared, self._metadata = self._planner.create_global_plan([plan for plan, _ in proposals])
            return [(plan, []) for plan in shared]

        local_plan, _ = ranks.at_first((local_plan, samples), share_out)
        places, end = list[TensorSlot](), 0
        for item in local_plan.items:
            if item.type is not WriteItemType.BYTE_IO:
                value = self._planner.lookup_object(item.index)
                place = TensorSlot(item, torch_frame(value.dtype, value.shape), -(-end // _ALIGNMENT) * _ALIGNMENT)
                end = place.start + place.frame.length
                places.append(place)
        fixed = {place.item.index: _info(ranks.rank, place.start, place.frame.length) for place in places}
        parts = ranks.gather((fixed, end))
        self._fixed = {index: info for infos, _ in parts for index, info in infos.items()}
        self._layout = RankLayout(places, end, sum(size for _, size in parts))
        self._signature = _signature(state)

    @property
    def layout(self) -> RankLayout:
        """What this rank writes, according to the latest plan."""
        assert self._layout is not None
        return self._layout

    def places_of(self, values: Mapping[str, bytes]) -> dict[str, tuple[int, int]]:
        """(start, length) of ``values`` in this rank's file, one after another after its tensors. Not collective."""
        places, end = {}, self.layout.tensor_bytes
        for name, content in values.items():
            places[name] = (end, len(content))
            end += len(content)
        return places

    def index(self, values: Mapping[str, tuple[int, int, int]]) -> bytes:
        """The content of ``.metadata``; on rank 0 only. ``values``: (rank, start, length) of each value, by name."""
        assert self._metadata is not None
        placed = {MetadataIndex(name): _info(*where) for name, where in values.items()}
        metadata = replace(self._metadata, storage_data={**self._fixed, **placed}, **index_version())
        return pickle.dumps(metadata)


def part_of(state: dict[str, Any], place: TensorSlot) -> torch.Tensor:
    """The tensor of ``state``, or part of one, that is written at ``place``."""
    part: torch.Tensor = find_state_dict_object(state, place.item.index)
    return part.detach()


def file_name(rank: int) -> str:
    """The name of a rank's file, following torch.distributed.checkpoint."""
    return f"__{rank}_0.distcp"


def meshes(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The device meshes that tensors of a state are sharded over."""
    used = {value.device_mesh for value in state.values() if isinstance(value, DTensor)}
    plain = [{"names": list(mesh.mesh_dim_names or ()), "shape": list(mesh.shape)} for mesh in used]
    return sorted(plain, key=str)


def _info(rank: int, start: int, length: int) -> StorageInfo:
    return storage_info(file_name(rank), start, length)


def _signature(state: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """What a plan depends on."""
    signature: list[tuple[Any, ...]] = []
    for name, value in state.items():
        if isinstance(value, DTensor):
            local = value.to_local()
            signature.append((name, value.shape, local.shape, value.dtype, value.placements, value.device_mesh))
        else:
            signature.append((name, value.shape, value.dtype) if isinstance(value, torch.Tensor) else (name,))
    return signature


# --- objects that are divided over ranks ------------------------------------------------------------------------------
# Such as the stages of a pipeline. Tensors have names that are the same on all ranks, so the parts of modules and
# optimizers merge by themselves. Anything but dense tensors, and the options of parameter groups, rank 0 saves for all
# ranks if all have the same names. Otherwise, every rank saves its part, and restoring merges the parts. For other
# shared objects, such as schedulers, each rank saves its own state if they are not equal, and gets its own back.


# What the shared state of modules and optimizers consists of: parameter groups of an optimizer that has a state, or
# that has none, values that are not dense tensors, by name, and whatever else the state_dict of an optimizer has.
GROUPS, OPTIONS, OTHERS, MORE = "param_groups", "options", "others", "more"
_PARAMETERS = "params"
SPLIT = "split"
"""The key in the manifest that marks objects that are divided over ranks."""
SHARED = "shared"
"""The name, in the index, of the state that all ranks share."""
MISSING = object()
"""What a rank has saved of an object that it had not registered; None is a state."""
PARTS = "parts"
"""The key, in a rank's own state, of its part of the shared state of split objects."""


def own_name(rank: int) -> str:
    """The name, in the index, of a rank's own state."""
    return f"ranks.{rank}"


class SplitObjects:
    """Which of the registered objects are split over ranks, as the ranks have agreed."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._names: frozenset[str] | None = None
        self._coverage: Mapping[str, int] = {}
        self.kinds: dict[str, dict[str, Any]] = {}
        """The kinds of the objects of all ranks, for the manifest."""

    def is_new(self, shared: Mapping[str, Any]) -> bool:
        """Whether the ``shared`` state has other names than when the ranks agreed. Not collective."""
        return self._names is None or coverage(shared) != self._coverage

    def part_of(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank must save of its ``shared`` state; before the ranks have agreed, all of it. Not collective."""
        if self._ranks.rank == 0:
            return {}
        return {name: state for name, state in shared.items() if self._names is None or name in self._names}

    def agree(self, shared: Mapping[str, Any], kinds: Mapping[str, dict[str, Any]]) -> None:
        """Find out which objects are split; call it on all ranks.

        ``shared``: this rank's shared state. ``kinds``: the kind of each of its objects. Raises CheckpointError if
        ranks have given the same name to objects of different kinds.
        """
        covered = coverage(shared)
        digests = {}
        for name, state in shared.items():
            # Neither a module's nor a named optimizer's.
            if not _is_part(state):
                buffer = io.BytesIO()
                torch.save(state, buffer)
                digests[name] = xxhash.xxh64_intdigest(buffer.getbuffer())
        gathered = self._ranks.gather(({**covered, **digests}, dict(kinds)))
        self.kinds = {}
        for rank, (_, own_kinds) in enumerate(gathered):
            for name, kind in own_kinds.items():
                if self.kinds.setdefault(name, kind) != kind:
                    raise CheckpointError(f"{name!r} is registered as {self.kinds[name]}, but on rank {rank} as {kind}")
        contents = [own for own, _ in gathered]
        names = {name for own in contents for name in own}
        self._names = frozenset(name for name in names if len({own.get(name) for own in contents}) > 1)
        self._coverage = covered
        for name in self._names & self.kinds.keys():
            self.kinds[name] = {**self.kinds[name], SPLIT: True}


def coverage(shared: Mapping[str, Any]) -> dict[str, int]:
    """For each object, a hash of the names that its ``shared`` state contains."""
    return {
        name: xxhash.xxh64_intdigest("\n".join(sorted(_names_in(state))).encode()) for name, state in shared.items()
    }


def _names_in(state: Any) -> Iterable[str]:
    if _is_part(state):
        yield from state.get(OTHERS, ())
        for group in (*state.get(GROUPS, ()), *state.get(OPTIONS, ())):
            yield from map(str, group.get(_PARAMETERS, ()))


def _is_part(state: Any) -> bool:
    """Whether this is the shared state of a module or optimizer, rather than what an object's state_dict returned."""
    return isinstance(state, dict) and state.keys() <= {GROUPS, OPTIONS, OTHERS, MORE}


def is_split(manifest: Manifest) -> bool:
    """Whether ranks had different parts of an object."""
    return any(kind.get(SPLIT) for kind in manifest.objects.values())


def read_shared(index: Index, manifest: Manifest) -> dict[str, Any]:
    """The shared state of all objects of a checkpoint; for split objects, all parts.

    Raises KeyError, OSError, and whatever torch.load raises.
    """
    others = range(1, manifest.world_size) if is_split(manifest) else ()
    return merge_parts([index.value(SHARED), *(index.value(own_name(rank)).get(PARTS, {}) for rank in others)])


def read_own(index: Index, rank: int, name: str) -> Any:
    """The state that ``rank`` saved of an object with a state for each rank, or :data:`MISSING`.

    ``index``: of the checkpoint. ``name``: the object's. Raises OSError, and whatever torch.load raises.
    """
    own = index.value(own_name(rank))
    places = [own["objects"], own.get(PARTS, {}), *([index.value(SHARED)] if rank == 0 else [])]
    return next((place[name] for place in places if name in place), MISSING)


class OwnStates(Sequence[Any]):
    """What each rank saved of an object, by rank; each is read when it is asked for."""

    def __init__(self, index: Index, name: str, world_size: int) -> None:
        """Of the object ``name`` in the checkpoint with this ``index``. ``world_size``: how many ranks saved it."""
        self._index = index
        self._name = name
        self._world_size = world_size

    def __len__(self) -> int:
        return self._world_size

    def __getitem__(self, rank: Any) -> Any:
        return read_own(self._index, range(self._world_size)[rank], self._name)


def merge_parts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The shared state of all objects, from the parts of all ranks. What is no part of anything is the first rank's."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, state in part.items():
            if name not in merged:
                merged[name] = state
            elif _is_part(merged[name]) and _is_part(state):
                merged[name] = _merge_parts(merged[name], state)
    return merged


def _merge_parts(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    if OTHERS in first or OTHERS in second:
        merged[OTHERS] = {**second.get(OTHERS, {}), **first.get(OTHERS, {})}
    if MORE in first or MORE in second:
        merged[MORE] = first.get(MORE, second.get(MORE))
    # If the optimizer has a state on any rank, it has one.
    key = GROUPS if GROUPS in first or GROUPS in second else OPTIONS
    first_groups, second_groups = (list(part.get(GROUPS, part.get(OPTIONS, ()))) for part in (first, second))
    if not first_groups and not second_groups:
        return merged
    # Groups with the same options become one.
    groups = [{**group, _PARAMETERS: list(group.get(_PARAMETERS, ()))} for group in first_groups]
    before = {name for group in groups for name in group[_PARAMETERS]}
    for group in second_groups:
        new = [name for name in group.get(_PARAMETERS, ()) if name not in before]
        alike = next((each for each in groups if equal(group_options(each), group_options(group))), None)
        if alike is not None:
            alike[_PARAMETERS] += new
        elif new:
            groups.append({**group, _PARAMETERS: new})
    merged[key] = groups
    return merged


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an optimizer's parameter group: everything except its parameters."""
    return {name: value for name, value in group.items() if name != _PARAMETERS}


def find_options(parameters: Iterable[str], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The options of the saved groups that contain these ``parameters``; None if there is no such group.

    Raises CheckpointError if these have different options: the script has them in one group.
    """
    names = set(parameters)
    candidates = [group_options(group) for group in groups if names.intersection(group.get(_PARAMETERS, ()))]
    if any(not equal(each, candidates[0]) for each in candidates):
        raise CheckpointError(f"parameters of one group have different options, {min(names)!r} among them")
    return candidates[0] if candidates else None


def equal(state: Any, other: Any) -> bool:
    """Whether two loaded states are the same, tensors included."""
    if isinstance(state, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(state, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and state.dtype == other.dtype
            and torch.equal(state, other)
        )
    if isinstance(state, Mapping) and isinstance(other, Mapping):
        return state.keys() == other.keys() and all(equal(value, other[key]) for key, value in state.items())
    if isinstance(state, list | tuple) and isinstance(other, list | tuple):
        return len(state) == len(other) and all(map(equal, state, other))
    return bool(state == other)
