"""The files of a git repository that are code: what git tracks, and what it neither tracks nor ignores.

Their contents are those of the work tree. Neither the index nor anything else of the repository is written to.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.errors import PathError, UserError

# A listing of very many files may take long; one that takes longer is of a home directory, or on a dead file server.
_TIMEOUT_S = 120.0
_SUBMODULE = b"160000"
_SHOWN = 3
# A hook, or a command in it, has these for the repository that it belongs to (git rev-parse --local-env-vars).
_OF_ANOTHER = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_PREFIX",
               "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE")  # fmt: skip


@dataclass(frozen=True, slots=True)
class NoGit(Exception):
    """A directory is in no work tree that git can read. ``why``: in a few words; empty if there is no repository."""

    why: str


def find_root(directory: Path) -> Path:
    """The outermost work tree that a directory is in: that of a submodule is part of another one. Raises NoGit."""
    if not any((parent / ".git").exists() for parent in (directory, *directory.parents)):
        raise NoGit("")
    root = directory
    outer = os.fsdecode(_ask(root, "rev-parse", "--show-toplevel"))
    while outer:
        root = Path(outer)
        outer = os.fsdecode(_ask(root, "rev-parse", "--show-superproject-working-tree"))
    return root


def list_files(root: Path) -> tuple[list[str], list[str]]:
    """The files of a work tree, and of its submodules and nested repositories: tracked ones, and others.

    Args:
        root: The work tree, which the paths are relative to.

    Raises:
        UserError: there are conflicts of a merge.
        NoGit: git does not answer.
        PathError: it takes too long.
    """
    tracked: list[str] = []
    others: list[str] = []
    for path, is_tracked in _list(root, b""):
        (tracked if is_tracked else others).append(os.fsdecode(path))
    return tracked, others


def _list(root: Path, prefix: bytes) -> Iterator[tuple[bytes, bool]]:
    """Paths, with whether git tracks them."""
    conflicts: list[bytes] = []
    inner: list[bytes] = []
    for entry in _lines(root, "ls-files", "-s", "-z"):
        facts, _, path = entry.partition(b"\t")
        mode, _, stage = facts.split(b" ")
        if stage != b"0":
            conflicts.append(path)
        elif mode == _SUBMODULE:
            inner.append(path)
        else:
            yield prefix + path, True
    if conflicts:
        raise UserError(_describe(root, sorted({os.fsdecode(path) for path in conflicts})))
    for path in _lines(root, "ls-files", "-o", "--exclude-standard", "-z"):
        if path.endswith(b"/"):
            inner.append(path.rstrip(b"/"))
        else:
            yield prefix + path, False
    for path in inner:
        nested = root / os.fsdecode(path)
        if _is_part(nested):
            yield from _list(nested, prefix + path + b"/")


def _is_part(nested: Path) -> bool:
    """Whether a repository inside another one belongs to its code: no empty submodule, no second work tree."""
    git = nested / ".git"
    if git.is_dir():
        return True
    try:
        return "/worktrees/" not in git.read_text(errors="replace")
    except OSError:
        return False


def _describe(root: Path, conflicts: list[str]) -> str:
    more = f" and {len(conflicts) - _SHOWN} more" if len(conflicts) > _SHOWN else ""
    return (
        f"the repository {root} is in the middle of a merge: {', '.join(conflicts[:_SHOWN])}{more} have conflicts; "
        "resolve them, or set 'code: none' to run whatever is there when the job starts"
    )


def _lines(root: Path, *arguments: str) -> list[bytes]:
    return [line for line in _run(root, *arguments).split(b"\0") if line]


def _ask(root: Path, *arguments: str) -> bytes:
    return _run(root, *arguments).removesuffix(b"\n")


def _run(root: Path, *arguments: str) -> bytes:
    """What git prints. Raises NoGit; PathError if it does not end."""
    environ = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER}
    try:
        completed = subprocess.run(
            # A monitor of files is a program that the repository names.
            ["git", "-c", "core.fsmonitor=false", "-C", str(root), *arguments],
            env={**environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise NoGit("there is no git on PATH") from None
    except subprocess.TimeoutExpired:
        raise PathError(
            f"git has not listed the files of {root} within {_TIMEOUT_S:.0f} s; set 'workdir' to the directory of the "
            "code, or set 'code: none'"
        ) from None
    if completed.returncode:
        lines = completed.stderr.decode(errors="replace").strip().splitlines()
        raise NoGit(lines[0].removeprefix("fatal: ") if lines else f"git exited with {completed.returncode}")
    return completed.stdout
