"""Whether the last checkpoints of two runs are identical: tensor by tensor, or file by file for a script's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import CheckpointError, PathError
from slurmtrain.model.diagnosis.drill import CheckpointComparison
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.current_plan import current_plan
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.checkpoint import external
from slurmtrain.runtime.checkpoint.files import new_hasher, newest_published, read_manifest

if TYPE_CHECKING:
    from torch import Tensor

    from slurmtrain.runtime.checkpoint.index import Index

# Bytes hashed at a time.
_CHUNK = 1 << 22
# Under this prefix a checkpoint keeps what belongs to one rank, such as its random number states.
_OF_A_RANK = "ranks."


def compare_checkpoints(workspace: Workspace, first: Run, second: Run) -> CheckpointComparison:
    """How the last checkpoints of runs ``first`` and ``second`` of one ``workspace`` differ.

    Raises nothing: if they cannot be compared, the result says why.
    """
    try:
        pattern = current_plan(workspace.root.run(first.id), first).spec.checkpoint.glob
        if pattern is not None:
            return _compare_external(_newest_external(workspace, first), _newest_external(workspace, second))
        return _compare_published(_newest(workspace, first), _newest(workspace, second))
    except (CheckpointError, PathError, OSError) as error:
        return CheckpointComparison(identical=None, why=str(error))


def _newest(workspace: Workspace, run: Run) -> Path:
    path = newest_published(workspace.root.run(run.id).checkpoints)
    if path is None:
        raise CheckpointError(f"run {run.id} has left no checkpoint")
    return path


def _newest_external(workspace: Workspace, run: Run) -> external.ExternalCheckpoint:
    """The newest checkpoint that the script itself has saved. Raises CheckpointError if there is none."""
    directory = workspace.root.run(run.id)
    plan = current_plan(directory, run)
    assert plan.spec.checkpoint.glob is not None
    checkpoint = external.newest(external.absolute(plan.spec.checkpoint.glob, plan.workdir, directory))
    if checkpoint is None:
        raise CheckpointError(f"run {run.id} has left no checkpoint that checkpoint.glob matches")
    return checkpoint


# --- checkpoints that the script itself saves -------------------------------------------------------------------------


def _compare_external(first: external.ExternalCheckpoint, second: external.ExternalCheckpoint) -> CheckpointComparison:
    if first.step != second.step:
        return CheckpointComparison(identical=None, why=f"they are {first.path.name} and {second.path.name}")
    return CheckpointComparison(identical=_hashes(first.path) == _hashes(second.path), method="files")


def _hashes(path: Path) -> Mapping[str, str]:
    """Hashes of a file, or of all files in a directory, by their names in it. Raises OSError."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return {str(file.relative_to(path)): _hash(file) for file in files}


def _hash(path: Path) -> str:
    hasher = new_hasher()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


# --- checkpoints of a session -----------------------------------------------------------------------------------------


def _compare_published(first: Path, second: Path) -> CheckpointComparison:
    manifest, other_manifest = read_manifest(first), read_manifest(second)
    # Weights of different steps differ anyway; what matters is that one run stopped early.
    if manifest.step != other_manifest.step:
        return CheckpointComparison(identical=None, why=f"they are of steps {manifest.step} and {other_manifest.step}")
    same_ranks = manifest.world_size == other_manifest.world_size
    # Equal hashes in the manifests save reading gigabytes. Different ones prove nothing: equal tensors may be pickled
    # differently.
    if same_ranks and manifest.files == other_manifest.files:
        return CheckpointComparison(identical=True, method="hashes")
    return _compare_values(first, second, same_ranks=same_ranks)


def _compare_values(first: Path, second: Path, *, same_ranks: bool) -> CheckpointComparison:
    """Compare the contents of two checkpoints, one whole tensor at a time.

    What belongs to single ranks is compared only if both have ``same_ranks``. Random number states are left out: a
    script that draws no random numbers does not seed them, and they differ every time.
    """
    # Imported here: torch takes a second.
    from torch.distributed.checkpoint.api import CheckpointException

    from slurmtrain.runtime.checkpoint.index import Index

    indexes = Index(first), Index(second)
    try:
        return _compare_indexes(*indexes, same_ranks=same_ranks)
    except CheckpointException as error:
        [problem, *_] = [problem for problem, _ in error.failures.values()]
        raise CheckpointError(f"they cannot be read: {problem}") from error
    except CheckpointError:
        raise
    except Exception as error:  # torch.load may raise anything that unpickling does
        raise CheckpointError(f"they cannot be read: {' '.join(str(error).split())[:500]}") from error


def _compare_indexes(first: Index, second: Index, *, same_ranks: bool) -> CheckpointComparison:
    shapes = first.shapes()
    if shapes != second.shapes():
        unmatched = sorted(set(shapes.items()) ^ set(second.shapes().items()))
        return CheckpointComparison(identical=False, method="values", where=unmatched[0][0])
    # Tensors first, one at a time: two whole checkpoints may not fit into memory.
    worst: tuple[float, str] | None = None
    for name in shapes:
        difference = _difference(_read(first, name), _read(second, name))
        if difference is not None and (worst is None or difference > worst[0]):
            worst = (difference, name)
    if worst is not None:
        return CheckpointComparison(identical=False, method="values", difference=worst[0], where=worst[1])
    # Then everything that is not a tensor: schedulers, counters, the states of ranks.
    for name in sorted(set(first.metadata.state_dict_metadata) - set(shapes)):
        if name.startswith(_OF_A_RANK) and not same_ranks:
            continue
        where = next(_differing(_value(first, name), _value(second, name), name), None)
        if where is not None:
            return CheckpointComparison(identical=False, method="values", where=where)
    return CheckpointComparison(identical=True, method="values")


def _read(index: Index, name: str) -> Tensor:
    tensors: dict[str, Tensor] = index.empty([name])
    index.read(tensors)
    return tensors[name]


def _value(index: Index, name: str) -> Any:
    value = index.value(name)
    return {key: item for key, item in value.items() if key != "rng"} if name.startswith(_OF_A_RANK) else value


def _difference(first: Tensor, second: Tensor) -> float | None:
    """The largest absolute difference over the largest absolute value; None if all bits are equal."""
    import torch

    # Bits rather than values: NaN is not equal to itself, and 0.0 equals -0.0.
    if first.dtype == second.dtype and torch.equal(_bits(first), _bits(second)):
        return None
    # Differences in small integer or half-precision types would overflow.
    wide = torch.complex128 if first.is_complex() or second.is_complex() else torch.float64
    a, b = first.to(wide), second.to(wide)
    largest = float(torch.maximum(a.abs(), b.abs()).max())
    return float((a - b).abs().max()) / largest if largest else 0.0


def _bits(tensor: Tensor) -> Tensor:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _differing(first: Any, second: Any, at: str) -> Iterator[str]:
    """The dotted paths, beginning with ``at``, at which two nested values differ."""
    import torch

    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.shape != second.shape or _difference(first, second) is not None:
            yield at
    elif isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        for key, value in first.items():
            yield from _differing(value, second[key], f"{at}.{key}")
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        for index, (a, b) in enumerate(zip(first, second, strict=True)):
            yield from _differing(a, b, f"{at}.{index}")
    elif first != second and (first == first or second == second):  # NaN does not equal itself
        yield at
