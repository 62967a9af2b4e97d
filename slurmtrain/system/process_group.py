"""A command that ends, with everything that it has started, when the process that has started it ends.

A supervisor stands between the two: ``python -m slurmtrain.system.process_group COMMAND...``. It leads the group of all
these processes, and its standard input is a pipe whose other end only the starting process has. However that process
ends, even by SIGKILL, the kernel closes that end, and the supervisor ends the group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

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
            [sys.executable, "-m", "slurmtrain.system.process_group", *command],
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
    threading.Thread(target=_end_with_parent, args=(process,), daemon=True).start()
    process.wait()
    os.killpg(0, signal.SIGKILL)


def _end_with_parent(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of the process at the other end of standard input, and end the group."""
    while os.read(0, 512):
        pass
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _supervise(sys.argv[1:])
