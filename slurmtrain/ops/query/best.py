"""The best runs by the newest value of a metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import QueryError
from slurmtrain.model.query.criterion import Criterion, choose_criterion
from slurmtrain.model.query.differing import differing
from slurmtrain.model.query.fields import value_of
from slurmtrain.model.query.quantities import number_of
from slurmtrain.model.query.sort import SortKey, in_order
from slurmtrain.ops.query.select import Question, select
from slurmtrain.ops.shared.views import RunRecord
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.shared.observe import ListedRuns

# The best of so many are read where there are more.
_RANKED = 500
# So many runs most often show all fields that there are.
_EXAMPLES = 200


@dataclass(frozen=True, slots=True)
class Ranking:
    """Runs, the best first.

    ``runs``: RUN of the JSON; of thousands only the best. ``params``: the names of those that differ among them.
    ``without``: how many runs have no value.
    """

    criterion: Criterion
    runs: Sequence[Mapping[str, Any]]
    params: Sequence[str]
    without: int


def rank(workspace: Workspace, runs: ListedRuns, question: Question, by: str | None, larger: bool | None) -> Ranking:
    """Rank the runs that a question is about; of equal ones the older comes first.

    Args:
        workspace: Where the runs are.
        runs: All of them, as observed.
        question: Which to rank.
        by: The metric, or any field that is a number; None: the only metric that they have.
        larger: Whether larger values are better; None: the metric's name shows it.

    Raises:
        RunNotFound: A name refers to no run.
        QueryError: The question means nothing, or it is not clear what is better.
    """
    if (ranking := _rank_by_database(workspace, runs, question, by, larger)) is not None:
        return ranking
    records = select(workspace, runs, question).runs
    criterion = choose_criterion(by, larger, records)
    ranked = [record for record in records if number_of(value_of(record, criterion.name)) is not None]
    return _ranking(criterion, ranked, len(records) - len(ranked))


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
    try:
        criterion = choose_criterion(by, larger, examples)
    except QueryError:
        return None
    section, _, metric = criterion.name.partition(".")
    if section != "metrics":
        return None
    ids, without = runs.best_candidates(metric, larger=criterion.larger, limit=_RANKED)
    return _ranking(criterion, [RunRecord(workspace, listed) for listed in runs.fetch(ids).values()], without)
