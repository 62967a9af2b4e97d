"""A run's own copy of its code, which node 0's agent makes before the ranks start.

It is made once for a run: what scripts write into it, later attempts find there. Where another snapshot is to replace
it, only the files of the two snapshots are touched. ``code.json`` is written last: if this is killed, the next attempt
does it again, and nothing depends on how far it was.

What the snapshot does not hold, such as data and directories for results, stays where it is, and the copy has links to
it; likewise to what is next to the repository, for paths such as ``../data``.

Programs in it that ask git get the answers of the submission (:mod:`~slurmtrain.runtime.code.git`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import hashlib
import os
import posixpath
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from slurmtrain.errors import PathError, SlurmtrainError
from slurmtrain.model.experiment.code import (
    LINK,
    PROGRAM,
    CodeFile,
    CodeManifest,
    CodeSnapshot,
    directories_of,
    link_target,
    may_appear_later,
    names_by_directory,
    path_in_word,
    relative_to_root,
)
from slurmtrain.model.experiment.command_words import DIRECTORY, UNKNOWN, paths_written, result_places
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.code.git import GIT, is_own_directory, make_repositories
from slurmtrain.system.files import describe_os_error, make_directory, read_json, write_json
from slurmtrain.system.inherited import PRIVATE, umask_of_ranks
from slurmtrain.system.owned_files import open_checked, read_checked

_DIRECTORY_MODE = 0o700
# Next to a repository in a home or project directory there are some dozens of others.
_MOST_NEIGHBOURS = 2_000
_CURE = "'slurmtrain resume --code now' uses the code as it is now"


def make_tree(run: RunDir, snapshot: CodeSnapshot) -> bool:
    """Make the copy of a snapshot that a run works in; returns False if it was there already.

    Args:
        run: The run, for whose directory nobody else does so at the same time.
        snapshot: What its plan says.

    Raises:
        SlurmtrainError: The snapshot is missing or damaged, or the copy cannot be written.
    """
    state = read_json(run.code_state) or {}
    revisions = [revision.to_dict() for revision in snapshot.revisions]
    complete = {"snapshot": snapshot.hash, "root": snapshot.root, **({"revisions": revisions} if revisions else {})}
    tree = snapshot.tree(run.code)
    if state == complete and tree.is_dir():
        return False
    manifest = read_code_manifest(run, snapshot.hash)
    # If this is killed, an attempt with yet another snapshot removes the files written so far.
    earlier = [name for name in _snapshots_in(state) if name != snapshot.hash]
    try:
        make_directory(run.code, private=True)
        root = Path(snapshot.root)
        # What is next to the repository, unless that cannot be read, or is very much.
        with contextlib.suppress(OSError):
            names = os.listdir(root.parent)
            if len(names) <= _MOST_NEIGHBOURS:
                neighbours = (name for name in names if name != root.name and not name.startswith("."))
                _link_missing(root.parent, run.code, neighbours)
        if tree.is_symlink():
            tree.unlink()  # to what was next to the repository of an earlier snapshot: nothing may be written there
        tree.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
        # Before any file: whoever goes on after a kill then knows which snapshots the files may be from.
        write_json(run.code_state, {"unfinished": [*earlier, snapshot.hash], "root": snapshot.root})
        for each in earlier:
            _remove_old(run, tree, each, {file.path for file in manifest.files})
        for directory in sorted(filter(None, directories_of(file.path for file in manifest.files))):
            path = tree / directory
            # A link to a directory of the repository, which was no code before: what is written must not go there.
            if path.is_symlink() or path.is_file():
                path.unlink()
            path.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
        _write_files(run, snapshot, tree)
        _link_rest(snapshot, manifest, tree)
        make_repositories(snapshot, manifest, tree)
        # Before the state, which says that everything is there.
        _flush(tree)
        write_json(run.code_state, complete)
    except OSError as error:
        place = error.filename or tree
        raise SlurmtrainError(f"cannot make the copy of the code in {place}: {describe_os_error(error)}") from error
    return True


def can_be_made_again(run: RunDir) -> bool:
    """Whether a run has a copy of its code without changes by scripts, and its snapshot is still there."""
    try:
        state = read_json(run.code_state) or {}
        snapshot, tree = str(state.get("snapshot")), run.code / Path(str(state.get("root"))).name
        files = [tree / file.path for file in read_code_manifest(run, snapshot).files]
        # It was written last when the copy was made.
        made_at = run.code_state.stat().st_mtime_ns
        is_changed = any(path.lstat().st_mtime_ns > made_at for path in files)
        return not is_changed and run.snapshot(snapshot).contents.is_file() and results_in_copy(run) == 0
    except (PathError, OSError):
        return False


def results_in_copy(run: RunDir) -> int:
    """How many bytes scripts have written to new files next to their code, in a run's own copy of it."""
    try:
        state = read_json(run.code_state) or {}
        code = {file.path for snapshot in _snapshots_in(state) for file in read_code_manifest(run, snapshot).files}
        name = Path(str(state.get("root"))).name
    except (PathError, OSError):
        return 0
    tree, size = run.code / name, 0
    for folder, directories, files in os.walk(tree):
        if GIT in directories:
            directories.remove(GIT)
        for file in files:
            place = Path(folder, file)
            status = place.lstat()
            # What Python compiles is no result.
            if stat.S_ISREG(status.st_mode) and place.suffix != ".pyc" and str(place.relative_to(tree)) not in code:
                size += status.st_size
    return size


