"""Whether two runs have left the same: their last checkpoints, tensor by tensor, or a script's own files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import CheckpointError, PlaceError
from slurmtrain.model.diagnosis.drill import Comparison
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.current_plan import current_plan
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.checkpoint import external
from slurmtrain.runtime.checkpoint.files import Manifest, new_hasher, newest_published, read_manifest

if TYPE_CHECKING:
    from torch import Tensor

    from slurmtrain.runtime.checkpoint.index import Index

_CHUNK = 1 << 22
_OWN = "ranks."


def compare(workspace: Workspace, one: Run, other: Run) -> Comparison:
    """What the last checkpoints of two runs have in common; where they cannot be compared it says why."""
    try:
        pattern = current_plan(workspace.root.run(one.id), one).spec.checkpoint.glob
        if pattern is not None:
            return _own(_newest_own(workspace, one), _newest_own(workspace, other))
        return _ours(_newest(workspace, one), _newest(workspace, other))
    except (CheckpointError, PlaceError, OSError) as error:
        return Comparison(identical=None, why=str(error))


def _newest(workspace: Workspace, run: Run) -> Path:
    found = newest_published(workspace.root.run(run.id).checkpoints)
    if found is None:
        raise CheckpointError(f"run {run.id} has left no checkpoint")
    return found


def _newest_own(workspace: Workspace, run: Run) -> external.ExternalCheckpoint:
    """The newest checkpoint of a script's own kind."""
    directory = workspace.root.run(run.id)
    plan = current_plan(directory, run)
    assert plan.spec.checkpoint.glob is not None
    found = external.newest(external.absolute(plan.spec.checkpoint.glob, plan.workdir, directory))
    if found is None:
        raise CheckpointError(f"run {run.id} has left no checkpoint that checkpoint.glob finds")
    return found


# --- a script's own ---------------------------------------------------------------------------------------------------


def _own(one: external.ExternalCheckpoint, other: external.ExternalCheckpoint) -> Comparison:
    if one.step != other.step:
        return Comparison(identical=None, why=f"they are {one.path.name} and {other.path.name}")
    return Comparison(identical=_hashes(one.path) == _hashes(other.path), how="files")


def _hashes(path: Path) -> Mapping[str, str]:
    """Hashes of a file, or of all files of a directory, by their names in it. Raises OSError."""
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return {str(file.relative_to(path)): _hash(file) for file in files}


def _hash(path: Path) -> str:
    hasher = new_hasher()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


# --- of our own kind --------------------------------------------------------------------------------------------------


def _ours(one: Path, other: Path) -> Comparison:
    first, second = read_manifest(one), read_manifest(other)
    if first.step != second.step:
        return Comparison(identical=None, why=f"they are of steps {first.step} and {second.step}")
    if (first.world_size, first.files) == (second.world_size, second.files):
        return Comparison(identical=True, how="hashes")
    return _values(one, other, same_ranks=_same_ranks(first, second))


def _same_ranks(first: Manifest, second: Manifest) -> bool:
    return first.world_size == second.world_size


def _values(one: Path, other: Path, *, same_ranks: bool) -> Comparison:
    """Compare what two checkpoints hold, each tensor as a whole, one at a time; where ranks are others, not their own.

    States of random numbers are left out: a script that draws none does not seed them, and they differ every time.
    """
    # Torch takes a second to import.
    from torch.distributed.checkpoint.api import CheckpointException

    from slurmtrain.runtime.checkpoint.index import Index

    first, second = Index(one), Index(other)
    try:
        return _compared(first, second, same_ranks=same_ranks)
    except CheckpointException as error:
        [problem, *_] = [problem for problem, _ in error.failures.values()]
        raise CheckpointError(f"they cannot be read: {problem}") from error
    except CheckpointError:
        raise
    except Exception as error:  # torch.load raises anything
        raise CheckpointError(f"they cannot be read: {' '.join(str(error).split())[:500]}") from error


def _compared(first: Index, second: Index, *, same_ranks: bool) -> Comparison:
    shapes = first.shapes()
    if shapes != second.shapes():
        odd = sorted(set(shapes.items()) ^ set(second.shapes().items()))
        return Comparison(identical=False, how="values", where=odd[0][0])
    worst: tuple[float, str] | None = None
    for name in shapes:
        found = _difference(_read(first, name), _read(second, name))
        if found is not None and (worst is None or found > worst[0]):
            worst = (found, name)
    if worst is not None:
        return Comparison(identical=False, how="values", difference=worst[0], where=worst[1])
    for name in sorted(set(first.metadata.state_dict_metadata) - set(shapes)):
        if name.startswith(_OWN) and not same_ranks:
            continue
        where = next(_differing(_value(first, name), _value(second, name), name), None)
        if where is not None:
            return Comparison(identical=False, how="values", where=where)
    return Comparison(identical=True, how="values")


def _read(index: Index, name: str) -> Tensor:
    tensors: dict[str, Tensor] = index.empty([name])
    index.read(tensors)
    return tensors[name]


def _value(index: Index, name: str) -> Any:
    value = index.value(name)
    return {key: each for key, each in value.items() if key != "rng"} if name.startswith(_OWN) else value


def _difference(one: Tensor, other: Tensor) -> float | None:
    """None where all bits are equal, else the largest difference beside the largest number."""
    import torch

    if one.dtype == other.dtype and torch.equal(_bits(one), _bits(other)):
        return None
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    largest = float(torch.maximum(a.abs(), b.abs()).max())
    return float((a - b).abs().max()) / largest if largest else 0.0


def _bits(tensor: Tensor) -> Tensor:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _differing(one: Any, other: Any, at: str) -> Iterator[str]:
    """Where two values differ."""
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or _difference(one, other) is not None:
            yield at
    elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key, value in one.items():
            yield from _differing(value, other[key], f"{at}.{key}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _differing(a, b, f"{at}.{index}")
    elif one != other and (one == one or other == other):  # NaN equals nothing, itself included
        yield at
