"""Files that have either their old content or their new content, whenever their writer is killed.

Everything below a run directory is private to its owner: directories 0700, files 0600. Where a group shares the runs
root, it may read what commands need to show runs: directories 2750, files 0640. A directory says so by its mode, which
directories and files in it inherit, so that every process of a job knows, also one that starts years later.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.run.events.base import UNUSABLE, is_within, reader_of_type
from slurmtrain.system.owned_files import Check, check_entry, check_owned, open_checked, read_checked

DIRECTORY_MODE = 0o700
_DEEPEST = 64
# So many levels of objects have a line for each key.
_LINED = 2
_ENCODE = json.JSONEncoder(allow_nan=False).encode
# The plans of a sweep have the same hundred keys a thousand times.
_AS_KEY = lru_cache(maxsize=1024)(_ENCODE)
# How many characters of a wrong value are shown.
_SHOWN = 50
FILE_MODE = 0o600
# With the bit that hands the directory's group on to what is created in it.
SHARED_DIRECTORY_MODE = 0o2750
SHARED_FILE_MODE = 0o640
# Whether this thread makes its files durable later, all at once.
_deferred = ContextVar("_deferred", default=False)


def make_directory(path: Path, *, private: bool = False) -> Path:
    """Create a directory and its parents if it does not exist.

    Args:
        path: The directory.
        private: Nobody else may read it, not even a group that shares the runs root.

    Raises:
        PathError: That fails.
    """
    try:
        if not path.is_dir():
            path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            if not private and _is_shared_directory(path.parent):
                path.chmod(SHARED_DIRECTORY_MODE)
    except OSError as error:
        raise PathError(f"cannot create the directory {path}: {describe_os_error(error)}") from error
    return path


def make_new_directory(path: Path) -> None:
    """Create a directory that must not exist. Raises OSError, such as FileExistsError."""
    # mkdir(2) ignores the set-group-ID bit, and the umask takes others: a shared one needs chmod.
    path.mkdir(mode=DIRECTORY_MODE)
    if _is_shared_directory(path.parent):
        path.chmod(SHARED_DIRECTORY_MODE)


def share_file(handle: int, path: Path) -> None:
    """Let the group read a new file if it may read the file's directory. Raises OSError.

    ``handle``: the file's descriptor; ``path``: where it is.
    """
    if _is_shared_directory(path.parent):
        os.fchmod(handle, SHARED_FILE_MODE)


def _is_shared_directory(directory: Path) -> bool:
    return stat.S_IMODE(directory.stat().st_mode) == SHARED_DIRECTORY_MODE


@contextlib.contextmanager
def durable_together(folder: Path) -> Iterator[None]:
    """Make all files that are written in this block durable at its end, with a single system call.

    An fsync takes milliseconds, and a new run has more than ten: for a thousand runs that is half a minute. Until the
    end, what was written survives a kill, but not a power failure.

    Args:
        folder: A directory of the file system that they are written on.

    Raises:
        OSError: The block has not failed, but the files cannot be made durable.
    """
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)
    import ctypes

    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # syncfs(2) is in Linux's C libraries, but not in Python's os.
        if ctypes.CDLL(None, use_errno=True).syncfs(handle) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(handle)


def fsync(handle: int) -> None:
    """Make an open file durable, now or at the end of :func:`durable_together`. Raises OSError."""
    if not _deferred.get():
        os.fsync(handle)


def fsync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable."""
    if _deferred.get():
        return
    # A rename changes the directory, not the file: fsync(2) of the file alone does not make it durable.
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes, *, private: bool = False, mode: int | None = None) -> None:
    """Replace a file's content, durably: temporary file, fsync, rename, fsync of the directory.

    Args:
        path: The file.
        content: Its new content.
        private: Nobody else may read it, not even a group that shares the runs root.
        mode: The file's mode, whatever its directory or the umask; None: as usual.

    Raises:
        OSError: That fails; the old content is untouched.
    """
    # Next to the file: a rename is atomic only within a file system. At random: two writers must not share it.
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                os.fchmod(handle, mode)
            elif not private:
                share_file(handle, path)
            file.write(content)
            file.flush()
            fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_directory(path.parent)


