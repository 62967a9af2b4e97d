"""Which runs a question is about, and their order."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import QueryError
from slurmtrain.model.run.run import ENDED
from slurmtrain.ops.shared.views import RunRecord
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.query.conditions import Condition
    from slurmtrain.model.query.sort import SortKey
    from slurmtrain.ops.shared.observe import ListedRuns
    from slurmtrain.registry.choice.index import IndexRow

# How many runs are listed if nothing is asked, apart from runs that have not ended.
NEWEST = 20
# So many runs most often show all fields that there are.
_EXAMPLES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which runs to list. Without names and conditions: runs that have not ended, and the newest."""

    names: Sequence[str] = ()
    """Names, patterns and sweeps; empty: all runs."""
    namesakes: bool = False
    """A name means all runs of that name, not the newest."""
    where: Sequence[str] = ()
    """Conditions, which all must hold."""
    states: Sequence[str] = ()
    """The run has one of these states."""
    causes: Sequence[str] = ()
    """Its newest attempt ended for one of these causes."""
    since: str | None = None
    """It was submitted at this time or later."""
    tags: Sequence[str] = ()
    """It has all of these tags."""
    sweep: str | None = None
    """The beginning of the id of its sweep."""
    node: str | None = None
    """Its newest attempt is or was on a node whose name this pattern matches."""
    sort: str | None = None
    """The order; None: first the runs that may still change, then the newest."""
    limit: int | None = None
    """At most this many, the first in this order."""
    columns: Sequence[str] = ()
    """Fields to show, which must exist."""
    over: Sequence[str] = ()
    """Parameters that may differ between repetitions of a run, such as ``params.seed``."""
    for_programs: bool = False
    """Any run may be the answer, also if nothing is asked; they come as they are named, or the oldest first."""
    all_runs: bool = False
    """Any run may be the answer, archived ones too, and in a shared root other users' runs."""
    folds: bool = False
    """Each sweep is a line of its own, unless the question chooses among runs."""
    tree: bool = False
    """Each run has the runs below it that start after it, whether or not they were asked for."""

    @property
    def chooses(self) -> bool:
        """Whether it chooses among runs, or says what to show of them."""
        conditions = (*self.where, *self.states, *self.causes, *self.tags, self.since, self.sweep, self.node)
        return any((*self.names, *conditions, self.sort, self.limit, *self.columns, *self.over))

    @property
    def is_about_all(self) -> bool:
        """Whether any run may be the answer, rather than the runs that are listed if nothing is asked."""
        conditions = (*self.where, *self.states, *self.causes, *self.tags, self.since, self.sweep, self.node)
        return self.for_programs or self.all_runs or any((*conditions, self.sort, self.limit))


@dataclass(frozen=True, slots=True)
class Selection:
    """The answer.

    ``runs``: RUN of the JSON, in order. ``cut``: states of the runs beyond the limit. ``fields``: the fields that the
    question sorts by, or compares by size. ``notes``: warnings. ``total``: how many runs there are. ``lines``: the runs
    as a list shows them, where each sweep may be one of them.
    """

    runs: Sequence[Mapping[str, Any]]
    cut: Sequence[str] = ()
    fields: Sequence[str] = ()
    notes: Sequence[str] = ()
    total: int = 0
    lines: Sequence[Mapping[str, Any]] = ()


def select(workspace: Workspace, runs: ListedRuns, question: Question) -> Selection:
    """The runs that a question is about.

    Args:
        workspace: Where the runs are.
        runs: All of them, as observed.
        question: The question.

    Raises:
        RunNotFound: A name refers to no run.
        QueryError: A condition, the order or a column means nothing.
    """
    conditions, keys = list(_conditions(question, time.time())), _sort_keys(question)
    ids = _candidates(runs, question, conditions)
    records: list[Mapping[str, Any]] = [RunRecord(workspace, listed) for listed in runs.fetch(ids).values()]
    notes: Sequence[str] = ()
    if question.all_runs and not question.names and workspace.config.shared_root is not None:
        from slurmtrain.ops.colleagues import runs_of_colleagues

        others, notes = runs_of_colleagues(workspace)
        records = [*({"user": workspace.root.path.name, **record} for record in records), *others]
    fields = [*(key.name for key in keys), *question.columns]
    measures = _measures([*fields, *(each.name for each in _comparisons(conditions))])
    _attach(workspace, records, measures)
    _check(_examples(workspace, runs, records, measures), conditions, fields)
    matching = [record for record in records if all(condition.holds(record) for _, condition in conditions)]
    ordered = _ordered(matching, keys)
    shown = ordered[: question.limit]
    cut = [run["state"] for run in ordered[len(shown) :]]
    if question.for_programs and not keys:
        chosen = {id(run) for run in shown}
        shown = [run for run in matching if id(run) in chosen]
    compared = (comparison.name for comparison in _comparisons(conditions) if comparison.is_order)
    fields = [*dict.fromkeys([*(key.name for key in keys), *compared])]
    if question.tree:
        from slurmtrain.ops.query.tree import chain_lines

        unfolded = chain_lines(workspace, runs, shown, folds=False)
        folded = chain_lines(workspace, runs, shown, folds=True) if question.folds else unfolded
        return Selection(unfolded, cut, fields, notes, len(runs), folded)
    lines = (
        _fold(workspace, runs, shown, archived_too=question.all_runs)
        if question.folds and not question.chooses
        else shown
    )
    return Selection(shown, cut, fields, notes, len(runs), lines)


