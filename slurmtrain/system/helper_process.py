"""A process of our own that gets its orders on standard input, and completes its work once that ends."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterable, Mapping
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
                own_python("-P", "-m", module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if answers else None,
                # What waits for an answer looks at the pipe.
                bufsize=0 if answers else -1,
                env=dict(environ),
            )
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
