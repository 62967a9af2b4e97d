"""The process that calls sbatch, as a fork of this one, which has imported submitit: 20 ms each, not 120."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from slurmtrain.slurm import sbatch_process


class ForkedLauncher:
    """What :mod:`slurmtrain.slurm.slurm_launch` uses of a Popen."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, pass_fds: Sequence[int], **_: object
    ) -> None:
        self.returncode: int | None = None
        order, self._order = os.pipe()
        self._printed, printed = os.pipe()
        self._errors, errors = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _become(command[-1], env, cwd, (order, printed, errors), pass_fds)
        for handle in (order, printed, errors):
            os.close(handle)

    def communicate(self, text: str) -> tuple[str, str]:
        """Hand its order over, and return what it prints until it ends."""
        with os.fdopen(self._order, "w", encoding="utf-8") as order:
            order.write(text)
        with os.fdopen(self._printed, errors="replace") as printed, os.fdopen(self._errors, errors="replace") as errors:
            result = printed.read(), errors.read()
        self._wait()
        return result

    def kill(self) -> None:
        """End it, if it has not replied."""
        if self.returncode is None:
            os.kill(self._pid, signal.SIGKILL)
            for handle in (self._order, self._printed, self._errors):
                os.close(handle)

    def _wait(self) -> None:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def __enter__(self) -> ForkedLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()


def fork_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork launchers from now on, as long as this process has one thread."""

    def start(command: Sequence[str], **options: Any) -> Any:
        return (ForkedLauncher if threading.active_count() == 1 else subprocess.Popen)(command, **options)

    monkeypatch.setattr("slurmtrain.slurm.slurm_launch.subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))


def _become(
    folder: str, env: Mapping[str, str], cwd: Path, streams: Sequence[int], pass_fds: Sequence[int]
) -> NoReturn:
    """In the child: become the launcher. Never returns."""
    code = 1
    try:
        os.setsid()
        for number, handle in enumerate(streams):
            os.dup2(handle, number)
        kept = sorted({2, *pass_fds})
        for first, last in zip(kept, [*kept[1:], 1024], strict=True):
            os.closerange(first + 1, last)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["launcher", folder]
        sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115 (descriptors)
        sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115
        # pytest's own writes to a file that has just been closed.
        sys.stderr = open(2, "w", encoding="utf-8")  # noqa: SIM115
        sbatch_process.call_sbatch()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 (what an interpreter prints at its end)
        os.write(2, traceback.format_exc().encode())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(code)
