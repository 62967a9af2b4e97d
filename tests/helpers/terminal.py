"""A program on a real pseudo-terminal, whose screen pyte keeps, with a person who presses keys and waits to see."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyte

PATIENCE_S = 60.0
# What terminals send for keys that are not characters.
KEYS = {"enter": "\r", "escape": "\x1b", "up": "\x1b[A", "down": "\x1b[B", "ctrl+c": "\x03"}


class Terminal:
    """The terminal, and the program on it."""

    def __init__(self, process: subprocess.Popen[bytes], controller: int, columns: int, lines: int) -> None:
        self.process = process
        self.raw = b""
        """All bytes that were written to it."""
        self._controller = controller
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def is_open(self) -> bool:
        """Whether its window has not been closed."""
        return self._controller >= 0

    @property
    def lines(self) -> list[str]:
        """What is on the screen."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def cells(self) -> list[list[pyte.screens.Char]]:
        """The same, cell by cell, with colours."""
        buffer, columns = self._screen.buffer, range(self._screen.columns)
        return [[buffer[line][column] for column in columns] for line in range(self._screen.lines)]

    @property
    def text(self) -> str:
        """The same in one piece."""
        return "\n".join(self.lines)

    def line_with(self, text: str) -> str:
        """Wait until a line contains this text; returns the first that does."""
        self.wait_for(text)
        return next(line for line in self.lines if text in line)

    def press(self, *keys: str) -> None:
        """Press keys, by name or character."""
        for key in keys:
            os.write(self._controller, KEYS.get(key, key).encode())

    def resize(self, columns: int, lines: int) -> None:
        """Change the size of the window."""
        self._screen.resize(lines, columns)
        termios.tcsetwinsize(self._controller, (lines, columns))
        self.process.send_signal(signal.SIGWINCH)

    def clear(self) -> None:
        """Forget what is on the screen."""
        self._screen.reset()

    def close(self) -> None:
        """Close the window."""
        os.close(self._controller)
        self._controller = -1

    def wait_for(self, expected: str | Callable[[str], bool]) -> str:
        """Wait until a text is on the screen, or the screen's text fulfils a condition; returns the screen's text."""
        condition = expected if callable(expected) else lambda text: expected in text
        deadline = time.monotonic() + PATIENCE_S
        while not condition(self.text):
            assert time.monotonic() < deadline, f"not shown: {expected}\n{self.text}"
            assert self._read(), f"ended before this was shown: {expected}\n{self.text}"
        return self.text

    def wait_for_end(self) -> int:
        """Wait until the program has ended; returns its exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read() and time.monotonic() < deadline:
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        """Read what is written within a moment; False if the program has closed the terminal."""
        if select.select([self._controller], [], [], 0.1)[0]:
            try:
                chunk = os.read(self._controller, 1 << 16)
            except OSError:  # EIO: nobody has the terminal open any more
                return False
            self.raw += chunk
            # pyte takes the "less than" of a private sequence, as in the keyboard protocol of kitty, for text.
            self._stream.feed(chunk.replace(b"\x1b[<u", b"").replace(b"\x1b[>", b"\x1b["))
        return True


@contextlib.contextmanager
def on_terminal(
    *arguments: str,
    columns: int = 80,
    lines: int = 24,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    identity: Mapping[str, Any] | None = None,
    command: Sequence[str] = (sys.executable, "-m", "slurmtrain"),
) -> Iterator[Terminal]:
    """Start a command of slurmtrain on a terminal of its own; it is killed at the end if it is still there.

    ``env``: added to this environment, in which nothing speaks of another terminal. ``identity``: its user, as
    arguments of Popen.
    """
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (lines, columns))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    with subprocess.Popen(
        [*command, *arguments],
        stdin=terminal, stdout=terminal, stderr=terminal, cwd=cwd,
        env={**kept, "TERM": "xterm-256color", "LANG": "C.UTF-8", **(env or {})},
        # The terminal becomes its own, as in a window: it is sent SIGHUP when that is closed.
        preexec_fn=_own_terminal,
        **(identity or {}),
    ) as process:  # fmt: skip
        os.close(terminal)
        started = Terminal(process, controller, columns, lines)
        try:
            yield started
        finally:
            process.kill()
            if started.is_open:
                started.close()


def _own_terminal() -> None:
    import fcntl

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
