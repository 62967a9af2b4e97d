"""The facts of pages that compare runs, of a sweep or chosen ones: how they rank, and their curves together."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.errors import QueryError
from slurmtrain.model.query.comparison import is_seed
from slurmtrain.model.query.fields import differing, flattened, names_in
from slurmtrain.model.query.folding import Objective, fold_sweep
from slurmtrain.model.query.measures import is_larger_better
from slurmtrain.model.run.costs import LOST, NODE_HOURS
from slurmtrain.model.run.run import Attempt
from slurmtrain.ops.query.compare import Answer, Ranking, rank
from slurmtrain.ops.query.performance import PerformanceAnswer
from slurmtrain.ops.query.select import Question, objectives_of, select_runs
from slurmtrain.ops.query.spending import Spending, sum_up
from slurmtrain.ops.query.trials import summarize
from slurmtrain.ops.shared.observe import Observed
from slurmtrain.ops.shared.views import RunRecord
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.report.curve_facts import curve_facts
from slurmtrain.plugins.report.node_hours import node_hours
from slurmtrain.plugins.report.pages import Facts, begin_facts, write_page

_FIELDS = (
    "id", "name", "state", "cause", "reason", "step", "total_steps", "lost_steps", "goodput", "attempt", "submitted_at",
    "started_at", "ended_at", "tags", "note",
)  # fmt: skip
# A row with more metrics could not be read.
_MOST_METRICS = 20


def sweep_facts(workspace: Workspace, observed: Observed, sweep: str) -> Facts:
    """The facts of the page of a sweep.

    Args:
        workspace: Where it is.
        observed: The state of all runs.
        sweep: Its id.
    """
    question = Question(names=(sweep,), for_programs=True)
    records = select_runs(workspace, observed.runs, question).runs
    ids = [str(record["id"]) for record in records]
    goal = objectives_of(workspace, {sweep: ids[0]}).get(sweep)
    line = fold_sweep(records, goal)
    search = next(iter(summarize(workspace, [sweep])), None)
    over = seeds_among(records)
    objective = goal
    if objective is None and line["best"] is not None:
        metric = line["best"]["metric"]
        objective = Objective(metric, bool(is_larger_better(metric)))
    ranking = objective and _rank(
        workspace, observed, Question(names=(sweep,), over=over, for_programs=True), objective
    )
    metrics = ranked_metrics(records, objective and objective.metric)
    loaded = workspace.store.load_all(ids)
    ordered = [str(run["id"]) for run in ranking.runs] if ranking else []
    ordered += [run_id for run_id in ids if run_id not in set(ordered)]
    curves, notes = curve_facts(workspace, [loaded[run_id] for run_id in ordered if run_id in loaded], metrics, over)
    attempts = {run_id: run.attempts for run_id, run in loaded.items()}
    params = differing([record["params"] for record in records])
    by_id = {record["id"]: record for record in records}
    return {
        **begin_facts("sweep", sweep, f"{line['name']}: sweep of {len(records)} runs"),
        "name": line["name"],
        "states": line["states"],
        "swept": line["swept"],
        "errors": line["errors"],
        "best": line["best"],
        "objective": objective and {
            "metric": objective.metric,
            "larger": objective.larger,
            "from": "search" if search else "checkpoint.keep.best" if goal else "name",
        },
        "search": search and search.to_json(),
        "over": [name.removeprefix("params.") for name in over],
        "groups": [group.to_json() for group in ranking.groups] if ranking else [],
        **run_rows(workspace, [by_id[run_id] for run_id in ordered], attempts, params, metrics[:_MOST_METRICS]),
        "curves": curves,
        "notes": [*_doubts_of_best(records, metrics, objective, line), *notes],
    }  # fmt: skip


def write_comparison(
    workspace: Workspace, observed: Observed, answer: Answer, performance: PerformanceAnswer, path: Path
) -> None:
    """Write a page that compares runs.

    Args:
        workspace: Where they are.
        observed: The state of all runs.
        answer: The runs side by side.
        performance: How fast they were.
        path: The file.

    Raises:
        UserError: The file cannot be written.
    """
    write_page(compare_facts(workspace, observed, answer, performance), path)


def compare_facts(workspace: Workspace, observed: Observed, answer: Answer, performance: PerformanceAnswer) -> Facts:
    """The facts of that page: ``comparison`` and ``performance`` are the JSON of ``compare`` and ``--performance``.

    Args:
        workspace: Where the runs are.
        observed: The state of all runs.
        answer: The runs side by side.
        performance: How fast they were.
    """
    comparison = answer.to_json()
    ids = [run["id"] for run in comparison["runs"]]
    records = [RunRecord(workspace, listed) for listed in observed.runs.fetch(ids).values()]
    loaded = workspace.store.load_all(ids)
    attempts = {run_id: run.attempts for run_id, run in loaded.items()}
    params = differing([record["params"] for record in records])
    judged = comparison["by"].removeprefix("metrics.") if comparison["by"] else None
    over = [name for name in comparison["differs"] if name in answer.comparison.over and name.startswith("params.")]
    compared = [name for name in ranked_metrics(records, judged) if name in comparison["metrics"]]
    others = [name for name in ranked_metrics(records, judged) if name not in compared]
    present = [loaded[run_id] for run_id in ids if run_id in loaded]
    curves, notes = curve_facts(workspace, present, [*compared, *others], over)
    names = list(dict.fromkeys(run["name"] for run in comparison["runs"]))
    return {
        **begin_facts("compare", "compare", f"{len(ids)} runs: {', '.join(names[:3])}{', …' * (len(names) > 3)}"),
        "comparison": comparison,
        "over": [name.removeprefix("params.") for name in over],
        "performance": {**performance.to_json(), "notes": performance.notes},
        **run_rows(workspace, records, attempts, params, compared or others[:3]),
        "curves": curves,
        "notes": [*answer.notes, *notes],
    }


def seeds_among(records: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The seeds that differ between runs, with ``params.``."""
    names = (f"params.{name}" for name in differing([record["params"] for record in records]))
    return tuple(name for name in names if is_seed(name))


