"""The facts of a run's page: RUN of ``show --json``, and what its files show besides, thinned to what can be seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurmtrain.cli import describe, formatting
from slurmtrain.cli.status_commands import attempt_facts, attempt_problems
from slurmtrain.errors import PathError
from slurmtrain.history import read_history, read_rows
from slurmtrain.model.metrics.chart import rollbacks, thinned
from slurmtrain.model.metrics.curves import Points
from slurmtrain.model.metrics.step_times import FinishedStep, distribution_of, step_times
from slurmtrain.model.preflight.election import why_elected
from slurmtrain.model.query.fields import iso
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Run
from slurmtrain.model.run.timeline import Timelines, goodput_over_time, legible, rows_of_nodes
from slurmtrain.model.urls import redact
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.run_details import checkpoints_json
from slurmtrain.ops.shared.run_measures import steps_are_read
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.why import explain, shown_json
from slurmtrain.plugins.report.pages import Facts, begin_facts
from slurmtrain.system.owned_files import read_checked

# A page has to stay small, and no screen shows more: rows of nodes, intervals of a timeline, points of all curves
# together without what was rolled back, columns of points in other charts, curves, checkpoints, nodes in a table,
# restarts and the like, and the slowest steps.
_ROWS = 24
_INTERVALS = 1500
_POINTS = 24_000
_COLUMNS = 400
_METRICS = 100
_CHECKPOINTS = 500
_NODES = 500
_MOMENTS = 200
_SLOWEST = 8
_BARS = 40
# What a page has of an attempt. The rest is of each node, a megabyte for hundreds of them, and stands there in words.
_OF_ATTEMPT = (
    "number", "job_id", "restart", "state", "cause", "reason", "nodes", "partition", "submitted_at", "started_at",
    "ended_at", "first_step", "last_step", "lost_steps", "seconds", "environment_changes",
)  # fmt: skip
# What says little beside the rest of a page: it has the same in other words.
_IN_COLUMNS = ("reason", "nodes", "from", "steps", "time", "lost")


def run_facts(workspace: Workspace, observed: Observed, run_id: str) -> Facts:
    """The facts of a run's page.

    Args:
        workspace: Where the run is.
        observed: The state of all runs.
        run_id: The run.

    Raises:
        RunNotFound: Its directory was deleted meanwhile.
    """
    # As 'show' does: also what a command that lists runs need not look at.
    observed = observe(workspace, [run_id], thorough=True)
    explanation = explain(workspace, observed.runs, run_id, ask=False)
    shown = shown_json(workspace, observed.runs, run_id, explanation)
    run = workspace.store.load(run_id)
    assert run is not None
    directory = workspace.root.run(run_id)
    lines = workspace.store.timelines(run_id)
    attempts = [{name: attempt[name] for name in _OF_ATTEMPT} for attempt in shown["attempts"]]
    problems: list[str] = []
    return {
        **begin_facts("run", run_id, f"{shown['name']} ({run_id})"),
        "run": {name: value for name, value in shown.items() if name != "checkpoints"} | {"attempts": attempts},
        "checkpoints": _checkpoint_facts(workspace, run),
        "timeline": _timeline_facts(run, lines),
        "curves": _curve_facts(run, directory, problems),
        "steps": _step_facts(run, directory, lines, problems),
        "why": {"details": list(explanation.details), "advice": list(explanation.advice)},
        "words": _in_words(shown),
        "spec": _spec_text(directory),
        "problems": problems,
    }


def _timeline_facts(run: Run, lines: Timelines) -> Facts:
    """What the time of each attempt was spent on, which nodes it had when, and the goodput so far."""
    ends = [interval.end for line in lines.values() for interval in line]
    begins = [interval.begin for line in lines.values() for interval in line]
    shortest_s = (max(ends) - min(begins)) / _INTERVALS if ends else 0.0
    is_long = sum(map(len, lines.values())) > _INTERVALS
    drawn = {
        attempt.number: legible(lines.get(attempt.key, ()), shortest_s if is_long else 0.0)
        for attempt in run.attempts
    }  # fmt: skip
    goodput = goodput_over_time(run.attempts, lines)
    places = thinned([at for at, _ in goodput], [share for _, share in goodput], _COLUMNS)
    return {
        "attempts": [
            {"number": number, "intervals": [[kind, round(begin, 3), round(end, 3)] for kind, begin, end in line]}
            for number, line in drawn.items()
        ],
        "shortest_s": shortest_s if is_long else None,
        "rows": [
            {"label": row.label, "hosts": len(row.hosts), "presences": [list(each) for each in row.presences]}
            for row in rows_of_nodes(run.attempts, lines, _ROWS)
        ],
        "goodput": [[round(goodput[place][0], 3), goodput[place][1]] for place in places],
    }


def _curve_facts(run: Run, directory: RunDir, problems: list[str]) -> Facts:
    """The curves of metrics; ``problems`` receives why there are none, or not all."""
    try:
        history = read_history(run, directory, keep_superseded=True)
    except PathError as error:
        problems.append(f"the metrics cannot be read: {error}")
        return {"metrics": [], "left_out": []}
    problems += history.problems
    names = [name for name in history.curves if not name.startswith("system/")]
    chosen = names[:_METRICS]
    columns = max(20, min(_COLUMNS, _POINTS // (4 * max(1, len(chosen)))))
    since = run.started_at or 0.0
    metrics = []
    for name in chosen:
        kept, replayed = history.curves[name].kept, list(rollbacks(history.curves[name]))
        # All parts together have half as much room as the curve.
        each = max(2, columns // (2 * max(1, len(replayed))))
        parts = [_drawn_points(part, each, since) for part in replayed[-columns:]]
        metrics.append({"name": name, "kept": _drawn_points(kept, columns, since), "replayed": parts})
    return {"since": since, "metrics": metrics, "left_out": names[_METRICS:]}


def _drawn_points(points: Points, columns: int, since: float) -> Facts:
    """The points that are drawn; times in seconds ``since`` then, and values with as many figures as can be told."""
    places = thinned(points.steps, points.values, columns)
    return {
        "step": [points.steps[place] for place in places],
        "time": [round(points.times[place] - since, 2) for place in places],
        "value": [float(f"{points.values[place]:.6g}") for place in places],
    }


def _step_facts(run: Run, directory: RunDir, lines: Timelines, problems: list[str]) -> Facts | None:
    """How long steps took; None if that is not known."""
    try:
        if steps_are_read(directory):
            return None
        rows = read_rows(run, directory)
    except PathError as error:
        problems.append(f"the times of steps cannot be read: {error}")
        return None
    restarts = {each.number: [float(restart["at"]) for restart in each.restarts] for each in run.attempts}
    times = step_times(rows, restarts)
    distribution = distribution_of((each.seconds for each in times), _BARS)
    if distribution is None:
        return None
    places = thinned([each.step for each in times], [each.seconds for each in times], _COLUMNS)
    slowest = sorted(times, key=lambda each: -each.seconds)[:_SLOWEST]
    keys = {attempt.number: attempt.key for attempt in run.attempts}
    return {
        "count": distribution.count,
        "quantiles": dict(distribution.quantiles),
        "bars": [list(bar) for bar in distribution.bars],
        "log": distribution.log,
        "points": [
            [times[place].attempt, times[place].step, round(times[place].seconds, 6)] for place in places
        ],
        "slowest": [
            {
                "attempt": each.attempt,
                "step": each.step,
                "at": iso(each.at),
                "seconds": each.seconds,
                "why": _meanwhile(each, lines, keys),
            }
            for each in slowest
        ],
    }  # fmt: skip


def _meanwhile(step: FinishedStep, lines: Timelines, keys: Mapping[int, str]) -> str:
    """What else the time of a step was spent on, in words; empty if it only trained."""
    begin, spent = step.at - step.seconds, dict[str, float]()
    for kind, since, until in lines.get(keys.get(step.attempt, ""), ()):
        overlap = min(until, step.at) - max(since, begin)
        if overlap > 0 and kind not in ("train", "lost"):
            spent[kind] = spent.get(kind, 0.0) + overlap
    words = {"stall": "saving", "queue": "suspended"}
    return ", ".join(f"{words.get(kind, kind)} {seconds:.3g} s" for kind, seconds in spent.items())


def _checkpoint_facts(workspace: Workspace, run: Run) -> Facts:
    """The newest checkpoints as ``checkpoints --json`` lists them, rather those on disk than deleted ones."""
    checkpoints: list[Facts] = checkpoints_json(workspace, run, deleted_too=True)["checkpoints"]
    newest = sorted(range(len(checkpoints)), key=lambda place: (checkpoints[place]["pruned_at"] is None, place))
    shown = [checkpoints[place] for place in sorted(newest[-_CHECKPOINTS:])]
    return {"shown": shown, "left_out": len(checkpoints) - len(shown)}


def _in_words(shown: Mapping[str, Any]) -> Facts:
    """What 'show' says of attempts, networks, clocks and checks in words."""
    attempts: Sequence[Mapping[str, Any]] = shown["attempts"]
    newest = attempts[-1] if attempts else None
    network = (newest and newest["network"]) or {}
    elected = network.get("elected") or ""
    described = [(*attempt_facts(dict(each), measured=True), *attempt_problems(dict(each))) for each in attempts]
    return {
        "attempts": [[[name, text] for name, text in facts if text and name not in _IN_COLUMNS] for facts in described],
        # What the rank that failed first printed last.
        "last_lines": [
            list((attempt["failures"][0].get("last_lines") or ()) if attempt["failures"] else ())
            for attempt in attempts
        ],
        "stragglers": _newest_moments(attempts, "stragglers", describe.describe_straggler),
        "restarts": _newest_moments(attempts, "restarts", describe.describe_restart),
        "hangs": _newest_moments(attempts, "hangs", describe.describe_hang),
        "findings": describe.finding_lines(attempts),
        "elected": ": ".join(filter(None, [elected, why_elected(elected, network.get("networks", ()))])),
        "networks": {
            "headers": describe.NETWORK_HEADERS,
            "rows": describe.network_rows(newest["network"]) if newest else [],
            "excluded": describe.excluded_addresses(newest["network"]) if newest else [],
        },
        "nodes": {"headers": describe.NODE_HEADERS, "rows": describe.node_rows(newest)[:_NODES] if newest else []},
        "clocks": describe.describe_clocks(newest["clock"]) if newest else "",
        "git": describe.describe_git_state(shown["git"] or {}),
        "params": formatting.params(shown["params"]),
    }


def _newest_moments(
    attempts: Sequence[Mapping[str, Any]], name: str, phrase: Callable[[Mapping[str, Any]], str]
) -> list[Facts]:
    """When something happened in attempts, in words; the newest, if it happened very often."""
    moments = [
        {"attempt": attempt["number"], "at": moment.get("at"), "text": phrase(moment)}
        for attempt in attempts
        for moment in attempt[name]
    ]
    return moments[-_MOMENTS:]


def _spec_text(directory: RunDir) -> str | None:
    """The spec as it was recorded, without what looks like a secret in its lines; None if it cannot be read."""
    with contextlib.suppress(OSError, PathError):
        text = read_checked(directory.path / "spec.yaml").decode(errors="replace")
        return "\n".join(map(redact, text.splitlines()))
    return None
