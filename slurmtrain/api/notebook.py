"""What notebooks show of runs and comparisons: HTML tables without scripts, in the colours of the notebook's theme."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from slurmtrain.model.query.comparison import Spread, count_states
from slurmtrain.model.query.fields import differing, flattened, names_in, write_measured, write_settings, write_value
from slurmtrain.model.query.folding import describe_sweep

if TYPE_CHECKING:
    from slurmtrain.api.run_handle import RunHandle
    from slurmtrain.ops.query.compare import Answer

# A table that is longer or wider than this is read in another way.
_MOST_ROWS = 30
_MOST_COLUMNS = 8
# Of a cell, in characters.
_LONGEST = 200
_LEFT = "text-align: left; vertical-align: top"


class RunList(list["RunHandle"]):
    """Runs in a list; a notebook shows them as a table."""

    def _repr_html_(self) -> str:
        runs = [run.to_dict() for run in self]
        if not runs:
            return "<p>no runs</p>"
        states = [run["state"] for run in runs]
        sweep = runs[0]["sweep"]
        is_sweep = len(runs) > 1 and sweep and all(run["sweep"] == sweep for run in runs)
        params = differing([run["params"] for run in runs])[:_MOST_COLUMNS]
        metrics = names_in(run["metrics"] for run in runs)[:_MOST_COLUMNS]
        rows = [
            [
                *(run[name] for name in ("name", "id", "state")),
                *(write_value(values[name]) if name in values else "" for name in params),
                _progress(run),
                *(_figure(run["metrics"].get(name)) for name in metrics),
                run["reason"],
            ]
            for run, values in ((run, dict(flattened(run["params"]))) for run in runs)
        ]
        caption = (
            describe_sweep(runs, self[0]._objective())
            if is_sweep
            else f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}: {count_states(states)}"
        )
        return html_table(caption, ["name", "id", "state", *params, "progress", *metrics, "reason"], rows)


class RunComparison:
    """Runs side by side, the best first; a notebook shows a table."""

    def __init__(self, answer: Answer) -> None:
        """``answer``: what ``compare`` has found."""
        self._answer = answer

    def __repr__(self) -> str:
        return f"<comparison of {sum(len(group.runs) for group in self._answer.comparison.groups)} runs>"

    def to_dict(self) -> dict[str, Any]:
        """What ``slurmtrain compare --json`` prints."""
        return self._answer.to_json()

    def _repr_html_(self) -> str:
        answer = self._answer
        settings = [name for name in answer.comparison.differs if name not in answer.comparison.over][:_MOST_COLUMNS]
        metrics = answer.metrics[:_MOST_COLUMNS]
        rows = []
        for group in answer.comparison.groups:
            first, ids = group.runs[0], [run.id for run in group.runs]
            values = answer.settings_of(first)
            rows.append(
                [
                    *(first.name, ids[0] if len(ids) == 1 else f"{len(ids)} runs"),
                    count_states([run.state for run in group.runs]) if len(ids) > 1 else first.state,
                    *(write_value(values[name]) if name in values else "" for name in settings),
                    *(_spread(group.spread(name)) for name in metrics),
                ]
            )
        criterion = "" if answer.criterion is None else str(answer.criterion)
        return html_table(criterion, ["name", "id", "state", *settings, *metrics], rows)


def run_table(run: Mapping[str, Any]) -> str:
    """What is known of a run, a line for each fact that there is. ``run``: RUN of the JSON."""
    facts = {
        "state": run["state"],
        "reason": run["reason"],
        "progress": _progress(run),
        "params": write_settings(run["params"], [name for name, _ in flattened(run["params"])]),
        "metrics": " ".join(f"{name}={_figure(value)}" for name, value in run["metrics"].items()),
        "attempt": run["attempt"] or "",
        "job": run["job_id"] or "",
        "nodes": " ".join(run["nodes"]),
        "sweep": run["sweep"] or "",
        "tags": " ".join(run["tags"]),
        "note": run["note"],
    }
    return html_table(f"{run['name']} {run['id']}", [], [[name, text] for name, text in facts.items() if text != ""])


def html_table(caption: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of text, with the first rows alone if there are very many, and their number.

    Args:
        caption: What stands above it; empty: nothing.
        headers: The titles of the columns; empty: the first cell of each row is its title.
        rows: The cells of each row.
    """
    head = f"<thead>{_row(headers, 'th')}</thead>" if headers else ""
    body = "".join(_row(row, "td", first="td" if headers else "th") for row in rows[:_MOST_ROWS])
    more = len(rows) - _MOST_ROWS
    left_out = f"<p>and {more} more</p>" if more > 0 else ""
    return f"<p>{_text(caption)}</p><table>{head}<tbody>{body}</tbody></table>{left_out}"


def _row(cells: Iterable[object], tag: str, first: str = "") -> str:
    """A row of ``cells``, each a ``tag``, the ``first`` one maybe another."""
    tags = (first or tag if index == 0 else tag for index, _ in enumerate(cells))
    drawn = (f'<{each} style="{_LEFT}">{_text(cell)}</{each}>' for each, cell in zip(tags, cells, strict=True))
    return f"<tr>{''.join(drawn)}</tr>"


def _text(cell: object) -> str:
    """A cell as text that HTML does not interpret, cut if it is very long."""
    text = str(cell)
    return escape(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…")


def _progress(run: Mapping[str, Any]) -> str:
    step, total = run["step"], run["total_steps"]
    if step is None:
        return ""
    return f"{step}/{total} ({100 * step // total} %)" if total else str(step)


def _figure(value: Any) -> str:
    return "" if value is None else write_measured(value) if isinstance(value, float) else str(value)


def _spread(spread: Spread | None) -> str:
    """A value, or a mean with its deviation."""
    if spread is None:
        return ""
    deviation = "" if spread.deviation is None else f" ± {write_measured(spread.deviation)}"
    return f"{write_measured(spread.mean)}{deviation}"