def _fold(
    workspace: Workspace, runs: ListedRuns, shown: Sequence[Mapping[str, Any]], *, archived_too: bool
) -> Sequence[Mapping[str, Any]]:
    """The runs that are ``shown``, with one line for all runs of a sweep in place of the first of them."""
    sweeps = dict.fromkeys(run["sweep"] for run in shown if run["sweep"] and "user" not in run)
    if not sweeps:
        return shown
    from slurmtrain.model.query.folding import fold_sweep

    rows = runs.named(list(sweeps))
    folded: dict[str, Mapping[str, Any]] = {}
    for sweep in sweeps:
        of_sweep = [(run_id, row) for run_id, row in rows.items() if row.sweep == sweep]
        ids = [run_id for run_id, row in of_sweep if archived_too or not _is_put_away(row)]
        if len(ids) > 1:
            folded[sweep] = fold_sweep([RunRecord(workspace, listed) for listed in runs.fetch(ids).values()])
    lines: dict[str, Mapping[str, Any]] = {}
    for run in shown:
        line = folded.get(run["sweep"] or "", run) if "user" not in run else run
        lines.setdefault(line["id"], line)
    return list(lines.values())


def by_worth(runs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The runs that may still change first, and of these and the others the newest first."""
    newest_first = sorted(runs, key=lambda run: str(run["id"]), reverse=True)
    return sorted(newest_first, key=lambda run: run["state"] in ENDED)


# A condition, and the text that states it; the text is empty for an option's condition.
_Stated = tuple[str, "Condition"]


def _conditions(question: Question, now: float) -> Iterator[_Stated]:
    """The conditions of a question. Raises QueryError."""
    if not question.is_about_all:
        return
    from slurmtrain.model.query.where import compare, parse

    for text in question.where:
        yield text, parse(text, now)
    if question.states:
        yield "", compare("state", "in", question.states, now)
    if question.causes:
        yield "", compare("cause", "in", question.causes, now)
    if question.since:
        yield "", compare("submitted_at", ">=", [question.since], now)
    for tag in question.tags:
        yield "", compare("tags", "=", [tag], now)
    if question.sweep:
        yield "", compare("sweep", "~", [f"{question.sweep}*"], now)
    if question.node:
        yield "", compare("nodes", "~", [question.node], now)


def _comparisons(conditions: Iterable[_Stated]) -> Iterator[Any]:
    return (comparison for text, condition in conditions if text for comparison in condition.comparisons())


def _sort_keys(question: Question) -> Sequence[SortKey]:
    if question.sort is None:
        return ()
    from slurmtrain.model.query.sort import read_sort

    return read_sort(question.sort)


def _candidates(runs: ListedRuns, question: Question, conditions: Sequence[_Stated]) -> list[str]:
    """The ids of the runs that may be the answer, oldest first unless they are named. Raises RunNotFound."""
    archived_too = question.all_runs or any(each.name == "archived" for each in _comparisons(conditions))
    if question.names:
        from slurmtrain.ops.shared.find import choose_all_listed

        groups = [choose_all_listed(runs, name, namesakes=question.namesakes) for name in question.names]
        if not archived_too:
            rows = runs.index_of([run_id for ids in groups for run_id in ids])
            groups = [[run_id for run_id in ids if not _is_put_away(rows[run_id])] or ids for ids in groups]
        return list(dict.fromkeys(run_id for ids in groups for run_id in ids))
    if not question.is_about_all:
        return runs.worth_listing(NEWEST)
    return runs.candidates([condition for _, condition in conditions], archived=archived_too)


def _is_put_away(row: IndexRow) -> bool:
    # What still runs is listed in any case: it costs something.
    return row.archived and row.ended


def _measures(names: Sequence[str]) -> Sequence[str]:
    """The names among these that may be measures of curves, such as ``min:loss``."""
    return [name for name in names if ":" in name or "@" in name]


def _attach(
    workspace: Workspace, records: Sequence[Mapping[str, Any]], measures: Sequence[str]
) -> Sequence[Mapping[str, Any]]:
    """The ``records``, which have these ``measures`` as fields now."""
    if measures:
        from slurmtrain.ops.query.measures import attach_measures

        attach_measures(workspace, records, measures)
    return records


def _examples(
    workspace: Workspace, runs: ListedRuns, records: Sequence[Mapping[str, Any]], measures: Sequence[str]
) -> Iterator[Sequence[Mapping[str, Any]]]:
    """More and more runs that show which fields there are: the answer's, the newest, all.

    Args:
        workspace: Where the runs are.
        runs: All of them.
        records: The runs of the answer.
        measures: Measures of curves that they have as fields.
    """
    if records:
        yield records
    for ids in (runs.worth_listing(_EXAMPLES), runs.index):
        listed_runs = runs.fetch(ids).values()
        yield _attach(workspace, [RunRecord(workspace, listed) for listed in listed_runs], measures)


def _check(
    examples: Iterable[Sequence[Mapping[str, Any]]], conditions: Sequence[_Stated], fields: Sequence[str]
) -> None:
    """Raise QueryError if none of the runs has a field, or it cannot be compared.

    Args:
        examples: More and more runs, lastly all: what is wrong with some may be right with more.
        conditions: The conditions.
        fields: Names of fields.
    """
    if not conditions and not fields:
        return
    from slurmtrain.model.query.mistakes import check_condition, check_field

    mistake: QueryError | None = None
    for records in examples:
        try:
            for text, condition in conditions:
                if text:
                    check_condition(condition, text, records)
            for name in fields:
                check_field(name, records)
        except QueryError as error:
            mistake = error
        else:
            return
    if mistake is not None:
        raise mistake


def _ordered(matching: Sequence[Mapping[str, Any]], keys: Sequence[SortKey]) -> list[Mapping[str, Any]]:
    ordered = by_worth(matching)
    if not keys:
        return ordered
    from slurmtrain.model.query.sort import in_order

    return in_order(ordered, keys)
