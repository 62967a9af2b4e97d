"""Many calls of commands, each in a process of its own, without the cost of starting Python for each.

A server imports the command line once, and forks for each call, whose process then gets standard streams as Python
makes them at its start. The encoding of file names cannot be changed so: that needs a new interpreter.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import math
import os
import pkgutil
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

PATIENCE_S = 60
# prctl(2).
_PR_SET_DUMPABLE = 4


@dataclass(frozen=True)
class Called:
    """How a call ended. ``seconds``: how long it took."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class Preloaded:
    """The client of the server."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def call(
        self,
        *arguments: str,
        cwd: Path,
        env: Mapping[str, str],
        stdout: str = "pipe",
        stderr: str = "pipe",
        encoding: str = "utf-8",
        deleted_cwd: bool = False,
        interrupt_after: str | None = None,
        limit_s: float = PATIENCE_S,
        account: tuple[int, int, int] | None = None,
        umask: int | None = None,
        size: tuple[int, int] | None = None,
    ) -> Called:
        """Call a command.

        Args:
            arguments: Those of the command line.
            cwd: The current directory.
            env: The whole environment.
            stdout: ``pipe``, ``terminal``, ``closed``, or a file to write to. A terminal is that of stderr too.
            stderr: ``pipe``, ``closed``, or a file to write to beside a terminal.
            encoding: That of the streams.
            deleted_cwd: Whether the current directory is one that was deleted.
            interrupt_after: Once this text is in its output, it gets a SIGINT.
            limit_s: After how many seconds it is killed, by SIGALRM.
            account: The numbers of its user, its group and one more group; None: those of the server.
            umask: Its umask; None: the server's.
            size: The lines and columns of its terminal; None: those of the environment.
        """
        order = {"arguments": arguments, "cwd": str(cwd), "env": dict(env), "stdout": stdout, "stderr": stderr,
                 "encoding": encoding, "deleted_cwd": deleted_cwd, "interrupt_after": interrupt_after,
                 "limit_s": limit_s, "account": account, "umask": umask, "size": size}  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Called(**json.loads(self._process.stdout.readline()))

    def end(self) -> None:
        """End the server, if that has not been done."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)


def preloaded(
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
    identity: Mapping[str, Any] | None = None,
    prefix: Sequence[str] = (),
) -> Preloaded:
    """A server, which lasts until it is ended, or this process ends.

    ``python``: its interpreter. ``env``: its whole environment; None: this process's. ``identity``: its user, as
    arguments of Popen. ``prefix``: what starts the interpreter, and the words of that before it.
    """
    # Its user may not be able to read this file.
    command = [*prefix, python, "-c", Path(__file__).read_text()]
    server = Preloaded(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, **(identity or {}))
    )
    atexit.register(server.end)
    return server


@cache
def shared() -> Preloaded:
    """The server for whatever has no need of one of its own."""
    return preloaded()


# --- the server -------------------------------------------------------------------------------------------------------


# Parts of the package that commands import while they run, and modules that take long of those which few tests need.
_IMPORTED_LATE = ("registry", "history", "model", "ops", "local", "specfile", "snapshots")
_RARE = ("slurmtrain.plugins.postgresql",)


def _serve() -> None:
    from importlib import import_module

    import sqlalchemy.dialects.sqlite  # noqa: F401 (a command imports it with its first question)

    for module, _ in import_module("slurmtrain.cli").cli.places.values():
        import_module(module)
    for part in _IMPORTED_LATE:
        package = import_module(f"slurmtrain.{part}")
        for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{package.__name__}."):
            if not module.name.startswith(_RARE):
                import_module(module.name)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    if order["stdout"] == "terminal":
        pid, terminal = pty.fork()
        if pid == 0:
            if order["size"] is not None:
                termios.tcsetwinsize(0, order["size"])
            if order["stderr"] not in ("pipe", "closed"):
                os.dup2(os.open(order["stderr"], os.O_WRONLY), 2)
            _run(order)
        output, errors = _read(pid, terminal, order["interrupt_after"]), b""
        os.close(terminal)
    else:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                _redirect(order, out, err)
                _run(order)
            _, status = _wait(pid)
            output, errors = (_content(file) for file in (out, err))
            return _answered(status, output, errors, began)
    _, status = _wait(pid)
    return _answered(status, output, errors, began)


def _wait(pid: int) -> tuple[int, int]:
    return os.waitpid(pid, 0)


def _answered(status: int, output: bytes, errors: bytes, began: float) -> dict[str, Any]:
    return {
        "code": os.waitstatus_to_exitcode(status),
        "stdout": output.decode(errors="surrogateescape"),
        "stderr": errors.decode(errors="surrogateescape"),
        "seconds": time.monotonic() - began,
    }


def _content(file: BinaryIO | Any) -> bytes:
    file.seek(0)
    content: bytes = file.read()
    return content


def _read(pid: int, terminal: int, interrupt_after: str | None) -> bytes:
    """What is written to a terminal until all processes have closed it."""
    output, deadline = b"", time.monotonic() + PATIENCE_S
    with suppress(OSError):
        while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
            more = os.read(terminal, 1 << 16)
            if not more:
                break
            output += more
            if interrupt_after is not None and interrupt_after.encode() in output:
                os.kill(pid, signal.SIGINT)
                interrupt_after = None
        else:
            os.kill(pid, signal.SIGKILL)
    return output


def _redirect(order: dict[str, Any], out: Any, err: Any) -> None:
    """Give this process the standard streams of a call."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, kind, file in ((1, order["stdout"], out), (2, order["stderr"], err)):
        if kind == "closed":
            os.close(number)
        else:
            os.dup2(file.fileno() if kind == "pipe" else os.open(kind, os.O_WRONLY), number)


def _run(order: dict[str, Any]) -> None:
    """Execute a call in this process, and end it."""
    code = 1
    # A command that never ends fails its own test, instead of all that follow.
    signal.alarm(math.ceil(order["limit_s"]))
    try:
        if order["umask"] is not None:
            os.umask(order["umask"])
        if order["account"] is not None:
            _become(*order["account"])
        os.environ.clear()
        os.environ.update(order["env"])
        time.tzset()
        os.chdir(order["cwd"])
        if order["deleted_cwd"]:
            gone = tempfile.mkdtemp()
            os.chdir(gone)
            shutil.rmtree(gone)
        for number, name in ((1, "stdout"), (2, "stderr")):
            errors = "strict" if number == 1 else "backslashreplace"
            stream = (
                None
                if order.get(name) == "closed"
                else os.fdopen(number, "w", encoding=order["encoding"], errors=errors)
            )
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        from slurmtrain.cli import main

        main(order["arguments"])
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    except BaseException:  # noqa: BLE001 (as Python does)
        import traceback

        traceback.print_exc()
    # As Python does at its exit.
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError:
        code = 120
    os._exit(code)


def _become(user: int, group: int, other_group: int) -> None:
    """Take the identity of an account for good."""
    os.setgroups([other_group])
    os.setgid(group)
    os.setuid(user)
    # A process that has changed its user may not read its own files in /proc: one that was started by that user may.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


if __name__ == "__main__":
    _serve()
