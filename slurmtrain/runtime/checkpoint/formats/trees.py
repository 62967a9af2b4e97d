"""The files of a checkpoint: names, sizes and times, listed once; and whether single files are whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.runtime.checkpoint.formats.archives import MAGIC, archive_problem
from slurmtrain.runtime.checkpoint.formats.safetensors_header import safetensors_problem
from slurmtrain.system.owned_files import open_readable, read_readable

_UNFINISHED = (".tmp", ".part", ".partial", ".incomplete", "~")
# How pickles of protocol 2 and later begin: what torch.save wrote before it wrote archives.
_PICKLE_MAGIC = b"\x80"
# After a crash of the machine, file systems return zeros for what was written last.
_ZEROS = bytes(len(MAGIC))
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
"""How the names of files that torch.save wrote commonly end."""


@dataclass(frozen=True, slots=True)
class FileTree:
    """A file, or a directory with all files below it.

    ``sizes`` are in bytes, ``times`` are times of modification in seconds since 1970, both by path relative to
    ``path``; a file has itself under the empty name.
    """

    path: Path
    sizes: Mapping[str, int]
    times: Mapping[str, float]
    is_directory: bool

    @property
    def bytes(self) -> int:
        """The total size."""
        return sum(self.sizes.values())

    @property
    def saved_at(self) -> float:
        """When one of the files was last written to, in seconds since 1970."""
        return max(self.times.values(), default=0.0)

    @property
    def top(self) -> set[str]:
        """The names of files directly in the directory."""
        return {name for name in self.sizes if "/" not in name}

    @property
    def folders(self) -> set[str]:
        """The names of folders directly in the directory that have files."""
        return {name.partition("/")[0] for name in self.sizes if "/" in name}

    def below(self, folder: str) -> FileTree:
        """The part of it in a ``folder``."""
        start = f"{folder}/"
        return FileTree(
            self.path / folder,
            {name.removeprefix(start): size for name, size in self.sizes.items() if name.startswith(start)},
            {name.removeprefix(start): time for name, time in self.times.items() if name.startswith(start)},
            is_directory=True,
        )

    def unfinished(self) -> str | None:
        """The name of a file that is being written, by its name; None if there is none.

        One that is older than all other files was left by an earlier save, which was repeated since.
        """
        marked = {name: self.times[name] for name in self.sizes if is_unfinished(name)}
        others = [time for name, time in self.times.items() if name not in marked]
        return next((name for name, time in marked.items() if not others or time >= min(others)), None)


def list_tree(path: Path) -> FileTree:
    """List a file, or a directory with everything below it. Raises OSError."""
    status = path.stat()
    if not path.is_dir():
        return FileTree(path, {"": status.st_size}, {"": status.st_mtime}, is_directory=False)
    files = {name: (path / name).stat() for name in _walk(path)}
    return FileTree(
        path,
        {name: each.st_size for name, each in files.items()},
        {name: each.st_mtime for name, each in files.items()},
        is_directory=True,
    )


def _walk(path: Path) -> Iterator[str]:
    for folder, _, names in os.walk(path):
        for name in names:
            yield Path(folder, name).relative_to(path).as_posix()


def is_unfinished(name: str) -> bool:
    """Whether the name of a file or directory says that it is still being written."""
    last = name.rpartition("/")[2]
    return last.endswith(_UNFINISHED) or last.startswith(".tmp")


def file_problem(tree: FileTree, name: str, *, by_torch: bool = True) -> str | None:
    """Why the file ``name`` in ``tree`` is missing or not whole, as a phrase; None if it is there and whole.

    ``by_torch``: whether it is known that ``torch.save`` has written it, unless its name ends in ``.safetensors``.
    Raises OSError.
    """
    called = name or tree.path.name
    size = tree.sizes.get(name)
    if size is None:
        return f"{called} is missing"
    if size == 0:
        return f"{called} is empty"
    path = tree.path / name
    in_safetensors = called.endswith(".safetensors")
    problem = safetensors_problem(path) if in_safetensors else _torch_problem(path, by_torch=by_torch)
    return f"{called} is not whole: {problem}" if problem else None


def _torch_problem(path: Path, *, by_torch: bool) -> str | None:
    with open_readable(path) as file:
        start = file.read(len(MAGIC))
    if MAGIC.startswith(start):
        return archive_problem(path)
    if start == _ZEROS:
        return "it begins with zeros"
    if by_torch and not start.startswith(_PICKLE_MAGIC):
        return "it does not begin like a file of torch.save"
    return None


def read_json_file(path: Path) -> Any:
    """What a JSON file holds; None if it holds no JSON. Raises OSError."""
    try:
        return json.loads(read_readable(path))
    except (ValueError, RecursionError):
        return None
