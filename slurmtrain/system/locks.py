"""Locks between commands, which are files: released when their holder dies, and waited for with a word about it.

The kernel's lock on the file (flock) decides. Where a file system has no locks (NFS without its lock manager, Lustre
mounted with ``noflock``, some FUSE file systems), or where their reach is one machine, a hard link takes their place
(:class:`LinkLock`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slurmtrain.errors import LockHeld, PathError
from slurmtrain.system.files import FILE_MODE, describe_os_error
from slurmtrain.system.owned_files import open_checked, open_regular
from slurmtrain.system.process import Process, is_stopped, this_process

# --- mounted file systems, and whether their locks also keep out processes on other machines --------------------------

# A blank, a tab, a newline or a backslash in a path, as /proc writes it: \040.
_OCTAL = re.compile(r"\\([0-7]{3})")
# Mount options with which locks keep out this machine's processes only: nfs(5), and Lustre's mount.lustre(8).
_LOCAL_LOCKS = frozenset({"nolock", "local_lock=all", "local_lock=flock", "local_lock=posix", "localflock"})


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system. ``kind``: such as ``ext4`` or ``nfs4``; ``source``: the device or server."""

    point: str
    kind: str
    source: str
    options: frozenset[str]

    @property
    def has_local_locks(self) -> bool:
        """Whether the mount's own options keep its locks from reaching other machines, which share its files."""
        return bool(self.options & _LOCAL_LOCKS)

    def __str__(self) -> str:
        return f"{self.point} ({self.kind} from {self.source})"


@cache
def mount_of(device: int) -> Mount | None:
    """The file system with this number (``st_dev`` of its files); None if /proc does not list it under that."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return find_mount(lines, f"{os.major(device)}:{os.minor(device)}")
    return None


def find_mount(lines: Iterable[str], number: str) -> Mount | None:
    """The mount with this ``number``, as ``major:minor``, in the ``lines`` of a mountinfo file (proc(5))."""
    for line in lines:
        # Optional fields, of any number, end with a dash.
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) >= 6 and len(rest) >= 3 and fields[2] == number:
            point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
            return Mount(point, rest[0], rest[1], frozenset([*fields[5].split(","), *rest[2].split(",")]))
    return None


# --- waiting: announced after two seconds, then rarely, and not for ever ----------------------------------------------

# How long commands wait for a lock: locked operations take less than a second, unless a file server or Slurm is slow.
LIMIT_S = 60.0
# Shorter waits are normal where several commands work at once, and not worth a line.
NOTICE_S = 2.0
_NEXT_NOTICE_S = 60.0
_FIRST_PAUSE_S = 0.01
_LAST_PAUSE_S = 0.25


_receiver: ContextVar[Callable[[str], None] | None] = ContextVar("receiver of notices", default=None)


@contextlib.contextmanager
def notices_to(receive: Callable[[str], None]) -> Iterator[None]:
    """Within this context, and in this thread, ``receive`` is called with each notice, and nothing is printed."""
    token = _receiver.set(receive)
    try:
        yield
    finally:
        _receiver.reset(token)


class Waiting:
    """One wait: call :meth:`pause` between two tries. A signal such as Ctrl-C ends it, as it ends a sleep."""

    def __init__(self, limit_s: float, describe: Callable[[], str]) -> None:
        """The wait begins now, and ends after ``limit_s`` seconds.

        ``describe``: what is waited for, and who holds it; called only for a notice, since it may take a moment.
        """
        now = time.monotonic()
        self._ends_at = now + limit_s
        self._notice_at = now + NOTICE_S
        self._pause_s = _FIRST_PAUSE_S
        self._describe = describe

    def pause(self) -> bool:
        """Sleep for a moment, after a notice if one is due; False, without sleeping, if the wait is over."""
        now = time.monotonic()
        if now >= self._ends_at:
            return False
        if now >= self._notice_at:
            self._notice_at = now + _NEXT_NOTICE_S
            print_notice(f"waiting for {self._describe()}")
        time.sleep(min(self._pause_s, self._ends_at - now))
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
        return True


def print_notice(text: str) -> None:
    """Print a line to standard error, now: the command may be ended before it prints anything else.

    Within :func:`notices_to`, it goes there instead.
    """
    receive = _receiver.get()
    if receive is not None:
        receive(text)
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error may be closed
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


# --- who holds a lock: what the holder has written, and what the kernel knows of its processes ------------------------

# More than the record of any holder has.
_RECORD_BYTES = 4096
_COMMAND_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds, or held, a lock. ``since``: seconds since 1970."""

    process: Process
    command: str
    user: str
    since: float

    def to_dict(self) -> dict[str, Any]:
        """Its form in lock files."""
        return {**self.process.to_dict(), "command": self.command, "user": self.user, "since": self.since}

    def __str__(self) -> str:
        pid = self.process.pid
        state = ", which is stopped" if self.process.alive() and is_stopped(pid) else ""
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.since))
        return (
            f"{self.command!r} of {self.user}@{_printable_text(self.process.host)}, process {pid}{state}, since {began}"
        )


