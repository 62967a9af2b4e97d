"""The best runs by the newest value of a metric, or by a measure of its curve."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import QueryError
from slurmtrain.model.query.comparison import Spread, spread_of
from slurmtrain.model.query.criterion import Criterion, choose_criterion
from slurmtrain.model.query.differing import differing, repetition_key
from slurmtrain.model.query.fields import flattened, value_of
from slurmtrain.model.query.measures import Measure, read_measure
from slurmtrain.model.query.mistakes import check_field
from slurmtrain.model.query.quantities import number_of
from slurmtrain.model.query.sort import SortKey, in_order
from slurmtrain.ops.query.measures import attach_measures, fields_of
from slurmtrain.ops.query.select import Question, select
from slurmtrain.ops.shared.views import RunRecord
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.shared.observe import ListedRuns

# The best of so many are read where there are more.
_RANKED = 500
# So many runs most often show all fields that there are.
_EXAMPLES = 200


_PARAMS = "params."


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
    repeated = {name.removeprefix(_PARAMS) for name in over}
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
