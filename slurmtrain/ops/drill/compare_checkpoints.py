"""Whether the last checkpoints of two runs are identical: tensor by tensor, or file by file for a script's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import CheckpointError, PathError
from slurmtrain.model.diagnosis.drill import CheckpointComparison, TensorDifference
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
# How many of the tensors that differ are named.
_NAMED = 10
# Under this prefix a checkpoint keeps what belongs to one rank, such as its random number states.
_OF_A_RANK = "ranks."

# How to read each tensor and plain value of a checkpoint, by name: whole checkpoints may not fit into memory.
Contents = Mapping[str, Callable[[], Any]]


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
    checkpoint = external.newest(external.Search.from_plan(plan, directory))
    if checkpoint is None:
        raise CheckpointError(f"run {run.id} has left no checkpoint that checkpoint.glob matches")
    return checkpoint


# --- checkpoints that the script itself saves -------------------------------------------------------------------------


def _compare_external(first: external.ExternalCheckpoint, second: external.ExternalCheckpoint) -> CheckpointComparison:
    if first.step != second.step:
        why = f"they are {first.path.name} and {second.path.name}"
        steps = None if first.step is None or second.step is None else (first.step, second.step)
        return CheckpointComparison(identical=None, why=why, steps=steps)
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
        steps = manifest.step, other_manifest.step
        return CheckpointComparison(identical=None, why=f"they are of steps {steps[0]} and {steps[1]}", steps=steps)
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
    return _compare_contents(
        _contents_of(first, same_ranks=same_ranks), _contents_of(second, same_ranks=same_ranks), "values"
    )


def _contents_of(index: Index, *, same_ranks: bool) -> Contents:
    """What to compare of a checkpoint: tensors, schedulers, counters and, with the ``same_ranks``, states of ranks."""
    shapes = index.shapes()
    others = [name for name in index.metadata.state_dict_metadata if name not in shapes]
    if not same_ranks:
        others = [name for name in others if not name.startswith(_OF_A_RANK)]
    return {
        **{name: partial(_read, index, name) for name in shapes},
        **{name: partial(_value, index, name) for name in sorted(others)},
    }


def _read(index: Index, name: str) -> Tensor:
    tensors: dict[str, Tensor] = index.empty([name])
    index.read(tensors)
    return tensors[name]


def _value(index: Index, name: str) -> Any:
    value = index.value(name)
    return {key: item for key, item in value.items() if key != "rng"} if name.startswith(_OF_A_RANK) else value


# --- contents, whatever the format ------------------------------------------------------------------------------------


def _compare_contents(first: Contents, second: Contents, method: str) -> CheckpointComparison:
    if unmatched := sorted(first.keys() ^ second.keys()):
        return CheckpointComparison(identical=False, method=method, where=unmatched[0])
    tensors: list[tuple[float, TensorDifference]] = []
    others: list[str] = []
    for name in first:
        _compare_one(name, first[name](), second[name](), tensors, others)
    if not tensors:
        where = others[0] if others else ""
        return CheckpointComparison(identical=not others, method=method, where=where)
    tensors.sort(key=lambda each: (-each[0], each[1].name))
    return CheckpointComparison(
        identical=False,
        method=method,
        difference=tensors[0][0],
        where=tensors[0][1].name,
        max_abs=max(difference.max_abs for _, difference in tensors),
        differing=tuple(difference for _, difference in tensors[:_NAMED]),
    )


def _compare_one(
    name: str, first: Any, second: Any, tensors: list[tuple[float, TensorDifference]], others: list[str]
) -> None:
    """Add how two values differ to ``tensors``, with the relative difference first, or their name to ``others``."""
    import torch

    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and first.shape == second.shape:
        difference = _difference(first, second)
        if difference is not None:
            tensors.append((difference[0], TensorDifference(name, difference[1])))
    else:
        others += _differing(first, second, name)


def _difference(first: Tensor, second: Tensor) -> tuple[float, float] | None:
    """The largest absolute difference, over the largest absolute value and as it is; None if all bits are equal."""
    import torch

    # Bits rather than values: NaN is not equal to itself, and 0.0 equals -0.0.
    if first.dtype == second.dtype and torch.equal(_bits(first), _bits(second)):
        return None
    # Differences in small integer or half-precision types would overflow.
    wide = torch.complex128 if first.is_complex() or second.is_complex() else torch.float64
    a, b = first.to(wide), second.to(wide)
    largest, difference = float(torch.maximum(a.abs(), b.abs()).max()), float((a - b).abs().max())
    return (difference / largest if largest else 0.0), difference


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
