"""Git without risk: nothing is written in repositories of users, and no program that they name is run.

Settings of a repository name programs: filters of contents, hooks, monitors of files, commands that fetch. Whoever
made the repository may have chosen them, and a look at its files is no reason to run them.

In a run's own copy of its code, programs that ask git for the revision get the submission's. Each repository there has
a ``.git`` of its own, with the commit and the branch that were checked out, and an index of that commit. Objects are
read from the repository that the code came from; nothing is written there. Nothing of this is needed by slurmtrain
itself: without git on the node, or where the repository is gone, only the commit is known.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.model.experiment.code import (
    LINK,
    CodeFile,
    CodeManifest,
    CodeSnapshot,
    Revision,
    link_target,
    names_by_directory,
)
from slurmtrain.system.files import make_directory

# A hook, or a command in it, has these for the repository that it belongs to (git rev-parse --local-env-vars).
_OF_ANOTHER = frozenset({
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_PREFIX",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE",
})  # fmt: skip
# An object that a partial clone lacks is not fetched: no protocol is allowed, and none has this name.
_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none",
          "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NoGit(Exception):
    """A directory is in no work tree that git can read. ``why``: in a few words; empty if there is no repository."""

    why: str


def run_git(directory: Path, *arguments: str, timeout_s: float, stdin: bytes = b"") -> bytes:
    """The output of git in a directory.

    Args:
        directory: Where git runs.
        arguments: The command and its options.
        timeout_s: Time limit, in seconds.
        stdin: Its standard input.

    Raises:
        NoGit: It fails, or there is no git.
        subprocess.TimeoutExpired: It takes longer.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER}
    # An entry such as "." would be a directory of the repository.
    path = os.pathsep.join(filter(os.path.isabs, environ.get("PATH", os.defpath).split(os.pathsep)))
    try:
        completed = subprocess.run(
            [
                "git",
                "-c",
                "core.fsmonitor=false",
                "-c",
                f"core.hooksPath={os.devnull}",
                "-C",
                str(directory),
                *arguments,
            ],
            env={**environ, **_QUIET, "PATH": path},
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise NoGit("there is no git on PATH") from None
    except OSError as error:
        raise NoGit(f"git cannot be started: {error.strerror}") from None
    if completed.returncode:
        lines = completed.stderr.decode(errors="replace").strip().splitlines()
        raise NoGit(lines[0].removeprefix("fatal: ") if lines else f"git exited with {completed.returncode}")
    return completed.stdout


def without_filters(directory: Path, *, timeout_s: float) -> Sequence[str]:
    """Options of git, before its command, with which it takes the bytes of files as they are.

    Commands that compare or add contents need them; others run no filter. git-lfs is a filter, too: it runs programs
    that a repository may name (``lfs.extension`` in git-lfs-extensions(7)).

    Args:
        directory: In the repository.
        timeout_s: How long git may take.

    Raises:
        NoGit: It fails, or a filter has a name that no option can contain.
        subprocess.TimeoutExpired: It takes longer.
    """
    settings = run_git(directory, "config", "--list", "--name-only", "-z", timeout_s=timeout_s)
    keys = {os.fsdecode(key) for key in settings.split(b"\0")}
    filters = sorted({key.rpartition(".")[0] for key in keys if key.startswith("filter.") and key.count(".") > 1})
    if any("=" in each for each in filters):
        raise NoGit("the name of a filter contains '='")
    values = ("clean=", "smudge=", "process=", "required=false")
    return [word for each in filters for value in values for word in ("-c", f"{each}.{value}")]


# --- repositories in a run's own copy of its code ---------------------------------------------------------------------

GIT = ".git"
# For all of a repository's commands together a job can wait a little, and not for a dead file server.
_TIMEOUT_S = 30.0
# What decides whether a file counts as changed, and what tools log of a repository.
_SETTINGS = (
    r"^(remote\..*\.url|submodule\..*|filter\..*"
    r"|core\.(autocrlf|eol|safecrlf|filemode|symlinks|ignorecase|precomposeunicode|abbrev|quotepath))$"
)
# Remotes may have passwords in their URLs, and secrets are never written anywhere.
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]*@")