def read_code_manifest(run: RunDir, name: str) -> CodeManifest:
    """The manifest of the snapshot with this hash. Raises SlurmtrainError if it is missing or damaged."""
    path = run.snapshot(name).manifest
    try:
        content = read_checked(path)
    except FileNotFoundError:
        raise PathError(
            f"run {run.id} needs the code of snapshot {path.parent}, which does not exist; {_CURE}"
        ) from None
    except OSError as error:
        raise PathError(f"cannot read {path}: {describe_os_error(error)}") from error
    try:
        if hashlib.sha256(content).hexdigest() != name:
            raise ValueError("its content has changed")
        return CodeManifest.from_bytes(content)
    except ValueError as error:
        raise PathError(f"the snapshot {path.parent} is damaged ({error}); {_CURE}") from error


def read_code(run: RunDir, name: str) -> Iterator[tuple[CodeFile, bytes]]:
    """Each file of a snapshot, with its content; a symbolic link has none.

    Args:
        run: A run in the same runs root.
        name: The snapshot's hash.

    Raises:
        PathError: The snapshot is missing or damaged.
    """
    manifest, path = read_code_manifest(run, name), run.snapshot(name).contents
    try:
        with os.fdopen(open_checked(path), "rb") as packed, gzip.GzipFile(fileobj=packed) as contents:
            for file in manifest.files:
                content = b"" if file.kind == LINK else contents.read(file.size)
                if file.kind != LINK and hashlib.sha256(content).hexdigest() != file.digest:
                    raise ValueError(f"{file.path} has changed")
                yield file, content
    except FileNotFoundError:
        raise PathError(f"the snapshot {path.parent} is damaged: there is no {path.name}; {_CURE}") from None
    except (EOFError, gzip.BadGzipFile, ValueError) as error:
        raise PathError(f"the snapshot {path.parent} is damaged ({error}); {_CURE}") from error
    except OSError as error:
        raise PathError(f"cannot read {path}: {describe_os_error(error)}") from error


def _snapshots_in(state: Mapping[str, object]) -> list[str]:
    """The snapshots that files in a run's copy may come from, by its state."""
    unfinished = state.get("unfinished")
    snapshots = unfinished if isinstance(unfinished, list) else [state.get("snapshot")]
    return [name for name in snapshots if isinstance(name, str)]


def _remove_old(run: RunDir, tree: Path, earlier: str, kept: Collection[str]) -> None:
    """Remove the files of an earlier snapshot that the new one does not hold, and directories that are empty then."""
    removed: dict[str, list[Path]] = {}
    with contextlib.suppress(PathError):
        for file in read_code_manifest(run, earlier).files:
            if file.path not in kept:
                removed.setdefault(posixpath.dirname(file.path), []).append(tree / file.path)
    # Python would import an empty directory, and none can be a link to what is no code any more.
    for directory in sorted(directories_of(posixpath.join(each, "file") for each in removed), reverse=True):
        # If this was killed before, there may be such a link by now, to files of the user's.
        if not is_own_directory(tree, directory):
            continue
        for place in removed.get(directory, ()):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                place.unlink()
        with contextlib.suppress(OSError):
            if directory:
                (tree / directory).rmdir()


def _write_files(run: RunDir, snapshot: CodeSnapshot, tree: Path) -> None:
    """Write the files of a snapshot. Raises PathError if their contents differ from its manifest."""
    for file, content in read_code(run, snapshot.hash):
        place = tree / file.path
        try:
            # Not written over: what is there may be a link that a script has made, to a file of the user's.
            place.unlink()
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            shutil.rmtree(place)
        if file.kind == LINK:
            place.symlink_to(link_target(file.path, file.digest, snapshot.root))
            continue
        mode = 0o700 if file.kind == PROGRAM else 0o600
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(place, flags, mode), "wb") as target:
            target.write(content)


