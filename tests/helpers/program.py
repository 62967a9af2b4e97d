"""Small programs that a test talks to: it writes lines to them, and they reply."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]


class Program:
    """A running program, in its own process group."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> str:
        """The next line of its output; empty at its end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def proceed(self) -> None:
        """Write a line to it."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def reply(self) -> str:
        """Its reply to a line."""
        self.proceed()
        return self.line()

    def send(self, *numbers: signal.Signals) -> None:
        """Send it a signal, but not the processes that it has started."""
        for number in numbers:
            self.process.send_signal(number)

    def ended(self) -> tuple[int, str]:
        """Its exit code and what it wrote to stderr, once it has ended."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@contextmanager
def program(text: str, file: Path | None = None) -> Iterator[Program]:
    """A program run by this Python. ``file``: where to write it, for a program that restarts itself as a module."""
    if file is not None:
        file.write_text(text)
    process = subprocess.Popen(
        [sys.executable, *(["-c", text] if file is None else [str(file)])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(_PACKAGE), "OMP_NUM_THREADS": "1"},
    )
    try:
        yield Program(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