def make_repositories(snapshot: CodeSnapshot, manifest: CodeManifest, tree: Path) -> None:
    """Make the repositories in a run's copy, which has all of its files and links.

    Args:
        snapshot: What the plan says.
        manifest: The files of the snapshot.
        tree: The copy.

    Raises:
        OSError: One cannot be written.
    """
    files = {file.path: file for file in manifest.files}
    included = {path.partition(f"{GIT}/")[0] for path in files if f"/{GIT}/" in f"/{path}"}
    for revision in snapshot.revisions:
        prefix = f"{revision.path}/" if revision.path else ""
        # What a spec includes expressly stays; and what is no code is a link to a repository of the user's.
        is_ours = any(path.startswith(prefix) for path in files) and is_own_directory(tree, revision.path)
        if is_ours and prefix not in included and f"{prefix}{GIT}" not in files:
            _Repository(snapshot, files, revision, tree).make()


def is_own_directory(tree: Path, path: str) -> bool:
    """Whether a path is a directory of a copy, and does not lead out of it.

    Args:
        tree: The copy.
        path: Relative to it; empty for the copy itself.
    """
    place = os.path.normpath(f"{os.path.realpath(tree)}/{path}")
    return os.path.realpath(place) == place and os.path.isdir(place)  # noqa: PTH112 (fast)