def ranked_metrics(records: Sequence[Mapping[str, Any]], first: str | None) -> list[str]:
    """The metrics of runs: the ``first``, then metrics whose names say which values are better, then all others."""
    names = names_in(record["metrics"] for record in records)
    return sorted(names, key=lambda name: (name != first, is_larger_better(name) is None))


def run_rows(
    workspace: Workspace,
    records: Sequence[Mapping[str, Any]],
    attempts: Mapping[str, Sequence[Attempt]],
    params: Sequence[str],
    metrics: Sequence[str],
) -> dict[str, Any]:
    """The table of runs: ``params`` and ``metrics``, the names of their columns, ``runs``, and the ``cost`` of all.

    A run has fields of RUN of the JSON, its node-hours by kind as ``hours``, and a part of its ``cost``. Empty fields
    are left out.

    Args:
        workspace: Where they are.
        records: RUN of the JSON of each, in order.
        attempts: Their attempts, by the run's id.
        params: The names of the params to show.
        metrics: The names of the metrics to show.
    """
    spending = sum_up(workspace, records, attempts)
    rows = []
    for record, cost in zip(records, spending.runs, strict=True):
        row = {name: record[name] for name in _FIELDS if name in record}
        flat = dict(flattened(record["params"]))
        row["params"] = {name: flat[name] for name in params if name in flat}
        row["metrics"] = {name: record["metrics"][name] for name in metrics if name in record["metrics"]}
        row["hours"] = node_hours(attempts.get(record["id"], ()))
        # Node-hours are there anyway.
        if cost["spent"] and cost["unit"] != NODE_HOURS:
            row["cost"] = {name: cost[name] for name in ("unit", "spent", LOST)}
        rows.append({name: value for name, value in row.items() if value is not None and value not in ("", [], {})})
    return {"params": list(params), "metrics": list(metrics), "runs": rows, "cost": cost_of_all(spending)}


def cost_of_all(spending: Spending) -> dict[str, Any]:
    """What runs cost: ``total`` of ``cost --json``, with ``unpriced``, and its sums by partition as ``partitions``.

    Args:
        spending: The runs.
    """
    by_partition = [{"partition": name, **cost} for name, cost in spending.groups.get("partition", {}).items()]
    return {**spending.total, "unpriced": [dict(each) for each in spending.unpriced], "partitions": by_partition}


def _rank(workspace: Workspace, observed: Observed, question: Question, objective: Objective) -> Ranking | None:
    """The runs as ``best`` ranks them; None if none of them has a value."""
    with contextlib.suppress(QueryError):
        ranking = rank(workspace, observed.runs, question, objective.metric, objective.larger)
        return ranking if ranking.runs else None
    return None


def _doubts_of_best(
    records: Sequence[Mapping[str, Any]], metrics: Sequence[str], objective: Objective | None, line: Mapping[str, Any]
) -> list[str]:
    """Why there is no best run, or why it may not stay so, as a sentence."""
    completed = line["states"].get("completed", 0)
    if not metrics:
        return ["none of the runs has logged a metric yet, so there is no best run, and there are no curves"]
    if objective is None:
        return ["there is no best run: no metric's name says which values are better, and neither a search nor "
                "'checkpoint.keep.best' names one; 'slurmtrain best' takes --by with --max or --min"]  # fmt: skip
    if line["best"] is None:
        return [f"there is no best run: apart from failed runs, none has logged {objective.metric!r}"]
    if not completed:
        return [f"none of the {len(records)} runs has completed, so the best run is provisional"]
    return []
