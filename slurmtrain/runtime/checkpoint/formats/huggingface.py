"""Checkpoints of the Trainer of transformers: directories ``checkpoint-<step>`` of many files.

The order of its writes: weights, optimizer, scheduler, random number states of each rank, and ``trainer_state.json`` by
rank 0, with no barrier after it (transformers/trainer.py, 5.23).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from typing import Any

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.formats.archives import read_archive
from slurmtrain.runtime.checkpoint.formats.base import Contents, Format, prefixes
from slurmtrain.runtime.checkpoint.formats.dcp import dcp_contents, dcp_problem
from slurmtrain.runtime.checkpoint.formats.deepspeed import tag_contents, tag_problem, tags_in
from slurmtrain.runtime.checkpoint.formats.pickles import as_step, member
from slurmtrain.runtime.checkpoint.formats.trees import TORCH_SUFFIXES, FileTree, file_problem, read_json_file
from slurmtrain.runtime.checkpoint.formats.weights import has_weights, weights_contents, weights_problem

_STATE = "trainer_state.json"
_ARGUMENTS = "training_args.bin"
# Written by the Trainer's JIT checkpoints until they are finished, and read by nothing in transformers.
_SENTINEL = "checkpoint-is-incomplete.txt"
_RNG = re.compile(r"rng_state(?:_(\d+))?\.pth")
_NAME = re.compile(r"checkpoint-\d+")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_OPTIMIZER_FOLDER = re.compile(r"optimizer_\d+")


class HuggingFace(Format):
    """A directory that the Trainer wrote."""

    NAME = "hf"

    def recognizes(self, tree: FileTree) -> bool:
        """Whether it has files that only the Trainer writes, or is called as it calls them."""
        if not tree.is_directory:
            return False
        own = {_STATE, _ARGUMENTS, _SENTINEL} & tree.top or any(map(_RNG.fullmatch, tree.top))
        # diffusers calls directories of accelerate so, too.
        by_accelerate = any(name.startswith("random_states_") for name in tree.top) or "scheduler.bin" in tree.top
        named = _NAME.fullmatch(tree.path.name) and (has_weights(tree) or "config.json" in tree.top)
        return bool(own) or bool(named and not by_accelerate)

    def problem(self, tree: FileTree, ranks: int) -> str | None:
        """Why a file is missing or not whole."""
        return next(_problems(tree, ranks), None)

    def step(self, tree: FileTree) -> int | None:
        """The Trainer's global step."""
        return as_step(member(read_json_file(tree.path / _STATE), "global_step"))

    def optional_files(self, tree: FileTree) -> set[str]:
        """The files of torch.save that do not belong to single ranks."""
        return {name for name in tree.top if name.endswith(TORCH_SUFFIXES) and not _RNG.fullmatch(name)}

    def contents(self, tree: FileTree) -> Contents:
        """Weights, optimizer, scheduler, step and epoch: the log of the Trainer's state has times and paths."""
        from slurmtrain.runtime.checkpoint.formats.values import leaves, read_torch

        contents = weights_contents(tree)
        for name in sorted(tree.top & {*_OPTIMIZERS, "scheduler.pt", "scaler.pt"}):
            contents |= leaves(read_torch(tree.path / name), name.partition(".")[0])
        for folder in _optimizer_folders(tree):
            contents |= dcp_contents(tree.below(folder))
        for tag in tags_in(tree):
            contents |= tag_contents(tree.below(tag))
        state = read_json_file(tree.path / _STATE)
        return contents | leaves({key: member(state, key) for key in ("global_step", "epoch")})

    def modules(self, names: Collection[str]) -> list[str]:
        """The weights of its one model."""
        return prefixes(names, ("model", "module"))


def _problems(tree: FileTree, ranks: int) -> Iterator[str]:
    if _SENTINEL in tree.top:
        yield f"it has {_SENTINEL}"
    if name := tree.unfinished():
        yield f"{name} is still being written"
    if not isinstance(state := read_json_file(tree.path / _STATE) if _STATE in tree.top else None, dict):
        yield f"{_STATE} is {'not whole' if _STATE in tree.top else 'missing'}"
    elif as_step(state.get("global_step")) is None:
        yield f"{_STATE} has no global_step"
    sharded_by_deepspeed = tags_in(tree)
    for tag in sharded_by_deepspeed:
        if problem := tag_problem(tree.below(tag), ranks):
            yield f"in {tag}, {problem}"
    if not sharded_by_deepspeed and (problem := weights_problem(tree)):
        yield problem
    for name in sorted(tree.top):
        if name.endswith(TORCH_SUFFIXES) and (problem := file_problem(tree, name, by_torch=name in _BY_TORCH)):
            yield problem
    if not _saves_only_model(tree):
        yield from _state_problems(tree, ranks, by_deepspeed=bool(sharded_by_deepspeed))


_BY_TORCH = frozenset((*_OPTIMIZERS, "scheduler.pt", "scaler.pt", _ARGUMENTS))


def _state_problems(tree: FileTree, ranks: int, *, by_deepspeed: bool) -> Iterator[str]:
    """What is missing of the states of anything but the model."""
    if not by_deepspeed:
        # Without a scheduler's state the Trainer does not load the optimizer's either, and says nothing.
        yield from (f"{name} is missing" for name in ("scheduler.pt",) if name not in tree.top)
        if not tree.top & set(_OPTIMIZERS) and not _optimizer_folders(tree):
            yield f"{_OPTIMIZERS[0]} is missing"
    for folder in _optimizer_folders(tree):
        if problem := dcp_problem(tree.below(folder)):
            yield f"in {folder}, {problem}"
    yield from _rng_problems(tree, ranks)


def _rng_problems(tree: FileTree, ranks: int) -> Iterator[str]:
    numbers = {int(match[1]) for name in tree.top if (match := _RNG.fullmatch(name)) and match[1] is not None}
    if not numbers and _processes(tree) <= 1:
        yield from (problem for problem in (file_problem(tree, "rng_state.pth"),) if problem)
        return
    for rank in range(max([*numbers, ranks - 1, _processes(tree) - 1]) + 1):
        if rank not in numbers:
            yield f"rng_state_{rank}.pth is missing"
    for rank in sorted(numbers):
        if problem := file_problem(tree, f"rng_state_{rank}.pth"):
            yield problem


def _saves_only_model(tree: FileTree) -> bool:
    return member(_arguments(tree), "save_only_model") is True


def _processes(tree: FileTree) -> int:
    """How many processes have saved it, according to the Trainer's arguments; 1 if they do not say."""
    return as_step(member(member(_arguments(tree), "distributed_state"), "num_processes")) or 1


def _arguments(tree: FileTree) -> Any:
    """The Trainer's arguments; None if they cannot be read."""
    with contextlib.suppress(CheckpointError, OSError):
        return read_archive(tree.path / _ARGUMENTS, _ARGUMENTS)
    return None


def _optimizer_folders(tree: FileTree) -> list[str]:
    return sorted(folder for folder in tree.folders if _OPTIMIZER_FOLDER.fullmatch(folder))
