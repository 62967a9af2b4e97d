"""Which files a snapshot holds, and what stays beside them."""

from __future__ import annotations

import glob
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from slurmtrain.errors import NoSnapshot, PathError, UserError
from slurmtrain.model.experiment.code import (
    CodeSpec,
    belongs_beside,
    names_by_directory,
    relative_to_root,
    without_data_directories,
    without_places,
)
from slurmtrain.runtime.code.git import NoGit
from slurmtrain.snapshots import listings
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.owned_files import read_readable

IGNORE_FILE = ".slurmtrainignore"
# Of files, and of what is beside them: more is no code, and takes a job long to set up.
_MOST_FILES = 100_000
_MOST_BESIDE = 10_000
_SHOWN = 4
_CURE = "set 'code: none' to run whatever is there when the job starts"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSource:
    """The source of a snapshot.

    ``workdir``: where the command runs. ``spec``: which of its files are code. ``by_default``: whether the user has not
    asked for a snapshot; a directory that is no project's then has none. ``no_code``: files and directories, absolute,
    that are no code unless there are programs in them: the command's outputs, and the spec.
    """

    workdir: Path
    spec: CodeSpec
    by_default: bool = False
    no_code: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class CodeSelection:
    """The files of a snapshot that is to be taken.

    ``root``: the directory that they are below, absolute. ``files``: their paths relative to it, with their status.
    ``beside``: the names of all else next to them, by directory. ``notes``: for the user. ``repositories``: the
    repositories that the files are in, relative to the root; none without git.
    """

    root: Path
    files: dict[str, os.stat_result]
    beside: dict[str, list[str]]
    notes: list[str]
    repositories: Sequence[str]


def select_code(source: CodeSource, runs_root: Path) -> CodeSelection:
    """Select the files of the repository that holds the working directory or, without one, of that directory itself.

    Args:
        source: What the snapshot is to be taken of.
        runs_root: Where runs are, which is never part of their code.

    Raises:
        NoSnapshot: There is too much, or it is not a project's.
        UserError: A pattern of ``code.include`` matches nothing, or a merge has conflicts.
        PathError: A directory cannot be read.
    """
    code = source.spec
    root, paths, repositories, notes = _listed(source, runs_root)
    files = dict(_stat(root, dict.fromkeys((*paths, *_included(root, code.include)))))
    no_code = {path for each in source.no_code if (path := relative_to_root(each, str(root)))}
    files = {path: files[path] for path in without_places(without_data_directories(files), no_code)}
    _check_size(root, files, code.max_size)
    return CodeSelection(root, files, _beside(root, files), notes, repositories)


def _listed(source: CodeSource, runs_root: Path) -> tuple[Path, list[str], Sequence[str], list[str]]:
    """The root of the code, the paths of its files, its repositories, and notes."""
    notes: list[str] = []
    workdir, code = source.workdir, source.spec
    try:
        root = listings.find_root(workdir)
        # A repository of a home directory has its settings, not all that is below it.
        if not (source.by_default and listings.why_no_project(root)):
            excluded = _rules(root, code.exclude)
            listing = listings.list_repository(root)
            paths = [path for path in (*listing.tracked, *_without_litter(listing.others)) if not excluded(path)]
            inside = "" if workdir == root else f"{workdir.relative_to(root)}/"
            # Where git ignores the working directory itself, the repository around it is not what runs.
            if any(path.startswith(inside) for path in paths):
                notes += _notes_on(root, listing)
                return root, _outside_of(root, runs_root, paths), listing.repositories, notes
    except NoGit as error:
        if error.why:
            notes.append(f"git cannot list the code ({error.why}); all files in {workdir} count as code")
    if source.by_default and (why := listings.why_no_project(workdir)):
        raise NoSnapshot(f"{workdir} {why}; set 'workdir' to the directory of the code")
    rules = [*listings.RULES, *_lines_of(workdir / ".gitignore"), *code.exclude]
    paths = list(islice(listings.list_folder(workdir, _rules(workdir, rules)), _MOST_FILES + 1))
    return workdir, _outside_of(workdir, runs_root, paths), (), notes


def _notes_on(root: Path, listing: listings.Listing) -> Iterator[str]:
    if operation := listings.unfinished(root):
        yield f"the repository {root} is in the middle of {operation}; the snapshot has its files as they are now"
    if listing.absent:
        absent = ", ".join(listing.absent)
        yield f"not initialised, so that runs lack their files: {absent} ('git submodule update --init' in {root})"


def _without_litter(paths: Sequence[str]) -> list[str]:
    """The files that git neither tracks nor ignores, without results and environments."""
    if not paths:
        return []
    from pathspec import GitIgnoreSpec

    is_litter = GitIgnoreSpec.from_lines(listings.RULES).match_file
    environments = tuple(
        path.removesuffix(mark) for path in paths for mark in listings.MARKS if path.endswith(f"/{mark}")
    )
    return [path for path in paths if not path.startswith(environments) and not is_litter(path)]


