"""A shell on a pseudo-terminal, in which commands are typed one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from helpers.terminal import Terminal, on_terminal

# Without readline, whose own way of wrapping a long line leaves copies of characters.
_SHELL = ("bash", "--norc", "--noprofile", "--noediting", "-i")
# What is left of the prompt on a screen without blanks at the ends of its lines.
_PROMPT = "$"


class Shell:
    """The shell."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        terminal.wait_for(self._shows_prompt)

    def call(self, command: str, *answers: tuple[str, str]) -> str:
        """Type a command; returns the screen, from the line on where it is typed to the one before the next prompt.

        Args:
            command: The command.
            answers: What the command asks, and what is typed then.
        """
        # The prompt before the command is no longer there; the next one comes when the command has ended.
        self.terminal.clear()
        self.terminal.press(f"{command}\n")
        for question, answer in answers:
            self.terminal.wait_for(question)
            self.terminal.press(f"{answer}\n")
        screen = self.terminal.wait_for(self._shows_prompt)
        return screen.rstrip().removesuffix(_PROMPT).rstrip("\n")

    @staticmethod
    def _shows_prompt(text: str) -> bool:
        lines = text.rstrip().splitlines()
        return bool(lines) and lines[-1] == _PROMPT


@contextlib.contextmanager
def shell(*, columns: int, lines: int, cwd: Path, env: Mapping[str, str]) -> Iterator[Shell]:
    """A shell, until the end of the context.

    Args:
        columns: How wide its terminal is, in cells.
        lines: How high it is.
        cwd: The current directory.
        env: Added to this environment.
    """
    own = {"PS1": f"{_PROMPT} ", "HISTFILE": ""}
    with on_terminal(columns=columns, lines=lines, cwd=cwd, env={**env, **own}, command=_SHELL) as terminal:
        yield Shell(terminal)
