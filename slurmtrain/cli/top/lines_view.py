"""A view of many lines of text, such as a log: only the visible ones are drawn."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

# How many lines are kept: older ones are dropped, so that following a log for days takes no more memory.
MOST_LINES = 10_000
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_MATCH = Style(reverse=True)


class LinesView(ScrollView, can_focus=True):
    """Printable lines, which may have colours (:func:`~slurmtrain.cli.shared.printable.printable_log`)."""

    def __init__(self, *, follows: bool = False, id: str | None = None) -> None:
        """``follows``: whether it begins at its last line, and stays there when lines are added. ``id``: textual's."""
        super().__init__(id=id)
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._widest = 0
        self._starts_at_end = follows
        self.pattern: re.Pattern[str] | None = None
        """What is highlighted."""

    @property
    def lines(self) -> list[str]:
        """All of them."""
        return list(self._lines)

    @property
    def at_end(self) -> bool:
        """Whether the last line is in sight."""
        return self.scroll_offset.y >= len(self._lines) - self._height

    def clear(self) -> None:
        """Drop all lines."""
        self._lines.clear()
        self._widest = 0
        self._resized()
        self.refresh()

    def set_lines(self, lines: Iterable[str]) -> None:
        """Show these ``lines`` instead; unchanged ones are not drawn again."""
        new = list(lines)[-MOST_LINES:]
        before, self._lines = list(self._lines), deque(new, maxlen=MOST_LINES)
        self._widest = max(map(_width, new), default=0)
        self._resized()
        top = self.scroll_offset.y
        for y in range(self._height):
            if before[top + y : top + y + 1] != new[top + y : top + y + 1]:
                self.refresh(Region(0, y, self.size.width, 1))

    def append(self, lines: Iterable[str]) -> None:
        """Add ``lines``, and stay at the end if it was in sight."""
        new = list(lines)
        if not new:
            return
        was_at_end = self.at_end or not self._lines
        self._lines.extend(new)
        self._widest = max(self._widest, *map(_width, new))
        self._resized()
        if was_at_end and self._starts_at_end:
            self.scroll_end(animate=False)
        self.refresh()

    def find(self, text: str, *, forwards: bool = True) -> bool:
        """Go to the next line that contains ``text``, and highlight it; False if there is none.

        ``forwards``: towards the end, from the first visible line; otherwise towards the beginning.
        """
        self.pattern = re.compile(re.escape(text), re.IGNORECASE) if text else None
        self.refresh()
        if self.pattern is None:
            return False
        top, count = self.scroll_offset.y, len(self._lines)
        order = range(1, count + 1) if forwards else range(-1, -count - 1, -1)
        lines = self.lines
        for step in order:
            number = (top + step) % count
            if self.pattern.search(_COLOUR.sub("", lines[number])):
                self.scroll_to(y=number, animate=False)
                return True
        return False

    def render_line(self, y: int) -> Strip:
        """The line at ``y`` below the top of the view."""
        scroll_x, scroll_y = self.scroll_offset
        width = self.size.width
        if not 0 <= scroll_y + y < len(self._lines):
            return Strip.blank(width, self.rich_style)
        text = Text.from_ansi(self._lines[scroll_y + y], end="")
        if self.pattern is not None:
            text.highlight_regex(self.pattern, _MATCH)
        strip = Strip(text.render(self.app.console)).apply_style(self.rich_style)
        return strip.crop_extend(scroll_x, scroll_x + width, self.rich_style)

    @property
    def _height(self) -> int:
        return self.size.height

    def _resized(self) -> None:
        self.virtual_size = Size(self._widest, len(self._lines))


def _width(line: str) -> int:
    return cell_len(_COLOUR.sub("", line))