def this_holder() -> Holder:
    """This process, from now on."""
    user = os.environ.get("USER") or str(os.getuid())
    program = Path(sys.argv[0])
    command = program.parent.name if program.name == "__main__.py" else program.name
    words = iter(sys.argv[1:])
    for word in words:
        if word == "--runs":
            next(words, None)
        elif not word.startswith("-"):
            # The subcommand, without the arguments, which may contain secrets.
            command = f"{command} {word}"
            break
    return Holder(this_process(), command, user, time.time())


def read_record(text: bytes) -> Holder | None:
    """The holder that the ``text`` of a lock file names; None if it names none, whatever else it is."""
    try:
        # A killed process may have left the end of an earlier, longer record.
        record = json.loads(text.partition(b"\n")[0])
        command, user = _printable_text(record["command"]), _printable_text(record["user"])
        return Holder(Process.from_dict(record), command, user, float(record["since"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def write_record(handle: int, holder: Holder) -> None:
    """Write who holds the lock into its file, which is open as ``handle``. A full disk does not prevent a lock."""
    # In place: the lock belongs to the file, and a new file with this name would not have it. Cut afterwards: ext4
    # writes a file that was emptied to the disk once it is closed (ext4(5), auto_da_alloc), in milliseconds.
    content = json.dumps(holder.to_dict()).encode() + b"\n"
    with contextlib.suppress(OSError):
        os.pwrite(handle, content, 0)
        os.ftruncate(handle, len(content))


def describe_holder(path: Path, handle: int) -> str:
    """Who holds the kernel's lock on the file at ``path``, open as ``handle``, as the end of a sentence."""
    holder = read_record(os.pread(handle, _RECORD_BYTES, 0))
    if holder is not None and holder.process.alive() is not False:
        return f"held by {holder}"
    # The holder's lock belongs to the processes that it has started too, and they may outlive it.
    others = describe_lockers(path)
    left = f", left by {holder.command!r}" if holder is not None and others else ""
    return f"held by {others}{left}" if others else "held by another process, which cannot be seen from here"


def describe_lockers(path: Path) -> str:
    """The processes on this machine that have a lock on a file, in words; empty if none can be seen."""
    # As /proc shows open files: without links.
    target = os.path.realpath(path)
    texts = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        # Another user's processes cannot be examined.
        with contextlib.suppress(OSError):
            if any(_is_locked_as(process, number, target) for number in os.listdir(process / "fd")):
                state = ", which is stopped" if is_stopped(int(process.name)) else ""
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                command = _printable_text(words.decode(errors="replace").strip())
                texts.append(f"process {process.name} ({command[:_COMMAND_CHARACTERS]}){state}")
    return ", ".join(texts)


def _is_locked_as(process: Path, number: str, target: str) -> bool:
    """Whether a process has a file open under this number, and locks it in any way (proc(5), "/proc/pid/fdinfo")."""
    with contextlib.suppress(OSError):
        is_open = os.readlink(process / "fd" / number) == target  # noqa: PTH115
        return is_open and "\nlock:" in (process / "fdinfo" / number).read_text(encoding="utf-8")
    return False


def _printable_text(text: object) -> str:
    """Text that may go to a terminal: a lock file may contain anything."""
    return "".join(character for character in str(text) if character.isprintable())


# --- hard links in place of locks -------------------------------------------------------------------------------------

# What link(2) fails with where there are no hard links, or not for this user.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class LinkLock:
    """A lock for file systems that have none: a second file, ``<lock>.held``, which exists as long as the lock is held.

    It is made as a hard link, which succeeds for exactly one process, even on NFS (open(2), O_EXCL), and it names its
    holder. The kernel does not remove it when that process dies. Therefore the next process on the same machine takes
    over the lock of one that is surely dead. About a process on another machine nothing is sure: its lock stays.

    Two processes may find the same dead holder. Only the one that holds a lock on that record, of this same kind,
    replaces it, and only if it is still there; the other would remove the lock of the first.

    The lock's directory may be renamed meanwhile.
    """

    def __init__(self, path: Path) -> None:
        """Nothing is taken yet. Raises PathError if the directory cannot be opened."""
        self._path = path.with_name(f"{path.name}.held")
        self._record = b""
        try:
            self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise PathError(f"cannot open {path.parent}: {describe_os_error(error)}") from error

    def take(self) -> bool:
        """Take the lock if it is free, or if its holder is dead. Raises PathError if it cannot be created."""
        # The number makes the record unlike any other of this process.
        record = {**this_holder().to_dict(), "number": secrets.token_hex(8)}
        content = json.dumps(record).encode() + b"\n"
        try:
            if _take_link(self._folder, self._path.name, content):
                self._record = content
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise PathError(
                    f"the file system of {self._path.parent} has neither locks nor hard links; choose another "
                    "directory for the runs with --runs or SLURMTRAIN_RUNS"
                ) from error
            raise PathError(f"cannot create the lock {self._path}: {describe_os_error(error)}") from error
        return bool(self._record)

    def close(self) -> None:
        """Release the lock if it was taken, unless somebody has removed it meanwhile and another process has it."""
        with contextlib.suppress(OSError):
            if self._record and _read_at(self._folder, self._path.name) == self._record:
                os.unlink(self._path.name, dir_fd=self._folder)
        os.close(self._folder)

    def describe_holder(self) -> str:
        """Who holds the lock, and what to do if that process is gone, as the end of a sentence."""
        content = _read_at(self._folder, self._path.name)
        holder = None if content is None else read_record(content)
        text = f"held by {holder}" if holder is not None else "held by another process"
        if holder is not None and holder.process.alive() is not None:
            return text
        return f"{text}; if that process no longer exists, delete {self._path}"


def _take_link(folder: int, name: str, content: bytes) -> bool:
    draft = _write_draft(folder, name, content)
    try:
        os.link(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        return True
    except FileExistsError:
        # It was this very link if the answer of an NFS server was lost and the request repeated (open(2), O_EXCL).
        if os.stat(draft, dir_fd=folder).st_nlink == 2:
            return True
    finally:
        os.unlink(draft, dir_fd=folder)
    present = _read_at(folder, name)
    holder = None if present is None else read_record(present)
    # None from alive(): it is on another machine.
    if present is None or holder is None or holder.process.alive() is not False:
        return False
    guard = f"{name}.{zlib.crc32(present):08x}"
    if not _take_link(folder, guard, content):
        return False
    try:
        if _read_at(folder, name) != present:
            return False
        draft = _write_draft(folder, name, content)
        # What killed processes have left of their tries: drafts, whose names nobody else uses.
        for entry in os.listdir(folder):
            if re.fullmatch(rf"{re.escape(name)}\.[0-9a-f]{{16}}", entry):
                left_by = read_record(_read_at(folder, entry) or b"")
                if left_by is not None and left_by.process.alive() is False:
                    os.unlink(entry, dir_fd=folder)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        return True
    finally:
        with contextlib.suppress(OSError):
            os.unlink(guard, dir_fd=folder)


def _write_draft(folder: int, name: str, content: bytes) -> str:
    """Write the file that will be the lock under a name of its own, so that a lock always has its whole record."""
    draft = f"{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(draft, flags, FILE_MODE, dir_fd=folder)
    try:
        os.write(handle, content)
        # A lock that a power failure leaves empty would name no holder, and stay for ever.
        os.fsync(handle)
    finally:
        os.close(handle)
    return draft


def _read_at(folder: int, name: str) -> bytes | None:
    """The content of a lock; None if there is none that can be read."""
    with contextlib.suppress(OSError, PathError):
        handle = open_regular(name, directory=folder)
        try:
            return os.read(handle, _RECORD_BYTES)
        finally:
            os.close(handle)
    return None


# --- locks of files ---------------------------------------------------------------------------------------------------

# What flock(2) and fcntl(2) fail with where a file system has no locks.
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})

# How SQLite opens files without any lock (a "VFS" of its), for code that has a lock of its own. Its option "nolock"
# does not suffice: where a killed process has left a journal, SQLite still asks for a lock, and reports an I/O error
# (sqlite3OsCheckReservedLock).
SQLITE_WITHOUT_LOCKS = "unix-none"


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True, limit_s: float = LIMIT_S) -> Iterator[int | None]:
    """Hold the exclusive lock at ``path``, which is released if this process dies.

    Yields the descriptor of the lock's file: where the kernel has the lock, a child that inherits it holds it too.
    Yields None, without the lock, if another process holds it and ``wait`` is false. With ``wait``, whoever waits is
    told after two seconds who holds the lock.

    Raises:
        LockHeld: another process has held it for ``limit_s`` seconds.
        PathError: the lock file cannot be opened.
    """
    with open_lock(path) as handle, contextlib.ExitStack() as stack:
        link: LinkLock | None = None
        waiting = Waiting(limit_s, lambda: f"the lock {path}, {_describe_either(path, handle, link)}")
        while not (is_ours := try_flock(handle) if link is None else link.take()):
            if is_ours is None:
                _note_links(os.fstat(handle).st_dev)
                link = stack.enter_context(contextlib.closing(LinkLock(path)))
            elif not wait:
                yield None
                return
            elif not waiting.pause():
                raise LockHeld(f"the lock {path}", _describe_either(path, handle, link), limit_s)
        if link is None:
            write_record(handle, this_holder())
        yield handle


@contextlib.contextmanager
def open_lock(path: Path) -> Iterator[int]:
    """The descriptor of the lock file at ``path``, which is created if it does not exist.

    Raises UntrustedPath if it is a link, or it or its directory is somebody else's; PathError if it cannot be opened.
    """
    try:
        handle = open_checked(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise PathError(f"cannot open the lock {path}: {describe_os_error(error)}") from error
    try:
        yield handle
    finally:
        os.close(handle)


def try_flock(handle: int) -> bool | None:
    """Take the kernel's lock on an open file: False if another process has it, None if it would not keep all out."""
    if _has_local_locks(os.fstat(handle).st_dev):
        return None
    try:
        # flock, not lockf: the lock belongs to the open file description, so a child that inherits the descriptor
        # holds it too, and closing another descriptor of the file does not release it (fcntl(2), "Record locking").
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise PathError(f"cannot lock a file: {describe_os_error(error)}") from error
    return True


def has_record_locks(path: Path) -> bool:
    """Whether fcntl's locks, which SQLite uses, work on the file system of the lock file at ``path``.

    Not to be called with a file that this process has locked like that: closing any descriptor releases such locks.
    """
    with open_lock(path) as handle:
        if _has_local_locks(os.fstat(handle).st_dev):
            return False
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in NO_LOCKS
    return True


def _describe_either(path: Path, handle: int, link: LinkLock | None) -> str:
    return describe_holder(path, handle) if link is None else link.describe_holder()


@cache
def _has_local_locks(device: int) -> bool:
    mount = mount_of(device)
    return mount is not None and mount.has_local_locks


@cache
def _note_links(device: int) -> None:
    """Note, once, that hard links replace locks on a file system."""
    mount = mount_of(device)
    print_notice(
        f"note: {mount or 'the file system of the runs'} has no locks that reach all machines: slurmtrain uses hard "
        "links instead; delete the lock of a dead machine by hand"
    )
