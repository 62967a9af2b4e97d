"""Checkpoints of trainers: DeepSpeed, transformers, accelerate and Lightning.

DeepSpeed has a directory of tags, each a directory with files of all ranks, and ``latest``, which names the tag that
DeepSpeed loads. Rank 0 writes it as soon as its own files are written, so it can name a tag that lacks files of other
ranks, or be empty (deepspeed/runtime/engine.py, 0.19.8).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.checkpoint_formats import (
    FSDP_FOLDER,
    Format,
    dcp_contents,
    dcp_problem,
    has_weights,
    is_dcp,
    prefixes,
    weights_contents,
    weights_problem,
)
from slurmtrain.runtime.checkpoint.untrusted_files import (
    TORCH_SUFFIXES,
    Contents,
    FileTree,
    as_step,
    file_problem,
    is_archive,
    member,
    read_archive,
    read_json_file,
)

LATEST = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_SHARDED_OPTIMIZER = re.compile(r"(?:\w+?_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_STATES = ("_model_states.pt", "_optim_states.pt", "-model_states.pt")
# Neither settings nor versions are state.
_LEFT_OUT = ("ds_config", "ds_version", "param_shapes", "buffer_names", "shared_params", "frozen_param_shapes")


class DeepSpeed(Format):
    """One tag, or a directory whose ``latest`` names one."""

    NAME = "deepspeed"

    def recognizes(self, tree: FileTree) -> bool:
        """Whether it has files of ranks, or a tag that has."""
        return tree.is_directory and (is_tag(tree) or bool(tags_in(tree)))

    def problems(self, tree: FileTree, ranks: int) -> Iterator[str | None]:
        """Why a file of a rank is missing or not whole; in a directory of tags, of the one that ``latest`` names."""
        if is_tag(tree) or not tags_in(tree):
            yield from tag_problems(tree, ranks)
            return
        tag = latest_tag(tree)
        if tag is None:
            yield f"its file {LATEST!r} is {'empty' if LATEST in tree.top else 'missing'}"
        else:
            yield from tag_problems(tree.below(tag), ranks, f"in {tag}, which {LATEST!r} names, ")

    def checkpoints_within(self, tree: FileTree) -> list[str] | None:
        """The tags in a directory of tags."""
        return None if is_tag(tree) else tags_in(tree)

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
    # Anybody may have written it, and a path would lead out of the directory.
    return text if text and "/" not in text and text != ".." else None


def tag_problems(tree: FileTree, ranks: int, place: str = "") -> Iterator[str]:
    """Why a tag is not complete, as phrases that begin with its ``place``. Raises OSError.

    ``tree``: its directory. ``ranks``: the least number of ranks that have saved it.
    """
    if problem := tree.unfinished_problem():
        yield f"{place}{problem}"
    models = {(match[1], int(match[2])) for name in tree.top if (match := _MODEL.fullmatch(name))}
    if not models:
        yield f"{place}mp_rank_00_model_states.pt is missing"
    for name in sorted(tree.top):
        if name.endswith(_STATES) and (problem := file_problem(tree, name)):
            yield f"{place}{problem}"
    try:
        state = _model_state(tree)
    except CheckpointError as error:
        yield f"{place}{error}"
        return
    for problem in _rank_problems(tree, state, models, ranks):
        yield f"{place}{problem}"


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
    optimizers = {(int(match[1]), int(match[2])) for name in tree.top if (match := _SHARDED_OPTIMIZER.fullmatch(name))}
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
    from slurmtrain.runtime.checkpoint.torch_values import leaves, read_torch

    contents: dict[str, Any] = {}
    whole = "mp_rank_00_model_states.pt"
    for name in sorted(name for name in tree.top if name.endswith(_STATES)):
        state = read_torch(tree.path / name)
        kept = {key: value for key, value in state.items() if key not in _LEFT_OUT}
        only_one = name == whole and f"{whole.replace('00', '01')}" not in tree.top
        contents |= leaves(kept, "" if only_one else name.removesuffix("_states.pt"))
    return contents


_HF_STATE = "trainer_state.json"
_ARGUMENTS = "training_args.bin"
# Written by the Trainer's JIT checkpoints until they are finished, and read by nothing in transformers.
_SENTINEL = "checkpoint-is-incomplete.txt"
_RNG = re.compile(r"rng_state(?:_(\d+))?\.pth")
_HF_NAME = re.compile(r"checkpoint-\d+")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_OPTIMIZER_FOLDER = re.compile(r"optimizer_\d+")


class HuggingFace(Format):
    """A directory ``checkpoint-<step>`` that the Trainer of transformers wrote.

    The order of its writes: weights, optimizer, scheduler, random number states of each rank, and
    ``trainer_state.json`` by rank 0, with no barrier after it (transformers/trainer.py, 5.23).
    """

    NAME = "hf"

    def recognizes(self, tree: FileTree) -> bool:
        """Whether it has files that only the Trainer writes, or is called as it calls them."""
        if not tree.is_directory:
            return False
        own = {_HF_STATE, _ARGUMENTS, _SENTINEL} & tree.top or any(map(_RNG.fullmatch, tree.top))
        # diffusers calls directories of accelerate so, too.
        by_accelerate = any(name.startswith("random_states_") for name in tree.top) or "scheduler.bin" in tree.top
        named = _HF_NAME.fullmatch(tree.path.name) and (has_weights(tree) or "config.json" in tree.top)
        return bool(own) or bool(named and not by_accelerate)

    def problems(self, tree: FileTree, ranks: int) -> Iterator[str | None]:
        """Why a file is missing or not whole."""
        yield f"it has {_SENTINEL}" if _SENTINEL in tree.top else None
        yield tree.unfinished_problem()
        if not isinstance(state := read_json_file(tree.path / _HF_STATE) if _HF_STATE in tree.top else None, dict):
            yield f"{_HF_STATE} is {'not whole' if _HF_STATE in tree.top else 'missing'}"
        elif as_step(state.get("global_step")) is None:
            yield f"{_HF_STATE} has no global_step"
        tags = tags_in(tree)
        for tag in tags:
            yield from tag_problems(tree.below(tag), ranks, f"in {tag}, ")
        if not tags:
            yield weights_problem(tree)
        for name in sorted(tree.top):
            if name.endswith(TORCH_SUFFIXES):
                yield file_problem(tree, name, by_torch=name in _BY_TORCH)
        # With it the Trainer saves neither optimizer nor scheduler nor random number states.
        if member(_training_arguments(tree), "save_only_model") is not True:
            yield from _state_problems(tree, ranks, by_deepspeed=bool(tags))

    def step(self, tree: FileTree) -> int | None:
        """The Trainer's global step."""
        return as_step(member(read_json_file(tree.path / _HF_STATE), "global_step"))

    def optional_files(self, tree: FileTree) -> set[str]:
        """The files of torch.save that do not belong to single ranks."""
        return {name for name in tree.top if name.endswith(TORCH_SUFFIXES) and not _RNG.fullmatch(name)}

    def contents(self, tree: FileTree) -> Contents:
        """Weights, optimizer, scheduler, step and epoch: the log of the Trainer's state has times and paths."""
        from slurmtrain.runtime.checkpoint.torch_values import leaves, read_torch

        contents = weights_contents(tree)
        for name in sorted(tree.top & {*_OPTIMIZERS, "scheduler.pt", "scaler.pt"}):
            contents |= leaves(read_torch(tree.path / name), name.partition(".")[0])
        for folder in _optimizer_folders(tree):
            contents |= dcp_contents(tree.below(folder))
        for tag in tags_in(tree):
            contents |= tag_contents(tree.below(tag))
        state = read_json_file(tree.path / _HF_STATE)
        return contents | leaves({key: member(state, key) for key in ("global_step", "epoch")})

    def modules(self, names: Collection[str]) -> list[str]:
        """The weights of its one model."""
        return prefixes(names, ("model", "module"))


