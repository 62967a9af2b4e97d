"""The rows of the page: the text of their cells, which are shown, and their order. Pure."""

from __future__ import annotations

import math
import operator
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from slurmtrain.cli import describe, formatting
from slurmtrain.cli.drawing import cell_width, content_width, cut, fit, whole_ones
from slurmtrain.cli.output import printable
from slurmtrain.cli.tables import LISTS, run_columns
from slurmtrain.model.diagnosis import answers
from slurmtrain.model.hostlist import compress_hostlist
from slurmtrain.model.query.fields import flattened, write_value
from slurmtrain.model.query.folding import Objective, fold_sweep, is_folded, short_keys, states_of, swept_values
from slurmtrain.model.run.job_state import error_first
from slurmtrain.model.run.run import ENDED, RUN_STATES
from slurmtrain.ops.shared.relatives import WAITING

if TYPE_CHECKING:
    from slurmtrain.model.query.conditions import Condition

COLUMNS = run_columns(*LISTS["top"])
_TITLES = [column.title for column in COLUMNS]
STATE = _TITLES.index("STATE")
NAME, PARAMS, _AGE = _TITLES.index("NAME"), _TITLES.index("PARAMS"), _TITLES.index("AGE")
# States that many runs of a sweep may share, as squeue writes them, if it has them.
STATE_CODES = {"unreadable": "UN", "failed": "F", "lost": "LO", "running": "R", "requeued": "RQ", "pending": "PD",
               "created": "CR", "cancelled": "CA", "completed": "CD"}  # fmt: skip
# What conditions have and words have not.
_COMPARISON = re.compile(r"[=<>~]|\sin\s")


@dataclass(frozen=True, slots=True)
class Row:
    """A run, or a sweep, as a line of the table.

    ``run``: RUN of the JSON contract, or what a sweep has of it. ``cells``: of :data:`COLUMNS`, printable. ``widths``:
    theirs on a terminal, 0 for placeholders. ``params``: the parts of the cell of parameters. ``put_away``: whether the
    run is archived or deleted, and shown only to who asks for that. A row is replaced only if its run or a cell has
    changed.
    """

    run: Mapping[str, Any]
    cells: tuple[str, ...]
    widths: tuple[int, ...]
    params: tuple[str, ...] = ()
    put_away: bool = False

    @property
    def id(self) -> str:
        """The id of the run, or of the sweep."""
        return str(self.run["id"])

    @property
    def is_sweep(self) -> bool:
        """Whether it stands for all runs of a sweep."""
        return is_folded(self.run)

    @property
    def ended(self) -> bool:
        """Whether the run has ended, or all of the sweep's."""
        return ENDED.issuperset(states_of(self.run))

    def text(self, index: int, width: int, names: Mapping[str, str]) -> str:
        """The text of a cell in so many cells of the terminal.

        Args:
            index: Of the column.
            width: How wide that is.
            names: Short forms of names that are too long for it.
        """
        text = self.cells[index]
        if index == PARAMS and self.widths[index] > width:
            text = whole_ones(self.params, width)
        return cut(names.get(text, text) if index == NAME else text, width)


def make_row(run: Mapping[str, Any], *, put_away: bool = False) -> Row:
    """The row of a ``run``, now; without its parameters, which :class:`Params` adds. ``put_away``: as in a row."""
    cells = (column.cell({**run, "params": {}}) for column in COLUMNS)
    return _row(run, tuple(map(printable, cells)), put_away=put_away)


def make_sweep_row(line: Mapping[str, Any]) -> Row:
    """The row of a sweep, by what :func:`.fold_sweep` says of it, now."""
    counts = sorted(
        line["states"].items(), key=lambda each: [*STATE_CODES].index(each[0]) if each[0] in STATE_CODES else -1
    )
    completed, all_runs = line["states"].get("completed", 0), sum(line["states"].values())
    cells = {
        **{column.title: printable(column.cell(line)) for column in COLUMNS},
        # Short, so that it is never cut.
        "STATE": " ".join(f"{count}{STATE_CODES.get(state, state)}" for state, count in counts),
        "STEP": f"{completed}/{all_runs}",
        "PROGRESS": formatting.bar(completed, all_runs),
    }
    return _row(line, tuple(cells[title] for title in _TITLES), tuple(cells["PARAMS"].split(", ")))


