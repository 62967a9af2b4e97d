"""The revision of a repository that a snapshot was taken of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

_HEX = frozenset("0123456789abcdef")
_LENGTHS = (40, 64)
_REFERENCES = "refs/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """What is checked out in a repository.

    ``path``: the repository relative to the root of the snapshot: empty for the one at the root, else a submodule or
    nested repository. ``commit``: its hash. ``branch``: the full name of the reference; empty without one. ``added``:
    files, relative to the repository, that its index has and the commit does not.
    """

    path: str
    commit: str
    branch: str = ""
    added: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {"path": self.path, "commit": self.commit, "branch": self.branch, "added": list(self.added)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Revision:
        """Read what :meth:`to_dict` returned. Raises KeyError, TypeError or ValueError if it is something else."""
        revision = cls(
            path=str(plain["path"]),
            commit=str(plain["commit"]),
            branch=str(plain["branch"]),
            added=[str(path) for path in plain["added"]],
        )
        path = PurePosixPath(revision.path)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError("a repository of its 'code' is not in it")
        if len(revision.commit) not in _LENGTHS or not _HEX.issuperset(revision.commit):
            raise ValueError("a commit of its 'code' is no hash")
        # It becomes a line of a file.
        if revision.branch and (not revision.branch.startswith(_REFERENCES) or "\n" in revision.branch):
            raise ValueError("a branch of its 'code' is no branch")
        return revision
