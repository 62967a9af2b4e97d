"""Runs side by side: what differs in their settings, code, environment and resources; and the best of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import PathError, QueryError, UserError
from slurmtrain.model.query.comparison import Compared, Score, SeedGroup, SideBySide, Spread, compare_runs, spread_of
from slurmtrain.model.query.fields import (
    SortKey,
    differing,
    flattened,
    in_order,
    names_in,
    number_of,
    repetition_key,
    value_of,
)
from slurmtrain.model.query.measures import (
    Criterion,
    Measure,
    check_field,
    choose_criterion,
    is_larger_better,
    read_measure,
)
from slurmtrain.ops.query.select import Question, attach_measures, fields_of, select
from slurmtrain.ops.shared.run_details import findings_json
from slurmtrain.ops.shared.views import SCHEMA, RunRecord
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import read_json

if TYPE_CHECKING:
    from slurmtrain.model.metrics.columns import MetricSummary
    from slurmtrain.model.run.run import Run
    from slurmtrain.ops.shared.observe import ListedRuns

_METRICS = "metrics."
# If no metrics are named, at most so many are compared whose names show what is better.
_MOST_METRICS = 3
# What a run has of its own, or what stands elsewhere.
_NOT_COMPARED = ("name", "params", "resources", "command", "sweep")


@dataclass(frozen=True, slots=True)
class Answer:
    """Runs side by side.

    ``criterion``: the criterion that they are sorted by, if any. ``metrics``: the names of compared metrics and
    measures. ``ranged``: metrics that have a best value beside their newest. ``notes``: what cannot be read.
    """

    comparison: SideBySide
    criterion: Criterion | None
    metrics: Sequence[str]
    ranged: Collection[str]
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """What ``compare --json`` prints."""
        groups = self.comparison.groups
        return {
            "schema": SCHEMA,
            "by": self.criterion.name if self.criterion else None,
            "better": self.criterion.better if self.criterion else None,
            "metrics": list(self.metrics),
            "differs": list(self.comparison.differs),
            "groups": [self._group(group) for group in groups],
            "runs": [self._run(run) for group in groups for run in group.runs],
        }

    def _group(self, group: SeedGroup) -> dict[str, Any]:
        settings, over = self.settings_of(group.runs[0]), self.comparison.over
        return {
            "runs": [run.id for run in group.runs],
            "name": group.runs[0].name,
            "settings": {name: value for name, value in settings.items() if name not in over},
            "seeds": {name: [run.settings.get(name) for run in group.runs] for name in settings if name in over},
            "metrics": {
                metric: {"last": _spread(group.spread(metric)), "best": _spread(group.spread(metric, best=True))}
                for metric in self.metrics
            },
        }

    def _run(self, run: Compared) -> dict[str, Any]:
        return {
            "id": run.id,
            "name": run.name,
            "state": run.state,
            "settings": self.settings_of(run),
            "metrics": {metric: asdict(score) for metric, score in run.scores.items()},
        }

    def settings_of(self, run: Compared) -> dict[str, Any]:
        """The settings of a run that differ among all."""
        return {name: run.settings[name] for name in self.comparison.differs if name in run.settings}


def compare(
    workspace: Workspace,
    runs: ListedRuns,
    question: Question,
    metrics: Sequence[str] = (),
    by: str | None = None,
    larger: bool | None = None,
) -> Answer:
    """Compare the runs that a question is about.

    Args:
        workspace: Where the runs are.
        runs: All of them, as observed.
        question: Which to compare.
        metrics: The names of metrics; empty: up to three whose names show what is better.
        by: The metric to sort by; None: the first of them whose name shows what is better.
        larger: Whether larger values of it are better; None: its name shows it.

    Raises:
        RunNotFound: A name refers to no run.
        QueryError: The question means nothing, or no run has such a metric.
        UserError: There are fewer than two runs.
    """
    records = select(workspace, runs, question).runs
    if len(records) < 2:
        raise UserError(f"a comparison takes at least two runs, and these are {len(records)}")
    chosen = [name.removeprefix(_METRICS) for name in metrics] or _telling_metrics(records)
    if by and by.removeprefix(_METRICS) not in chosen:
        chosen.insert(0, by.removeprefix(_METRICS))
    fields = fields_of(workspace, records, chosen)
    first = by or next((name for name in chosen if is_larger_better(name) is not None or larger is not None), None)
    criterion = None if first is None else choose_criterion(fields[first.removeprefix(_METRICS)], larger, records)
    for name in (*fields.values(), *question.over):
        check_field(name, records)
    directions = {name: is_larger_better(name) for name in chosen}
    if criterion is not None:
        directions[criterion.name.removeprefix(_METRICS)] = criterion.larger
    notes: list[str] = []
    summaries = workspace.store.surviving_metrics([record["id"] for record in records])
    loaded = workspace.store.load_all([record["id"] for record in records])
    compared = [
        Compared(
            record["id"],
            record["name"],
            record["state"],
            _settings(workspace, record, loaded[record["id"]], notes),
            {
                name: _score(value_of(record, fields[name]), summaries.get(record["id"], {}).get(name), larger)
                for name, larger in directions.items()
            },
        )
        for record in records
    ]
    by_metric = criterion.name.removeprefix(_METRICS) if criterion else None
    comparison = compare_runs(compared, by_metric, larger=bool(criterion and criterion.larger), over=question.over)
    ranged = [name for name in chosen if fields[name] != name]
    return Answer(comparison, criterion, chosen, ranged, notes)


def _telling_metrics(records: Sequence[Mapping[str, Any]]) -> list[str]:
    names = names_in(record["metrics"] for record in records)
    telling = [name for name in names if is_larger_better(name) is not None]
    return (telling or names)[:_MOST_METRICS]


def _settings(workspace: Workspace, record: Mapping[str, Any], run: Run, notes: list[str]) -> dict[str, Any]:
    settings = spec_settings(workspace, record, run, notes)
    settings |= {f"git.{name}": value for name, value in (record["git"] or {}).items()}
    settings |= {f"versions.{name}": value for name, value in _versions(workspace, run)}
    settings["executor"] = record["executor"]
    return settings


def spec_settings(workspace: Workspace, record: Mapping[str, Any], run: Run, notes: list[str]) -> dict[str, Any]:
    """What a run's newest attempt was given by its spec, by the names of the keys.

    Args:
        workspace: Where the run is.
        record: RUN of the JSON contract.
        run: The same run with all details.
        notes: Receives what cannot be read.
    """
    settings: dict[str, Any] = {f"params.{name}": value for name, value in flattened(record["params"])}
    try:
        settings |= _plan_settings(workspace, run)
    except PathError as error:
        notes.append(f"run {run.id}: {error}")
    return settings


def _plan_settings(workspace: Workspace, run: Run) -> dict[str, Any]:
    """The keys of the spec in the newest attempt, apart from its parameters, and where it runs. Raises PathError."""
    directory, newest = workspace.root.run(run.id), run.newest
    data = (read_json(directory.submission(newest.submission).plan) if newest else None) or read_json(directory.plan)
    if data is None:
        return {}
    spec, template = _section(data, "spec"), _section(data, "template")
    written = dict(flattened(template))
    resolved = {
        **{f"resources.{name}": value for name, value in flattened(_section(spec, "resources"))},
        "command": spec.get("command"),
        **dict(flattened({name: value for name, value in spec.items() if name not in _NOT_COMPARED})),
        "workdir": data.get("workdir"),
        "python": data.get("python"),
    }
    if resolved.get("tracking.mlflow.experiment") == run.name:
        del resolved["tracking.mlflow.experiment"]
    # What refers to a parameter differs because the parameter does.
    return {name: text if "${" in str(text := written.get(name)) else value for name, value in resolved.items()}


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    return section if isinstance(section, Mapping) else {}


def _versions(workspace: Workspace, run: Run) -> Iterator[tuple[str, Any]]:
    """Versions of the software that it ran with, as the preflight of its first node found them."""
    for findings in findings_json(workspace, run).values():
        for finding in findings:
            evidence = finding.get("evidence")
            if finding.get("check") == "versions" and isinstance(evidence, Mapping):
                yield from ((name, value) for name, value in evidence.items() if isinstance(value, str))
                return


def _score(last: Any, summary: MetricSummary | None, larger: bool | None) -> Score:
    """A metric of a run, or a measure of one, which has no ``summary``."""
    if larger is None or summary is None:
        return Score(last)
    return Score(last, summary.max, summary.max_step) if larger else Score(last, summary.min, summary.min_step)


def _spread(spread: Spread | None) -> dict[str, float | None] | None:
    return None if spread is None else asdict(spread)


# The best of so many are read where there are more.
_RANKED = 500
# So many runs most often show all fields that there are.
_EXAMPLES = 200


@dataclass(frozen=True, slots=True)
class Ranking:
    """Runs, the best first.

    ``runs``: RUN of the JSON; of thousands only the best. ``params``: the names of params that differ among them.
    ``without``: how many runs have no value. ``groups``: runs that repeat each other, if the question says which do,
    the group with the best mean first.
    """

    criterion: Criterion
    runs: Sequence[Mapping[str, Any]]
    params: Sequence[str]
    without: int
    groups: Sequence[RankedGroup] = ()


@dataclass(frozen=True, slots=True)
class RankedGroup:
    """Runs that repeat each other, the best first. ``params``: the params that all of them share."""

    runs: Sequence[Mapping[str, Any]]
    spread: Spread
    params: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """A group in what ``best --over --json`` prints."""
        return {
            "runs": [run["id"] for run in self.runs],
            "count": len(self.runs),
            "name": self.runs[0]["name"],
            "params": dict(self.params),
            **asdict(self.spread),
        }


def rank(workspace: Workspace, runs: ListedRuns, question: Question, by: str | None, larger: bool | None) -> Ranking:
    """Rank the runs that a question is about; of equal ones the older comes first.

    Args:
        workspace: Where the runs are.
        runs: All of them, as observed.
        question: Which to rank.
        by: The metric, a measure of one, or any field that is a number; None: the only metric that they have.
        larger: Whether larger values are better; None: the metric's name shows it.

    Raises:
        RunNotFound: A name refers to no run.
        QueryError: The question means nothing, or it is not clear what is better.
    """
    if (ranking := _rank_by_database(workspace, runs, question, by, larger)) is not None:
        return ranking
    records = select(workspace, runs, question).runs
    for name in question.over:
        check_field(name, records)
    if by is not None:
        fields_of(workspace, records, [by])
    criterion = choose_criterion(by, larger, records)
    ranked = [record for record in records if number_of(value_of(record, criterion.name)) is not None]
    ranking = _ranking(criterion, ranked, len(records) - len(ranked))
    groups = _groups(ranking.runs, ranking.params, criterion, question.over) if question.over else ()
    return replace(ranking, groups=groups)


def _ranking(criterion: Criterion, ranked: Sequence[Mapping[str, Any]], without: int) -> Ranking:
    return Ranking(
        criterion=criterion,
        runs=in_order(ranked, [SortKey(criterion.name, descending=criterion.larger)]),
        params=differing([record["params"] for record in ranked]),
        without=without,
    )


def _rank_by_database(
    workspace: Workspace, runs: ListedRuns, question: Question, by: str | None, larger: bool | None
) -> Ranking | None:
    """The best of thousands of runs by a metric, if nothing else is asked; None: all must be read."""
    if by is None or question != Question(namesakes=True, for_programs=True) or len(runs) <= _RANKED:
        return None
    examples = [RunRecord(workspace, listed) for listed in runs.fetch(runs.worth_listing(_EXAMPLES)).values()]
    fields_of(workspace, examples, [by])
    try:
        criterion = choose_criterion(by, larger, examples)
    except QueryError:
        return None
    section, _, metric = criterion.name.partition(".")
    measure = Measure("last", metric) if section == "metrics" else read_measure(criterion.name)
    if measure is None or not measure.is_summarised:
        return None
    ids, without = runs.best_candidates(measure, larger=criterion.larger, limit=_RANKED)
    records = [RunRecord(workspace, listed) for listed in runs.fetch(ids).values()]
    attach_measures(workspace, records, [criterion.name])
    return _ranking(criterion, records, without)


def _groups(
    ordered: Sequence[Mapping[str, Any]], params: Sequence[str], criterion: Criterion, over: Sequence[str]
) -> list[RankedGroup]:
    """The runs that are equal but for some parameters, together.

    Args:
        ordered: The runs, the best first.
        params: The names of the parameters that differ.
        criterion: The criterion that they are ranked by.
        over: The parameters that may differ, with ``params.``.
    """
    repeated = {name.removeprefix("params.") for name in over}
    shared = [name for name in params if name not in repeated]
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for run in ordered:
        groups.setdefault((run["name"], *repetition_key(run["params"], shared)), []).append(run)
    ranked = [_group(runs, criterion, repeated) for runs in groups.values()]
    return sorted(ranked, key=lambda group: group.spread.mean, reverse=criterion.larger)


def _group(runs: Sequence[Mapping[str, Any]], criterion: Criterion, repeated: Collection[str]) -> RankedGroup:
    spread = spread_of([number for run in runs if (number := number_of(value_of(run, criterion.name))) is not None])
    assert spread is not None
    params = {name: value for name, value in flattened(runs[0]["params"]) if name not in repeated}
    return RankedGroup(runs, spread, params)
