"""Which runs a question is about, and their order; with measures of their metrics, and with their chains, if asked."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import PathError, QueryError
from slurmtrain.model.query.fields import in_order, read_sort
from slurmtrain.model.query.folding import Objective, fold_sweep, is_folded, states_of
from slurmtrain.model.query.measures import Measure, read_measure
from slurmtrain.model.run.run import ENDED
from slurmtrain.ops.shared.views import RunRecord
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import read_json

if TYPE_CHECKING:
    from slurmtrain.model.metrics.curves import Points
    from slurmtrain.model.query.conditions import Condition
    from slurmtrain.ops.shared.observe import ListedRuns
    from slurmtrain.registry.rows import Listed

# How many runs and sweeps are listed if nothing is asked, apart from runs that have not ended.
NEWEST = 20
# So many runs most often show all fields that there are.
_EXAMPLES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which runs to list. Without names and conditions: runs that have not ended, and the newest."""

    names: Sequence[str] = ()
    """Names, patterns and sweeps; empty: all runs."""
    namesakes: bool = False
    """The name of a run that was submitted alone means all runs of that name."""
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
    put_away: bool = False
    """Archived and deleted runs may be the answer, too."""
    folds: bool = False
    """Each sweep is a line of its own, unless the question chooses among runs."""
    tree: bool = False
    """Each run has the runs below it that start after it, whether or not they were asked for."""

    @property
    def has_conditions(self) -> bool:
        """Whether it has conditions."""
        return any((self.where, self.states, self.causes, self.tags, self.since, self.sweep, self.node))

    @property
    def chooses(self) -> bool:
        """Whether it chooses among runs, or says what to show of them."""
        return self.has_conditions or any((self.names, self.sort, self.limit, self.columns, self.over))

    @property
    def is_about_all(self) -> bool:
        """Whether any run may be the answer, rather than the runs that are listed if nothing is asked."""
        return self.for_programs or self.all_runs or self.has_conditions or any((self.sort, self.limit))


@dataclass(frozen=True, slots=True)
class Selection:
    """The answer.

    ``runs``: RUN of the JSON, in order. ``cut``: states of the runs beyond the limit; ``unlisted``: how many others
    there are in each state, if nothing was asked. ``fields``: the fields that the
    question sorts by, or compares by size. ``notes``: warnings. ``total``: how many runs there are. ``lines``: the runs
    as a list shows them, where each sweep may be one of them.
    """

    runs: Sequence[Mapping[str, Any]]
    cut: Sequence[str] = ()
    fields: Sequence[str] = ()
    notes: Sequence[str] = ()
    total: int = 0
    lines: Sequence[Mapping[str, Any]] = ()
    unlisted: Mapping[str, int] = field(default_factory=dict)


def select_runs(workspace: Workspace, runs: ListedRuns, question: Question) -> Selection:
    """The runs that a question is about.

    Args:
        workspace: Where the runs are.
        runs: All of them, as observed.
        question: The question.

    Raises:
        RunNotFound: A name refers to no run.
        QueryError: A condition, the order or a column means nothing.
    """
    conditions = list(_conditions(question, time.time()))
    keys = () if question.sort is None else read_sort(question.sort)
    ids = _candidates(workspace, runs, question, conditions)
    records: list[Mapping[str, Any]] = [RunRecord(workspace, listed) for listed in runs.fetch(ids).values()]
    notes: Sequence[str] = ()
    if question.all_runs and not question.names and workspace.config.shared_root is not None:
        from slurmtrain.ops.colleagues import runs_of_colleagues

        others, notes = runs_of_colleagues(workspace)
        records = [*({"user": workspace.root.path.name, **record} for record in records), *others]
    fields = [*(key.name for key in keys), *question.columns]
    # What may be a measure of a curve, such as min:loss.
    names = [*fields, *(each.name for each in _comparisons(conditions))]
    measures = [name for name in names if ":" in name or "@" in name or name.startswith(COST)]
    attach_measures(workspace, records, measures)
    _check(_examples(workspace, runs, records, measures), conditions, fields)
    matching = [record for record in records if all(condition.holds(record) for _, condition in conditions)]
    ordered = in_order(by_worth(matching), keys)
    shown = ordered[: question.limit]
    cut = [run["state"] for run in ordered[len(shown) :]]
    if question.for_programs and not keys:
        chosen = {id(run) for run in shown}
        shown = [run for run in matching if id(run) in chosen]
    compared = (comparison.name for comparison in _comparisons(conditions) if comparison.is_order)
    fields = [*dict.fromkeys([*(key.name for key in keys), *compared])]
    if question.tree:
        unfolded = chain_lines(workspace, runs, shown, folds=False)
        folded = chain_lines(workspace, runs, shown, folds=True) if question.folds else unfolded
        return Selection(unfolded, cut, fields, notes, len(runs), folded)
    folds = question.folds and not question.chooses
    lines = _fold(workspace, runs, shown, put_away_too=question.all_runs) if folds else shown
    # How many runs there are in each state besides those that lines stand for.
    unlisted: Counter[str] = Counter()
    if not (question.names or question.is_about_all):
        unlisted.update(runs.state_counts())
        unlisted.subtract(state for line in lines for state in states_of(line))
    return Selection(shown, cut, fields, notes, len(runs), lines, +unlisted)


