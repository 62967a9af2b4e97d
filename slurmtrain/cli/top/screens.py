"""What covers the page for a while: logs, the text of ``show``, help, a question."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, Static

from slurmtrain.cli.top import keys
from slurmtrain.cli.top.lines_view import MOST_LINES, LinesView

_KEY = Style(reverse=True)


def keys_text(of_screen: Sequence[tuple[str, str, str]], width: int) -> Text:
    """The last line of a screen with these keys, ``width`` cells wide."""
    text = Text(no_wrap=True)
    for key, word in keys.line(of_screen, width):
        text.append(key, _KEY).append(f" {word}  ")
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
    KEYS: ClassVar[Sequence[tuple[str, str, str]]] = keys.TEXT_KEYS

    def __init__(self, title: str, lines: Iterable[str] = (), *, follows: bool = False) -> None:
        """``title``: the first line. ``lines``: printable. ``follows``: whether more of them will come."""
        super().__init__()
        self._title = title
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
    KEYS = keys.LOG_KEYS
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
        self.view.set_lines(keys.help_lines(self.size.width - 1))


class QuestionScreen(ModalScreen[bool]):
    """A question that is answered with y or n."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", show=False),
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