def fold_rows(
    rows: Sequence[Row], before: Mapping[str, tuple[Sequence[Row], Row]], goals: Mapping[str, Objective | None]
) -> dict[str, tuple[Sequence[Row], Row]]:
    """Of each sweep with several runs: their rows, and its own, which stays the same while these do.

    Args:
        rows: The rows of all runs.
        before: What this returned last time.
        goals: What searches are for.
    """
    of_sweep: dict[str, list[Row]] = {}
    for row in rows:
        if row.run["sweep"] and not row.put_away:
            of_sweep.setdefault(row.run["sweep"], []).append(row)
    folded: dict[str, tuple[Sequence[Row], Row]] = {}
    for sweep, members in of_sweep.items():
        earlier = before.get(sweep)
        if (
            earlier is not None
            and len(earlier[0]) == len(members)
            and not any(map(operator.is_not, earlier[0], members))
        ):
            folded[sweep] = (members, aged(earlier[1]))
        elif len(members) > 1:
            folded[sweep] = (members, make_sweep_row(fold_sweep([row.run for row in members], goals.get(sweep))))
    return folded


def arrange(rows: Sequence[Row], sweeps: Mapping[str, Row], opened: Set[str]) -> list[Row]:
    """Rows with one for each sweep in place of the first of its runs, which stand below it if it is opened.

    Args:
        rows: The chosen rows, in order.
        sweeps: The rows of sweeps, by id.
        opened: The ids of the opened ones.
    """
    arranged: dict[str, list[Row]] = {}
    for row in rows:
        sweep = row.run["sweep"] or ""
        if sweep not in sweeps:
            arranged[row.id] = [row]
            continue
        entry = arranged.setdefault(sweep, [sweeps[sweep]])
        if sweep in opened:
            entry.append(row)
    return [row for entry in arranged.values() for row in entry]


def aged(row: Row) -> Row:
    """The same ``row``, unless the age that it shows is over."""
    age = COLUMNS[_AGE].cell(row.run)
    return row if age == row.cells[_AGE] else _with_cell(row, _AGE, age)


