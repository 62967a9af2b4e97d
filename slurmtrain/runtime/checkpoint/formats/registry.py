"""All formats, which one a checkpoint has, and what is read of any."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.errors import CheckpointError
from slurmtrain.model.spec.checkpoint import AUTO, OWN
from slurmtrain.runtime.checkpoint.formats.accelerate import Accelerate
from slurmtrain.runtime.checkpoint.formats.archives import is_archive, read_archive
from slurmtrain.runtime.checkpoint.formats.base import Contents, Format
from slurmtrain.runtime.checkpoint.formats.dcp import DcpDirectory
from slurmtrain.runtime.checkpoint.formats.deepspeed import DeepSpeed
from slurmtrain.runtime.checkpoint.formats.huggingface import HuggingFace
from slurmtrain.runtime.checkpoint.formats.lightning import Lightning
from slurmtrain.runtime.checkpoint.formats.other import Other
from slurmtrain.runtime.checkpoint.formats.pickles import as_step, member
from slurmtrain.runtime.checkpoint.formats.safetensors_files import SafetensorsFiles
from slurmtrain.runtime.checkpoint.formats.safetensors_header import METADATA, read_header
from slurmtrain.runtime.checkpoint.formats.torch_files import TorchFiles
from slurmtrain.runtime.checkpoint.formats.trees import FileTree, list_tree
from slurmtrain.system.owned_files import open_readable

OTHER = Other()
# Tried in this order: directories of trainers contain files of the simpler formats.
_FORMATS: tuple[Format, ...] = (
    HuggingFace(), Accelerate(), Lightning(), DeepSpeed(), DcpDirectory(), SafetensorsFiles(), TorchFiles(), OTHER,
)  # fmt: skip
# A larger JSON file holds no state of a trainer.
_LIMIT_BYTES = 1 << 24
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


def step_by_key(tree: FileTree, names: Sequence[str]) -> int | None:
    """The whole number under a key of a checkpoint; None if no file has one.

    Files of torch.save, headers of safetensors, and JSON are searched, in the order of their names. Nothing in them is
    executed.

    Args:
        tree: The checkpoint.
        names: The names of the key, from the outermost dictionary inwards.
    """
    for name in sorted(tree.sizes):
        with contextlib.suppress(CheckpointError, OSError, ValueError, RecursionError):
            step = _as_number(_look_up(_read(tree.path / name, name or tree.path.name), names))
            if step is not None:
                return step
    return None


def _read(path: Path, name: str) -> Any:
    """The dictionary that a file holds; None if it holds none that can be read."""
    if name.endswith(".safetensors"):
        return (read_header(path)[0] or {}).get(METADATA)
    if name.endswith(".json"):
        with open_readable(path) as file:
            return json.loads(file.read(_LIMIT_BYTES))
    return read_archive(path, name) if is_archive(path) else None


def _look_up(value: Any, names: Sequence[str]) -> Any:
    """What stands under a key, whose names may have dots themselves."""
    for count in range(len(names), 0, -1):
        inner = member(value, ".".join(names[:count]))
        if inner is not None:
            return inner if count == len(names) else _look_up(inner, names[count:])
    return None


def _as_number(value: Any) -> int | None:
    """A step that may be written as text, as all metadata of safetensors is, or as a whole floating-point number."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return as_step(int(value) if isinstance(value, float) and value.is_integer() else value)
