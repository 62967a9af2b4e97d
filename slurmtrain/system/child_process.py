"""Processes that end when the process that has started them ends: helpers of our own, and commands with all they start.

Between this process and a command there is a supervisor, ``python -m slurmtrain.system.child_process COMMAND...``. It
leads the group of all these processes, and its standard input is a pipe whose other end only the starting process has.
However that process ends, even by SIGKILL, the kernel closes that end, and the supervisor ends the group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from slurmtrain.system.interpreter import own_python
from slurmtrain.system.process import block_signals


class HelperProcess:
    """A Python process beside this one, which must not wait for its work."""

    def __init__(
        self,
        module: str,
        orders: bytes,
        environ: Mapping[str, str],
        blocked: Iterable[signal.Signals],
        *,
        answers: bool = False,
    ) -> None:
        """Start it.

        Args:
            module: Its program.
            orders: The line that it reads first.
            environ: Its environment.
            blocked: Signals that it begins with blocked, since its last work comes after them.
            answers: Whether somebody reads its output; otherwise, the output goes where the output of this process
                goes.

        Raises:
            OSError: It cannot be started.
        """
        with block_signals(blocked):
            self._process = subprocess.Popen(
                # -P: otherwise modules in the current directory, maybe a run's own, would be imported instead.
                own_python("-P", "-m", module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if answers else None,
                # What waits for an answer looks at the pipe.
                bufsize=0 if answers else -1,
                env=dict(environ),
            )
        # If it has died already, whoever waits for its answers or its end notices that.
        with contextlib.suppress(BrokenPipeError):
            self._input.write(orders)
            self._input.flush()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def answers(self) -> IO[bytes]:
        """Its output, unbuffered."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def end(self, wait_s: float) -> None:
        """Let it complete its work for at most ``wait_s`` seconds."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        self._process.kill()
        self._process.wait()


# --- a command and all that it starts ---------------------------------------------------------------------------------

# What the command has to end by itself before it is killed.
_GRACE_S = 3.0


class ProcessGroup:
    """A command and everything that it starts, for as long as this context and this process last.

    A process that leaves the group, as daemons do, is not ended with it.
    """

    def __init__(self, command: Sequence[str], *, environ: Mapping[str, str], cwd: Path, output: IO[bytes]) -> None:
        """Start ``command`` in ``cwd``, without input.

        ``environ``: its whole environment; ``output``: the file for its output. Raises OSError.
        """
        self._supervisor = subprocess.Popen(
            [sys.executable, "-m", "slurmtrain.system.child_process", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=dict(environ),
            cwd=cwd,
            # In a session of its own: Ctrl-C is meant for the command that the user has typed.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The id of the supervisor, from which all processes of the group descend."""
        return self._supervisor.pid

    @property
    def ended(self) -> bool:
        """Whether the command has ended, and with it the group."""
        return self._supervisor.poll() is not None

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._supervisor.stdin is not None
        with contextlib.suppress(OSError):
            self._supervisor.stdin.close()
        self._supervisor.wait()


def _supervise(command: Sequence[str]) -> None:
    """Run a command until it ends or standard input does, and then kill the group, this process included."""
    # For the signal that this process sends to its own group. A command does not inherit a handler.
    signal.signal(signal.SIGTERM, lambda *_: None)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def end_with_parent() -> None:
        # Until the end of the process at the other end of standard input.
        while os.read(0, 512):
            pass
        os.killpg(0, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    process.wait()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _supervise(sys.argv[1:])