def _fold(
    workspace: Workspace, runs: ListedRuns, shown: Sequence[Mapping[str, Any]], *, put_away_too: bool
) -> Sequence[Mapping[str, Any]]:
    """The runs that are ``shown``, with one line for all runs of a sweep in place of the first of them."""
    # The registry has no sweeps of other users, so their runs are not folded.
    sweeps = dict.fromkeys(run["sweep"] for run in shown if run["sweep"] and "user" not in run)
    if not sweeps:
        return shown
    index = runs.named(list(sweeps))
    ids = [run_id for run_id, row in index.items() if row.sweep in sweeps and (put_away_too or not row.put_away)]
    lines = fold_records(workspace, [RunRecord(workspace, listed) for listed in runs.fetch(ids).values()])
    folded = {line["id"]: line for line in lines if is_folded(line)}
    chosen = [folded.get(run["sweep"] or "", run) if "user" not in run else run for run in shown]
    return list({line["id"]: line for line in chosen}.values())


def fold_records(workspace: Workspace, records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Runs, with one entry for all runs of a sweep in place of the first of several.

    Args:
        workspace: Where the runs are.
        records: RUN of the JSON of each.
    """
    of_sweep: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        of_sweep.setdefault(record["sweep"] or record["id"], []).append(record)
    goals = objectives_of(workspace, {sweep: of[0]["id"] for sweep, of in of_sweep.items() if len(of) > 1})
    return [fold_sweep(of, goals.get(sweep)) if len(of) > 1 else of[0] for sweep, of in of_sweep.items()]


def objectives_of(workspace: Workspace, sweeps: Mapping[str, str]) -> dict[str, Objective]:
    """What sweeps are for, by their ids: what their search optimizes, else the ``checkpoint.keep.best`` of their spec.

    Args:
        workspace: Where the runs are.
        sweeps: A run of each sweep, by the sweep's id. A single run may stand for itself.
    """
    from slurmtrain.model.run.events.command_events import RunCreated

    created = workspace.store.events_of(list(sweeps.values()), RunCreated) if sweeps else {}
    goals: dict[str, Objective] = {}
    for sweep, run_id in sweeps.items():
        searched = created[run_id][0].payload.search if created.get(run_id) else None
        if goal := searched or _kept_best(workspace, run_id):
            goals[sweep] = Objective(str(goal["metric"]), goal.get("mode") == "max")
    return goals


def _kept_best(workspace: Workspace, run_id: str) -> Mapping[str, Any] | None:
    """The ``checkpoint.keep.best`` of a run's plan; None if it has none, or its plan is gone."""
    section: Any = None
    with contextlib.suppress(PathError):
        section = read_json(workspace.root.run(run_id).plan)
    for key in ("spec", "checkpoint", "keep", "best"):
        section = section.get(key) if isinstance(section, Mapping) else None
    return section if isinstance(section, Mapping) and section.get("metric") else None


def shared_objective(workspace: Workspace, records: Sequence[Mapping[str, Any]]) -> Objective | None:
    """What all of several runs are for; None if they differ, or have metrics but not this one.

    Args:
        workspace: Where the runs are.
        records: RUN of the JSON of each.
    """
    sweeps: dict[str, str] = {}
    for record in records:
        sweeps.setdefault(record["sweep"] or record["id"], record["id"])
    # Most runs have none: then a look at one of them suffices.
    first = dict([*sweeps.items()][:1])
    if not (goals := objectives_of(workspace, first)):
        return None
    goals |= objectives_of(workspace, {sweep: sweeps[sweep] for sweep in sweeps.keys() - first.keys()})
    if len(goals) < len(sweeps) or len({*goals.values()}) > 1:
        return None
    objective = next(iter(goals.values()))
    logged = {name for record in records for name in record["metrics"]}
    return objective if not logged or objective.metric in logged else None


def by_worth(runs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The runs that may still change first, and of these and the others the newest first."""
    newest_first = sorted(runs, key=lambda run: str(run["id"]), reverse=True)
    # Sorting is stable: within both halves the newest stays first.
    return sorted(newest_first, key=lambda run: run["state"] in ENDED)


# A condition, and the text that states it; the text is empty for an option's condition.
_Stated = tuple[str, "Condition"]


def _conditions(question: Question, now: float) -> Iterator[_Stated]:
    """The conditions of a question. Raises QueryError."""
    if not question.is_about_all:
        return
    from slurmtrain.model.query.conditions import compare_texts, parse

    for text in question.where:
        yield text, parse(text, now)
    options: Iterable[tuple[str, str, Sequence[str]]] = (
        ("state", "in", question.states),
        ("cause", "in", question.causes),
        ("submitted_at", ">=", [question.since] if question.since else ()),
        *(("tags", "=", [tag]) for tag in question.tags),
        ("sweep", "~", [f"{question.sweep}*"] if question.sweep else ()),
        ("nodes", "~", [question.node] if question.node else ()),
    )
    for name, relation, values in options:
        if values:
            yield "", compare_texts(name, relation, values, now)


def _comparisons(conditions: Iterable[_Stated]) -> Iterator[Any]:
    return (comparison for text, condition in conditions if text for comparison in condition.comparisons())


def _candidates(workspace: Workspace, runs: ListedRuns, question: Question, conditions: Sequence[_Stated]) -> list[str]:
    """The ids of the runs that may be the answer, oldest first unless they are named. Raises RunNotFound."""
    named = {each.name for each in _comparisons(conditions)}
    put_away_too = question.all_runs or question.put_away or not named.isdisjoint(("archived", "deleted_at"))
    if question.names:
        from slurmtrain.ops.shared.find import choose_all

        groups = [choose_all(workspace, runs, [name], widely=question.namesakes) for name in question.names]
        if not put_away_too:
            rows = runs.index_of([run_id for ids in groups for run_id in ids])
            # A name that means only runs which are put away means them all the same.
            groups = [[run_id for run_id in ids if not rows[run_id].put_away] or ids for ids in groups]
        return list(dict.fromkeys(run_id for ids in groups for run_id in ids))
    if not question.is_about_all:
        return runs.worth_listing(NEWEST, folds=question.folds and not question.chooses)
    return runs.candidates([condition for _, condition in conditions], put_away=put_away_too)


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
    # All runs last: they are read only if a field seems not to exist.
    for ids in (runs.worth_listing(_EXAMPLES), runs.index):
        examples = [RunRecord(workspace, listed) for listed in runs.fetch(ids).values()]
        attach_measures(workspace, examples, measures)
        yield examples


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
    from slurmtrain.model.query.conditions import check_condition
    from slurmtrain.model.query.measures import check_field

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


# --- measures of curves -----------------------------------------------------------------------------------------------


def asks_for_states(question: Question) -> bool:
    """Whether a condition of the ``question`` says which states runs may have."""
    conditions = _conditions(question, time.time())
    return any(each.name == "state" for _, condition in conditions for each in condition.comparisons())


_METRICS = "metrics."
# Begins the names of fields of what a run cost, which few questions are about.
COST = "cost."
# How many runs are looked up at once whose curves may be needed.
_AT_ONCE = 500


def attach_measures(workspace: Workspace, records: Iterable[Mapping[str, Any]], names: Iterable[str]) -> None:
    """Let records have the measures among some names as fields, unless no run has logged such a metric; and costs.

    Values are computed when they are first read: finding the curves of runs that other conditions leave out would cost
    more than everything else.

    Args:
        workspace: Where the runs are.
        records: The runs; colleagues' runs are passed over.
        names: Names of fields; some may be measures.
    """
    own = {record.listed.id: record for record in records if isinstance(record, RunRecord)}
    names = list(names)
    if any(name.startswith(COST) for name in names):
        _attach_costs(workspace, own)
    measures = {name: measure for name in names if (measure := read_measure(name)) is not None}
    if not measures:
        return
    metrics = {measure.metric for measure in measures.values()}
    is_by_curve = not all(measure.is_summarised for measure in measures.values())
    # What a run has reached is what any of its metrics has.
    summaries = workspace.store.surviving_metrics(list(own), None if is_by_curve else metrics)
    curves = _Curves(workspace, list(own))

    def value(measure: Measure, record: RunRecord) -> float | None:
        of_run = summaries.get(record.listed.id, {})
        if measure.metric not in of_run:
            return None
        if measure.is_summarised:
            return measure.of_summary(of_run[measure.metric])
        points = curves.points(record.listed.id, measure.metric)
        return measure.of_curve(points.steps, points.values, max(each.last_step for each in of_run.values()))

    logged = {name for of_run in summaries.values() for name in of_run}
    fields: dict[str, Callable[[RunRecord], float | None]] = {
        name: partial(value, measure) for name, measure in measures.items() if measure.metric in logged
    }
    for record in own.values():
        record.measures = {**record.measures, **fields}


def _attach_costs(workspace: Workspace, records: Mapping[str, RunRecord]) -> None:
    """Let records have the field ``cost``, which is computed for all of them when the first one is read."""
    from slurmtrain.ops.shared.run_costs import costs_of_runs

    costs = cache(lambda: costs_of_runs(workspace, records))
    for record in records.values():
        record.measures = {**record.measures, COST.rstrip("."): lambda each: costs()[each.listed.id]}


class _Curves:
    """The curves of some runs, looked up many at once."""

    def __init__(self, workspace: Workspace, run_ids: Sequence[str]) -> None:
        self._workspace = workspace
        self._batches = [run_ids[first : first + _AT_ONCE] for first in range(0, len(run_ids), _AT_ONCE)]
        self._batch_of = {run_id: number for number, batch in enumerate(self._batches) for run_id in batch}
        self._load = cache(lambda number: workspace.store.load_all(self._batches[number]))

    def points(self, run_id: str, metric: str) -> Points:
        """What survives of a metric; nothing if its files cannot be read."""
        from slurmtrain.history import read_history
        from slurmtrain.model.metrics.curves import Points

        run = self._load(self._batch_of[run_id]).get(run_id)
        try:
            curves = read_history(run, self._workspace.root.run(run_id), [metric]).curves if run else {}
        except PathError:
            curves = {}
        return curves[metric].kept if metric in curves else Points()


def fields_of(workspace: Workspace, records: Sequence[Mapping[str, Any]], names: Collection[str]) -> dict[str, str]:
    """The fields that names of metrics, measures and costs stand for, by these names; the records get the measures.

    Args:
        workspace: Where the runs are.
        records: The runs.
        names: Metrics, without ``metrics.``, measures, and fields of ``cost``; of two of one name it is the metric.
    """
    metrics = {name for record in records for name in record["metrics"]}
    others = {name for name in names if name not in metrics and (read_measure(name) or name.startswith(COST))}
    fields = {name: name if name in others else f"{_METRICS}{name}" for name in names}
    attach_measures(workspace, records, fields.values())
    return fields


# --- chains -----------------------------------------------------------------------------------------------------------


def chain_lines(
    workspace: Workspace, runs: ListedRuns, shown: Sequence[Mapping[str, Any]], *, folds: bool
) -> list[Mapping[str, Any]]:
    """Runs and all others of their chains: RUN of the JSON of each, with its ``depth`` in the tree.

    Args:
        workspace: Where they are.
        runs: All runs, as observed.
        shown: Runs that are to be shown in any case, in order. Other users' runs, whose chains are unknown, come last.
        folds: The runs of a sweep are one line.
    """
    from slurmtrain.model.run.lineage import tree_order
    from slurmtrain.ops.shared.relatives import chains_of

    own = [run["id"] for run in shown if "user" not in run]
    chains = chains_of(workspace, own)
    members = runs.fetch(runs.index_of(sorted(chains)))
    line_of = {each.id: str(each.sweep) if folds and each.sweep else each.id for each in members.values()}
    lines: dict[str, list[Listed]] = {}
    above: dict[str, set[str]] = {}
    for run_id, listed in members.items():
        line = line_of[run_id]
        lines.setdefault(line, []).append(listed)
        above.setdefault(line, set()).update(line_of[each] for each in chains[run_id] if each in line_of)
    tree = tree_order(above, [line_of[run_id] for run_id in own if run_id in line_of])
    in_tree = [{**_line(workspace, lines[line]), "depth": depth} for line, depth in tree.items()]
    return [*in_tree, *(run for run in shown if "user" in run)]


def _line(workspace: Workspace, of_line: Sequence[Listed]) -> Mapping[str, Any]:
    records = [RunRecord(workspace, listed) for listed in of_line]
    if len(records) == 1:
        return records[0]
    [folded] = fold_records(workspace, records)
    # What all of them wait for, or why they will never start.
    reasons = {record["reason"] for record in records if record["reason"]}
    return {**folded, "reason": reasons.pop()} if len(reasons) == 1 and not folded["errors"] else folded
