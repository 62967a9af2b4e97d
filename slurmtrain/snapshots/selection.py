"""Which files a snapshot holds, with git or without it, and what stays beside them.

Contents are read from the work tree. Neither the index nor anything else of a repository is written to.
"""

from __future__ import annotations

import contextlib
import glob
import os
import stat
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from slurmtrain.errors import NoSnapshot, PathError, UserError
from slurmtrain.model.experiment.code import (
    CodeSpec,
    Revision,
    belongs_beside,
    names_by_directory,
    relative_to_root,
    without_data_directories,
    without_places,
)
from slurmtrain.runtime.code.git import NoGit, run_git
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.inherited import expand_home
from slurmtrain.system.owned_files import read_readable

IGNORE_FILE = ".slurmtrainignore"
_CONFIGURATION = "slurmtrain.yaml"
# Of files, and of what is beside them: more is no code, and takes a job long to set up.
_MOST_FILES = 100_000
_MOST_BESIDE = 10_000
_SHOWN = 4
_CURE = "set 'code: none' to run the code as it is when the job starts"


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
    root, paths, repositories, notes = _list_code(source, runs_root)
    for pattern in code.include:
        matches = sorted(glob.glob(pattern, root_dir=root, recursive=True, include_hidden=True))  # noqa: PTH207
        before = len(paths)
        for match in matches:
            if os.path.isabs(match) or ".." in Path(match).parts:  # noqa: PTH117 (text)
                raise UserError(f"'code.include': {match} is not in the repository {root}; use a path relative to it")
            place, name = root / match, os.path.normpath(match)
            is_folder = place.is_dir() and not place.is_symlink()
            paths += [f"{name}/{inner}" for inner in list_folder(place, lambda _path: False)] if is_folder else [name]
        if len(paths) == before:
            raise UserError(f"'code.include': nothing in {root} matches {pattern!r}")
    files = dict(_stat(root, dict.fromkeys(paths)))
    no_code = {path for each in source.no_code if (path := relative_to_root(each, str(root)))}
    files = {path: files[path] for path in without_places(without_data_directories(files), no_code)}
    files = {path: status for path, status in files.items() if not _may_have_secrets(path, status)}
    total = sum(status.st_size for status in files.values())
    if total > code.max_size:
        sizes: Counter[str] = Counter()
        for path, status in files.items():
            first, _, rest = path.partition("/")
            sizes[f"{first}/" if rest else first] += status.st_size
        largest = ", ".join(f"{path} {_size(size)}" for path, size in sizes.most_common(_SHOWN))
        raise NoSnapshot(
            f"the code in {root} takes {_size(total)}, but a snapshot may take at most {_size(code.max_size)} "
            "(code.max_size); "
            f"the largest are {largest}: exclude files that are not code ('code.exclude', or {IGNORE_FILE}), raise "
            f"the limit, or {_CURE}"
        )
    return CodeSelection(root, files, _beside(root, files), notes, repositories)


def _may_have_secrets(path: str, status: os.stat_result) -> bool:
    """Whether a file is a configuration that only its owner can read: it is no code, and may have URLs with secrets."""
    return os.path.basename(path) == _CONFIGURATION and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)  # noqa: PTH119


def _list_code(source: CodeSource, runs_root: Path) -> tuple[Path, list[str], Sequence[str], list[str]]:
    """The root of the code, the paths of its files, its repositories, and notes."""
    notes: list[str] = []
    workdir, code = source.workdir, source.spec
    try:
        root = find_root(workdir)
        # A repository of a home directory has its settings, not all that is below it.
        if not (source.by_default and why_no_project(root)):
            excluded = _rules(root, code.exclude)
            listing = list_repository(root)
            others = listing.others
            if others:
                # What git neither tracks nor ignores may still be results and environments.
                from pathspec import GitIgnoreSpec

                is_litter = GitIgnoreSpec.from_lines(RULES).match_file
                marked = [(path, mark) for path in others for mark in MARKS if path.endswith(f"/{mark}")]
                environments = tuple(path.removesuffix(mark) for path, mark in marked)
                others = [path for path in others if not path.startswith(environments) and not is_litter(path)]
            paths = [path for path in (*listing.tracked, *others) if not excluded(path)]
            inside = "" if workdir == root else f"{workdir.relative_to(root)}/"
            # Where git ignores the working directory itself, the repository around it is not what runs.
            if any(path.startswith(inside) for path in paths):
                if listing.absent:
                    absent = ", ".join(listing.absent)
                    cure = f"('git submodule update --init' in {root})"
                    notes.append(f"some submodules are not initialised, so runs will lack their files: {absent} {cure}")
                return root, _outside_of(root, runs_root, paths), listing.repositories, notes
    except NoGit as error:
        if error.why:
            notes.append(f"git cannot list the code ({error.why}), so all files in {workdir} count as code")
    if source.by_default and (why := why_no_project(workdir)):
        raise NoSnapshot(f"{workdir} {why}; set 'workdir' to the directory of the code")
    rules = [*RULES, *_pattern_lines(workdir / ".gitignore"), *code.exclude]
    # One more than allowed, which _stat() then refuses.
    paths = list(islice(list_folder(workdir, _rules(workdir, rules)), _MOST_FILES + 1))
    return workdir, _outside_of(workdir, runs_root, paths), (), notes