def _link_rest(snapshot: CodeSnapshot, manifest: CodeManifest, tree: Path) -> None:
    """Link to what is next to the code in the repository, and is no code."""
    root = Path(snapshot.root)
    for directory, held in names_by_directory(file.path for file in manifest.files).items():
        listed = snapshot.beside.get(directory, ())
        try:
            present = os.listdir(root / directory)
        except OSError:
            continue  # deleted meanwhile, with all that was in it
        earlier = {*held, *listed}
        names = (name for name in present if name not in held and (name in listed or may_appear_later(name, earlier)))
        _link_missing(root / directory, tree / directory, names)


def _link_missing(source: Path, target: Path, names: Iterable[str]) -> None:
    """Make links in the directory ``target`` to entries of ``source``, unless something of their name is there."""
    for name in names:
        with contextlib.suppress(FileExistsError):
            (target / name).symlink_to(source / name)


def _flush(tree: Path) -> None:
    """Make all that was written durable: a flush of each file would take seconds for thousands of them."""
    handle = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # syncfs(2), which Python's os has not.
        if ctypes.CDLL(None, use_errno=True).syncfs(handle):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(tree))
    finally:
        os.close(handle)


# --- paths in the copy: which are its own, what a command names, and where results go ---------------------------------
# Links in it lead to files of the user's. Whoever writes ``--output-dir out`` looks for ``out`` next to the code, and
# not in the directory of the run: for such places there are links to where they are.


def translate_command(plan: Plan, run: RunDir, argv: Sequence[str]) -> list[str]:
    """A filled-in command, with absolute paths of code as the run has it.

    Paths that the command writes to stay as they are, and so does the interpreter, which finds its environment by its
    path.

    Args:
        plan: The run's plan, which has a snapshot.
        run: The run, which has its own copy of its code.
        argv: The command.
    """
    assert plan.code is not None
    written = {named.path for named in paths_written(argv)}
    copy = CodeCopy(plan.code, run)
    return [word if word == plan.python else copy.translate_word(word, written) for word in argv]


class CodeCopy:
    """A run's own copy of a repository."""

    def __init__(self, snapshot: CodeSnapshot, run: RunDir) -> None:
        """The copy of this snapshot in a run, which has been made."""
        self.tree = snapshot.tree(run.code)
        """Where it is."""
        self._root = snapshot.root
        self._real = Path(os.path.realpath(self.tree))

    def translate(self, path: str) -> str:
        """An absolute path in the repository as one in the copy, if the copy holds it; else unchanged."""
        relative = relative_to_root(path, self._root)
        if relative is None:
            return path
        place = self.tree / relative
        # What the snapshot does not hold are links to where it is.
        held = os.path.lexists(place) and Path(os.path.realpath(place)).is_relative_to(self._real)
        return str(place) if held else path

    def translate_word(self, word: str, written: set[str]) -> str:
        """A word of a command; ``written``: paths that the command writes to."""
        for before, path in path_in_word(word):
            if path not in written and (place := self.translate(path)) != path:
                return before + place
        return word


def link_results(plan: Plan, run: RunDir) -> None:
    """Link from a run's copy of its code to the places in the repository that its command writes to.

    Directories are made in the repository. Where that is not possible, what is written stays in the copy.

    Args:
        plan: The run's plan, which has a snapshot.
        run: The run, whose copy has been made.
    """
    assert plan.code is not None
    tree = plan.code.tree(run.code)
    for place in result_places(plan.words, plan.spec.checkpoint.glob, plan.workdir, plan.code.root):
        parts = PurePosixPath(place.path).parts
        # A link leads to the repository already; a directory of the code is the run's own.
        paths = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        path = next((path for path in paths if not (tree / path).is_dir() or (tree / path).is_symlink()), None)
        # Something may be there already, such as the link of an earlier attempt.
        if path is None or os.path.lexists(tree / path):
            continue
        is_directory = path != paths[-1] or place.kind == DIRECTORY
        if not is_directory and place.kind == UNKNOWN:
            continue  # whichever of the two it is made, the script may need the other
        source = Path(plan.code.root, path)
        with contextlib.suppress(OSError):
            if is_directory and not source.is_dir():
                # With the rights that it would have if a script of the run made it.
                source.mkdir()
                source.chmod(stat.S_IMODE(source.stat().st_mode) | PRIVATE & ~umask_of_ranks())
            (tree / path).symlink_to(source)