class _Repository:
    """One of them: its place in the copy, and where it came from."""

    def __init__(self, snapshot: CodeSnapshot, files: Mapping[str, CodeFile], revision: Revision, tree: Path) -> None:
        self._root = snapshot.root
        self._files = files
        self._revision = revision
        self._source = Path(snapshot.root, revision.path)
        self._place = tree / revision.path
        self._prefix = f"{revision.path}/" if revision.path else ""

    def make(self) -> None:
        """Make it, as far as git can read where it came from. Raises OSError."""
        git = self._place / GIT
        if git.is_symlink() or git.is_file():
            git.unlink()
        shutil.rmtree(git, ignore_errors=True)
        for directory in (git, git / "objects", git / "objects" / "info", git / "refs", git / "info"):
            make_directory(directory, private=True)
        revision = self._revision
        references = f"{revision.commit} {revision.branch}\n" if revision.branch else ""
        _write_private(git / "packed-refs", references)
        # Without settings of the source, which git may not be able to read.
        _write_private(git / "config", _config_text(revision.commit, []))
        _write_private(git / "info" / "exclude", "".join(self._links()))
        # Last: without it, it is no repository.
        _write_private(git / "HEAD", f"ref: {revision.branch}\n" if revision.branch else f"{revision.commit}\n")
        with contextlib.suppress(NoGit, subprocess.TimeoutExpired):
            common = self._path_in_source("objects")
            if common.startswith(("#", '"')) or "\n" in common:
                common = f'"{_escaped(common)}"'  # gitrepository-layout(5)
            _write_private(git / "objects" / "info" / "alternates", f"{common}\n")
            tags = self._ask_source("for-each-ref", "--format=%(objectname) %(refname)", "refs/tags")
            _write_private(git / "packed-refs", references + os.fsdecode(tags))
            settings: list[str] = []
            with contextlib.suppress(NoGit):  # it fails if there are none
                settings = _null_lines(self._ask_source("config", "--local", "-z", "--get-regexp", _SETTINGS))
            fields = (line.partition("\n") for line in settings)
            of_source = [(name, value if equals else "true") for name, equals, value in fields]
            _write_private(git / "config", _config_text(revision.commit, of_source))
            shallow = Path(self._path_in_source("shallow"))
            if shallow.is_file():
                shutil.copyfile(shallow, git / "shallow")
            self._make_index()

    def _make_index(self) -> None:
        self._ask("read-tree", self._revision.commit)
        is_sparse = False
        with contextlib.suppress(NoGit):  # it fails if this is not set
            is_sparse = self._ask_source("config", "--bool", "core.sparseCheckout") == b"true\n"
        listed = _null_lines(self._ask("ls-files", "-z"))
        hidden = [path for path in listed if self._is_hidden(path, is_sparse=is_sparse)]
        self._ask("update-index", "-z", "--skip-worktree", "--stdin", stdin=_null_joined(hidden))
        added = [path for path in self._revision.added if self._prefix + path in self._files]
        plain = without_filters(self._place, timeout_s=_TIMEOUT_S)
        self._ask(*plain, "update-index", "-z", "--add", "--stdin", stdin=_null_joined(added))
        # Plumbing such as diff-index takes new times of files for changes. It fails if there are changes.
        self._ask(*plain, "update-index", "-q", "--refresh")

    def _is_hidden(self, path: str, *, is_sparse: bool) -> bool:
        """Whether git must not look at a file of the commit: a link is in its place, or in its directory's.

        ``is_sparse``: absent ones are not there either where the code came from.
        """
        file = self._files.get(self._prefix + path)
        if file is not None:
            return file.kind == LINK and link_target(file.path, file.digest, self._root) != file.digest
        parts = Path(path).parts
        if is_sparse and not os.path.lexists(self._place / path):
            return True
        return any(self._place.joinpath(*parts[:depth]).is_symlink() for depth in range(1, len(parts) + 1))

    def _links(self) -> Iterator[str]:
        """Lines that make git ignore the links to what is no code, as rules for directories do not hold for links."""
        inside = [path.removeprefix(self._prefix) for path in self._files if path.startswith(self._prefix)]
        for directory, held in names_by_directory(inside).items():
            with os.scandir(self._place / directory) as entries:
                for entry in sorted(entries, key=lambda each: each.name):
                    if entry.is_symlink() and entry.name not in held and "\n" not in entry.name:
                        path = re.sub(r"([\\*?\[\] ])", r"\\\1", os.path.join(directory, entry.name))  # noqa: PTH118
                        yield f"/{path}\n"

    def _path_in_source(self, name: str) -> str:
        path = os.fsdecode(self._ask_source("rev-parse", "--git-path", name)).removesuffix("\n")
        return os.path.normpath(self._source / path)

    def _ask_source(self, *arguments: str) -> bytes:
        return run_git(self._source, *arguments, timeout_s=_TIMEOUT_S)

    def _ask(self, *arguments: str, stdin: bytes = b"") -> bytes:
        return run_git(self._place, *arguments, timeout_s=_TIMEOUT_S, stdin=stdin)


def _config_text(commit: str, of_source: Iterable[tuple[str, str]]) -> str:
    """The content of a repository's ``config`` (git-config(1), its syntax)."""
    # Without automatic packing: the objects are in a repository of the user's.
    own = {"core.repositoryformatversion": "0", "core.bare": "false", "gc.auto": "0", "maintenance.auto": "false"}
    # SHA-1 has 40 hexadecimal digits; what is longer is SHA-256.
    if len(commit) > 40:
        own |= {"core.repositoryformatversion": "1", "extensions.objectformat": "sha256"}
    lines = []
    for key, value in (*own.items(), *of_source):
        section, _, rest = key.partition(".")
        subsection, _, name = rest.rpartition(".")
        heading = f'{section} "{_escaped(subsection)}"' if subsection else section
        lines.append(f'[{heading}]\n\t{name} = "{_escaped(_USER_IN_URL.sub("", value))}"\n')
    return "".join(lines)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _null_joined(paths: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(path) + b"\0" for path in paths)


def _null_lines(output: bytes) -> list[str]:
    return [os.fsdecode(line) for line in output.split(b"\0") if line]


def _write_private(path: Path, text: str) -> None:
    path.write_bytes(os.fsencode(text))
    path.chmod(0o600)
