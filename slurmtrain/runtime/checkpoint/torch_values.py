"""Reading tensors and values of checkpoints with torch, without executing anything that may be planted in them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

import torch

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.untrusted_files import Contents, Inert, is_archive

# Lists and dictionaries inside each other: states have a handful.
_DEEPEST = 64
_SHOWN = 50
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Random number states: a script that draws none does not seed them, and they differ every time.
_RANDOM = re.compile(
    r"(?:^|_)rng(?:_|$)|random_state|numpy_random_seed|torch_manual_seed|base_seed|generator", re.IGNORECASE
)
# Values that differ between two runs of one script.
_VOLATILE = re.compile(
    r"(?:time|timestamp|date|datetime|hostname|host|pid|elapsed|.*_time|.*_runtime|.*_per_second)", re.IGNORECASE
)


class _StandIn(Inert):
    """What a class that torch does not allow becomes: torch creates and fills it like any other."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """An object without content, whatever its constructor would take."""
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing with the arguments."""

    def __setstate__(self, _state: Any) -> None:
        """Ignore the state."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Ignore an item."""


def read_torch(source: Path | IO[bytes]) -> Any:
    """What ``torch.save`` wrote, on the CPU; its tensors are read when they are used.

    Objects of classes that ``weights_only=True`` does not allow become inert. Raises CheckpointError if it cannot be
    read, OSError.
    """
    # torch maps only archives into memory, and not the format that it had before them.
    mapped = isinstance(source, Path) and is_archive(source)
    try:
        names: Iterable[str] = ()
        with contextlib.suppress(ValueError):  # from before archives: torch refuses globals that it does not allow
            names = torch.serialization.get_unsafe_globals_in_checkpoint(_path_or_file(source))
        # A stand-in for each class or function that the pickle names and torch does not allow.
        classes: list[Any] = [(type("StandIn", (_StandIn,), {}), name) for name in names]
        with torch.serialization.safe_globals(classes):
            return torch.load(_path_or_file(source), map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except Exception as error:  # a damaged file can raise anything
        name = source.name if isinstance(source, Path) else "a value"
        raise CheckpointError(f"{name} cannot be read: {' '.join(str(error).split())[:300]}") from error


def _path_or_file(source: Path | IO[bytes]) -> Any:
    if isinstance(source, Path):
        return str(source)
    source.seek(0)
    return source


def read_safetensors(path: Path) -> Contents:
    """The tensors of a file by their names. Raises CheckpointError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error

    # Opened anew each time: contents are read one after the other, perhaps long after they were listed.
    def read(name: str) -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    return {name: partial(read, name) for name in names}


def leaves(value: Any, name: str = "", *, tensors_only: bool = False) -> Contents:
    """The tensors and plain values in ``value``, nested dictionaries and lists, by dotted names after ``name``.

    ``tensors_only``: leaves out plain values. Always leaves out what differs between two equal trainings: random number
    states, paths, times, and objects of unknown classes.
    """
    return {
        at: lambda leaf=leaf: leaf  # type: ignore[misc]
        for at, leaf in _walk_values(value, name)
        if isinstance(leaf, torch.Tensor) or not tensors_only
    }


def _walk_values(value: Any, at: str, depth: int = _DEEPEST) -> Iterator[tuple[str, Any]]:
    """The tensors and values in ``value``. Raises CheckpointError if it is nested deeper, or contains itself."""
    if depth == 0:
        raise CheckpointError(f"{at[:_SHOWN]}... is nested more than {_DEEPEST} levels deep")
    last = at.rpartition(".")[2]
    if _RANDOM.search(last):
        return
    if isinstance(value, torch.Tensor):
        yield at, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk_values(item, f"{at}.{key}" if at else str(key), depth - 1)
    elif isinstance(value, list | tuple) and not all(isinstance(item, _PLAIN) for item in value):
        for index, item in enumerate(value):
            yield from _walk_values(item, f"{at}.{index}" if at else str(index), depth - 1)
    else:
        values = value if isinstance(value, list | tuple) else (value,)
        is_plain = all(isinstance(each, _PLAIN) for each in values)
        has_path = any(isinstance(each, str) and os.sep in each for each in values)
        if is_plain and not has_path and not _VOLATILE.fullmatch(last):
            yield at, value
