"""The parts of the page: its keys, lines of text, the table of runs, and screens that cover them for a while."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Region, Size
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input, Static

from slurmtrain.cli.drawing import GAP, STATE_STYLES, cut, shorten_names
from slurmtrain.plugins.top.top_rows import COLUMNS, NAME, STATE, Row, column_widths

_REVERSE = Style(reverse=True)
# By worth: (key, word in the last line, its effect).
PAGE_KEYS = (
    ("?", "help", "this help"),
    ("q", "quit", "leave; runs continue"),
    ("l", "logs", "logs of the run on the whole screen, also Enter; of a sweep, show its runs, or fold them again"),
    ("c", "cancel", "cancel the run: it saves and ends (asks)"),
    (
        "/",
        "filter",
        "show only runs with these words in id, name, state, tags or reason, or that meet a condition such as "
        "params.lr < 0.1 and state = failed; Esc shows all again",
    ),
    ("s", "show", "all about the run, as 'slurmtrain show'"),
    ("r", "resume", "start the run again from its newest checkpoint (asks)"),
    ("p", "save", "ask the run to save now, as 'slurmtrain checkpoint'"),
    ("w", "page", "write a page about the run or the sweep, as 'slurmtrain report'"),
    ("a", "all/live", "show all runs, or only those that have not ended"),
    ("x", "unfold", "show the runs of the sweep, or fold them again, also from one of its runs"),
    ("o", "sort", "sort in the next way: live first, newest, name, state, progress, ETA"),
    ("j k", "move", "next and previous run, also arrows; g and G: first and last; Space and b: a page"),
)
LOG_KEYS = (
    ("q", "back", "back to the runs, also Esc"),
    ("/", "search", "search; n and N: next and previous match"),
    ("n", "next", ""),
    ("t", "rank 0/all", "logs of rank 0, or of all ranks"),
    ("f", "follow", "go to the end, and stay there, also G"),
)
TEXT_KEYS = (("q", "back", "back to the runs, also Esc"), ("/", "search", "search; n and N: next and previous match"))


def key_words(keys: Sequence[tuple[str, str, str]], width: int) -> list[tuple[str, str]]:
    """The keys that fit on a line, by worth: (key, word) each.

    Args:
        keys: Such as :data:`PAGE_KEYS`.
        width: How wide the screen is, in cells.
    """
    fitting: list[tuple[str, str]] = []
    for key, word, _ in keys:
        width -= cell_len(key) + cell_len(word) + 3
        if width < -2:
            break
        fitting.append((key, word))
    return fitting


def help_lines(width: int) -> list[str]:
    """What all keys do, on lines of at most ``width`` cells."""
    about = [(key, text) for key, _, text in PAGE_KEYS]
    logs = [(key, text) for key, _, text in LOG_KEYS if text]
    end = "Leaving this page does not change any run. 'slurmtrain COMMAND --help' says what each action does."
    lines = [f"{key:<5} {text}" for key, text in about]
    lines += ["", "In logs:", *(f"{key:<5} {text}" for key, text in logs), "", end]
    return [part for line in lines for part in wrap(line, max(20, width), subsequent_indent=" " * 6) or [""]]


# How many lines are kept: older ones are dropped, so that following a log for days takes no more memory.
MOST_LINES = 10_000
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


class LinesView(ScrollView, can_focus=True):
    """Printable lines, which may have colours (:func:`~slurmtrain.cli.output.printable_log`)."""

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
        return self.scroll_offset.y >= len(self._lines) - self.size.height

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
        self._widest = max(map(_line_width, new), default=0)
        self._resized()
        top = self.scroll_offset.y
        for y in range(self.size.height):
            if before[top + y : top + y + 1] != new[top + y : top + y + 1]:
                self.refresh(Region(0, y, self.size.width, 1))

    def append(self, lines: Iterable[str]) -> None:
        """Add ``lines``, and stay at the end if it was in sight."""
        new = list(lines)
        if not new:
            return
        was_at_end = self.at_end or not self._lines
        self._lines.extend(new)
        # Lines that have been dropped still count: to find the widest of the others, all would be measured again.
        self._widest = max(self._widest, *map(_line_width, new))
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
            # Without colours, which may change in the middle of a word.
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
            text.highlight_regex(self.pattern, _REVERSE)
        strip = Strip(text.render(self.app.console)).apply_style(self.rich_style)
        return strip.crop_extend(scroll_x, scroll_x + width, self.rich_style)

    def _resized(self) -> None:
        self.virtual_size = Size(self._widest, len(self._lines))


def _line_width(line: str) -> int:
    return cell_len(_COLOUR.sub("", line))


_HEADER = Style(bold=True)


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
        # Short forms of the names that are too long.
        self._names: dict[str, str] = {}
        self._cursor = 0
        self._top = 0

    @property
    def selected(self) -> Row | None:
        """The selected run; None if there are no runs."""
        return self._rows[self._cursor] if self._rows else None

    @property
    def unseen(self) -> list[str]:
        """The titles of the columns that have something to show, and no room."""
        widest = [max(widths) for widths in zip(*(row.widths for row in self._rows), strict=True)]
        return [COLUMNS[index].title for index, wide in enumerate(widest) if wide and index not in self._widths]

    def show(self, rows: Sequence[Row]) -> None:
        """Show these ``rows``, and draw again what is different. The selected run stays selected while it is there."""
        before, top, cursor, selected = self._rows, self._top, self._cursor, self.selected
        self._rows = rows
        places = {row.id: place for place, row in enumerate(rows)}
        place = places.get(selected.id, cursor) if selected else 0
        self._cursor = max(0, min(place, len(rows) - 1))
        self._follow_cursor()
        if self._fit() or top != self._top or not before:
            self.refresh()
        else:
            for place in range(self._top, min(max(len(before), len(rows)), self._top + self._room)):
                old = before[place] if place < len(before) else None
                new = rows[place] if place < len(rows) else None
                if old is None or new is None:
                    self._refresh_lines({place})
                    continue
                # Only the cells that have changed are drawn.
                x = 0
                for index, width in self._widths.items():
                    if old is not new and old.cells[index] != new.cells[index]:
                        self.refresh(Region(x, 1 + place - self._top, width, 1))
                    x += width + GAP
            self._refresh_lines({cursor, self._cursor} if cursor != self._cursor else set())
        # By id: a new row of the same run must not have the page read its logs from the beginning.
        if (self.selected and self.selected.id) != (selected and selected.id):
            self.post_message(self.Selected())

    def _fit(self) -> bool:
        """Fit columns to the screen, and names to their column; returns whether anything is drawn in another way."""
        widths = column_widths(self._rows, self.size.width)
        long = list(dict.fromkeys(row.cells[NAME] for row in self._rows if row.widths[NAME] > widths.get(NAME, 0)))
        names = dict(zip(long, shorten_names(long, widths.get(NAME, 0)), strict=True))
        before, self._widths, self._names = (self._widths, self._names), widths, names
        return before != (widths, names)

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
        self._fit()
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
            header = "".join(cut(COLUMNS[index].title, wide) + " " * GAP for index, wide in self._widths.items())
            return Strip([Segment(header, base + _HEADER)]).adjust_cell_length(width, base)
        if not 0 <= place < len(self._rows):
            return Strip.blank(width, base)
        style = base + _REVERSE if place == self._cursor else base
        row, segments = self._rows[place], []
        for index, wide in self._widths.items():
            colour = STATE_STYLES.get(row.cells[index], "") if index == STATE else ""
            text = row.text(index, wide, self._names)
            segments.append(Segment(text, style + Style.parse(colour) if colour else style))
            segments.append(Segment(" " * GAP, style))
        return Strip(segments).adjust_cell_length(width, style)


def keys_text(of_screen: Sequence[tuple[str, str, str]], width: int) -> Text:
    """The last line of a screen with these keys, ``width`` cells wide."""
    text = Text(no_wrap=True)
    for key, word in key_words(of_screen, width):
        text.append(key, _REVERSE).append(f" {word}  ")
    return text


class Prompt(Input):
    """A line to type words in; it is there only while they are typed."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", show=False)]

    def ask(self, about: str, value: str = "") -> None:
        """Open it. ``about``: what is typed; ``value``: what is there already."""
        self.placeholder, self.value, self.display = about, value, True
        # At once: the next key may be there already.
        self.screen.set_focus(self)

    def close(self) -> None:
        """Hide it."""
        self.display = False

    def action_leave(self) -> None:
        """Close it, and forget what was typed."""
        self.value = ""
        self.close()
        self.screen.query_one(".main").focus()


