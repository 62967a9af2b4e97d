"""The section `code` of a spec, and snapshots of code: their files, and which paths lead where in a run's own copy."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, NamedTuple

from slurmtrain.model.experiment.kinds import Conflict, Items, Scalar, choice, text
from slurmtrain.model.experiment.values import parse_size, write_size
from slurmtrain.model.hostlist import name_some

_HEX = frozenset("0123456789abcdef")
# In hex digits, of git's SHA-1 and SHA-256.
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
            raise ValueError("a commit in its 'code' is not a hash")
        # It becomes a line of a file.
        if revision.branch and (not revision.branch.startswith(_REFERENCES) or "\n" in revision.branch):
            raise ValueError("a branch in its 'code' is not the name of a branch")
        return revision


# Files that keep an otherwise empty directory in git, or say what the directory is for.
_PLACEHOLDERS = frozenset({".gitkeep", ".gitignore", ".keep", "readme", "readme.md", "readme.txt", "readme.rst"})
# Files that Python imports, or a shell reads.
_CODE = frozenset({".py", ".pyi", ".pyx", ".pxd", ".so", ".pyd", ".sh", ".bash"})
# What nobody needs beside the files of a snapshot: git would write to the repository's own index.
_NEVER = frozenset({".git", "__pycache__"})


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
    code = directories_of(path for path in paths if posixpath.basename(path).lower() not in _PLACEHOLDERS)
    return [path for path in paths if posixpath.dirname(path) in code]


def without_places(paths: Collection[str], places: Collection[str]) -> list[str]:
    """The paths that are neither among the ``places`` nor in a directory of them that has no programs."""
    by_path = {
        path: [each for each in (path, *map(str, PurePosixPath(path).parents[:-1])) if each in places]
        for path in (paths if places else ())
    }
    with_code = {place for path, its in by_path.items() if posixpath.splitext(path)[1] in _CODE for place in its}
    return [path for path in paths if with_code.issuperset(by_path.get(path, ()))]


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
    # Python prefers a package and a compiled module to a file of the same stem.
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
    if inside != target.startswith("/"):
        return target
    # Relative, so that it leads into the copy: as an absolute path it would lead into the repository.
    return posixpath.relpath(place, posixpath.join(root, posixpath.dirname(path))) if inside else place


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
        # In a fixed order, since the hash of the manifest names the snapshot.
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
            raise ValueError("it is not a manifest of this version")
        files: list[CodeFile] = []
        for row in data["files"]:
            if not isinstance(row, list) or list(map(type, row)) != [str, str, str, int]:
                raise ValueError("an entry of it is of the wrong type")
            file = CodeFile(*row)
            path = PurePosixPath(file.path)
            if path.is_absolute() or ".." in path.parts or not path.parts or file.kind not in (FILE, PROGRAM, LINK):
                raise ValueError(f"{file.path!r} is not a valid path in a snapshot")
            files.append(file)
        return cls(files)


class Difference(NamedTuple):
    """How one snapshot differs from an earlier one: paths, in order."""

    changed: Sequence[str]
    added: Sequence[str]
    removed: Sequence[str]

    @property
    def text(self) -> str:
        """This in a few words, such as ``2 changed (a.py, b.py), 1 added (c.py)``."""
        parts = ((self.changed, "changed"), (self.added, "added"), (self.removed, "removed"))
        texts = [f"{len(paths)} {how} ({name_some(paths)})" for paths, how in parts if paths]
        return ", ".join(texts) or "no file differs"


def compare_manifests(earlier: CodeManifest, later: CodeManifest) -> Difference:
    """How ``later`` differs from ``earlier``."""
    before, after = ({file.path: file for file in manifest.files} for manifest in (earlier, later))
    return Difference(
        [path for path in after if path in before and before[path] != after[path]],
        [path for path in after if path not in before],
        [path for path in before if path not in after],
    )


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
        if re.fullmatch("[0-9a-f]{64}", str(plain["snapshot"])) is None or not isinstance(plain["root"], str):
            raise ValueError("its 'code' is not a snapshot")
        return cls(
            hash=plain["snapshot"],
            root=plain["root"],
            files=int(plain["files"]),
            bytes=int(plain["bytes"]),
            import_roots=[str(root) for root in plain["import_roots"]],
            beside={str(directory): list(map(str, names)) for directory, names in plain["beside"].items()},
            revisions=tuple(Revision.from_dict(each) for each in plain.get("revisions", ())),
        )


SNAPSHOT = "snapshot"
NONE = "none"


Patterns = Annotated[tuple[str, ...], Items(text("pattern"), "list of patterns")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSpec:
    """Which code a run uses. `code: none` is short for `code: {mode: none}`."""

    SHORTHAND: ClassVar = "mode"
    mode: Annotated[str, choice(SNAPSHOT, NONE)] = SNAPSHOT
    """`snapshot`: the files as they are when the run is submitted, also after a requeue. `none`: the files in `workdir`
    as they are when an attempt starts. If you set `snapshot`, submitting fails where none can be taken; by default
    `submit` only says so."""
    include: Patterns = ()
    """Files that git ignores but the code needs, such as `src/**/*.so`, relative to the repository."""
    exclude: Patterns = ()
    """Files that are not code, in the syntax of .gitignore; a `.slurmtrainignore` does the same for all specs."""
    max_size: Annotated[int, Scalar("amount with a unit, such as `100MB`", parse_size, write_size)] = 100 << 20
    """How large a snapshot may be, in units of 1024, before it is compressed."""

    @property
    def has_snapshot(self) -> bool:
        """Whether a run has a snapshot."""
        return self.mode == SNAPSHOT

    def conflicts(self) -> Iterator[Conflict]:
        """Keys that contradict each other, and why."""
        untouched = CodeSpec()
        for key in ("include", "exclude", "max_size"):
            if not self.has_snapshot and getattr(self, key) != getattr(untouched, key):
                yield key, f"{key!r} has no effect without a snapshot; set 'mode: snapshot', or remove it"
