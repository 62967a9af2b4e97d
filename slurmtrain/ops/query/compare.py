"""Runs side by side: what differs in their settings, code, environment and resources; and the best of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import PathError, QueryError, UserError
from slurmtrain.model.query.comparison import (
    Compared,
    Score,
    SideBySide,
    Spread,
    compare_runs,
    is_unfinished,
    spread_of,
)
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
from slurmtrain.ops.query.select import (
    Question,
    asks_for_states,
    attach_measures,
    fields_of,
    select_runs,
    shared_objective,
)
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
        groups, over = self.comparison.groups, self.comparison.over
        as_json = []
        for group in groups:
            settings = self.settings_of(group.runs[0])
            shared = {name: value for name, value in settings.items() if name not in over}
            seeds = {name: [run.settings.get(name) for run in group.runs] for name in settings if name in over}
            spreads = {}
            for name in self.metrics:
                both = {"last": group.spread(name), "best": group.spread(name, best=True)}
                spreads[name] = {kind: spread and asdict(spread) for kind, spread in both.items()}
            ids, name = [run.id for run in group.runs], group.runs[0].name
            as_json.append({"runs": ids, "name": name, "settings": shared, "seeds": seeds, "metrics": spreads})
        return {
            "schema": SCHEMA,
            "by": self.criterion.name if self.criterion else None,
            "better": self.criterion.better if self.criterion else None,
            "metrics": list(self.metrics),
            "differs": list(self.comparison.differs),
            "groups": as_json,
            "runs": [
                {
                    "id": run.id,
                    "name": run.name,
                    "state": run.state,
                    "settings": self.settings_of(run),
                    "metrics": {metric: asdict(score) for metric, score in run.scores.items()},
                }
                for group in groups
                for run in group.runs
            ],
        }

    def settings_of(self, run: Compared) -> dict[str, Any]:
        """The settings of a run that differ among all."""
        return {name: run.settings[name] for name in self.comparison.differs if name in run.settings}


def put_side_by_side(
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
        by: The metric to sort by; None: without ``metrics`` what the runs are for, as in :func:`rank`, else the first
            of them whose name shows what is better.
        larger: Whether larger values of it are better; None: its name shows it.

    Raises:
        RunNotFound: A name refers to no run.
        QueryError: The question means nothing, or no run has such a metric.
        UserError: There are fewer than two runs.
    """
    records = select_runs(workspace, runs, question).runs
    if len(records) < 2:
        instead = f"there is only {records[0]['id']}" if records else "no run meets the conditions"
        raise UserError(f"a comparison needs at least two runs, and {instead}")
    if not metrics:
        by, larger = _by_objective(workspace, records, by, larger)
    names = names_in(record["metrics"] for record in records)
    telling = [name for name in names if is_larger_better(name) is not None] or names
    chosen = [name.removeprefix(_METRICS) for name in metrics] or telling[:_MOST_METRICS]
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
    compared = []
    for record in records:
        run = loaded[record["id"]]
        bests = _best_values(summaries.get(record["id"], {}), directions)
        scores = {name: Score(value_of(record, fields[name]), *bests.get(name, ())) for name in directions}
        settings = _settings(workspace, record, run, notes)
        compared.append(Compared(run.id, record["name"], record["state"], settings, scores))
    by_metric = criterion.name.removeprefix(_METRICS) if criterion else None
    larger, any_state = bool(criterion and criterion.larger), asks_for_states(question)
    comparison = compare_runs(compared, by_metric, larger=larger, over=question.over, any_state=any_state)
    ranged = [name for name in chosen if fields[name] != name]
    return Answer(comparison, criterion, chosen, ranged, notes)


def _best_values(
    summaries: Mapping[str, MetricSummary], directions: Mapping[str, bool | None]
) -> dict[str, tuple[float | None, int | None]]:
    """The best value of metrics and its step. ``directions``: whether larger values are better; None: not known."""
    bests = {}
    for name, larger in directions.items():
        # A measure of a metric has no summary.
        if larger is not None and (summary := summaries.get(name)) is not None:
            bests[name] = (summary.max, summary.max_step) if larger else (summary.min, summary.min_step)
    return bests


def _settings(workspace: Workspace, record: Mapping[str, Any], run: Run, notes: list[str]) -> dict[str, Any]:
    """As :func:`spec_settings`, with the revision, the software that its preflight found, and the executor."""
    findings = (finding for of_node in findings_json(workspace, run).values() for finding in of_node)
    evidence = (each.get("evidence") for each in findings if each.get("check") == "versions")
    versions = next((each for each in evidence if isinstance(each, Mapping)), {})
    return {
        **spec_settings(workspace, record, run, notes),
        **{f"git.{name}": value for name, value in (record["git"] or {}).items()},
        **{f"versions.{name}": value for name, value in versions.items() if isinstance(value, str)},
        "executor": record["executor"],
    }


