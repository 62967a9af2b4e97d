"""The page: it draws what other threads have read, and answers keys meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.widgets import Input, Static

from slurmtrain.cli import formatting, output
from slurmtrain.cli.drawing import cut
from slurmtrain.cli.output import printable
from slurmtrain.errors import QueryError
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.top import top_rows
from slurmtrain.plugins.top.reading import (
    CANCEL,
    CHECKPOINT,
    REPORT,
    RESUME,
    Action,
    Actions,
    FollowedRun,
    Follower,
    News,
    Outcome,
    Repeater,
    RunsReader,
    Snapshot,
    report_lines,
)
from slurmtrain.plugins.top.widgets import (
    PAGE_KEYS,
    HelpScreen,
    LinesView,
    LogScreen,
    Prompt,
    QuestionScreen,
    RunsTable,
    TextScreen,
    keys_text,
)

if TYPE_CHECKING:
    from slurmtrain.config import Config

# How often logs are looked at, in seconds.
_LOGS_S = 0.5
# How many lines of the log are read for the pane.
_TAIL_LINES = 200
# Narrower screens have the log below the facts, wider ones beside them.
_WIDE = 120
# Lower screens have no pane, and one line above the table.
_LOWEST = 14
# So many seconds a person who leaves the page waits for each look that is under way.
_PATIENCE_S = 0.5
# What keys do to the table of runs.
_PAGE_ACTIONS = frozenset((
    "help", "logs", "unfold", "show", "cancel", "resume", "checkpoint", "report", "filter", "no_filter", "live_only",
    "order",
))  # fmt: skip


class TopApp(App[int]):
    """``slurmtrain top``."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen, RunsTable, LinesView, Static, Input, Container { background: ansi_default; color: ansi_default; }
    LinesView { scrollbar-size: 1 1; scrollbar-background: ansi_default; scrollbar-color: ansi_bright_black; }
    .keys, .title { height: 1; }
    #summary, #unseen { height: auto; }
    .title { text-style: reverse; }
    #problems { color: ansi_red; height: auto; max-height: 3; display: none; }
    RunsTable { height: 1fr; }
    #pane { layout: vertical; }
    #pane.wide { layout: horizontal; }
    #pane > LinesView { height: 1fr; width: 1fr; scrollbar-size: 0 0; }
    #pane.wide > #facts { margin-right: 2; }
    Prompt { height: 1; border: none; padding: 0; }
    QuestionScreen { align: center middle; background: transparent; }
    .question { width: auto; max-width: 90%; height: auto; max-height: 90%; border: solid ansi_yellow; padding: 0 1; background: ansi_default; }
    .question > Static { width: auto; max-width: 100%; height: auto; }
    Toast { max-width: 90%; padding: 0 1; }
    """  # noqa: E501
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave", show=False),
        Binding("ctrl+c", "leave", show=False, priority=True),
        Binding("l,enter", "logs", show=False),
        Binding("x", "unfold", show=False),
        Binding("s", "show", show=False),
        Binding("c", "cancel", show=False),
        Binding("r", "resume", show=False),
        Binding("p", "checkpoint", show=False),
        Binding("w", "report", show=False),
        # With priority it acts before the next key is looked at, which is the first of the words.
        Binding("slash", "filter", show=False, priority=True),
        Binding("escape", "no_filter", show=False),
        Binding("a", "live_only", show=False),
        Binding("o", "order", show=False),
        Binding("question_mark", "help", show=False),
    ]

    def __init__(self, config: Config, interval_s: float) -> None:
        """``interval_s``: seconds between two looks at all runs."""
        super().__init__(ansi_color=True)
        # The theme with the terminal's own colours, whose name depends on the version of textual.
        self.theme = next(name for name in ("ansi-dark", "textual-ansi") if name in self.available_themes)
        self.animation_level = "none"
        self._config = config
        self._snapshot: Snapshot | None = None
        self._view = top_rows.RunsView()
        self._params = top_rows.Params()
        self._opened: set[str] = set()
        self._mistake = ""
        self._attempts: Sequence[Any] = ()
        self._why = ""
        self._reader = RunsReader(config)
        self._follower = Follower(config, partial(self._later, self._show_news), interval_s)
        self._looks = Repeater(lambda: self._later(self.show_snapshot, self._reader.look()), interval_s)
        self._follows = Repeater(self._follower.look, min(_LOGS_S, interval_s))
        self.actions = Actions(config, partial(self._later, self._show_outcome))

    def _later(self, show: Callable[..., object], *news: Any) -> None:
        """Have the page show something, from any thread; it is lost if the page has been left."""
        if self.is_running:
            self.call_later(show, *news)

    def compose(self) -> ComposeResult:
        """The parts of the page, from top to bottom."""
        yield Static("reading runs ...", id="summary", markup=False)
        yield Static(id="problems", markup=False)
        table = RunsTable()
        table.add_class("main")
        yield table
        yield Static(id="unseen", markup=False)
        yield Static(id="selected", classes="title", markup=False)
        with Container(id="pane"):
            yield LinesView(id="facts")
            yield LinesView(id="log", follows=True)
        yield Prompt(compact=True)
        yield Static(classes="keys")

    def on_mount(self) -> None:
        """Begin to look."""
        self.query_one(Prompt).close()
        for view in self.query(LinesView):
            view.can_focus = False
        self.table.focus()
        self.begin_capture_print(self)
        self._looks.start()
        self._follows.start()

    def on_unmount(self) -> None:
        """Look no more."""
        for repeater in (self._looks, self._follows):
            repeater.stop(_PATIENCE_S)

    def on_print(self, event: events.Print) -> None:
        """Show what an operation prints, such as whom it waits for."""
        if text := printable(event.text.strip()):
            self.notify(text, markup=False)

    @property
    def table(self) -> RunsTable:
        """The table of runs."""
        return self.screen_stack[0].query_one(RunsTable)

    # --- what was read ------------------------------------------------------------------------------------------------

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Draw what has changed since the last ``snapshot``."""
        self._snapshot = snapshot
        self._show_runs()

    def _show_runs(self) -> None:
        snapshot = self._snapshot
        if snapshot is None:
            return
        page = self.screen_stack[0]
        problems = page.query_one("#problems", Static)
        problems.display = bool(snapshot.problems)
        problems.update(Text(printable("; ".join(snapshot.problems))))
        chosen = top_rows.choose(snapshot.rows.values(), self._view)
        page.query_one("#summary", Static).update(self._summary(snapshot, len(chosen)))
        folded = top_rows.arrange(chosen, snapshot.sweeps, self._opened) if self._view.folds else chosen
        shown = self._params.add_to(folded)
        self.table.show(shown)
        # The columns for which the screen is too narrow.
        line, titles = page.query_one("#unseen", Static), self.table.unseen
        line.display = bool(titles) and self.size.height >= _LOWEST
        line.update(f"no room for {', '.join(titles)}")
        self._show_facts()

    def _summary(self, snapshot: Snapshot, shown: int) -> str:
        parts = [top_rows.summary(snapshot.rows.values())]
        if shown != sum(not row.put_away for row in snapshot.rows.values()):
            chosen = ("live" if self._view.live_only else "", printable(self._view.text))
            parts.insert(0, f"{shown} shown: {' '.join(filter(None, chosen))}")
        if self._view.order != top_rows.RunsView().order:
            parts.insert(0, f"by {self._view.order}")
        slurm_age = (
            ""
            if snapshot.slurm_at is None
            else f"Slurm {formatting.duration(max(0.0, time.time() - snapshot.slurm_at))} ago"
        )
        text, width = "  ".join(parts), self.size.width - cell_len(slurm_age) - 2
        # Where it is too long for a line, it goes on below.
        return f"{cut(text, width)}  {slurm_age}" if cell_len(text) <= width else f"{text}  {slurm_age}".rstrip()

    def on_runs_table_selected(self) -> None:
        """Follow another run."""
        self._attempts, self._why = (), ""
        self.screen_stack[0].query_one("#log", LinesView).clear()
        self._show_facts()
        self._follow()

    def on_log_screen_chosen(self) -> None:
        """Follow other logs of the same run."""
        self._follow()

    def _follow(self) -> None:
        """Follow the run whose logs are shown."""
        screen, selected = self.screen, self.table.selected
        if isinstance(screen, LogScreen):
            self._follower.subject = FollowedRun(screen.run_id, screen.LINES, screen.all_ranks)
        else:
            is_run = selected is not None and not selected.is_sweep
            self._follower.subject = FollowedRun(selected.id, _TAIL_LINES) if selected and is_run else None
        self._follows.wake()

    def _show_news(self, news: News) -> None:
        """Show what is new about the run that is followed."""
        screen = self.screen
        if news.subject != self._follower.subject:
            return
        if news.attempts is not None:
            self._attempts, self._why = news.attempts, news.why
            self._show_facts()
        log = screen.view if isinstance(screen, LogScreen) else self.screen_stack[0].query_one("#log", LinesView)
        if news.first:
            log.clear()
        log.append([printable(news.problem)] if news.problem else news.lines)

    def _show_facts(self) -> None:
        page, selected = self.screen_stack[0], self.table.selected
        facts, title = page.query_one("#facts", LinesView), page.query_one("#selected", Static)
        if selected is None:
            facts.clear()
            title.update("")
            return
        title.update(Text(printable(f"{selected.run['name']} {selected.id}"), no_wrap=True, overflow="ellipsis"))
        pairs = top_rows.facts(selected.run, self._attempts, self._why)
        lines = top_rows.fact_lines(pairs, facts.size.width)
        facts.set_lines(f"\x1b[1m{top_rows.label(name)}\x1b[0m{text}" for name, text in lines)

    # --- the screen ---------------------------------------------------------------------------------------------------

    def on_resize(self, event: events.Resize) -> None:
        """Share the screen between the table and the pane."""
        page, (width, height) = self.screen_stack[0], event.size
        pane = page.query_one("#pane", Container)
        pane.display = page.query_one("#selected").display = height >= _LOWEST
        page.query_one("#summary").styles.height = "auto" if pane.display else 1
        pane.styles.height = max(4, height * 2 // 5 if height < 40 else height // 3)
        pane.set_class(width >= _WIDE, "wide")
        page.query_one(".keys", Static).update(keys_text(PAGE_KEYS, width))
        self.call_after_refresh(self._show_runs)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether a key may act: keys of the page only while nothing covers it, and no words are typed.

        Args:
            action: The name of the action.
            parameters: Its parameters.
        """
        if action not in _PAGE_ACTIONS:
            return super().check_action(action, parameters)
        return len(self.screen_stack) == 1 and not isinstance(self.focused, Prompt)

    # --- keys ---------------------------------------------------------------------------------------------------------

    def action_leave(self) -> None:
        """End the page."""
        self.exit(0)

    def action_help(self) -> None:
        """Say what the keys do."""
        self.push_screen(HelpScreen())

    def action_logs(self) -> None:
        """Show the logs of the selected run; of a sweep, its runs."""
        selected = self.table.selected
        if selected and selected.is_sweep:
            self.action_unfold()
        elif selected:
            self.push_screen(LogScreen(selected.id, printable(selected.run["name"])), lambda _: self._follow())
            self.call_after_refresh(self._follow)

    def action_unfold(self) -> None:
        """Show the runs of the selected sweep, or of the selected run's sweep, or fold them again."""
        selected = self.table.selected
        if selected and (sweep := selected.id if selected.is_sweep else selected.run["sweep"]):
            self._opened ^= {sweep}
            self._show_runs()

    def action_show(self) -> None:
        """Show all about the selected run."""
        selected, columns = self.table.selected, self.size.width
        if selected is None or self._is_unfit(selected):
            return

        def read() -> None:
            lines = report_lines(self._config, selected.run, columns)
            title = printable(f"{selected.run['name']} {selected.id}")
            # The screen has to be made in the page's own thread.
            self._later(lambda: self.push_screen(TextScreen(title, lines)))

        threading.Thread(target=read, daemon=True).start()

    def action_cancel(self) -> None:
        """Cancel the selected run, if that is confirmed."""
        self._ask(CANCEL)

    def action_resume(self) -> None:
        """Resume the selected run, if that is confirmed."""
        self._ask(RESUME)

    def action_checkpoint(self) -> None:
        """Have the selected run save."""
        if (selected := self.table.selected) and not self._is_unfit(selected):
            self._start(CHECKPOINT, selected.id)

    def action_report(self) -> None:
        """Write a page about the selected run or sweep."""
        if selected := self.table.selected:
            self._start(REPORT, selected.id)

    def _is_unfit(self, selected: top_rows.Row) -> bool:
        """Whether it is a sweep; says that a run has to be selected."""
        if selected.is_sweep:
            self.notify("that is done to a run: Enter shows the runs of the sweep", markup=False)
        return selected.is_sweep

    def _ask(self, action: Action) -> None:
        selected = self.table.selected
        if selected is None:
            return
        if selected.is_sweep and action.of_sweep:
            action = action.of_sweep

        def answered(confirmed: bool | None) -> None:
            if confirmed:
                self._start(action, selected.id)

        self.push_screen(QuestionScreen(printable(action.ask(selected.run))), answered)

    def _start(self, action: Action, run_id: str) -> None:
        self.notify(self.actions.start(action, run_id), markup=False)

    def _show_outcome(self, outcome: Outcome) -> None:
        """Say what became of an action, and look at once."""
        self.notify(
            printable(outcome.text), severity="information" if outcome.good else "error", timeout=10.0, markup=False
        )
        self._looks.wake()
        self._follows.wake()

    def action_live_only(self) -> None:
        """Show all runs, or only runs that have not ended."""
        self._see(replace(self._view, live_only=not self._view.live_only))

    def action_order(self) -> None:
        """Sort in another way."""
        self._see(self._view.next_order())

    def action_filter(self) -> None:
        """Ask which runs to show."""
        self.query_one(Prompt).ask("words, or a condition such as params.lr < 0.1", self._view.text)

    def action_no_filter(self) -> None:
        """Show all runs again."""
        self._filter("")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while words are typed."""
        if not isinstance(self.screen, TextScreen):
            self._filter(event.value)

    def on_input_submitted(self) -> None:
        """Keep the filter; say what is wrong with it."""
        if isinstance(self.screen, TextScreen):
            return
        if self._mistake:
            self.notify(self._mistake, severity="error", markup=False)
            return
        self.query_one(Prompt).close()
        self.table.focus()

    def _filter(self, text: str) -> None:
        """Show the runs that a filter chooses; the last filter's runs if this one is wrong, or not complete yet."""
        all_rows = list(self._snapshot.rows.values()) if self._snapshot else []
        try:
            view, self._mistake = self._view.filtered(text, all_rows), ""
        except QueryError as error:
            self._mistake = "\n".join(map(printable, str(error).split("\n")))
        else:
            self._see(view)

    def _see(self, view: top_rows.RunsView) -> None:
        self._view = view
        self._show_runs()


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How long the terminal may take to be restored after a signal: one that was closed cannot be written to.
_RESTORED_S = 3.0


def run_top(workspace: Workspace, interval_s: float) -> int:
    """Show the page until it is left; returns the exit code, 128 and the signal's number if a signal ended it.

    Args:
        workspace: The runs.
        interval_s: Seconds between two looks.
    """
    app = TopApp(workspace.config, interval_s)

    async def run_app() -> int | None:
        loop = asyncio.get_running_loop()
        for each in _SIGNALS:
            loop.add_signal_handler(each, _leave, app, 128 + each)
        return await app.run_async()

    code = asyncio.run(run_app())
    if code is None:
        # textual has printed what went wrong.
        return 1
    if code == 0 and app.actions.under_way:
        output.echo(f"still {'; '.join(app.actions.under_way)}; Ctrl-C leaves that to 'slurmtrain sync'", err=True)
        app.actions.wait()
    return code


def _leave(app: TopApp, code: int) -> None:
    """End the page, or at least the process."""
    last = threading.Timer(_RESTORED_S, os._exit, [code])
    last.daemon = True
    last.start()
    app.exit(code)