def _rules(root: Path, exclude: Sequence[str]) -> Callable[[str], bool]:
    """Whether a path is excluded by these patterns, or by the patterns of the file for all specs."""
    lines = [*exclude, *_pattern_lines(root / IGNORE_FILE)]
    if not lines:
        return lambda _path: False
    # Imported here: a snapshot of a repository mostly needs none.
    from pathspec import GitIgnoreSpec

    try:
        return GitIgnoreSpec.from_lines(lines).match_file
    except ValueError as error:
        raise UserError(f"a pattern of 'code.exclude' or {root / IGNORE_FILE} is wrong: {error}") from error


def _pattern_lines(path: Path) -> list[str]:
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


def _stat(root: Path, paths: Iterable[str]) -> Iterator[tuple[str, os.stat_result]]:
    """The files and links among these paths that are there. Raises NoSnapshot if there are too many."""
    # Text and not a Path for each file: there may be a hundred thousand.
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
                f"the code in {root} consists of more than {_MOST_FILES} files; exclude files that are not code "
                f"('code.exclude', or {IGNORE_FILE}), set 'workdir' to the directory of the code, or {_CURE}"
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
                f"there are {len(names)} files beside the code in {root / directory}, but a run can have links to at "
                f"most {_MOST_BESIDE}; move them to a directory of their own, or {_CURE}"
            )
        if names:
            beside[directory] = names
    return beside


# --- a directory without git, by rules about names --------------------------------------------------------------------

# In the syntax of .gitignore: what tools, environments and training leave next to code.
RULES = """
.git/
.hg/
.svn/
.*cache*/
.cache/
.eggs/
.ipynb_checkpoints/
.nox/
.tox/
.venv/
__pycache__/
lightning_logs/
mlruns/
node_modules/
venv/
wandb/
*.ckpt
*.egg-info/
*.log
*.pt
*.pth
*.pyc
*.safetensors
""".split()  # noqa: SIM905 (a list of names to read, not of strings)
# Each is in the root of an environment: of venv, and of conda.
MARKS = ("pyvenv.cfg", "conda-meta/history")
_SHARED = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 (nothing is written there)
# A listing that takes longer is of far more than a project, or on a dead file server.
_TIMEOUT_S = 30.0


def why_no_project(directory: Path) -> str:
    """Why a directory is certainly no project's, as the end of a sentence; empty if it may be."""
    # HOME may be anything, or there may be no place for temporary files.
    with contextlib.suppress(PathError, OSError):
        home = expand_home("~").resolve()
        if directory == home:
            return "is your home directory"
        if home.is_relative_to(directory):
            return "holds your home directory"
    with contextlib.suppress(OSError):
        if directory in map(Path, (*_SHARED, tempfile.gettempdir())):
            return "is for temporary files of all users"
    return ""


def list_folder(root: Path, ignored: Callable[[str], bool]) -> Iterator[str]:
    """The paths of files below a directory, relative to it, as they are found.

    Args:
        root: The directory.
        ignored: Whether a path, which ends in a slash for a directory, is left out.

    Raises:
        NoSnapshot: It takes too long.
    """
    top, deadline = str(root), time.monotonic() + _TIMEOUT_S
    for folder, directories, files in os.walk(top):
        if time.monotonic() > deadline:
            raise NoSnapshot(
                f"the files of {root} have not been listed within {_TIMEOUT_S:.0f} s; set 'workdir' to the directory "
                "of the code, or set 'code: none'"
            )
        # An environment inside the project, whatever it is called.
        if folder != top and not {"pyvenv.cfg", "conda-meta"}.isdisjoint([*directories, *files]):
            directories.clear()
            continue
        prefix = os.path.relpath(folder, top) + "/" if folder != top else ""
        links = [name for name in directories if os.path.islink(f"{folder}/{name}")]  # noqa: PTH114 (fast)
        directories[:] = sorted(name for name in directories if name not in links and not ignored(f"{prefix}{name}/"))
        yield from (f"{prefix}{name}" for name in sorted((*files, *links)) if not ignored(prefix + name))


# --- a git repository: files that git tracks, and files that it neither tracks nor ignores ----------------------------

