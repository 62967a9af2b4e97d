"""Directories that ``Accelerator.save_state`` wrote.

The order of its writes: weights, optimizers, schedulers, samplers, gradient scaler, ``random_states_<rank>.pkl`` of
each rank, then registered objects by the main process; no barrier, no marker, no temporary directory
(accelerate/accelerator.py and checkpointing.py, 1.15).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from slurmtrain.runtime.checkpoint.formats.base import Contents, Format, prefixes
from slurmtrain.runtime.checkpoint.formats.dcp import dcp_contents, dcp_problem
from slurmtrain.runtime.checkpoint.formats.deepspeed import tag_contents, tag_problem, tags_in
from slurmtrain.runtime.checkpoint.formats.trees import FileTree, file_problem
from slurmtrain.runtime.checkpoint.formats.weights import FSDP_FOLDER, has_weights, weights_contents, weights_problem

_RANDOM = re.compile(r"random_states_(\d+)\.pkl")
_CUSTOM = re.compile(r"custom_checkpoint_(\d+)\.pkl")
# Further optimizers, schedulers and loaders are numbered from 1.
_STATE = re.compile(r"(?:optimizer|scheduler|sampler|dl_state_dict)(?:_\d+)?\.bin|scaler\.pt")
_OPTIMIZER = re.compile(r"optimizer(?:_\d+)?\.bin")
_OPTIMIZER_FOLDER = re.compile(r"optimizer_\d+")
# What automatic naming calls them. The number counts saves, not steps.
_NAME = re.compile(r"checkpoint_\d+")
# Files of models that a script's own hooks save.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


class Accelerate(Format):
    """A directory of Accelerator's."""

    NAME = "accelerate"

    def recognizes(self, tree: FileTree) -> bool:
        """Whether it has files that only accelerate writes, or is called as accelerate calls them."""
        if not tree.is_directory:
            return False
        own = any(_RANDOM.fullmatch(name) or _STATE.fullmatch(name) for name in tree.top - {"scaler.pt"})
        folders = any(FSDP_FOLDER.fullmatch(name) or _OPTIMIZER_FOLDER.fullmatch(name) for name in tree.folders)
        return own or folders or bool(_NAME.fullmatch(tree.path.name) and has_weights(tree))

    def problem(self, tree: FileTree, ranks: int) -> str | None:
        """Why a file is missing or not whole."""
        return next(_problems(tree, ranks), None)

    def step_in_name(self, name: str) -> int | None:
        """The step, unless accelerate chose the name: it counts saves. ``step`` inside counts batches of an epoch."""
        return None if _NAME.fullmatch(name) else super().step_in_name(name)

    def optional_files(self, tree: FileTree) -> set[str]:
        """The files of objects that only some scripts have."""
        return {name for name in tree.top if _STATE.fullmatch(name) or _CUSTOM.fullmatch(name)}

    def contents(self, tree: FileTree) -> Contents:
        """Weights, optimizers, schedulers, samplers and registered objects."""
        from slurmtrain.runtime.checkpoint.formats.values import leaves, read_torch

        contents = weights_contents(tree)
        for name in sorted(self.optional_files(tree)):
            contents |= leaves(read_torch(tree.path / name), name.partition(".")[0])
        for folder in _optimizer_folders(tree):
            contents |= dcp_contents(tree.below(folder))
        for tag in tags_in(tree):
            contents |= tag_contents(tree.below(tag))
        return contents

    def modules(self, names: Collection[str]) -> list[str]:
        """The weights of all models."""
        numbered = {match[0] for name in names if (match := re.match(r"model(_\d+)?(?=\.)", name))}
        return sorted(numbered) or prefixes(names, ("module",))


def _problems(tree: FileTree, ranks: int) -> Iterator[str]:
    if name := tree.unfinished():
        yield f"{name} is still being written"
    tags = tags_in(tree)
    for tag in tags:
        if problem := tag_problem(tree.below(tag), ranks):
            yield f"in {tag}, {problem}"
    if not tags:
        if (has_weights(tree) or not _own_weights(tree)) and (problem := weights_problem(tree)):
            yield problem
        if not any(_OPTIMIZER.fullmatch(name) for name in tree.top) and not _optimizer_folders(tree):
            yield "optimizer.bin is missing"
    for folder in _optimizer_folders(tree):
        if problem := dcp_problem(tree.below(folder)):
            yield f"in {folder}, {problem}"
    for name in sorted(tree.top):
        if (_STATE.fullmatch(name) or name.endswith(_WEIGHTS)) and (problem := file_problem(tree, name)):
            yield problem
    yield from numbering_problems(tree, _RANDOM, "random_states_{}.pkl", at_least=ranks)
    yield from numbering_problems(tree, _CUSTOM, "custom_checkpoint_{}.pkl", at_least=0)


def numbering_problems(tree: FileTree, pattern: re.Pattern[str], name: str, *, at_least: int) -> Iterator[str]:
    """Which of the files numbered from 0 are missing or not whole.

    Args:
        tree: The directory.
        pattern: Matches their names; its group is the number.
        name: Their name, with braces for the number.
        at_least: How many there must be.
    """
    numbers = {int(match[1]) for each in tree.top if (match := pattern.fullmatch(each))}
    for number in range(max([at_least - 1, *numbers], default=-1) + 1):
        if problem := file_problem(tree, name.format(number)):
            yield problem


def _own_weights(tree: FileTree) -> bool:
    """Whether there are weights that a hook of the script has saved, as hooks of diffusers do."""
    states = {name for name in tree.top if _STATE.fullmatch(name)}
    return any(name.endswith(_WEIGHTS) for name in tree.sizes if name not in states)


def _optimizer_folders(tree: FileTree) -> list[str]:
    return sorted(folder for folder in tree.folders if _OPTIMIZER_FOLDER.fullmatch(folder))
