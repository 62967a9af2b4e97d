"""A snapshot of code: the files that it holds, and what a plan says about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from slurmtrain.model.spec.code.revision import Revision
from slurmtrain.model.spec.code.tree_paths import relative_to_root

SCHEMA = 1
FILE, PROGRAM, LINK = "file", "program", "link"
_SHORT = 12


class CodeFile(NamedTuple):
    """A file of a snapshot.

    ``path``: relative to the repository. ``kind``: ``program`` for a file that may be executed, ``link`` for a symbolic
    link. ``digest``: SHA-256 of the content in hex; the target of a link. ``size``: in bytes; 0 for a link.
    """

    path: str
    kind: str
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class CodeManifest:
    """The files of a snapshot, in the order of their paths."""

    files: Sequence[CodeFile]

    @classmethod
    def sorted(cls, files: Iterable[CodeFile]) -> CodeManifest:
        """The manifest of these files, which may be in any order."""
        return cls(sorted(files))

    def to_bytes(self) -> bytes:
        """The content of its file: the same for the same files."""
        # ASCII: names of files need not be valid UTF-8, and surrogates can only be written as escapes.
        return json.dumps({"schema": SCHEMA, "files": self.files}, separators=(",", ":")).encode() + b"\n"

    @property
    def hash(self) -> str:
        """SHA-256 of :meth:`to_bytes`, in hex, which names the snapshot."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def size(self) -> int:
        """How many bytes the files take together."""
        return sum(file.size for file in self.files)

    @classmethod
    def from_bytes(cls, content: bytes) -> CodeManifest:
        """Read what :meth:`to_bytes` returned. Raises ValueError if this is no manifest, or leads out of a tree."""
        data = json.loads(content)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("files"), list):
            raise ValueError("it is no manifest of this version")
        return cls([_read_file(row) for row in data["files"]])


def _read_file(row: object) -> CodeFile:
    if not isinstance(row, list) or list(map(type, row)) != [str, str, str, int]:
        raise ValueError("an entry of it is of the wrong type")
    file = CodeFile(*row)
    path = PurePosixPath(file.path)
    if path.is_absolute() or ".." in path.parts or not path.parts or file.kind not in (FILE, PROGRAM, LINK):
        raise ValueError(f"{file.path!r} is no path in a snapshot")
    return file


class Difference(NamedTuple):
    """How one snapshot differs from an earlier one: paths, in order."""

    changed: Sequence[str]
    added: Sequence[str]
    removed: Sequence[str]

    @property
    def text(self) -> str:
        """This in a few words, such as ``2 changed (a.py, b.py), 1 added (c.py)``."""
        parts = ((self.changed, "changed"), (self.added, "added"), (self.removed, "removed"))
        texts = [f"{len(paths)} {how} ({_some(paths)})" for paths, how in parts if paths]
        return ", ".join(texts) or "no file differs"


def compare(earlier: CodeManifest, later: CodeManifest) -> Difference:
    """How ``later`` differs from ``earlier``."""
    before, after = ({file.path: file for file in manifest.files} for manifest in (earlier, later))
    return Difference(
        [path for path in after if path in before and before[path] != after[path]],
        [path for path in after if path not in before],
        [path for path in before if path not in after],
    )


def _some(paths: Sequence[str], most: int = 3) -> str:
    more = len(paths) - most
    return ", ".join(paths[:most]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSnapshot:
    """What a plan says about its snapshot.

    ``hash``: names it. ``root``: the directory that it was taken of, absolute. ``files``, ``bytes``: how much it holds.
    ``import_roots``: the directories in it, relative to ``root``, that must precede installed packages. ``beside``:
    what else there was next to its files, by directory: it stays where it is, and a run gets links to it.
    ``revisions``: of the repositories that it was taken of, the one around others first; none without git.
    """

    hash: str
    root: str
    files: int
    bytes: int
    import_roots: Sequence[str] = ()
    beside: Mapping[str, Sequence[str]]
    revisions: Sequence[Revision] = ()

    @property
    def short_hash(self) -> str:
        """The beginning of the hash, for people."""
        return self.hash[:_SHORT]

    def stays(self, path: str) -> bool:
        """Whether an absolute path leads to the same place in a run's own copy: it is no code, and was there."""
        relative = relative_to_root(path, self.root)
        if relative is None:
            return True
        parts = PurePosixPath(relative).parts
        return any(part in self.beside.get("/".join(parts[:depth]), ()) for depth, part in enumerate(parts))

    def tree(self, code: Path) -> Path:
        """Where its files are in a run whose directory for code is ``code``."""
        # Not in it: what a path such as "../data" leads to can then be next to them, as it is next to the repository.
        return code / (Path(self.root).name or "root")

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {
            "snapshot": self.hash,
            "root": self.root,
            "files": self.files,
            "bytes": self.bytes,
            "import_roots": list(self.import_roots),
            "beside": {directory: list(names) for directory, names in self.beside.items()},
            **({"revisions": [revision.to_dict() for revision in self.revisions]} if self.revisions else {}),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> CodeSnapshot:
        """Read what :meth:`to_dict` returned. Raises KeyError, TypeError or ValueError if it is something else."""
        if not _is_hash(plain["snapshot"]) or not isinstance(plain["root"], str):
            raise ValueError("its 'code' is no snapshot")
        return cls(
            hash=plain["snapshot"],
            root=plain["root"],
            files=int(plain["files"]),
            bytes=int(plain["bytes"]),
            import_roots=[str(root) for root in plain["import_roots"]],
            beside={str(directory): list(map(str, names)) for directory, names in plain["beside"].items()},
            revisions=tuple(Revision.from_dict(each) for each in plain.get("revisions", ())),
        )


def _is_hash(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= set("0123456789abcdef")