_BY_TORCH = frozenset((*_OPTIMIZERS, "scheduler.pt", "scaler.pt", _ARGUMENTS))


def _state_problems(tree: FileTree, ranks: int, *, by_deepspeed: bool) -> Iterator[str | None]:
    """What is missing of the states of anything but the model."""
    folders = _optimizer_folders(tree)
    if not by_deepspeed:
        # Without a scheduler's state the Trainer does not load the optimizer's either, and says nothing.
        yield None if "scheduler.pt" in tree.top else "scheduler.pt is missing"
        yield None if tree.top & set(_OPTIMIZERS) or folders else f"{_OPTIMIZERS[0]} is missing"
    yield from _folder_problems(tree, folders)
    numbers = {int(match[1]) for name in tree.top if (match := _RNG.fullmatch(name)) and match[1] is not None}
    # According to the Trainer's arguments.
    processes = as_step(member(member(_training_arguments(tree), "distributed_state"), "num_processes")) or 1
    if not numbers and processes <= 1:
        yield file_problem(tree, "rng_state.pth")
        return
    everyone = range(max([*numbers, ranks - 1, processes - 1]) + 1)
    yield from (f"rng_state_{rank}.pth is missing" for rank in everyone if rank not in numbers)
    yield from (file_problem(tree, f"rng_state_{rank}.pth") for rank in sorted(numbers))