def write_new(path: Path, content: bytes) -> None:
    """Write a file, durably, where nobody can see half of it, as nothing names its directory yet.

    Args:
        path: The file, which must not exist.
        content: Its content.

    Raises:
        OSError: That fails; the file may be there.
    """
    # Not a file object, which asks for the kind of the file three times: a sweep writes thousands.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        share_file(handle, path)
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(handle, rest) :]
        fsync(handle)
    finally:
        os.close(handle)
    fsync_directory(path.parent)


def link_new(path: Path, twin: Path) -> bool:
    """Make a file that is to be equal to another one by a hard link, which needs less time, and no space.

    Args:
        path: The file, which must not exist.
        twin: A durable file in the same runs root; neither of them ever changes.

    Returns:
        False where there can be no link, as between directories on some file systems; there is no file then.
    """
    try:
        os.link(twin, path)
    except OSError:
        return False
    fsync_directory(path.parent)
    return True


def write_json(path: Path, data: Mapping[str, Any], *, private: bool = False) -> None:
    """Write ``data`` as :func:`json_bytes` to ``path``, like :func:`write_atomically`, with ``private`` as there.

    Raises OSError; ValueError for NaN and infinities.
    """
    write_atomically(path, json_bytes(data), private=private)


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """JSON for files: each key of ``data``, and of objects in it, in a line of its own; deeper ones share a line.

    With ``indent``, json.dumps encodes in Python, which for a plan takes ten times as long (CPython's json.encoder).

    Raises ValueError for NaN and infinities.
    """
    return (_json_text(data, _LINED) + "\n").encode()


def _json_text(value: object, levels: int, margin: str = "\n") -> str:
    if not levels or not isinstance(value, Mapping) or not value:
        return _ENCODE(value)
    margin += " "
    inside = [f"{margin}{_AS_KEY(str(key))}: {_json_text(each, levels - 1, margin)}" for key, each in value.items()]
    return f"{{{','.join(inside)}{margin[:-1]}}}"


