"""The files of a git repository that are code: files that git tracks, and files that it neither tracks nor ignores.

Their contents are read from the work tree. Neither the index nor anything else of the repository is written to.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from slurmtrain.errors import NoSnapshot, UserError
from slurmtrain.model.spec.code import Revision
from slurmtrain.runtime.code.git import NoGit, run_git

# A listing that takes longer is of a home directory, or on a dead file server.
_TIMEOUT_S = 30.0
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


def list_files(root: Path) -> Listing:
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
