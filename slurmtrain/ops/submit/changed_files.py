"""Which files of a work tree differ from its commit, by their bytes.

A file that a filter of git would change counts as modified if its bytes are not those of the commit: the filter is a
program that the repository names. Only what git-lfs keeps is recognized, by the pointer in the commit, which has the
SHA-256 and the size of the content (git-lfs-spec, "The Pointer").
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.runtime.code.git import NoGit, run_git, without_filters

_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?oid sha256:([0-9a-f]{64})\nsize (\d+)\n"
)
# A diff of what a filter would change shows nothing that somebody has written; one of very many files is not read.
_MOST_EXCLUDED = 500


@dataclass(frozen=True, slots=True)
class ChangedFiles:
    """What has changed in a work tree since its commit.

    ``paths``: files and submodules, relative to the work tree. ``difference``: what ``git diff HEAD`` prints, of files
    without a filter.
    """

    paths: Sequence[str]
    difference: bytes


def changed_files(directory: Path, *, timeout_s: float) -> ChangedFiles:
    """What has changed in the work tree that a directory is in.

    Args:
        directory: In the work tree.
        timeout_s: How long each command of git may take.

    Raises:
        NoGit: There is no work tree, or git fails.
        subprocess.TimeoutExpired: It takes longer.
    """
    root = Path(os.fsdecode(run_git(directory, "rev-parse", "--show-toplevel", timeout_s=timeout_s)).removesuffix("\n"))

    def ask(*arguments: str, stdin: bytes = b"") -> bytes:
        return run_git(root, *arguments, timeout_s=timeout_s, stdin=stdin)

    plain = without_filters(root, timeout_s=timeout_s)
    # Submodules have filters of their own, and git would ask them with these options only.
    status = ask(
        *plain, "status", "--porcelain", "-z", "--untracked-files=no", "--ignore-submodules=dirty", "--no-renames"
    )
    listed = [os.fsdecode(line[3:]) for line in status.split(b"\0") if line]
    filtered = _filtered(listed, ask)
    paths = [path for path in listed if path not in filtered or not _is_kept_by_lfs(root, path, ask)]
    submodules = [path for path in _submodules(root, ask) if path not in paths and _is_changed(root / path, timeout_s)]
    difference = b""
    if paths and len(filtered) <= _MOST_EXCLUDED:
        excluded = [f":(top,exclude,literal){path}" for path in filtered]
        # Neither programs that are configured for git nor colours.
        options = ("--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=dirty", "--submodule=short")
        difference = ask(*plain, "diff", *options, "HEAD", "--", ":(top)", *excluded)
    return ChangedFiles([*paths, *submodules], difference)


def _is_changed(submodule: Path, timeout_s: float) -> bool:
    try:
        return (submodule / ".git").exists() and bool(changed_files(submodule, timeout_s=timeout_s).paths)
    except NoGit:
        return False


def _submodules(root: Path, ask: Callable[..., bytes]) -> list[str]:
    if not (root / ".gitmodules").exists():
        return []
    entries = (entry.partition(b"\t") for entry in ask("ls-files", "-s", "-z").split(b"\0"))
    return [os.fsdecode(path) for facts, _, path in entries if facts.startswith(b"160000")]


def _filtered(paths: Sequence[str], ask: Callable[..., bytes]) -> set[str]:
    """Those of the paths that have a filter: git's attributes are read, and nothing is run."""
    stdin = b"".join(os.fsencode(path) + b"\0" for path in paths)
    words = ask("check-attr", "-z", "--stdin", "filter", stdin=stdin).split(b"\0") if paths else []
    triples = zip(words[::3], words[2::3], strict=False)
    return {os.fsdecode(path) for path, value in triples if value not in (b"unspecified", b"unset")}


def _is_kept_by_lfs(root: Path, path: str, ask: Callable[..., bytes]) -> bool:
    """Whether a file has the content that a pointer in the commit stands for."""
    try:
        if int(ask("cat-file", "-s", f"HEAD:{path}")) > 1024:
            return False
        pointer = _POINTER.match(ask("cat-file", "blob", f"HEAD:{path}"))
        if pointer is None or os.lstat(root / path).st_size != int(pointer[2]):
            return False
        with (root / path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest().encode() == pointer[1]
    except (NoGit, OSError, ValueError):
        return False