class Params:
    """Adds to rows the parameters that differ among the shown runs; remembers the rows that it has made."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._rows: Sequence[Row] = ()
        self._made: dict[str, tuple[Row, Row]] = {}

    def add_to(self, rows: Sequence[Row]) -> list[Row]:
        """The ``rows`` with their parameters: unchanged rows are the same objects as last time."""
        # By identity: a run that has changed has a new row, and comparing the contents of thousands would take longer.
        if len(rows) != len(self._rows) or any(map(operator.is_not, rows, self._rows)):
            swept = swept_values([row.run["params"] for row in rows if not row.is_sweep])
            # Those with the most values tell runs apart.
            names = sorted(swept, key=lambda name: -len(swept[name]))
            if names != self._names:
                self._names, self._made = names, {}
            self._rows = rows
        before, self._made, short = self._made, {}, short_keys(self._names)
        for row in rows:
            made = before.get(row.id)
            if made is None or made[0] is not row:
                made = row, row
                if not row.is_sweep:
                    flat = dict(flattened(row.run["params"]))
                    named = [(short[name], flat[name]) for name in self._names if name in flat]
                    parts = tuple(printable(f"{name}={write_value(value)}") for name, value in named)
                    text = printable(formatting.params(row.run["params"], self._names)) or "-"
                    made = row, replace(_with_cell(row, PARAMS, text), params=parts)
            self._made[row.id] = made
        return [made for _, made in self._made.values()]


def _with_cell(row: Row, index: int, text: str) -> Row:
    cells = (*row.cells[:index], text, *row.cells[index + 1 :])
    return _row(row.run, cells, row.params, put_away=row.put_away)


def _row(
    run: Mapping[str, Any], cells: tuple[str, ...], params: tuple[str, ...] = (), *, put_away: bool = False
) -> Row:
    return Row(run, cells, tuple(map(cell_width, cells)), params, put_away)


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

    @property
    def folds(self) -> bool:
        """Whether a sweep is one row: not where a filter chooses among its runs."""
        return not self.text.strip()

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
            from slurmtrain.model.query.conditions import check_condition, parse

            condition = parse(text, time.time())
            check_condition(condition, text, [row.run for row in rows])
        return replace(self, text=text, condition=condition)

    def next_order(self) -> RunsView:
        """The same, sorted in the next way."""
        names = list(ORDERS)
        return replace(self, order=names[(names.index(self.order) + 1) % len(names)])


# By name: the key of a row. Rows of equal keys stay as they are: the newest first.
ORDERS: Mapping[str, Callable[[Row], Any]] = {
    "live first": lambda row: row.ended,
    "newest": lambda _: 0,
    "name": lambda row: row.run["name"],
    "state": lambda row: RUN_STATES.index(row.run["state"]) if row.run["state"] in RUN_STATES else len(RUN_STATES),
    # Without a total, a run counts as not begun.
    "progress": lambda row: -(row.run["step"] or 0) / (row.run["total_steps"] or math.inf),
    "ETA": lambda row: (row.run["eta_seconds"] is None, row.run["eta_seconds"]),
}


def choose(rows: Iterable[Row], view: RunsView) -> list[Row]:
    """The ``rows`` that a ``view`` shows, in its order; those put away only if its condition is about that."""

    def text_of(run: Mapping[str, Any]) -> str:
        return " ".join((run["id"], run["name"], run["state"], *run["tags"], run["reason"] or "")).casefold()

    condition = view.condition
    words = [] if condition else view.text.casefold().split()
    about = {each.name for each in condition.comparisons()} if condition is not None else set()
    put_away_too = not about.isdisjoint(("archived", "deleted_at"))
    chosen = [
        row
        for row in rows
        if not ((row.ended and view.live_only) or (row.put_away and not put_away_too))
        and (condition is None or condition.holds(row.run))
        and all(word in text_of(row.run) for word in words)
    ]
    newest_first = sorted(chosen, key=lambda row: row.id, reverse=True)
    return sorted(newest_first, key=ORDERS[view.order])


def column_widths(rows: Sequence[Row], width: int) -> dict[int, int]:
    """The widths of the columns that are shown on a terminal, by index; ``width``: the terminal's, in cells."""
    cells = zip(COLUMNS, *(row.widths for row in rows), strict=True)
    return fit(COLUMNS, [content_width(column, widths) for column, *widths in cells], width)


def summary(rows: Iterable[Row]) -> str:
    """How many runs there are in each state, first the states that may change."""
    counts = Counter(str(row.run["state"]) for row in rows)
    live_first = sorted(
        counts, key=lambda state: (state in ENDED, RUN_STATES.index(state) if state in RUN_STATES else 0)
    )
    return "  ".join(f"{counts[state]} {state}" for state in live_first) or "no runs"


# In cells: the longest name, "checkpoint", and a blank.
_LABEL = 11
_METRICS_SHOWN = 12


def waiting_headline(run: Mapping[str, Any]) -> str:
    """Why a ``run`` waits (RUN of the JSON contract), with what Slurm says now; empty if it does not wait."""
    return answers.waiting(run).headline if run["state"] in WAITING else ""