_SUBMODULE = b"160000"
_SHOWN_CONFLICTS = 3
# At most so many files that a commit lacks are named: a first commit, say, may lack any number.
_MOST_ADDED = 1000


def find_root(directory: Path) -> Path:
    """The outermost work tree that a directory is in: a submodule's is part of another one. Raises NoGit."""
    # Outside of any work tree, git need not be started.
    if not any((parent / ".git").exists() for parent in (directory, *directory.parents)):
        raise NoGit("")
    root = directory
    outer = os.fsdecode(_ask_repository(root, "rev-parse", "--show-toplevel"))
    while outer:
        root = Path(outer)
        outer = os.fsdecode(_ask_repository(root, "rev-parse", "--show-superproject-working-tree"))
    return root


class Listing(NamedTuple):
    """The files of a work tree: files that git tracks, and others; and the submodules that are not there.

    ``repositories``: the work tree's, and repositories inside it, relative to it: the first is an empty text.
    """

    tracked: list[str]
    others: list[str]
    absent: list[str]
    repositories: list[str]


def list_repository(root: Path) -> Listing:
    """The files of a work tree, and of its submodules and nested repositories, relative to it; none that git ignores.

    Args:
        root: The work tree.

    Raises:
        UserError: there are conflicts of a merge.
        NoGit: git does not answer.
        NoSnapshot: it takes too long.
    """
    listing = Listing([], [], [], [])
    _list_tree(root, b"", listing)
    return listing


def _list_tree(root: Path, prefix: bytes, listing: Listing) -> None:
    """Add the files of a work tree, with this prefix before their paths."""
    listing.repositories.append(os.fsdecode(prefix).rstrip("/"))
    conflicts: list[bytes] = []
    submodules: list[bytes] = []
    for entry in _git_lines(root, "ls-files", "-s", "-z"):
        facts, _, path = entry.partition(b"\t")
        mode, _, stage = facts.split(b" ")
        if stage != b"0":
            conflicts.append(path)
        elif mode == _SUBMODULE:
            submodules.append(path)
        else:
            listing.tracked.append(os.fsdecode(prefix + path))
    if conflicts:
        paths = sorted({os.fsdecode(path) for path in conflicts})
        more = f" and {len(paths) - _SHOWN_CONFLICTS} more" if len(paths) > _SHOWN_CONFLICTS else ""
        raise UserError(
            f"{', '.join(paths[:_SHOWN_CONFLICTS])}{more} in the repository {root} have merge conflicts; resolve "
            "them, or set 'code: none' to run the code as it is when the job starts"
        )
    nested: list[bytes] = []
    for path in _git_lines(root, "ls-files", "-o", "--exclude-standard", "-z"):
        if path.endswith(b"/"):
            nested.append(path.rstrip(b"/"))
        else:
            listing.others.append(os.fsdecode(prefix + path))
    for path in (*submodules, *nested):
        git = root / os.fsdecode(path) / ".git"
        # No empty submodule, and no second work tree.
        is_part = git.is_dir()
        with contextlib.suppress(OSError):
            is_part = is_part or "/worktrees/" not in git.read_text(errors="replace")
        if is_part:
            _list_tree(root / os.fsdecode(path), prefix + path + b"/", listing)
        elif path in submodules:
            listing.absent.append(os.fsdecode(prefix + path))


def revisions(root: Path, repositories: Sequence[str]) -> Iterator[Revision]:
    """What is checked out in the repositories of a :class:`Listing`; of one without a commit there is nothing."""
    for path in repositories:
        place = root / path
        with contextlib.suppress(NoGit):
            answer = _ask_repository(place, "rev-parse", "HEAD", "--symbolic-full-name", "HEAD")
            commit, branch = os.fsdecode(answer).split("\n")
            added = _git_lines(
                place, "diff-index", "--cached", "--name-only", "--no-renames", "--diff-filter=A", "-z", commit
            )
            yield Revision(
                path=path,
                commit=commit,
                branch="" if branch == "HEAD" else branch,
                added=[os.fsdecode(each) for each in added[:_MOST_ADDED]],
            )


def _git_lines(root: Path, *arguments: str) -> list[bytes]:
    return [line for line in _run_git_here(root, *arguments).split(b"\0") if line]


def _ask_repository(root: Path, *arguments: str) -> bytes:
    return _run_git_here(root, *arguments).removesuffix(b"\n")


def _run_git_here(root: Path, *arguments: str) -> bytes:
    """What git prints. Raises NoGit; NoSnapshot if it does not end."""
    try:
        return run_git(root, *arguments, timeout_s=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise NoSnapshot(
            f"git has not listed the files of {root} within {_TIMEOUT_S:.0f} s; set 'workdir' to the directory of the "
            "code, or set 'code: none'"
        ) from None