class TextScreen(Screen[None]):
    """Text on the whole screen, which can be searched."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "close", show=False),
        Binding("slash", "search", show=False, priority=True),
        Binding("n", "next(True)", show=False),
        Binding("N", "next(False)", show=False),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
        Binding("g", "ends(True)", show=False),
        Binding("G,f", "ends(False)", show=False),
        Binding("space", "page", show=False),
    ]
    KEYS: ClassVar[Sequence[tuple[str, str, str]]] = TEXT_KEYS

    def __init__(self, title: str, lines: Iterable[str] = (), *, follows: bool = False) -> None:
        """``title``: the first line. ``lines``: printable. ``follows``: whether more of them will come."""
        super().__init__()
        self._title = title
        # Kept until the screen is mounted: before that, there is no view to add them to.
        self._first = list(lines)
        self._follows = follows

    def compose(self) -> ComposeResult:
        """The title, the text, a prompt and the keys."""
        yield Static(Text(self._title, no_wrap=True, overflow="ellipsis"), classes="title")
        view = LinesView(follows=self._follows)
        view.add_class("main")
        yield view
        yield Prompt(compact=True)
        yield Static(classes="keys")

    def on_mount(self) -> None:
        """Show the lines there are."""
        self.query_one(Prompt).close()
        self.view.append(self._first)
        self.view.focus()

    def on_resize(self) -> None:
        """Fit the keys to the width."""
        self.query_one(".keys", Static).update(keys_text(self.KEYS, self.size.width))

    @property
    def view(self) -> LinesView:
        """What shows the lines."""
        return self.query_one(LinesView)

    def retitle(self, title: str) -> None:
        """Change the first line."""
        self.query_one(".title", Static).update(Text(title, no_wrap=True, overflow="ellipsis"))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether a key may act: a slash may be among the words that are typed.

        Args:
            action: The name of the action.
            parameters: Its parameters.
        """
        if action == "search":
            return not isinstance(self.focused, Prompt)
        return super().check_action(action, parameters)

    def action_close(self) -> None:
        """Back to the page."""
        self.dismiss()

    def action_search(self) -> None:
        """Ask what to search for."""
        self.query_one(Prompt).ask("search")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Search for what was typed."""
        self.query_one(Prompt).close()
        self.view.focus()
        if event.value and not self.view.find(event.value):
            self.notify(f"no line contains {event.value!r}", markup=False)

    def action_next(self, forwards: bool) -> None:
        """Go to another match."""
        self.view.find(self.query_one(Prompt).value, forwards=forwards)

    def action_scroll(self, by: int) -> None:
        """Scroll by lines."""
        self.view.scroll_relative(y=by, animate=False)

    def action_page(self) -> None:
        """Scroll by a page."""
        self.view.scroll_page_down(animate=False)

    def action_ends(self, first: bool) -> None:
        """Go to the first line, or to the last."""
        if first:
            self.view.scroll_home(animate=False)
        else:
            self.view.scroll_end(animate=False)


class LogScreen(TextScreen):
    """The logs of a run, as they grow."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("t", "all_ranks", show=False)]
    KEYS = LOG_KEYS
    LINES = MOST_LINES
    """How many lines of each log are read at first."""

    class Chosen(Message):
        """Which logs to show was chosen."""

    def __init__(self, run_id: str, name: str) -> None:
        """``run_id``, ``name``: the run's; the name is printable."""
        super().__init__(f"logs of {name} {run_id}", follows=True)
        self.run_id = run_id
        self.all_ranks = False

    def action_all_ranks(self) -> None:
        """Read the logs of all ranks, or of rank 0 only."""
        self.all_ranks = not self.all_ranks
        self.post_message(self.Chosen())


class HelpScreen(TextScreen):
    """What the keys do."""

    def __init__(self) -> None:
        super().__init__("keys")

    def on_resize(self) -> None:
        """Fit the text to the width."""
        # The last cell is the scroll bar's.
        self.view.set_lines(help_lines(self.size.width - 1))


class QuestionScreen(ModalScreen[bool]):
    """A question that is answered with y or n."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", show=False),
        # Enter opens logs on the page: pressed once too often, it must not cancel a run.
        Binding("n,escape,q,enter", "answer(False)", show=False),
    ]

    def __init__(self, question: str) -> None:
        """``question``: printable."""
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """The question, and how to answer it."""
        with Vertical(classes="question"):
            yield Static(Text(self._question))
            yield Static(Text("y yes   n no"))

    def action_answer(self, answer: bool) -> None:
        """Close with an answer."""
        self.dismiss(answer)
