"""Checkpoints of Lightning: one file, or a directory of torch.distributed.checkpoint with ``meta.pt``.

A file is written aside and renamed, so it is whole or not there. In a directory, ``meta.pt`` is written after the
shards, and holds everything that is not sharded (lightning/fabric/strategies/fsdp.py, 2.6.6).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.formats.archives import is_archive, read_archive
from slurmtrain.runtime.checkpoint.formats.base import Contents, Format, prefixes
from slurmtrain.runtime.checkpoint.formats.dcp import dcp_contents, dcp_problem, is_dcp
from slurmtrain.runtime.checkpoint.formats.deepspeed import tag_contents, tag_problem, tags_in
from slurmtrain.runtime.checkpoint.formats.pickles import as_step, member
from slurmtrain.runtime.checkpoint.formats.trees import FileTree, file_problem

_META = "meta.pt"
_VERSION = "pytorch-lightning_version"
_SUFFIX = ".ckpt"
# The tag that Lightning's strategy for DeepSpeed saves under.
_TAG = "checkpoint"
# Settings, which hold paths.
_SETTINGS = ("hparams_name", "hparams_type", "hyper_parameters", "datamodule_hyper_parameters", _VERSION)


class Lightning(Format):
    """What Lightning's Trainer saved, in a file or sharded."""

    NAME = "lightning"

    def recognizes(self, tree: FileTree) -> bool:
        """Whether a file names Lightning's version, or a directory is one of a sharded strategy."""
        if not tree.is_directory:
            return _names_lightning(tree)
        sharded = is_dcp(tree) or _TAG in tags_in(tree)
        return _META in tree.top or (sharded and tree.path.name.endswith(_SUFFIX))

    def problem(self, tree: FileTree, ranks: int) -> str | None:
        """Why it is not whole."""
        return next(_problems(tree, ranks), None)

    def step(self, tree: FileTree) -> int | None:
        """Lightning's global step, which counts updates of all optimizers."""
        return as_step(member(_read_plain(tree), "global_step"))

    def contents(self, tree: FileTree) -> Contents:
        """Weights, optimizers, schedulers, loops and counters; of callbacks, tensors alone."""
        from slurmtrain.runtime.checkpoint.formats.values import read_torch

        if not tree.is_directory:
            return _without_settings(read_torch(tree.path))
        if _TAG in tags_in(tree):
            return tag_contents(tree.below(_TAG))
        return dcp_contents(tree) | _without_settings(read_torch(tree.path / _META))

    def modules(self, names: Collection[str]) -> list[str]:
        """The weights of the LightningModule."""
        return prefixes(names, ("state_dict", "model", "module"))


def _names_lightning(tree: FileTree) -> bool:
    if not is_archive(tree.path):
        return False
    try:
        return member(read_archive(tree.path, tree.path.name), _VERSION) is not None
    except CheckpointError:
        return False


def _problems(tree: FileTree, ranks: int) -> Iterator[str | None]:
    if not tree.is_directory:
        yield file_problem(tree, "")
        return
    if name := tree.unfinished():
        yield f"{name} is still being written"
    if tags_in(tree):
        yield tag_problem(tree.below(_TAG), ranks)
        return
    yield dcp_problem(tree) or file_problem(tree, _META)


def _read_plain(tree: FileTree) -> Any:
    path = tree.path
    if tree.is_directory:
        tag = tree.below(_TAG)
        models = sorted(name for name in tag.top if name.endswith("_model_states.pt"))
        path = tag.path / models[0] if models else tree.path / _META
    return read_archive(path, path.name) if is_archive(path) else None


def _without_settings(state: Any) -> Contents:
    from slurmtrain.runtime.checkpoint.formats.values import leaves

    if not isinstance(state, Mapping):
        return leaves(state)
    kept = {key: value for key, value in state.items() if key not in (*_SETTINGS, "callbacks")}
    # The states of callbacks hold paths, times, and what a user's own callback finds worth keeping.
    return leaves(kept) | leaves(state.get("callbacks"), "callbacks", tensors_only=True)
