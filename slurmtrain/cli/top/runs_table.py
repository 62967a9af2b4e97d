"""The table of runs: only what has changed is drawn again, down to the cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from slurmtrain.cli.shared.fit import GAP
from slurmtrain.cli.shared.tables import STATE_STYLES
from slurmtrain.cli.top.rows import COLUMNS, STATE, Row, column_widths, cut

_HEADER = Style(bold=True)
_SELECTED = Style(reverse=True)


class RunsTable(Widget, can_focus=True):
    """A line for each run below a header; one is selected."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("pageup,b", "page(-1)", show=False),
        Binding("home,g", "move_to(0)", show=False),
        Binding("end,G", "move_to(-1)", show=False),
    ]

    class Selected(Message):
        """Another run is selected."""

    def __init__(self, id: str | None = None) -> None:
        """``id``: textual's."""
        super().__init__(id=id)
        self._rows: Sequence[Row] = ()
        self._widths: dict[int, int] = {}
        self._cursor = 0
        self._top = 0

    @property
    def selected(self) -> Row | None:
        """The selected run; None if there are no runs."""
        return self._rows[self._cursor] if self._rows else None

    def show(self, rows: Sequence[Row]) -> None:
        """Show these ``rows``, and draw again what is different. The selected run stays selected while it is there."""
        before, top, cursor, selected = self._rows, self._top, self._cursor, self.selected
        self._rows = rows
        places = {row.id: place for place, row in enumerate(rows)}
        place = places.get(selected.id, cursor) if selected else 0
        self._cursor = max(0, min(place, len(rows) - 1))
        self._follow_cursor()
        widths = column_widths(rows, self.size.width)
        if widths != self._widths or top != self._top or not before:
            self._widths = widths
            self.refresh()
        else:
            for y in self._visible(max(len(before), len(rows))):
                self._refresh_row(y, before, rows)
            self._refresh_lines({cursor, self._cursor} if cursor != self._cursor else set())
        if (self.selected and self.selected.id) != (selected and selected.id):
            self.post_message(self.Selected())

    def _visible(self, count: int) -> range:
        """The places of the rows in sight, out of ``count``."""
        return range(self._top, min(count, self._top + self._room))

    def _refresh_row(self, place: int, before: Sequence[Row], after: Sequence[Row]) -> None:
        """Draw the cells of a row that have changed."""
        old = before[place] if place < len(before) else None
        new = after[place] if place < len(after) else None
        if old is new:
            return
        if old is None or new is None:
            self._refresh_lines({place})
            return
        x = 0
        for index, width in self._widths.items():
            if old.cells[index] != new.cells[index]:
                self.refresh(Region(x, 1 + place - self._top, width, 1))
            x += width + GAP

    def _refresh_lines(self, places: set[int]) -> None:
        for place in places:
            if 0 <= place - self._top < self._room:
                self.refresh(Region(0, 1 + place - self._top, self.size.width, 1))

    @property
    def _room(self) -> int:
        """How many rows fit below the header."""
        return max(1, self.size.height - 1)

    def _follow_cursor(self) -> None:
        """Scroll as little as needed to have the selected run in sight, and no empty lines below the last."""
        self._top = min(self._top, self._cursor, max(0, len(self._rows) - self._room))
        self._top = max(self._top, self._cursor - self._room + 1)

    def action_move(self, by: int) -> None:
        """Select the run that is ``by`` lines below."""
        self._select(self._cursor + by)

    def action_page(self, by: int) -> None:
        """Select the run that is ``by`` pages below."""
        self._select(self._cursor + by * self._room)

    def action_move_to(self, place: int) -> None:
        """Select the run in this ``place``; -1: the last."""
        self._select(place % max(1, len(self._rows)))

    def _select(self, place: int) -> None:
        cursor, top = self._cursor, self._top
        self._cursor = max(0, min(place, len(self._rows) - 1))
        if self._cursor == cursor:
            return
        self._follow_cursor()
        if self._top != top:
            self.refresh()
        else:
            self._refresh_lines({cursor, self._cursor})
        self.post_message(self.Selected())

    def on_resize(self) -> None:
        """Fit the columns to the new size."""
        self._widths = column_widths(self._rows, self.size.width)
        self._follow_cursor()
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        """Select the run that was clicked."""
        if 0 < event.y <= len(self._rows) - self._top:
            self._select(self._top + event.y - 1)

    def on_mouse_scroll_down(self) -> None:
        """Select the next run."""
        self.action_move(1)

    def on_mouse_scroll_up(self) -> None:
        """Select the previous run."""
        self.action_move(-1)

    def render_line(self, y: int) -> Strip:
        """The line at ``y``: the header, a run, or nothing."""
        width, base = self.size.width, self.rich_style
        place = self._top + y - 1
        if y == 0:
            header = "".join(cut(COLUMNS[index].header, wide) + " " * GAP for index, wide in self._widths.items())
            return Strip([Segment(header, base + _HEADER)]).adjust_cell_length(width, base)
        if not 0 <= place < len(self._rows):
            return Strip.blank(width, base)
        style = base + _SELECTED if place == self._cursor else base
        return Strip(list(self._segments(self._rows[place], style))).adjust_cell_length(width, style)

    def _segments(self, row: Row, style: Style) -> Iterator[Segment]:
        for index, wide in self._widths.items():
            colour = STATE_STYLES.get(row.cells[index], "") if index == STATE else ""
            yield Segment(cut(row.cells[index], wide), style + Style.parse(colour) if colour else style)
            yield Segment(" " * GAP, style)
