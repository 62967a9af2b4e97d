"""Which paths of a repository lead where in a run's own copy of its code. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable, Iterator
from pathlib import PurePosixPath

# Files that keep an otherwise empty directory in git, or say what the directory is for.
_PLACEHOLDERS = frozenset({".gitkeep", ".gitignore", ".keep", "readme", "readme.md", "readme.txt", "readme.rst"})
# Files that Python imports, or a shell reads.
_CODE = frozenset({".py", ".pyi", ".pyx", ".pxd", ".so", ".pyd", ".sh", ".bash"})
# What nobody needs beside the files of a snapshot: git would write to the repository's own index.
_NEVER = frozenset({".git", "__pycache__"})


def is_placeholder(path: str) -> bool:
    """Whether a file is there for its directory, not for its content."""
    return PurePosixPath(path).name.lower() in _PLACEHOLDERS


def directories_of(paths: Iterable[str]) -> set[str]:
    """All directories that contain files with these relative paths; the root is an empty text."""
    directories = {""}
    for path in paths:
        parent = posixpath.dirname(path)
        while parent not in directories:
            directories.add(parent)
            parent = posixpath.dirname(parent)
    return directories


def without_data_directories(paths: Collection[str]) -> list[str]:
    """The paths that are not in a directory with nothing but placeholders.

    Such a directory is for data or results: a run uses the one that is there.
    """
    code = directories_of(path for path in paths if not is_placeholder(path))
    return [path for path in paths if posixpath.dirname(path) in code]


def without_places(paths: Collection[str], places: Collection[str]) -> list[str]:
    """The paths that are neither among the ``places`` nor in a directory of them that has no programs."""
    by_path = {path: [each for each in (path, *_parents(path)) if each in places] for path in paths} if places else {}
    with_code = {place for path, its in by_path.items() if posixpath.splitext(path)[1] in _CODE for place in its}
    return [path for path in paths if with_code.issuperset(by_path.get(path, ()))]


def _parents(path: str) -> Iterator[str]:
    while path := posixpath.dirname(path):
        yield path


def names_by_directory(paths: Iterable[str]) -> dict[str, set[str]]:
    """The names of the files and directories with these relative paths, by the directory that they are in."""
    paths = list(paths)
    held: dict[str, set[str]] = {directory: set() for directory in directories_of(paths)}
    for path in (*paths, *filter(None, held)):
        held[posixpath.dirname(path)].add(posixpath.basename(path))
    return held


def belongs_beside(name: str) -> bool:
    """Whether something of this name, which a snapshot does not hold, is needed next to its files."""
    return name not in _NEVER and not name.endswith(".pyc")


def may_appear_later(name: str, held: Collection[str]) -> bool:
    """Whether a run may see something of this ``name`` that was not there when it was submitted.

    It is data that an earlier job has made, for example, but nothing that could replace code: a package ``model``
    precedes ``model.py``.

    Args:
        name: Of a file or directory.
        held: The names that the snapshot holds, and that were there, in the same directory.
    """
    stem, suffix = posixpath.splitext(name)
    return belongs_beside(name) and suffix not in _CODE and stem not in {posixpath.splitext(other)[0] for other in held}


def link_target(path: str, target: str, root: str) -> str:
    """Where a symbolic link of a snapshot leads to in a run's own copy.

    Args:
        path: The link, relative to ``root``.
        target: Where it leads to in the repository.
        root: The repository, absolute.
    """
    place = posixpath.normpath(posixpath.join(root, posixpath.dirname(path), target))
    inside = place == root or place.startswith(f"{root.rstrip('/')}/")
    if not inside:
        return place if not target.startswith("/") else target
    if not target.startswith("/"):
        return target
    return posixpath.relpath(place, posixpath.join(root, posixpath.dirname(path)))


def path_in_word(word: str) -> Iterator[tuple[str, str]]:
    """The parts of a word of a command that may be a path, each with what is before it: ``("--config=", "/x")``."""
    yield "", word
    before, equals, value = word.partition("=")
    if equals and "/" not in before:
        yield f"{before}=", value


def relative_to_root(path: str, root: str) -> str | None:
    """An absolute ``path`` relative to ``root``, ``.`` for the root itself; None if it lies elsewhere."""
    place = posixpath.normpath(path)
    if not path.startswith("/"):
        return None
    if place == root:
        return "."
    return place.removeprefix(f"{root}/") if place.startswith(f"{root}/") else None
