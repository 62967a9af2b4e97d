"""A model's weights in a directory as transformers, peft and accelerate write them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from slurmtrain.runtime.checkpoint.formats.base import Contents
from slurmtrain.runtime.checkpoint.formats.dcp import dcp_contents, dcp_problem
from slurmtrain.runtime.checkpoint.formats.trees import FileTree, file_problem, read_json_file

_INDEX = ".index.json"
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(\.\w+)")
# model.safetensors, and model_1.safetensors of a second model; the same for pytorch_model.bin and adapters.
_WHOLE = re.compile(r"(?:pytorch_|adapter_)?model(?:_fsdp)?(_\d+)?\.(?:safetensors|bin)")
# Weights that FSDP has sharded (FSDP_MODEL_NAME of accelerate): the format of torch.distributed.checkpoint.
FSDP_FOLDER = re.compile(r"pytorch_model_fsdp_\d+")


def weights_problem(tree: FileTree) -> str | None:
    """Why the weights are missing or not whole, as a phrase; None if they are there. Raises OSError."""
    if not has_weights(tree):
        return "the weights of its model are missing"
    return sharding_problem(tree) or next(_file_problems(tree), None)


def has_weights(tree: FileTree) -> bool:
    """Whether there is any file of weights."""
    return bool(_whole_files(tree) or _sharded(tree) or _fsdp_folders(tree))


def sharding_problem(tree: FileTree) -> str | None:
    """Why the index of sharded weights is missing, or does not name files; None if nothing is wrong. Raises OSError."""
    for start, ending in sorted({match.groups() for name in tree.top if (match := _SHARD.fullmatch(name))}):
        if f"{start}{ending}{_INDEX}" not in tree.top:
            return f"{start}{ending}{_INDEX} is missing"
    for index in _indexes(tree):
        if not _files_in(tree.path / index):
            return f"{index} is not whole"
    return None


def indexed_files(tree: FileTree) -> set[str]:
    """The names of the files that indexes name. Raises OSError."""
    return {name for index in _indexes(tree) for name in _files_in(tree.path / index)}


def weights_contents(tree: FileTree) -> Contents:
    """All weights, under ``model.``, or ``model_1.`` and so on for further models. Raises CheckpointError, OSError."""
    contents: Contents = {}
    for name in sorted({*_whole_files(tree), *indexed_files(tree)}):
        match = _WHOLE.fullmatch(name)
        prefix = f"model{(match[1] if match else '') or ''}"
        contents |= {f"{prefix}.{each}": read for each, read in tensors_of(tree.path / name).items()}
    for folder in _fsdp_folders(tree):
        contents |= dcp_contents(tree.below(folder))
    return contents


def tensors_of(path: Path) -> Contents:
    """The tensors of one file by their names in it. Raises CheckpointError, OSError."""
    from slurmtrain.runtime.checkpoint.formats.values import leaves, read_safetensors, read_torch

    return read_safetensors(path) if path.name.endswith(".safetensors") else leaves(read_torch(path))


def _file_problems(tree: FileTree) -> Iterator[str]:
    for name in sorted({*_whole_files(tree), *indexed_files(tree)}):
        if problem := file_problem(tree, name):
            yield problem
    for folder in _fsdp_folders(tree):
        if problem := dcp_problem(tree.below(folder)):
            yield f"in {folder}, {problem}"


def _whole_files(tree: FileTree) -> list[str]:
    return sorted(name for name in tree.top if _WHOLE.fullmatch(name))


def _sharded(tree: FileTree) -> bool:
    return any(_SHARD.fullmatch(name) for name in tree.top) or bool(_indexes(tree))


def _indexes(tree: FileTree) -> list[str]:
    return sorted(name for name in tree.top if name.endswith((f".safetensors{_INDEX}", f".bin{_INDEX}")))


def _fsdp_folders(tree: FileTree) -> list[str]:
    return sorted(folder for folder in tree.folders if FSDP_FOLDER.fullmatch(folder))


def _files_in(index: Path) -> set[str]:
    content = read_json_file(index)
    files = content.get("weight_map") if isinstance(content, dict) else None
    # A name that leads elsewhere is no name of a shard.
    return {Path(str(name)).name for name in files.values()} if isinstance(files, dict) else set()