def facts(run: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]], why: str = "") -> list[tuple[str, str]]:
    """The known facts about a run, by worth: (name, text) each, without empty ones.

    Args:
        run: RUN of the JSON contract.
        attempts: Its ATTEMPTs, oldest first; empty if they are not known yet.
        why: Why it is in its state; empty if that is not known yet.
    """
    if is_folded(run):
        return _sweep_facts(run)
    newest, saved = attempts[-1] if attempts else None, run["checkpoint"]
    reason, why = error_first(run["reason"]), waiting_headline(run) or why
    to_go = f"{formatting.duration(run['eta_seconds'])} to go" if run["eta_seconds"] else ""
    goodput = "" if run["goodput"] is None else f"goodput {100 * run['goodput']:.0f} %"
    lost = f"lost {run['lost_steps']} steps" if run["lost_steps"] else ""
    progress = (formatting.steps(run), formatting.rate(run), to_go, lost, goodput)
    pairs = [
        ("state", run["state"] + (f": {reason}" if reason not in ("", run["state"]) and reason not in why else "")),
        ("why", why),
        ("step", ", ".join(part for part in progress if part not in ("", "-"))),
        ("params", formatting.params(run["params"])),
        ("metrics", formatting.metrics(run, _METRICS_SHOWN)),
        ("checkpoint", f"{formatting.newest_checkpoint(run)}, {formatting.size(saved['bytes'])}" if saved else ""),
        *(("attempt", line) for line in _attempts(attempts)),
        ("nodes", _nodes(newest)),
        ("gpus", _gpus(newest)),
        ("tags", " ".join(run["tags"])),
        ("note", run["note"]),
        ("sweep", run["sweep"] or ""),
        ("job", f"{run['job_id']} ({run['executor']})" if run["job_id"] else ""),
        ("directory", run["dir"]),
    ]
    return [(name, printable(formatting.localized(text))) for name, text in pairs if text not in ("", "-")]


def _sweep_facts(line: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [
        ("runs", f"{sum(line['states'].values())}: {line['state']}; Enter shows them"),
        ("params", formatting.params_of(line)),
        ("errors", formatting.reason(line)),
        ("metrics", formatting.metrics(line)),
    ]
    return [(name, printable(text)) for name, text in pairs if text not in ("", "-")]


def fact_lines(pairs: Sequence[tuple[str, str]], width: int) -> list[tuple[str, str]]:
    """Facts as lines of at most ``width`` cells: (name, text), the name empty on the lines that continue a fact.

    Args:
        pairs: From :func:`facts`.
        width: In cells, names included.
    """
    room = max(10, width - _LABEL)
    return [
        (name if number == 0 else "", part)
        for name, text in pairs
        for number, part in enumerate(wrap(text, room) or [""])
    ]


def label(name: str) -> str:
    """The name of a fact, as wide as all names are."""
    return name.ljust(_LABEL)


def _attempts(attempts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How each attempt ended, the newest first."""
    for attempt in reversed(attempts):
        why = attempt["cause"] or attempt["state"]
        steps = f"steps {attempt['first_step']} to {attempt['last_step']}" if attempt["last_step"] is not None else ""
        lost = f"lost {attempt['lost_steps']}" if attempt["lost_steps"] else ""
        time = describe.describe_time(attempt["seconds"])
        reason = attempt["reason"] if attempt["reason"] != why else ""
        yield f"{attempt['number']} " + "; ".join(filter(None, (why, steps, lost, time, reason)))


def _nodes(attempt: Mapping[str, Any] | None) -> str:
    hosts = [] if attempt is None else attempt["nodes"]
    try:
        return compress_hostlist(hosts)
    except ValueError:
        return ", ".join(hosts)


def _gpus(attempt: Mapping[str, Any] | None) -> str:
    """What the preflight has seen of the GPUs: nothing records how busy they are."""
    by_summary: dict[str, list[str]] = {}
    for host, checks in ({} if attempt is None else attempt["checks"]).items():
        for check in checks:
            if check.get("check") == "gpu":
                by_summary.setdefault(str(check.get("summary")), []).append(host)
    if len(by_summary) == 1:
        return next(iter(by_summary))
    return "; ".join(f"{', '.join(hosts)}: {summary}" for summary, hosts in by_summary.items())
