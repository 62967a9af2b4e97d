"""The rows of the page: the text of their cells, which are shown, and their order. Pure."""

from __future__ import annotations

import operator
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size

from slurmtrain.cli.shared import formatting, times
from slurmtrain.cli.shared.fit import Column, fit
from slurmtrain.cli.shared.printable import printable
from slurmtrain.model.query.differing import differing
from slurmtrain.model.run.run import ENDED, RUN_STATES

if TYPE_CHECKING:
    from slurmtrain.model.query.conditions import Condition

# By worth on a page that is watched: how far runs are, what tells them apart, when they are done.
COLUMNS = (
    Column("ID"),
    Column("NAME", room=20),
    Column("STATE"),
    Column("PARAMS", rank=2, room=14),
    Column("STEP", rank=1),
    Column("PROGRESS", rank=6),
    Column("AGE", rank=5),
    Column("ETA", rank=4),
    Column("RATE", rank=7),
    Column("METRICS", rank=8, room=20),
    Column("REASON", rank=3, room=14),
)
_HEADERS = [column.header for column in COLUMNS]
STATE = _HEADERS.index("STATE")
_PARAMS, _AGE = _HEADERS.index("PARAMS"), _HEADERS.index("AGE")
# Cells that show that there is nothing to show.
_EMPTY = ("", "-")
# What conditions have and words have not.
_COMPARISON = re.compile(r"[=<>~]|\sin\s")
_BAR_CELLS = 8
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True)
class Row:
    """A run as a line of the table.

    ``run``: RUN of the JSON contract. ``cells``: of :data:`COLUMNS`, printable. ``widths``: theirs on a terminal, 0 for
    placeholders. A row is replaced only if its run or a cell has changed.
    """

    run: Mapping[str, Any]
    cells: tuple[str, ...]
    widths: tuple[int, ...]

    @property
    def id(self) -> str:
        """The run's id."""
        return str(self.run["id"])

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return self.run["state"] in ENDED


def make_row(run: Mapping[str, Any]) -> Row:
    """The row of a ``run``, now; :class:`Params` adds its parameters."""
    cells = (
        run["id"],
        run["name"],
        run["state"],
        "-",
        formatting.steps(run),
        bar(run["step"], run["total_steps"]),
        formatting.age(run["submitted_at"]),
        formatting.duration(run["eta_seconds"]),
        formatting.rate(run),
        formatting.metrics(run),
        times.localized(run["reason"] or ""),
    )
    return _row(run, tuple(map(printable, cells)))


def aged(row: Row) -> Row:
    """The same ``row``, unless the age that it shows is over."""
    age = formatting.age(row.run["submitted_at"])
    return row if age == row.cells[_AGE] else _with_cell(row, _AGE, age)


