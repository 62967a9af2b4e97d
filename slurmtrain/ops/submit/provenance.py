"""What a run is submitted from: the revision of its code, what differs from that, and the packages of its Python."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.model.diagnosis.redact import redact_code
from slurmtrain.ops.submit.changed_files import ChangedFiles, changed_files
from slurmtrain.runtime.code.git import NoGit, run_git
from slurmtrain.runtime.code.packages import read_software

# The revision is useful but not required: git on a slow file system is not worth a longer wait.
_GIT_TIMEOUT_S = 10.0
# More is data or generated, not what somebody has changed to try something.
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a run is submitted from.

    ``git``: ``commit``, ``dirty`` and ``branch``; None outside a checkout. ``difference``: what ``git diff HEAD``
    prints of files that no filter applies to, without secrets; empty if there is none, or it is too long.
    ``environment``: Python and its packages, the text of a :class:`~slurmtrain.model.environment.software.Software`.
    """

    git: dict[str, Any] | None
    difference: bytes
    environment: bytes


def find_provenance(workdir: Path, python: str) -> Provenance:
    """What runs that are submitted now come from.

    Args:
        workdir: Where their commands run.
        python: What the word ``python`` in their commands stands for.
    """
    git, difference = _git_facts(workdir)
    return Provenance(git, _without_secrets(difference), read_software(Path(python)).to_text().encode())


def _git_facts(directory: Path) -> tuple[dict[str, Any] | None, bytes]:
    """The revision of the code that runs, if it is in git, and how the code differs from that."""
    commit = _ask_git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None, b""
    try:
        changed = changed_files(directory, timeout_s=_GIT_TIMEOUT_S)
    except (NoGit, subprocess.TimeoutExpired):
        changed = ChangedFiles((), b"")
    modified = len(changed.paths)
    facts = {"commit": commit, "dirty": modified > 0, "modified": modified}
    branch = _ask_git(directory, "symbolic-ref", "--quiet", "--short", "HEAD")
    return ({**facts, "branch": branch} if branch else facts), changed.difference


def describe_git(directory: Path) -> str:
    """The revision of the code in a directory in a few words; empty if it is not in git."""
    return describe_revision(_git_facts(directory)[0])


def describe_revision(git: Mapping[str, Any] | None) -> str:
    """A revision in a few words; empty if there is none.

    Args:
        git: ``commit``, ``branch``, and how many files were modified, as a run keeps it.
    """
    if not git or not git.get("commit"):
        return ""
    state = f"{git.get('modified', 'some')} modified" if git.get("dirty") else "clean"
    return ", ".join(filter(None, (str(git["commit"])[:12], git.get("branch"), state)))


def _without_secrets(difference: bytes) -> bytes:
    text = difference.decode(errors="replace").strip()
    safe = "".join(f"{redact_code(line)}\n" for line in text.splitlines()).encode()
    return safe if len(safe) <= _MOST_BYTES else b""


def _ask_git(directory: Path, *arguments: str) -> str | None:
    try:
        return run_git(directory, *arguments, timeout_s=_GIT_TIMEOUT_S).decode(errors="replace").strip()
    except (NoGit, subprocess.TimeoutExpired):
        return None
