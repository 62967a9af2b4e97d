"""Where in its working directory a run keeps results, by what its command and its spec name. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from slurmtrain.model.spec.command_paths import NamedPath, paths_written

DIRECTORY, FILE, UNKNOWN = "directory", "file", "unknown"
_PLACEHOLDER = re.compile(r"\{\w+\}")
# Stands for a placeholder in a path: a name that no directory has.
_UNKNOWN_NAME = "_slurmtrain_placeholder_"
# Options whose values are directories, such as --output_dir, --savedir and --default_root_dir.
_OF_DIRECTORIES = re.compile(r"(dir|directory|folder)$", re.IGNORECASE)
_WILDCARD = re.compile(r"[*?\[{]")
# Endings of files that programs write; whatever else a path ends in, it may be a directory's name, such as "v1.5".
_FILES = frozenset(
    """
    .bin .ckpt .csv .db .gz .h5 .hdf5 .joblib .json .jsonl .log .md .npy .npz .onnx .out .parquet .pdf .pickle .pkl .png
    .pt .pth .safetensors .tar .tsv .txt .yaml .yml .zip
    """.split()  # noqa: SIM905 (a list of names to read, not of strings)
)


class ResultPlace(NamedTuple):
    """A place for results, which may not be there yet.

    ``path``: relative to the repository. ``kind``: :data:`DIRECTORY`, :data:`FILE`, or :data:`UNKNOWN`.
    """

    path: str
    kind: str


def result_places(words: Sequence[str], pattern: str | None, workdir: str, root: str) -> list[ResultPlace]:
    """The places in a repository, or next to it, that a command writes to by a path relative to its working directory.

    Args:
        words: Words of the command, placeholders included; of a path, the part before the first placeholder counts.
        pattern: ``checkpoint.glob``, whose directories count.
        workdir: Where the command runs, absolute.
        root: The repository, absolute.
    """
    written = paths_written([_PLACEHOLDER.sub(_UNKNOWN_NAME, word) for word in words])
    places = [*map(_place_of, written), *([_directory_of(pattern)] if pattern else ())]
    return list(dict.fromkeys(_in_repository(places, workdir, root)))


def _place_of(named: NamedPath) -> ResultPlace:
    path = PurePosixPath(named.path)
    if _UNKNOWN_NAME in named.path:
        before = next(parent for parent in path.parents if _UNKNOWN_NAME not in str(parent))
        return ResultPlace(str(before), DIRECTORY)
    if path.suffix.lower() in _FILES:
        return ResultPlace(str(path), FILE)
    is_directory = named.path.endswith("/") or _OF_DIRECTORIES.search(named.option)
    return ResultPlace(str(path), DIRECTORY if is_directory else UNKNOWN)


def _directory_of(pattern: str) -> ResultPlace:
    """The directory of all files that a pattern matches."""
    parents = PurePosixPath(pattern).parents
    return ResultPlace(str(next(each for each in parents if not _WILDCARD.search(str(each)))), DIRECTORY)


def _in_repository(places: Sequence[ResultPlace], workdir: str, root: str) -> Iterator[ResultPlace]:
    """The relative places below the root or next to it, without the working directory."""
    for place in places:
        if place.path.startswith(("/", "~")):
            continue
        absolute = posixpath.normpath(posixpath.join(workdir, place.path))
        path = posixpath.relpath(absolute, root)
        # Further up, a copy is not surrounded by what surrounds the repository.
        if not path.startswith("../..") and not f"{workdir}/".startswith(f"{absolute.rstrip('/')}/"):
            yield ResultPlace(path, place.kind)