def _folder_problems(tree: FileTree, folders: Iterable[str]) -> Iterator[str]:
    for folder in folders:
        if problem := dcp_problem(tree.below(folder)):
            yield f"in {folder}, {problem}"


def _training_arguments(tree: FileTree) -> Any:
    """The Trainer's arguments; None if they cannot be read."""
    with contextlib.suppress(CheckpointError, OSError):
        return read_archive(tree.path / _ARGUMENTS, _ARGUMENTS)
    return None


def _optimizer_folders(tree: FileTree) -> list[str]:
    return sorted(folder for folder in tree.folders if _OPTIMIZER_FOLDER.fullmatch(folder))


_RANDOM = re.compile(r"random_states_(\d+)\.pkl")
_CUSTOM = re.compile(r"custom_checkpoint_(\d+)\.pkl")
# Further optimizers, schedulers and loaders are numbered from 1.
_ACCELERATE_STATE = re.compile(r"(?:optimizer|scheduler|sampler|dl_state_dict)(?:_\d+)?\.bin|scaler\.pt")
_OPTIMIZER = re.compile(r"optimizer(?:_\d+)?\.bin")
# What automatic naming calls them. The number counts saves, not steps.
_ACCELERATE_NAME = re.compile(r"checkpoint_\d+")
# Files of models that a script's own hooks save.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


class Accelerate(Format):
    """A directory that ``Accelerator.save_state`` wrote.

    The order of its writes: weights, optimizers, schedulers, samplers, gradient scaler, ``random_states_<rank>.pkl`` of
    each rank, then registered objects by the main process; no barrier, no marker, no temporary directory
    (accelerate/accelerator.py and checkpointing.py, 1.15).
    """

    NAME = "accelerate"

    def recognizes(self, tree: FileTree) -> bool:
        """Whether it has files that only accelerate writes, or is called as accelerate calls them."""
        if not tree.is_directory:
            return False
        # The Trainer of transformers has a file scaler.pt, too.
        own = any(_RANDOM.fullmatch(name) or _ACCELERATE_STATE.fullmatch(name) for name in tree.top - {"scaler.pt"})
        folders = any(FSDP_FOLDER.fullmatch(name) or _OPTIMIZER_FOLDER.fullmatch(name) for name in tree.folders)
        return own or folders or bool(_ACCELERATE_NAME.fullmatch(tree.path.name) and has_weights(tree))

    def problems(self, tree: FileTree, ranks: int) -> Iterator[str | None]:
        """Why a file is missing or not whole."""
        yield tree.unfinished_problem()
        tags, folders = tags_in(tree), _optimizer_folders(tree)
        for tag in tags:
            yield from tag_problems(tree.below(tag), ranks, f"in {tag}, ")
        if not tags:
            # A hook of the script may have saved the weights, as hooks of diffusers do.
            by_hook = any(name.endswith(_WEIGHTS) and not _ACCELERATE_STATE.fullmatch(name) for name in tree.sizes)
            yield weights_problem(tree) if has_weights(tree) or not by_hook else None
            has_optimizer = folders or any(_OPTIMIZER.fullmatch(name) for name in tree.top)
            yield None if has_optimizer else "optimizer.bin is missing"
        yield from _folder_problems(tree, folders)
        for name in sorted(tree.top):
            if _ACCELERATE_STATE.fullmatch(name) or name.endswith(_WEIGHTS):
                yield file_problem(tree, name)
        yield from numbering_problems(tree, _RANDOM, "random_states_{}.pkl", at_least=ranks)
        yield from numbering_problems(tree, _CUSTOM, "custom_checkpoint_{}.pkl", at_least=0)

    def step_in_name(self, name: str) -> int | None:
        """The step, unless accelerate chose the name: it counts saves. ``step`` inside counts batches of an epoch."""
        return None if _ACCELERATE_NAME.fullmatch(name) else super().step_in_name(name)

    def optional_files(self, tree: FileTree) -> set[str]:
        """The files of objects that only some scripts have."""
        return {name for name in tree.top if _ACCELERATE_STATE.fullmatch(name) or _CUSTOM.fullmatch(name)}

    def contents(self, tree: FileTree) -> Contents:
        """Weights, optimizers, schedulers, samplers and registered objects."""
        from slurmtrain.runtime.checkpoint.torch_values import leaves, read_torch

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