class Params:
    """Adds to rows the parameters that differ among the shown runs; remembers the rows that it has made."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._rows: Sequence[Row] = ()
        self._made: dict[str, tuple[Row, Row]] = {}

    def add_to(self, rows: Sequence[Row]) -> list[Row]:
        """The ``rows`` with their parameters: unchanged rows are the same objects as last time."""
        if len(rows) != len(self._rows) or any(map(operator.is_not, rows, self._rows)):
            names = differing([row.run["params"] for row in rows])
            if names != self._names:
                self._names, self._made = names, {}
            self._rows = rows
        self._made = {row.id: self._made_of(row) for row in rows}
        return [made for _, made in self._made.values()]

    def _made_of(self, row: Row) -> tuple[Row, Row]:
        cached = self._made.get(row.id)
        if cached is not None and cached[0] is row:
            return cached
        text = printable(formatting.params(row.run["params"], self._names)) or "-"
        return row, _with_cell(row, _PARAMS, text)


def _with_cell(row: Row, index: int, text: str) -> Row:
    return _row(row.run, (*row.cells[:index], text, *row.cells[index + 1 :]))


def _row(run: Mapping[str, Any], cells: tuple[str, ...]) -> Row:
    return Row(run, cells, tuple(0 if cell in _EMPTY else cell_len(cell) for cell in cells))


def bar(step: int | None, total: int | None) -> str:
    """How much of ``total`` steps is done, drawn to an eighth of a cell; empty if that is unknown."""
    if step is None or not total:
        return ""
    eighths = round(max(0.0, min(1.0, step / total)) * _BAR_CELLS * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(_BAR_CELLS, "·")


@dataclass(frozen=True, slots=True)
class RunsView:
    """What a person has chosen to see.

    ``text``: words that rows must contain or, if there is a ``condition``, what states it. ``order``: a key of
    :data:`ORDERS`.
    """

    text: str = ""
    live_only: bool = False
    order: str = "live first"
    condition: Condition | None = None

    def filtered(self, text: str, rows: Sequence[Row]) -> RunsView:
        """The same with another filter: words, or a condition such as ``params.lr < 0.1 and state = failed``.

        Args:
            text: The filter.
            rows: All rows, to check that a condition is about fields that there are.

        Raises:
            QueryError: It is a condition, and a wrong one.
        """
        condition = None
        if _COMPARISON.search(text):
            from slurmtrain.model.query.mistakes import check_condition
            from slurmtrain.model.query.where import parse

            condition = parse(text, time.time())
            check_condition(condition, text, [row.run for row in rows])
        return replace(self, text=text, condition=condition)

    def next_order(self) -> RunsView:
        """The same, sorted in the next way."""
        names = list(ORDERS)
        return replace(self, order=names[(names.index(self.order) + 1) % len(names)])


def _none_last(value: float | None, *, descending: bool = False) -> tuple[bool, float]:
    return (value is None, 0.0 if value is None else -value if descending else value)


def _progress(row: Row) -> float | None:
    step, total = row.run["step"], row.run["total_steps"]
    return step / total if step is not None and total else None


# By name: the key of a row. Rows of equal keys stay as they are: the newest first.
ORDERS: Mapping[str, Callable[[Row], Any]] = {
    "live first": lambda row: row.ended,
    "newest": lambda _: 0,
    "name": lambda row: row.run["name"],
    "state": lambda row: RUN_STATES.index(row.run["state"]) if row.run["state"] in RUN_STATES else len(RUN_STATES),
    "progress": lambda row: _none_last(_progress(row), descending=True),
    "ETA": lambda row: _none_last(row.run["eta_seconds"]),
}


def choose(rows: Iterable[Row], view: RunsView) -> list[Row]:
    """The ``rows`` that a ``view`` shows, in its order; archived runs only if its condition is about that."""
    condition = view.condition
    words = [] if condition else view.text.casefold().split()
    archived_too = condition is not None and any(each.name == "archived" for each in condition.comparisons())
    chosen = [
        row
        for row in rows
        if not (row.ended and (view.live_only or (row.run["archived"] and not archived_too)))
        and (condition is None or condition.holds(row.run))
        and _contains(row, words)
    ]
    newest_first = sorted(chosen, key=lambda row: row.id, reverse=True)
    return sorted(newest_first, key=ORDERS[view.order])


def _contains(row: Row, words: Sequence[str]) -> bool:
    """Whether each of these words is in the row's id, name, state, tags or reason."""
    if not words:
        return True
    run = row.run
    text = " ".join((run["id"], run["name"], run["state"], *run["tags"], run["reason"] or "")).casefold()
    return all(word in text for word in words)


def column_widths(rows: Sequence[Row], width: int) -> dict[int, int]:
    """The widths of the columns that are shown on a terminal, by index; ``width``: the terminal's, in cells."""
    content = [max(column, default=0) for column in zip(*(row.widths for row in rows), strict=True)]
    content = content or [cell_len(column.header) if not column.rank else 0 for column in COLUMNS]
    headers = [cell_len(column.header) for column in COLUMNS]
    return fit(
        COLUMNS, [max(wide, header) if wide else 0 for wide, header in zip(content, headers, strict=True)], width
    )


def cut(text: str, width: int) -> str:
    """A cell's ``text``, ``width`` cells wide: filled with blanks, or ended with an ellipsis."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, max(0, width - 1)) + "…"


def summary(rows: Iterable[Row]) -> str:
    """How many runs there are in each state, first the states that may change."""
    counts = Counter(str(row.run["state"]) for row in rows)
    live_first = sorted(
        counts, key=lambda state: (state in ENDED, RUN_STATES.index(state) if state in RUN_STATES else 0)
    )
    return "  ".join(f"{counts[state]} {state}" for state in live_first) or "no runs"
