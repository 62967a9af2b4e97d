"""The facts of a page that compares runs: what ``compare`` prints, how fast they were, and their curves."""

from __future__ import annotations

from pathlib import Path

from slurmtrain.model.query.fields import differing
from slurmtrain.ops.query.compare import Answer
from slurmtrain.ops.query.performance import PerformanceAnswer
from slurmtrain.ops.shared.observe import Observed
from slurmtrain.ops.shared.views import RunRecord
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.report.curve_facts import curve_facts
from slurmtrain.plugins.report.facts import Facts, begin_facts
from slurmtrain.plugins.report.pages import write_page
from slurmtrain.plugins.report.sweep_facts import ranked_metrics, run_rows


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
    """The facts of that page: ``comparison`` is what ``compare --json`` prints, ``performance`` what it has of speed.

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
