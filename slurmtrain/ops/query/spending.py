"""What runs cost, each and together, from the registry alone: no directory of a run of one's own is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from slurmtrain.errors import UserError
from slurmtrain.model.experiment.prices import mean_gpus
from slurmtrain.model.run.costs import Charges, add_up, charges_of, cost_json
from slurmtrain.model.run.run import Attempt
from slurmtrain.ops.query.select import Question, select_runs
from slurmtrain.ops.shared.observe import ListedRuns
from slurmtrain.ops.shared.run_costs import idle_part
from slurmtrain.ops.shared.views import SCHEMA, RunRecord
from slurmtrain.ops.shared.workspace import Workspace

Record = Mapping[str, Any]
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Spending:
    """What runs cost together.

    ``total``: the sum, as the field ``cost`` of a run. ``groups``: the same by ``partition``, ``state``, ``day``, the
    date (UTC) when an attempt began, and ``user``; each sum by its name. ``runs``: the cost of each run, with its
    ``id``, ``name``, ``state``, ``submitted_at`` and ``user``. ``unpriced``: the sums of runs without a price, which
    are in no other sum, by the ``problem``, with their number as ``runs``. ``notes``: warnings.
    """

    total: Record
    groups: Mapping[str, Mapping[str, Record]]
    runs: Sequence[Record]
    unpriced: Sequence[Record]
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """What ``cost --json`` prints."""
        sums = {kind: [{kind: name, **cost} for name, cost in by_name.items()] for kind, by_name in self.groups.items()}
        return {
            "schema": SCHEMA,
            "total": dict(self.total),
            "unpriced": [dict(each) for each in self.unpriced],
            "by": sums,
            "runs": [dict(each) for each in self.runs],
        }


def spending_of(workspace: Workspace, runs: ListedRuns, question: Question) -> Spending:
    """What the runs cost that a question is about.

    Args:
        workspace: Where the runs are.
        runs: All of them, as observed.
        question: Which runs; archived and deleted ones, which cost something too, are among them.

    Raises:
        RunNotFound: A name refers to no run.
        QueryError: A condition means nothing.
        UserError: No run meets the conditions.
    """
    selection = select_runs(workspace, runs, replace(question, for_programs=True, put_away=True))
    if not selection.runs:
        raise UserError("there are no such runs, so nothing was spent")
    own = workspace.root.path.name if workspace.config.shared_root is not None else ""
    attempts: dict[str, Sequence[Attempt]] = {}
    attempts |= workspace.store.charged_attempts([run["id"] for run in selection.runs if run.get("user", own) == own])
    notes = list(selection.notes)
    if any(run.get("user", own) != own for run in selection.runs):
        from slurmtrain.ops.colleagues import attempts_of_colleagues

        attempts |= attempts_of_colleagues(workspace)
    return sum_up(workspace, selection.runs, attempts, own, notes)


def sum_up(
    workspace: Workspace,
    runs: Sequence[Record],
    attempts: Mapping[str, Sequence[Attempt]],
    own: str = "",
    notes: Sequence[str] = (),
) -> Spending:
    """What some runs cost.

    Args:
        workspace: Where they are.
        runs: RUN of the JSON of each.
        attempts: Their attempts, in order, by the run's id.
        own: Whose runs they are, unless they say another user.
        notes: Warnings.
    """
    currency = workspace.config.prices.currency if workspace.config.prices else None
    bills = [_Bill(run, attempts.get(run["id"], []), workspace, own) for run in runs]
    return _summed_up(bills, currency, notes)


class _Bill:
    """A run, its attempts, and what each of these took. ``own``: whose run it is, unless it says another user."""

    def __init__(self, run: Record, attempts: Sequence[Attempt], workspace: Workspace, own: str) -> None:
        self.run = run
        self.attempts = attempts
        self.user = str(run.get("user", own))
        self.charges = charges_of(attempts, run["executor"] or "", workspace.config.prices)
        self.total = add_up(self.charges)
        # A run that has not been on nodes has a unit, too.
        self.has_gpus = bool(mean_gpus(run["resources"] or {})) or any(self.total.gpu_hours.values())

    def to_json(self, currency: str | None) -> dict[str, Any]:
        """The run as ``cost --json`` lists it."""
        facts = {name: self.run[name] for name in ("id", "name", "state", "submitted_at")}
        whose = {"user": self.user} if self.user else {}
        return {**facts, **whose, **cost_json(self.total, currency, has_gpus=self.has_gpus)}

    @property
    def idle(self) -> tuple[Charges, float] | None:
        """What of it has been idle, for how many seconds: by reading a file of the run."""
        return idle_part(self.charges, self.run.idleness) if isinstance(self.run, RunRecord) else None

    def parts(self) -> Iterable[tuple[str, str, Charges]]:
        """Its part of sums: by which fact, for which value of it, and how much."""
        yield "state", self.run["state"], self.total
        if self.user:
            yield "user", self.user, self.total
        for attempt, charges in zip(self.attempts, self.charges, strict=True):
            if charges.hours:
                yield "partition", charges.partition or UNKNOWN, charges
                yield "day", _day_of(attempt.started_at), charges


def _day_of(moment: float | None) -> str:
    try:
        return UNKNOWN if moment is None else datetime.fromtimestamp(moment, UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):
        return UNKNOWN


def _summed_up(bills: Sequence[_Bill], currency: str | None, notes: Sequence[str]) -> Spending:
    # Money and hours do not add up: without a price of any run, all are in hours.
    lacking = [bill for bill in bills if currency is not None and bill.total.money is None]
    if len(lacking) == len(bills):
        currency, lacking = None, []
    missing = {id(bill) for bill in lacking}
    summed = [bill for bill in bills if id(bill) not in missing]
    has_gpus = any(bill.has_gpus for bill in summed)
    parts: dict[str, dict[str, list[Charges]]] = {"partition": {}, "state": {}, "user": {}, "day": {}}
    for bill in summed:
        for kind, name, charges in bill.parts():
            parts[kind].setdefault(name, []).append(charges)
    groups = {
        kind: {name: cost_json(add_up(of), currency, has_gpus=has_gpus) for name, of in sorted(by_name.items())}
        for kind, by_name in parts.items()
        if by_name
    }
    # Of many runs it would take reading a file of each.
    idle = summed[0].idle if len(summed) == 1 else None
    total = cost_json(add_up(bill.total for bill in summed), currency, has_gpus=has_gpus, idle=idle)
    return Spending(total, groups, [bill.to_json(currency) for bill in bills], _unpriced(lacking), notes)


def _unpriced(bills: Sequence[_Bill]) -> list[Record]:
    counts = Counter(bill.total.problem for bill in bills)
    records = []
    for problem, count in counts.items():
        total = add_up(bill.total for bill in bills if bill.total.problem == problem)
        hours = {"node_hours": sum(total.node_hours.values()), "gpu_hours": sum(total.gpu_hours.values())}
        records.append({"problem": problem, "runs": count, **hours})
    return sorted(records, key=itemgetter("runs"), reverse=True)
