"""Errors, starting programs, and finding and ending what a cluster started.

A daemon is known by its command line, which begins with a link in the cluster's directory; what jobs started is known
by its network namespace. Nothing else is ever ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

# Not the caller's: what is in there is nothing that daemons and jobs should depend on.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
POLL = 0.05

Identity = tuple[int, int]
Daemon = subprocess.Popen[bytes]


class ClusterError(Exception):
    """Something failed."""

    exit_code = 1


class WrongInput(ClusterError):
    """What was asked for cannot be done as asked; nothing was changed."""

    exit_code = 2


class CannotHere(ClusterError):
    """This machine cannot host a cluster."""

    exit_code = 3


def find_program(program: str) -> str | None:
    """The path of a program, also of one that only root has on PATH."""
    return shutil.which(program, path=PATH)


def run(
    arguments: Sequence[str | Path],
    *,
    stdin: str = "",
    check: bool = True,
    timeout: float | None = 60,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; raises ClusterError with its output where it fails, unless ``check`` is off."""
    typed = " ".join(map(str, arguments))
    try:
        completed = subprocess.run(
            [str(argument) for argument in arguments],
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout,
            # Not closed are only those that are inheritable: the lock, which outlives this process that way.
            close_fds=False,
            env={"PATH": PATH, "LANG": "C.UTF-8", **(environment or {})},
        )
    except FileNotFoundError:
        raise ClusterError(f"there is no program {arguments[0]} on this machine") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"'{typed}' did not end within {timeout:g} s") from None
    if check and completed.returncode != 0:
        raise ClusterError(f"'{typed}' failed, saying: {last_words(completed) or 'nothing'}")
    return completed


def last_words(completed: subprocess.CompletedProcess[str]) -> str:
    """The end of what a program has printed."""
    return "\n".join((completed.stdout + completed.stderr).strip().splitlines()[-10:])


def start(arguments: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> Daemon:
    """Start a daemon, out of reach of the terminal and of the caller's pipes."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [str(argument) for argument in arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            start_new_session=True,
            env={"PATH": PATH, "LANG": "C.UTF-8", **environment},
        )


def wait_until(lacking: Callable[[], str], timeout: float, watched: Mapping[Path, Daemon] | None = None) -> None:
    """Wait until nothing is lacking any more, but not beyond the end of a daemon; these are given with their logs."""
    deadline = time.monotonic() + timeout
    while missing := lacking():
        for log, daemon in (watched or {}).items():
            if daemon.poll() is not None:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
                raise ClusterError(f"waiting for {missing}: {log.stem} has ended; the end of its log {log}:\n{tail}")
        if time.monotonic() > deadline:
            raise ClusterError(f"waiting for {missing}: not within {timeout:g} s")
        time.sleep(POLL)


def listing(directory: Path) -> Iterator[tuple[int, list[str]]]:
    """Daemons of a cluster, by pid, with their command lines; any user may ask."""
    links = f"{directory}/bin/"
    for pid in _pids():
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:
            continue  # it has ended
        if arguments and arguments[0].startswith(links):
            yield pid, arguments


def inside(namespaces: set[Identity]) -> list[int]:
    """All processes in these network namespaces, and never one of this machine's own."""
    namespaces = namespaces - {namespace_of("self"), namespace_of(1)}
    return [pid for pid in _pids() if namespace_of(pid) in namespaces]


def namespace_of(pid: int | str) -> Identity | None:
    """Which network namespace a process is in; None where it has ended or may not be asked."""
    return identity(Path(f"/proc/{pid}/ns/net"))


def identity(path: Path) -> Identity | None:
    """What identifies a network namespace."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def end_all(find: Callable[[], list[int]], timeout: float = 15) -> int:
    """SIGKILL all that is found until nothing more is; returns how many there were."""
    deadline = time.monotonic() + timeout
    ended: set[int] = set()
    while pids := [pid for pid in find() if pid != os.getpid()]:
        if time.monotonic() > deadline:
            raise ClusterError(f"these processes do not end after SIGKILL: {' '.join(map(str, pids))}")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended.update(pids)
        time.sleep(0.02)
    return len(ended)


def _pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
