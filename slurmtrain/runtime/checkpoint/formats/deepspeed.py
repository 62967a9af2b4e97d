"""Checkpoints of DeepSpeed: a directory of tags, each a directory with files of all ranks, and ``latest``.

``latest`` names the tag that DeepSpeed loads. Rank 0 writes it as soon as its own files are written, so it can name a
tag that lacks files of other ranks, or be empty (deepspeed/runtime/engine.py, 0.19.8).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.formats.pickles import as_step, member
from slurmtrain.runtime.checkpoint.formats.plain_files import Format, prefixes
from slurmtrain.runtime.checkpoint.formats.trees import Contents, FileTree, file_problem, is_archive, read_archive

LATEST = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:\w+?_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_STATES = ("_model_states.pt", "_optim_states.pt", "-model_states.pt")
# Neither settings nor versions are state.
_LEFT_OUT = ("ds_config", "ds_version", "param_shapes", "buffer_names", "shared_params", "frozen_param_shapes")


class DeepSpeed(Format):
    """One tag, or a directory whose ``latest`` names one."""

    NAME = "deepspeed"

    def recognizes(self, tree: FileTree) -> bool:
        """Whether it has files of ranks, or a tag that has."""
        return tree.is_directory and (is_tag(tree) or bool(tags_in(tree)))

    def problem(self, tree: FileTree, ranks: int) -> str | None:
        """Why a file of a rank is missing or not whole; in a directory of tags, of the one that ``latest`` names."""
        if is_tag(tree) or not tags_in(tree):
            return problem_of_tag(tree, ranks)
        tag = latest_tag(tree)
        if tag is None:
            return f"its file {LATEST!r} is {'empty' if LATEST in tree.top else 'missing'}"
        problem = problem_of_tag(tree.below(tag), ranks)
        return f"in {tag}, which {LATEST!r} names, {problem}" if problem else None

    def step(self, tree: FileTree) -> int | None:
        """The engine's global steps."""
        return as_step(member(_model_state(_tag(tree)), "global_steps"))

    def contents(self, tree: FileTree) -> Contents:
        """The states of all ranks."""
        return tag_contents(_tag(tree))

    def modules(self, names: Collection[str]) -> list[str]:
        """The weights of a model that no rank has a part of alone."""
        return prefixes(names, ("module",))


def is_tag(tree: FileTree) -> bool:
    """Whether a directory holds files of ranks."""
    return any(name.endswith(_STATES) for name in tree.top)


def tags_in(tree: FileTree) -> list[str]:
    """The names of the tags in a directory."""
    return sorted(folder for folder in tree.folders if is_tag(tree.below(folder)))


def latest_tag(tree: FileTree) -> str | None:
    """The tag that ``latest`` names, there or not; None if it names none. Raises OSError."""
    if LATEST not in tree.top:
        return None
    text = (tree.path / LATEST).read_text(errors="replace").strip()
    return text if text and "/" not in text and text != ".." else None


def problem_of_tag(tree: FileTree, ranks: int) -> str | None:
    """Why a tag is not complete, as a phrase; None if it is. Raises OSError.

    ``ranks``: the least number of ranks that have saved it.
    """
    return next(_problems(tree, ranks), None)


def _problems(tree: FileTree, ranks: int) -> Iterator[str]:
    if name := tree.unfinished():
        yield f"{name} is still being written"
    models = {(match[1], int(match[2])) for name in tree.top if (match := _MODEL.fullmatch(name))}
    if not models:
        yield "mp_rank_00_model_states.pt is missing"
    for name in sorted(tree.top):
        if name.endswith(_STATES) and (problem := file_problem(tree, name)):
            yield problem
    try:
        state = _model_state(tree)
    except CheckpointError as error:
        yield str(error)
        return
    yield from _rank_problems(tree, state, models, ranks)


def _rank_problems(tree: FileTree, state: Any, models: Collection[tuple[str | None, int]], ranks: int) -> Iterator[str]:
    """Which ranks' files are missing. ``models``: data-parallel (if sharded) and model-parallel ranks with weights."""
    mp_size = max(as_step(member(state, "mp_world_size")) or 1, *(mp + 1 for _, mp in models))
    dp_size = as_step(member(state, "dp_world_size")) or max(1, ranks // mp_size)
    sharded = any(dp is not None for dp, _ in models)
    for mp in range(mp_size):
        for dp in range(dp_size) if sharded else [None]:
            if (None if dp is None else str(dp), mp) not in models:
                start = "" if dp is None else f"zero_pp_rank_{dp}_"
                yield f"{start}mp_rank_{mp:02d}_model_states.pt is missing"
    optimizers = {(int(match[1]), int(match[2])) for name in tree.top if (match := _OPTIMIZER.fullmatch(name))}
    # From stage 1 of ZeRO on, each rank has a file.
    zero = member(member(state, "ds_config"), "zero_optimization")
    if not optimizers and not as_step(member(zero, "stage")):
        return
    for mp in range(mp_size):
        for dp in range(dp_size):
            if (dp, mp) not in optimizers:
                yield f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt is missing"


def _tag(tree: FileTree) -> FileTree:
    """The tag to load. Raises CheckpointError if there is none."""
    if is_tag(tree):
        return tree
    tag = latest_tag(tree)
    if tag is None:
        raise CheckpointError(f"{tree.path / LATEST} names no tag")
    return tree.below(tag)


def _model_state(tree: FileTree) -> Any:
    """The state of the first model-parallel rank. Raises CheckpointError, OSError."""
    names = sorted(name for name in tree.top if _MODEL.fullmatch(name))
    if not names:
        raise CheckpointError("mp_rank_00_model_states.pt is missing")
    path = tree.path / names[0]
    return read_archive(path, names[0]) if is_archive(path) else None


def tag_contents(tree: FileTree) -> Contents:
    """Everything in the files of ranks but settings. Raises CheckpointError, OSError."""
    from slurmtrain.runtime.checkpoint.formats.torch_values import leaves, read_torch

    contents: dict[str, Any] = {}
    whole = "mp_rank_00_model_states.pt"
    for name in sorted(name for name in tree.top if name.endswith(_STATES)):
        state = read_torch(tree.path / name)
        kept = {key: value for key, value in state.items() if key not in _LEFT_OUT}
        only_one = name == whole and f"{whole.replace('00', '01')}" not in tree.top
        contents |= leaves(kept, "" if only_one else name.removesuffix("_states.pt"))
    return contents
