"""All formats, and which one a checkpoint has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from slurmtrain.model.spec.checkpoint.formats import AUTO, OWN
from slurmtrain.runtime.checkpoint.formats.accelerate import Accelerate
from slurmtrain.runtime.checkpoint.formats.base import Contents, Format
from slurmtrain.runtime.checkpoint.formats.dcp import DcpDirectory
from slurmtrain.runtime.checkpoint.formats.deepspeed import DeepSpeed
from slurmtrain.runtime.checkpoint.formats.huggingface import HuggingFace
from slurmtrain.runtime.checkpoint.formats.lightning import Lightning
from slurmtrain.runtime.checkpoint.formats.other import Other
from slurmtrain.runtime.checkpoint.formats.safetensors_files import SafetensorsFiles
from slurmtrain.runtime.checkpoint.formats.torch_files import TorchFiles
from slurmtrain.runtime.checkpoint.formats.trees import FileTree, list_tree

OTHER = Other()
# In the order in which they are tried: directories of trainers contain files of the simpler formats.
_FORMATS: tuple[Format, ...] = (
    HuggingFace(), Accelerate(), Lightning(), DeepSpeed(), DcpDirectory(), SafetensorsFiles(), TorchFiles(), OTHER,
)  # fmt: skip
_BY_NAME: Mapping[str, Format] = {each.NAME: each for each in _FORMATS}


def format_of(tree: FileTree, declared: str = AUTO) -> Format:
    """The format of a checkpoint: the ``declared`` one of ``checkpoint.format``, or else the one of its content.

    Raises OSError.
    """
    if declared not in (AUTO, OWN):
        return _BY_NAME[declared]
    return next(each for each in _FORMATS if each.recognizes(tree))


def find_modules(name: str, contents: Collection[str]) -> list[str]:
    """The prefixes of models' weights among the names in a checkpoint's ``contents``; ``name``: its format's."""
    return _BY_NAME[name].modules(contents)


def read_contents(path: Path, declared: str = AUTO) -> Contents:
    """How to read each tensor and plain value of the checkpoint at ``path``, by name, in the order of names.

    Only what training continues from: no random number states, paths, times or settings, so that two equal trainings
    have equal contents. A tensor is read when its function is called.

    Args:
        path: A file or directory.
        declared: Its format as in ``checkpoint.format``.

    Raises:
        CheckpointError: it cannot be read.
        OSError: a file cannot be read.
    """
    tree = list_tree(path)
    contents = format_of(tree, declared).contents(tree)
    return dict(sorted(contents.items()))
