"""Objects that are divided over ranks, such as the stages of a pipeline, and their state as a whole.

Tensors have names that are the same on all ranks, so the parts of modules and optimizers merge by themselves. Anything
but dense tensors, and the options of parameter groups, rank 0 saves for all ranks if all have the same names.
Otherwise, every rank saves its part, and restoring merges the parts. For other shared objects, such as schedulers, each
rank saves its own state if they are not equal, and gets its own back.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.checkpoint_files import Manifest
from slurmtrain.runtime.checkpoint.torch_index import Index
from slurmtrain.runtime.job.process_group import RankGroup

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
        gathered = self._ranks.gather(({**covered, **_digests(shared)}, dict(kinds)))
        self.kinds = {}
        for rank, (_, own_kinds) in enumerate(gathered):
            for name, kind in own_kinds.items():
                if self.kinds.setdefault(name, kind) != kind:
                    raise CheckpointError(f"{name!r} is registered as {self.kinds[name]}, on rank {rank} as {kind}")
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


def _digests(shared: Mapping[str, Any]) -> dict[str, int]:
    """A hash of the state of each object that is not a module or a named optimizer."""
    digests = {}
    for name, state in shared.items():
        if not _is_part(state):
            buffer = io.BytesIO()
            torch.save(state, buffer)
            digests[name] = xxhash.xxh64_intdigest(buffer.getbuffer())
    return digests


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
    groups = [list(part.get(GROUPS, part.get(OPTIONS, ()))) for part in (first, second)]
    if any(groups):
        merged[key] = _merge_groups(*groups)
    return merged


def _merge_groups(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups with the same options become one."""
    merged = [{**group, _PARAMETERS: list(group.get(_PARAMETERS, ()))} for group in first]
    before = {name for group in merged for name in group[_PARAMETERS]}
    for group in second:
        new = [name for name in group.get(_PARAMETERS, ()) if name not in before]
        alike = next((each for each in merged if equal(group_options(each), group_options(group))), None)
        if alike is not None:
            alike[_PARAMETERS] += new
        elif new:
            merged.append({**group, _PARAMETERS: new})
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