def spec_settings(workspace: Workspace, record: Mapping[str, Any], run: Run, notes: list[str]) -> dict[str, Any]:
    """What a run's newest attempt was given by its spec, by the names of the keys.

    Args:
        workspace: Where the run is.
        record: RUN of the JSON contract.
        run: The same run with all details.
        notes: Receives what cannot be read.
    """
    settings: dict[str, Any] = {f"params.{name}": value for name, value in flattened(record["params"])}
    directory, newest = workspace.root.run(run.id), run.newest
    try:
        data = read_json(directory.submission(newest.submission).plan) if newest else None
        data = data or read_json(directory.plan)
    except PathError as error:
        notes.append(f"run {run.id}: {error}")
        data = None
    if data is None:
        return settings
    spec = _mapping_of(data, "spec")
    written = dict(flattened(_mapping_of(data, "template")))
    resolved = {
        **{f"resources.{name}": value for name, value in flattened(_mapping_of(spec, "resources"))},
        "command": spec.get("command"),
        **dict(flattened({name: value for name, value in spec.items() if name not in _NOT_COMPARED})),
        "workdir": data.get("workdir"),
        "python": data.get("python"),
    }
    # By default it is the run's name, which is not compared.
    if resolved.get("tracking.mlflow.experiment") == run.name:
        del resolved["tracking.mlflow.experiment"]
    # What refers to a parameter differs because the parameter does.
    for name, value in resolved.items():
        settings[name] = text if "${" in str(text := written.get(name)) else value
    return settings


def _mapping_of(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    return section if isinstance(section, Mapping) else {}


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

    Runs that ended before they were done come last, unless a condition asks for states.

    Args:
        workspace: Where the runs are.
        runs: All of them, as observed.
        question: Which to rank.
        by: The metric, a measure of one, or any field that is a number; None: what all of them are for by their search
            or ``checkpoint.keep.best``, or the only metric that they have.
        larger: Whether larger values are better; None: that, or the metric's name, shows it.

    Raises:
        RunNotFound: A name refers to no run.
        QueryError: The question means nothing, or it is not clear what is better.
    """
    if (ranking := _rank_by_database(workspace, runs, question, by, larger)) is not None:
        return ranking
    records = select_runs(workspace, runs, question).runs
    for name in question.over:
        check_field(name, records)
    by, larger = _by_objective(workspace, records, by, larger)
    if by is not None:
        fields_of(workspace, records, [by])
    criterion = choose_criterion(by, larger, records)
    ranked = [record for record in records if number_of(value_of(record, criterion.name)) is not None]
    any_state = asks_for_states(question)
    ranking = _ranking(criterion, ranked, len(records) - len(ranked), any_state=any_state)
    return replace(ranking, groups=_ranked_groups(ranking, question.over, any_state=any_state))


def _by_objective(
    workspace: Workspace, records: Sequence[Mapping[str, Any]], by: str | None, larger: bool | None
) -> tuple[str | None, bool | None]:
    """The metric to judge runs by, and which values are better, with what the runs themselves say about both.

    Args:
        workspace: Where the runs are.
        records: The runs.
        by: The metric that was asked for; None: none was.
        larger: Whether larger values were said to be better; None: nothing was said.
    """
    if by is not None and (larger is not None or is_larger_better(by.removeprefix(_METRICS)) is not None):
        return by, larger
    objective = shared_objective(workspace, records)
    if objective is None or (by or objective.metric).removeprefix(_METRICS) != objective.metric:
        return by, larger
    return by or objective.metric, objective.larger if larger is None else larger


def _ranking(
    criterion: Criterion, ranked: Sequence[Mapping[str, Any]], without: int, *, any_state: bool = False
) -> Ranking:
    ordered = in_order(ranked, [SortKey(criterion.name, descending=criterion.larger)])
    return Ranking(
        criterion=criterion,
        # Sorting is stable: of those that ended before they were done, which come last, the best comes first.
        runs=sorted(ordered, key=lambda run: not any_state and is_unfinished(run["state"])),
        params=differing([record["params"] for record in ranked]),
        without=without,
    )


def _rank_by_database(
    workspace: Workspace, runs: ListedRuns, question: Question, by: str | None, larger: bool | None
) -> Ranking | None:
    """The best of thousands of runs by a metric, if nothing else is asked; None: all must be read."""
    # This is 'best --by METRIC' without names and conditions; all else needs the fields of each run.
    if by is None or question != Question(for_programs=True) or len(runs) <= _RANKED:
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


def _ranked_groups(ranking: Ranking, over: Sequence[str], *, any_state: bool) -> list[RankedGroup]:
    """The runs that are equal but for some parameters, together.

    Args:
        ranking: All runs.
        over: The parameters that may differ, with ``params.``; empty: there are no groups.
        any_state: As in :func:`_ranking`.
    """
    if not over:
        return []
    criterion = ranking.criterion
    repeated = {name.removeprefix("params.") for name in over}
    shared = [name for name in ranking.params if name not in repeated]
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for run in ranking.runs:
        groups.setdefault((run["name"], *repetition_key(run["params"], shared)), []).append(run)
    ranked = []
    for of_group in groups.values():
        numbers = [number_of(value_of(run, criterion.name)) for run in of_group]
        spread = spread_of([number for number in numbers if number is not None])
        assert spread is not None
        params_of_all = {name: value for name, value in flattened(of_group[0]["params"]) if name not in repeated}
        ranked.append(RankedGroup(of_group, spread, params_of_all))

    def order(group: RankedGroup) -> tuple[bool, float]:
        last = not any_state and all(is_unfinished(run["state"]) for run in group.runs)
        return last, -group.spread.mean if criterion.larger else group.spread.mean

    return sorted(ranked, key=order)
