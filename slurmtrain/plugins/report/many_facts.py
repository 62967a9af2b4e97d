"""The facts of the page of many runs: node-hours by day and kind, interruptions by cause, and the runs themselves."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from typing import Any

from slurmtrain.errors import UserError
from slurmtrain.model.query.fields import differing, flattened, names_in
from slurmtrain.model.query.folding import is_folded, swept_texts
from slurmtrain.model.run.costs import interruptions_of
from slurmtrain.model.run.run import Attempt
from slurmtrain.ops.query.select import Question, by_worth, fold_records, select_runs
from slurmtrain.ops.query.spending import sum_up
from slurmtrain.ops.shared.observe import Observed
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.report.node_hours import Calendar, as_hours, node_hours
from slurmtrain.plugins.report.pages import Facts, begin_facts
from slurmtrain.plugins.report.sweep_facts import cost_of_all, run_rows

# Rows of the table, and days of the calendar: more of them would make the page slow to open.
_ROWS, _DAYS = 2000, 750
_SWEEPS, _COLUMNS = 200, 6
_OF_SWEEP = ("id", "name", "states", "best", "errors", "submitted_at")


def many_facts(workspace: Workspace, observed: Observed, question: Question) -> Facts:
    """The facts of the page of many runs.

    Sums are over all of them; of very many, the table has those that may still change and the newest.

    Args:
        workspace: Where the runs are.
        observed: The state of all runs.
        question: Which runs.

    Raises:
        RunNotFound: A name refers to no run.
        QueryError: A condition means nothing.
        UserError: There is no such run.
    """
    records = select_runs(workspace, observed.runs, question).runs
    if not records:
        why, remedy = f"none of {len(observed.runs)} runs matches", "'slurmtrain status --all' lists all"
        if not len(observed.runs):
            why, remedy = f"there are no runs in {workspace.root.path}", "'slurmtrain submit' starts one"
        raise UserError(f"{why}, so there is nothing to report; {remedy}")
    attempts = workspace.store.charged_attempts([record["id"] for record in records])
    calendar, interruptions = Calendar(), _Interruptions()
    for of_run in attempts.values():
        calendar.add(of_run)
        interruptions.add(of_run)
    rows = by_worth(records)[:_ROWS]
    lines = [line for line in fold_records(workspace, records) if is_folded(line)]
    days = calendar.days
    shown = [day for day in sorted(days) if day > max(days) - timedelta(days=_DAYS)] if days else []
    total = node_hours(attempt for of_run in attempts.values() for attempt in of_run)
    used = sum(hours for kind, hours in total.items() if kind != "queue")
    return {
        **begin_facts("many", "runs", _title(question, len(records))),
        "question": _chosen_by(question),
        "total": len(records),
        "states": dict(Counter(record["state"] for record in records)),
        "hours": total,
        "goodput": round(total.get("train", 0.0) / used, 4) if used else None,
        "lost_steps": sum(record["lost_steps"] or 0 for record in records),
        "interruptions": interruptions.to_json(),
        "zone": time.strftime("%Z"),
        "days": [
            {"day": day.isoformat(), "hours": as_hours(days[day].hours), "interruptions": dict(days[day].interruptions)}
            for day in shown
        ],
        "sweeps": [
            {**{name: line[name] for name in _OF_SWEEP if line[name]}, "swept": ", ".join(swept_texts(line))}
            for line in lines[-_SWEEPS:]
        ],
        **run_rows(workspace, rows, attempts, _commonest(rows, "params"), _commonest(rows, "metrics")),
        "cost": cost_of_all(sum_up(workspace, records, attempts)),
        "notes": _left_out(records, rows, lines, days, shown),
    }


class _Interruptions:
    """How often attempts were interrupted, by cause, and how many node-hours of training that cost."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lost: dict[str, float] = defaultdict(float)

    def add(self, attempts: Sequence[Attempt]) -> None:
        """Count the attempts of a run."""
        for attempt in attempts:
            causes = interruptions_of(attempt)
            self.counts.update(causes)
            for cause, count in causes.items():
                # Which of several has lost how much is not known.
                self.lost[cause] += node_hours([attempt]).get("lost", 0.0) * count / causes.total()

    def to_json(self) -> dict[str, Any]:
        """By cause, the most frequent first."""
        return {
            cause: {"count": count, "lost": round(self.lost[cause], 6)} for cause, count in self.counts.most_common()
        }


def _commonest(records: Sequence[Mapping[str, Any]], section: str) -> list[str]:
    """The names in a ``section`` of most runs, such as their params; of params only names that differ."""
    names = (
        names_in(record[section] for record in records)
        if section == "metrics"
        else differing([record[section] for record in records])
    )
    counts = Counter(name for record in records for name, _ in flattened(record[section]))
    return sorted(names, key=lambda name: -counts[name])[:_COLUMNS]


def _chosen_by(question: Question) -> list[str]:
    """What the runs were chosen by."""
    since = [f"submitted since {question.since}"] if question.since else []
    return [*question.names, *since, *question.where]


def _title(question: Question, count: int) -> str:
    runs = "1 run" if count == 1 else f"{count} runs"
    return f"{runs}: {', '.join(_chosen_by(question))}" if _chosen_by(question) else f"All {runs}"


def _left_out(
    records: Sequence[Any], rows: Sequence[Any], lines: Sequence[Any], days: Mapping[date, Any], shown: Sequence[date]
) -> list[str]:
    """What the page does not show, as sentences."""
    notes = []
    if rest := len(records) - len(rows):
        notes.append(
            f"the table has the {len(rows)} runs that may still change or are the newest; {rest} others are in all sums"
        )
    if len(lines) > _SWEEPS:
        notes.append(f"the newest {_SWEEPS} of {len(lines)} sweeps are listed")
    if len(shown) < len(days):
        notes.append(f"the calendar has the {len(shown)} days with runs since {shown[0]}, of {len(days)}")
    return notes
