"""The files of a directory that are code, with git or without it.

Their contents are read from the work tree. Neither the index nor anything else of a repository is written to.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from slurmtrain.errors import NoSnapshot, PathError, UserError
from slurmtrain.model.experiment.code import Revision
from slurmtrain.runtime.code.git import NoGit, run_git
from slurmtrain.system.inherited import expand_home

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
        if folder != top and not {"pyvenv.cfg", "conda-meta"}.isdisjoint([*directories, *files]):
            directories.clear()
            continue
        prefix = os.path.relpath(folder, top) + "/" if folder != top else ""
        links = [name for name in directories if os.path.islink(f"{folder}/{name}")]  # noqa: PTH114 (fast)
        directories[:] = sorted(name for name in directories if name not in links and not ignored(f"{prefix}{name}/"))
        yield from (f"{prefix}{name}" for name in sorted((*files, *links)) if not ignored(prefix + name))


# --- a git repository: files that git tracks, and files that it neither tracks nor ignores ----------------------------

_SUBMODULE = b"160000"
_SHOWN = 3
# What is in git's directory meanwhile (git status, wt-status.c).
_UNFINISHED = {
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "MERGE_HEAD": "a merge",
}
# At most so many files that a commit lacks are named: a first commit, say, may lack any number.
_MOST_ADDED = 1000


def find_root(directory: Path) -> Path:
    """The outermost work tree that a directory is in: a submodule's is part of another one. Raises NoGit."""
    if not any((parent / ".git").exists() for parent in (directory, *directory.parents)):
        raise NoGit("")
    root = directory
    outer = os.fsdecode(_ask(root, "rev-parse", "--show-toplevel"))
    while outer:
        root = Path(outer)
        outer = os.fsdecode(_ask(root, "rev-parse", "--show-superproject-working-tree"))
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
    _list(root, b"", listing)
    return listing


def _list(root: Path, prefix: bytes, listing: Listing) -> None:
    """Add the files of a work tree, with this prefix before their paths."""
    listing.repositories.append(os.fsdecode(prefix).rstrip("/"))
    conflicts: list[bytes] = []
    submodules: list[bytes] = []
    for entry in _lines(root, "ls-files", "-s", "-z"):
        facts, _, path = entry.partition(b"\t")
        mode, _, stage = facts.split(b" ")
        if stage != b"0":
            conflicts.append(path)
        elif mode == _SUBMODULE:
            submodules.append(path)
        else:
            listing.tracked.append(os.fsdecode(prefix + path))
    if conflicts:
        raise UserError(_describe(root, sorted({os.fsdecode(path) for path in conflicts})))
    nested: list[bytes] = []
    for path in _lines(root, "ls-files", "-o", "--exclude-standard", "-z"):
        if path.endswith(b"/"):
            nested.append(path.rstrip(b"/"))
        else:
            listing.others.append(os.fsdecode(prefix + path))
    for path in (*submodules, *nested):
        if _is_part(root / os.fsdecode(path)):
            _list(root / os.fsdecode(path), prefix + path + b"/", listing)
        elif path in submodules:
            listing.absent.append(os.fsdecode(prefix + path))


def _is_part(nested: Path) -> bool:
    """Whether a repository inside another one belongs to its code: no empty submodule, no second work tree."""
    git = nested / ".git"
    if git.is_dir():
        return True
    try:
        return "/worktrees/" not in git.read_text(errors="replace")
    except OSError:
        return False


def revisions(root: Path, repositories: Sequence[str]) -> Iterator[Revision]:
    """What is checked out in the repositories of a :class:`Listing`; of one without a commit there is nothing."""
    for path in repositories:
        place = root / path
        with contextlib.suppress(NoGit):
            commit, branch = os.fsdecode(_ask(place, "rev-parse", "HEAD", "--symbolic-full-name", "HEAD")).split("\n")
            added = _lines(
                place, "diff-index", "--cached", "--name-only", "--no-renames", "--diff-filter=A", "-z", commit
            )
            yield Revision(
                path=path,
                commit=commit,
                branch="" if branch == "HEAD" else branch,
                added=[os.fsdecode(each) for each in added[:_MOST_ADDED]],
            )


def unfinished(root: Path) -> str:
    """What somebody is in the middle of in a work tree, such as ``a merge``; empty if that is nothing."""
    git = root / ".git"
    with contextlib.suppress(OSError):
        if git.is_file():
            git = root / git.read_text(errors="surrogateescape").removeprefix("gitdir:").strip()
    return next((operation for name, operation in _UNFINISHED.items() if (git / name).exists()), "")


def _describe(root: Path, conflicts: list[str]) -> str:
    more = f" and {len(conflicts) - _SHOWN} more" if len(conflicts) > _SHOWN else ""
    operation = unfinished(root) or "a merge"
    return (
        f"the repository {root} is in the middle of {operation}: {', '.join(conflicts[:_SHOWN])}{more} have conflicts; "
        "resolve them, or set 'code: none' to run whatever is there when the job starts"
    )


def _lines(root: Path, *arguments: str) -> list[bytes]:
    return [line for line in _run(root, *arguments).split(b"\0") if line]


def _ask(root: Path, *arguments: str) -> bytes:
    return _run(root, *arguments).removesuffix(b"\n")


def _run(root: Path, *arguments: str) -> bytes:
    """What git prints. Raises NoGit; NoSnapshot if it does not end."""
    try:
        return run_git(root, *arguments, timeout_s=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise NoSnapshot(
            f"git has not listed the files of {root} within {_TIMEOUT_S:.0f} s; set 'workdir' to the directory of the "
            "code, or set 'code: none'"
        ) from None