_META = "meta.pt"
_VERSION = "pytorch-lightning_version"
_LIGHTNING_SUFFIX = ".ckpt"
# The tag that Lightning's strategy for DeepSpeed saves under.
_TAG = "checkpoint"
# Settings, which hold paths.
_SETTINGS = ("hparams_name", "hparams_type", "hyper_parameters", "datamodule_hyper_parameters", _VERSION)


class Lightning(Format):
    """What Lightning's Trainer saved: one file, or a directory of torch.distributed.checkpoint with ``meta.pt``.

    A file is written aside and renamed, so it is whole or not there. In a directory, ``meta.pt`` is written after the
    shards, and holds everything that is not sharded (lightning/fabric/strategies/fsdp.py, 2.6.6).
    """

    NAME = "lightning"

    def recognizes(self, tree: FileTree) -> bool:
        """Whether a file names Lightning's version, or a directory is one of a sharded strategy."""
        if not tree.is_directory:
            with contextlib.suppress(CheckpointError):
                archive = read_archive(tree.path, tree.path.name) if is_archive(tree.path) else None
                return member(archive, _VERSION) is not None
            return False
        sharded = is_dcp(tree) or _TAG in tags_in(tree)
        return _META in tree.top or (sharded and tree.path.name.endswith(_LIGHTNING_SUFFIX))

    def problems(self, tree: FileTree, ranks: int) -> Iterator[str | None]:
        """Why it is not whole."""
        if not tree.is_directory:
            yield file_problem(tree, "")
            return
        yield tree.unfinished_problem()
        if tags_in(tree):
            yield from tag_problems(tree.below(_TAG), ranks)
        else:
            yield dcp_problem(tree)
            yield file_problem(tree, _META)

    def step(self, tree: FileTree) -> int | None:
        """Lightning's global step, which counts updates of all optimizers."""
        path = tree.path
        if tree.is_directory:
            tag = tree.below(_TAG)
            models = sorted(name for name in tag.top if name.endswith("_model_states.pt"))
            path = tag.path / models[0] if models else tree.path / _META
        return as_step(member(read_archive(path, path.name), "global_step")) if is_archive(path) else None

    def contents(self, tree: FileTree) -> Contents:
        """Weights, optimizers, schedulers, loops and counters; of callbacks, tensors alone."""
        from slurmtrain.runtime.checkpoint.torch_values import read_torch

        if not tree.is_directory:
            return _without_settings(read_torch(tree.path))
        if _TAG in tags_in(tree):
            return tag_contents(tree.below(_TAG))
        return dcp_contents(tree) | _without_settings(read_torch(tree.path / _META))

    def modules(self, names: Collection[str]) -> list[str]:
        """The weights of the LightningModule."""
        return prefixes(names, ("state_dict", "model", "module"))


def _without_settings(state: Any) -> Contents:
    from slurmtrain.runtime.checkpoint.torch_values import leaves

    if not isinstance(state, Mapping):
        return leaves(state)
    kept = {key: value for key, value in state.items() if key not in (*_SETTINGS, "callbacks")}
    # The states of callbacks hold paths, times, and what a user's own callback finds worth keeping.
    return leaves(kept) | leaves(state.get("callbacks"), "callbacks", tensors_only=True)


# Tried in this order: directories of the first ones can have files of the later ones.
FORMATS = (HuggingFace(), Accelerate(), Lightning(), DeepSpeed())