def _rules(root: Path, exclude: Sequence[str]) -> Callable[[str], bool]:
    """Whether a path is excluded by these patterns, or by the patterns of the file for all specs."""
    lines = [*exclude, *_lines_of(root / IGNORE_FILE)]
    if not lines:
        return lambda _path: False
    # Imported here: a snapshot of a repository mostly needs none.
    from pathspec import GitIgnoreSpec

    try:
        return GitIgnoreSpec.from_lines(lines).match_file
    except ValueError as error:
        raise UserError(f"a pattern of 'code.exclude' or {root / IGNORE_FILE} is wrong: {error}") from error


def _lines_of(path: Path) -> list[str]:
    try:
        return read_readable(path).decode(errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise PathError(f"cannot read {path}: {describe_os_error(error)}") from error


def _outside_of(root: Path, runs_root: Path, paths: list[str]) -> list[str]:
    if not runs_root.is_relative_to(root) or runs_root == root:
        return paths
    prefix = f"{runs_root.relative_to(root)}/"
    return [path for path in paths if not path.startswith(prefix)]


def _included(root: Path, patterns: Sequence[str]) -> Iterator[str]:
    """The files that the patterns of ``code.include`` name. Raises UserError if one names none."""
    for pattern in patterns:
        matches = sorted(glob.glob(pattern, root_dir=root, recursive=True, include_hidden=True))  # noqa: PTH207
        files = [path for match in matches for path in _files_of(root, match)]
        if not files:
            raise UserError(f"'code.include': nothing in {root} matches {pattern!r}")
        yield from files


def _files_of(root: Path, path: str) -> Iterator[str]:
    if os.path.isabs(path) or ".." in Path(path).parts:  # noqa: PTH117 (a pattern's match)
        raise UserError(f"'code.include': {path} is not in the repository {root}; use a path relative to that")
    place = root / path
    if place.is_dir() and not place.is_symlink():
        prefix = os.path.normpath(path)
        yield from (f"{prefix}/{inner}" for inner in listings.list_folder(place, lambda _path: False))
    else:
        yield os.path.normpath(path)


def _stat(root: Path, paths: Iterable[str]) -> Iterator[tuple[str, os.stat_result]]:
    """The files and links among these paths that are there. Raises NoSnapshot if there are too many."""
    number, top = 0, f"{root}/"
    for path in paths:
        try:
            status = os.lstat(top + path)
        except OSError:
            continue  # deleted, or left out by a sparse checkout
        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            number += 1
            yield path, status
        if number > _MOST_FILES:
            raise NoSnapshot(
                f"the code in {root} consists of more than {_MOST_FILES} files; exclude what is no code "
                f"('code.exclude', or {IGNORE_FILE}), set 'workdir' to the directory of the code, or {_CURE}"
            )


def _check_size(root: Path, files: dict[str, os.stat_result], most: int) -> None:
    """Raise NoSnapshot if the files take too much, with the largest directories and files."""
    total = sum(status.st_size for status in files.values())
    if total <= most:
        return
    sizes: Counter[str] = Counter()
    for path, status in files.items():
        first, _, rest = path.partition("/")
        sizes[f"{first}/" if rest else first] += status.st_size
    largest = ", ".join(f"{path} {_size(size)}" for path, size in sizes.most_common(_SHOWN))
    raise NoSnapshot(
        f"the code in {root} takes {_size(total)}, and a snapshot at most {_size(most)} (code.max_size); the largest "
        f"are {largest}: exclude what is no code ('code.exclude', or {IGNORE_FILE}), raise the limit, or {_CURE}"
    )


def _size(count: int) -> str:
    return f"{count / (1 << 20):.1f} MB" if count < 1 << 30 else f"{count / (1 << 30):.1f} GB"


def _beside(root: Path, files: Iterable[str]) -> dict[str, list[str]]:
    """The names of what is next to these files, by directory. Raises NoSnapshot if that is too much."""
    beside, number = {}, 0
    for directory, held in sorted(names_by_directory(files).items()):
        try:
            present = os.listdir(root / directory)
        except OSError as error:
            raise PathError(f"cannot read {root / directory}: {describe_os_error(error)}") from error
        names = sorted(name for name in present if name not in held and belongs_beside(name))
        number += len(names)
        if number > _MOST_BESIDE:
            raise NoSnapshot(
                f"there are {len(names)} files beside the code in {root / directory}, and a run can have links to "
                f"{_MOST_BESIDE}; move them to a directory of their own, or {_CURE}"
            )
        if names:
            beside[directory] = names
    return beside