def link_json(path: Path, data: Mapping[str, Any]) -> bool:
    """Write ``data`` to ``path`` unless there is a file; returns whether this process did it.

    Creating a hard link either succeeds or fails, even on NFS (open(2), O_EXCL), so exactly one of several contenders
    succeeds, even where locks do not work. Half a file is never read. Raises OSError.
    """
    draft = path.with_name(f".{secrets.token_hex(8)}")
    try:
        write_json(draft, data)
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def read_json(
    path: Path, *, check: Check = check_owned, types: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """A JSON object from a file; None if there is no such file.

    Args:
        path: The file.
        check: Who may own the file and its directory, or write to them.
        types: The types of keys that it may have, as annotations that ``model/run/events/base`` reads.

    Raises:
        PathError: It cannot be read, or is not such an object.
        UntrustedPath: The file, or its directory, does not pass ``check``.
    """
    try:
        data = json.loads(read_checked(path, check=check))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PathError(f"cannot read {path}: {describe_os_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise PathError(f"{path} has changed since slurmtrain wrote it ({error}); restore it from a backup") from error
    wrong = ""
    if not isinstance(data, dict):
        wrong = "it is not an object"
    elif not is_within(data, _DEEPEST):
        # Our files nest a few levels deep; what reads them later would exceed the recursion limit.
        wrong = f"it is nested more than {_DEEPEST} levels deep"
    else:
        for key, type_ in (types or {}).items():
            if key in data and reader_of_type(type_)(data[key], []) is UNUSABLE:
                wrong = wrong or f"its {key!r} cannot be {json.dumps(data[key])[:_SHOWN]}"
    if wrong:
        raise PathError(f"{path} has changed since slurmtrain wrote it ({wrong}); restore it from a backup")
    assert isinstance(data, dict)
    return data


def create_private(path: Path) -> None:
    """Create a file that only its owner can read, if it does not exist.

    For libraries such as SQLite, which create files with the umask's mode but keep the mode of an existing file.

    Raises OSError; UntrustedPath if the file, or its directory, is somebody else's.
    """
    try:
        os.close(open_checked(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        check_entry(path)


def describe_os_error(error: OSError) -> str:
    """What went wrong, as the end of a message: lower case, without a full stop."""
    if error.errno == errno.ENOSPC:
        return "no space left on the device"
    return (error.strerror or str(error)).lower()


def describe_os_error_at(error: OSError) -> str:
    """The same after the path that it is about, if it names one."""
    path = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    return path + describe_os_error(error)


# --- how much a file system can still take ----------------------------------------------------------------------------

# The error numbers of a write for which there is no room: on the file system, or in a quota.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """What a file system has left, or what somebody needs of it.

    ``inodes``: how many files and directories; None: as many as fit.
    """

    bytes: int
    inodes: int | None

    def shortage(self, needed: DiskSpace) -> str:
        """What is missing for what is ``needed``, as a phrase; empty if there is enough."""
        if self.bytes < needed.bytes:
            return f"only {self.bytes // 1024} KiB are left of the {needed.bytes // 1024} KiB"
        if self.inodes is not None and needed.inodes is not None and self.inodes < needed.inodes:
            return f"only {self.inodes} inodes are left of the {needed.inodes}"
        return ""


def space_left(path: Path) -> DiskSpace:
    """What the file system of an existing file or directory has left for users other than root (statvfs(3)).

    It includes quotas of projects and directories where the file system reports them there, as XFS and many servers of
    network file systems do, but not quotas of users. Raises OSError.
    """
    filesystem = os.statvfs(path)
    # File systems without a fixed number of inodes, such as btrfs, have 0 here.
    inodes = filesystem.f_favail if filesystem.f_files else None
    return DiskSpace(filesystem.f_bavail * filesystem.f_frsize, inodes)


# --- answers in the user's cache directory, $XDG_CACHE_HOME/slurmtrain ------------------------------------------------

# Answers that cost a moment and rarely change: a file holds one, and its key, all that the answer depends on. Nothing
# may rely on it: where the directory cannot be used, nothing is kept.


def load_answer(name: str, key: Any) -> Any:
    """The answer that was stored under this name; None if there is none, or it was stored with another key.

    ``key``: plain data, as JSON has it.
    """
    with contextlib.suppress(PathError, OSError, RuntimeError):
        kept = read_json(_answer_file(name))
        if kept is not None and kept.get("key") == key:
            return kept.get("answer")
    return None


def store_answer(name: str, key: Any, answer: Any) -> None:
    """Store an answer under a ``name``, for as long as its key stays the same.

    ``key``, ``answer``: plain data, as JSON has it.
    """
    with contextlib.suppress(PathError, OSError, RuntimeError):
        file = _answer_file(name)
        make_directory(file.parent, private=True)
        write_json(file, {"key": key, "answer": answer}, private=True)


def file_identity(path: str) -> list[Any]:
    """What changes if the file or directory behind a path is replaced or changed: part of a key."""
    try:
        status = Path(path).stat()
    except OSError:
        return [path]
    return [path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]


def cache_directory() -> Path:
    """The user's cache directory for slurmtrain. Raises RuntimeError if the home directory is not known."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # Relative paths are to be ignored (XDG Base Directory Specification).
    parent = configured if configured.is_absolute() else Path("~").expanduser() / ".cache"
    return parent / "slurmtrain"


def _answer_file(name: str) -> Path:
    return cache_directory() / f"{name}.json"
