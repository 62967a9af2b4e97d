"""What a terminal shows after a program has written to it."""

from __future__ import annotations

import pyte


def screen(output: str, columns: int, lines: int = 1000) -> list[str]:
    """The lines of a terminal of this size after ``output``, without blanks at their ends and empty lines below."""
    terminal = pyte.Screen(columns, lines)
    pyte.Stream(terminal).feed(output)
    return "\n".join(line.rstrip() for line in terminal.display).rstrip("\n").split("\n")
