"""Whether the last checkpoints of two runs are identical: tensor by tensor, or file by file in unknown formats."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import CheckpointError, PathError
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.current_plan import current_plan
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.drill.facts import CheckpointComparison, TensorDifference
from slurmtrain.runtime.checkpoint import external
from slurmtrain.runtime.checkpoint.checkpoint_files import newest_published, read_manifest
from slurmtrain.runtime.checkpoint.external import OTHER, read_contents
from slurmtrain.runtime.checkpoint.formats.untrusted_files import Contents

if TYPE_CHECKING:
    from torch import Tensor

    from slurmtrain.runtime.checkpoint.torch_index import Index


# How many of the tensors that differ are named.
_NAMED = 10
# Under this prefix a checkpoint keeps what belongs to one rank, such as its random number states.
_OF_A_RANK = "ranks."


def compare_checkpoints(workspace: Workspace, first: Run, second: Run) -> CheckpointComparison:
    """How the last checkpoints of runs ``first`` and ``second`` of one ``workspace`` differ.

    Raises nothing: if they cannot be compared, the result says why.
    """
    try:
        spec = current_plan(workspace.root.run(first.id), first).spec.checkpoint
        if spec.glob is not None:
            own, other = (_newest_external(workspace, run) for run in (first, second))
            if own.step != other.step:
                steps = None if own.step is None or other.step is None else (own.step, other.step)
                why = f"they are {own.path.name} and {other.path.name}"
                return CheckpointComparison(identical=None, why=why, steps=steps)
            method = "files" if own.format == OTHER.NAME else "tensors"
            with _readable():
                contents = (read_contents(each.path, spec.format) for each in (own, other))
                return _compare_contents(*contents, method=method)
        return _compare_published(_newest_of_session(workspace, first), _newest_of_session(workspace, second))
    except (CheckpointError, PathError, OSError) as error:
        return CheckpointComparison(identical=None, why=str(error))


def _newest_of_session(workspace: Workspace, run: Run) -> Path:
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


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Raise CheckpointError for everything that reading a checkpoint may raise."""
    # Imported here: torch takes a second.
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        [problem, *_] = [problem for problem, _ in error.failures.values()]
        raise CheckpointError(f"they cannot be read: {problem}") from error
    except CheckpointError:
        raise
    except Exception as error:  # torch.load may raise anything that unpickling does
        raise CheckpointError(f"they cannot be read: {' '.join(str(error).split())[:500]}") from error


# --- checkpoints of a session -----------------------------------------------------------------------------------------


def _compare_published(first: Path, second: Path) -> CheckpointComparison:
    manifest, other_manifest = read_manifest(first), read_manifest(second)
    # Weights of different steps differ anyway; what matters is that one run stopped early.
    if manifest.step != other_manifest.step:
        steps = manifest.step, other_manifest.step
        return CheckpointComparison(identical=None, why=f"they are of steps {steps[0]} and {steps[1]}", steps=steps)
    # What belongs to single ranks is compared only if there are as many.
    same_ranks = manifest.world_size == other_manifest.world_size
    # Equal hashes in the manifests save reading gigabytes. Different ones prove nothing: equal tensors may be pickled
    # differently.
    if same_ranks and manifest.files == other_manifest.files:
        return CheckpointComparison(identical=True, method="hashes")
    from slurmtrain.runtime.checkpoint.torch_index import Index

    with _readable():
        contents = (_contents_of(Index(path), same_ranks=same_ranks) for path in (first, second))
        return _compare_contents(*contents, method="values")


def _contents_of(index: Index, *, same_ranks: bool) -> Contents:
    """What to compare of a checkpoint: tensors, schedulers, counters and, with the ``same_ranks``, states of ranks."""
    shapes = index.shapes()
    others = [name for name in index.metadata.state_dict_metadata if name not in shapes]
    if not same_ranks:
        others = [name for name in others if not name.startswith(_OF_A_RANK)]

    def value(name: str) -> Any:
        # A script that draws no random numbers does not seed them, and they differ every time.
        value = index.value(name)
        return {key: item for key, item in value.items() if key != "rng"} if name.startswith(_OF_A_RANK) else value

    return {
        **{name: partial(index.tensor, name) for name in shapes},
        **{name: partial(value, name) for name in sorted(others)},
    }


# --- contents, whatever the format ------------------------------------------------------------------------------------


def _compare_contents(first: Contents, second: Contents, *, method: str) -> CheckpointComparison:
    if unmatched := sorted(first.keys() ^ second.keys()):
        return CheckpointComparison(identical=False, method=method, where=unmatched[0])
    differences = _Differences()
    # One at a time: two whole checkpoints may not fit into memory.
    for name in first:
        differences.add(name, first[name](), second[name]())
    return differences.summarize(method)


class _Differences:
    """What differs in two checkpoints, as found so far."""

    def __init__(self) -> None:
        self._has_tensors = False
        # The relative difference of each tensor first.
        self._tensors: list[tuple[float, TensorDifference]] = []
        self._others: list[str] = []

    def add(self, name: str, first: Any, second: Any) -> None:
        """Compare the two values called ``name``."""
        import torch

        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and first.shape == second.shape:
            self._has_tensors = True
            difference = _tensor_difference(first, second)
            if difference is not None:
                self._tensors.append((difference[0], TensorDifference(name, difference[1])))
        else:
            self._others += _differing_paths(first, second, name)

    def summarize(self, method: str) -> CheckpointComparison:
        """All of it; tensors matter more than anything else."""
        others = tuple(self._others[:_NAMED])
        if not self._tensors and method == "tensors":
            if not self._has_tensors:
                why = "no tensor in them can be read safely: save state_dict()s, not whole objects"
                return CheckpointComparison(identical=None, method=method, why=why)
            # A trainer keeps much that training does not depend on.
            return CheckpointComparison(identical=True, method=method, others=others)
        if not self._tensors:
            return CheckpointComparison(
                identical=not others, method=method, where=others[0] if others else "", others=others
            )
        self._tensors.sort(key=lambda each: (-each[0], each[1].name))
        largest, first = self._tensors[0]
        return CheckpointComparison(
            identical=False,
            method=method,
            difference=largest,
            where=first.name,
            max_abs=max(difference.max_abs for _, difference in self._tensors),
            differing=tuple(difference for _, difference in self._tensors[:_NAMED]),
            count=len(self._tensors),
            others=others,
        )


def _tensor_difference(first: Tensor, second: Tensor) -> tuple[float, float] | None:
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


def _differing_paths(first: Any, second: Any, at: str) -> Iterator[str]:
    """The dotted paths, beginning with ``at``, at which two nested values differ."""
    import torch

    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.shape != second.shape or _tensor_difference(first, second) is not None:
            yield at
    elif isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        for key, value in first.items():
            yield from _differing_paths(value, second[key], f"{at}.{key}")
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        for index, (a, b) in enumerate(zip(first, second, strict=True)):
            yield from _differing_paths(a, b, f"{at}.{index}")
    elif first != second and (first == first or second == second):  # NaN does not equal itself
        yield at
