"""Commands of slurmtrain in forked children of a process that has imported everything: about 30 ms each, not 500.

The parent must have one thread only, and call :func:`import_everything` first.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import resource
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import slurmtrain

# What no command imports: programs, and callbacks for libraries of users.
_NOT_IMPORTED = ("slurmtrain.integrations", "slurmtrain.__main__", "slurmtrain.runtime.agent.rank_main")
# What commands import while they run.
_IMPORTED_LATE = (
    "mlflow",
    "optuna",
    "submitit",
    "torch",
    "torch.distributed.checkpoint",
    "safetensors.torch",
    "rich.table",
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.summary.writer.record_writer",
)
# A command that prints without end must not fill the memory.
_OUTPUT_BYTES = 4 * 2**20
# Python's exit code if it cannot write what is left in its buffers.
_UNFLUSHED = 120
_KILLER = Path(__file__).with_name("killer") / "sitecustomize.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A command to run.

    ``python``: what the command takes for its interpreter. ``stdout``: where its output goes: ``pipe``, ``full``
    (a device without space) or ``closed``. ``interrupt_s``: after how many seconds it gets a Ctrl-C; None: never.
    ``limit_s``: after how many seconds it is killed. ``kill``: variables of helpers/killer.
    """

    arguments: Sequence[str]
    cwd: Path
    environ: Mapping[str, str]
    python: str = sys.executable
    stdout: str = "pipe"
    umask: int = 0o022
    interrupt_s: float | None = None
    limit_s: float = 10.0
    kill: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[int, int] = field(default_factory=dict)
    """What setrlimit(2) gets."""
    before: str = ""
    """What happens to the working directory once the command is in it: ``removed``, or nothing."""

    def set_limits(self) -> None:
        """Lower the limits of this process."""
        for kind, value in self.limits.items():
            resource.setrlimit(kind, (value, value))


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended. ``code``: negative for a signal. ``hung``: it was killed after ``limit_s``."""

    code: int
    output: bytes
    errors: bytes
    seconds: float
    hung: bool


def import_everything() -> None:
    """Import every module of the package and what commands import while they run."""
    for module in pkgutil.walk_packages(slurmtrain.__path__, "slurmtrain."):
        if not module.name.startswith(_NOT_IMPORTED):
            importlib.import_module(module.name)
    for name in _IMPORTED_LATE:
        importlib.import_module(name)


def run_forked(command: CommandLine) -> Ended:
    """Run a command in a child of this process, and wait for its end."""
    output, errors = os.pipe(), os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(command, output[1], errors[1])
    os.close(output[1])
    os.close(errors[1])
    return collect(child, output[0], errors[0], command, began)


def collect(child: int, output: int, errors: int, command: CommandLine, began: float) -> Ended:
    """Read both pipes until the child has ended; interrupt and kill it when its time is over."""
    handle = os.pidfd_open(child)
    texts: dict[int, bytearray] = {output: bytearray(), errors: bytearray()}
    interrupted, hung = command.interrupt_s is None, False
    with selectors.DefaultSelector() as selector:
        for each in (handle, output, errors):
            selector.register(each, selectors.EVENT_READ)
        while True:
            passed = time.monotonic() - began
            limit = command.limit_s if interrupted else command.interrupt_s or 0.0
            ready = {key.fd for key, _ in selector.select(max(0.0, limit - passed))}
            for pipe in ready & texts.keys():
                _read(pipe, texts[pipe], selector)
            if handle in ready:
                break
            if time.monotonic() - began >= limit:
                hung = interrupted
                signal.pidfd_send_signal(handle, signal.SIGKILL if interrupted else signal.SIGINT)
                interrupted = True
    for pipe, text in texts.items():
        _drain(pipe, text)
        os.close(pipe)
    os.close(handle)
    _, status = os.waitpid(child, 0)
    seconds = time.monotonic() - began
    return Ended(os.waitstatus_to_exitcode(status), bytes(texts[output]), bytes(texts[errors]), seconds, hung)


def _read(pipe: int, text: bytearray, selector: selectors.BaseSelector) -> None:
    piece = os.read(pipe, 65536)
    if not piece:
        selector.unregister(pipe)
    elif len(text) < _OUTPUT_BYTES:
        text += piece


def _drain(pipe: int, text: bytearray) -> None:
    """Read what the command has left in a pipe; a process that it has started may hold its other end open."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(pipe, 65536):
            text += piece


def _become(command: CommandLine, output: int, errors: int) -> NoReturn:
    """In the child: become the command. Never returns."""
    code = 1
    try:
        _enter(command, output, errors)
        code = _call(command.arguments)
    except BaseException:  # noqa: BLE001 (what an interpreter prints at its end)
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


def _enter(command: CommandLine, output: int, errors: int) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(errors, 2)
    if command.stdout == "closed":
        os.close(1)
    else:
        os.dup2(os.open("/dev/full", os.O_WRONLY) if command.stdout == "full" else output, 1)
    os.closerange(3, 256)
    os.umask(command.umask)
    command.set_limits()
    os.chdir(command.cwd)
    if command.before == "removed":
        command.cwd.rmdir()
    os.environ.clear()
    os.environ.update(command.environ)
    time.tzset()
    tempfile.tempdir = None
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.executable = command.python
    sys.argv = ["slurmtrain", *command.arguments]
    sys.stdin = open(0)  # noqa: SIM115 (a descriptor)
    sys.stdout = None if command.stdout == "closed" else open(1, "w", encoding="utf-8")  # type: ignore[assignment]  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
    if command.kill:
        _kill_at_effects(command.kill)


def _call(arguments: Sequence[str]) -> int:
    """What ``slurmtrain ARGUMENTS`` does; returns its exit code."""
    from slurmtrain.cli import main

    try:
        main(list(arguments))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        print(f"Exception ignored in: <stdout>\n{type(error).__name__}: {error}", file=sys.stderr)
        return _UNFLUSHED
    return code & 0xFF


def _kill_at_effects(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    specification = importlib.util.spec_from_file_location("killer", _KILLER)
    assert specification is not None
    assert specification.loader is not None
    killer = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(killer)
    killer.watch_effects()
