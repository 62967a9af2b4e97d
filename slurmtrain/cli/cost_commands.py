"""``slurmtrain cost``: what runs cost, each and together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli import formatting, options, output, tables
from slurmtrain.cli.drawing import Column
from slurmtrain.cli.options import since_option, where_option
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.query.spending import Spending

Record = Mapping[str, Any]
# So many runs, and sums of one kind, are listed; --csv and --json have all.
_SHOWN = 20
_VERBS = ("is", "are")


@options.command("cost @last", "cost --since 2w", "cost --where 'params.lr > 0.1' --csv", looks=True)
@options.some_runs_argument
@since_option
@where_option
@click.option("--all", "all_runs", is_flag=True, help="In a shared runs root, also the other users' runs.")
@options.csv_option
@options.json_option
def cost_command(
    workspace: Workspace, names: tuple[str, ...], since: str | None, where: tuple[str, ...], all_runs: bool,
    as_csv: bool, as_json: bool,
) -> int:  # fmt: skip
    """Show what runs cost, and how much was lost to interruptions; without RUN, the sum over all runs.

    RUN may also be a pattern such as 'cnn*', or a sweep. Prices are in slurmtrain.yaml (docs/cost.md); without them,
    costs are GPU-hours, or node-hours of runs without GPUs. A run that has not ended has cost what is known so far.
    Archived and deleted runs count, too.
    """
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other")
    from slurmtrain.ops.query.select import Question
    from slurmtrain.ops.query.spending import spending_of
    from slurmtrain.ops.shared.observe import observe

    observed = observe(workspace)
    output.warn_about(observed)
    question = Question(names=names, since=since, where=where, all_runs=all_runs)
    spending = spending_of(workspace, observed.runs, question)
    output.warn(spending.notes)
    if as_json:
        output.print_json(spending.to_json())
    elif as_csv:
        fields = [name for name in spending.runs[0] if name != "interruptions_by_cause"]
        output.print_csv([fields, *([tables.csv_cell(run[name]) for name in fields] for run in spending.runs)])
    else:
        print_spending(spending)
    return 0


def print_spending(spending: Spending) -> None:
    """Print what runs cost: the sum by purpose, a comparison with nodes on demand, and sums by what differs."""
    total, runs = spending.total, spending.runs
    of_what = f"run {runs[0]['id']} ({runs[0]['name']})" if len(runs) == 1 else f"{len(runs)} runs"
    output.echo(f"{of_what}: {_amount(total, 'spent')} {total['unit']}", "")
    tables.print_table(("", total["unit"], "", ""), list(_purpose_rows(total)))
    if lines := list(describe_comparison(total)):
        output.echo("")
        for line in lines:
            output.paragraph(line, "  ")
    for kind, sums in spending.groups.items():
        if len(sums) > 1:
            output.echo("")
            named = [{kind: name, **cost} for name, cost in sums.items()][-_SHOWN:]
            tables.print_lines([Column(kind.upper(), itemgetter(kind)), *_COLUMNS], named)
    if len(runs) > 1:
        output.echo("")
        dearest = sorted(runs, key=lambda run: (run["currency"] == total["currency"], run["spent"]), reverse=True)
        tables.print_lines([*_RUN_COLUMNS, *_COLUMNS], dearest[:_SHOWN])
        if len(runs) > _SHOWN:
            output.note(f"and {len(runs) - _SHOWN} more runs, which cost less; --csv prints all")
    output.warn(_uncounted(spending))


def _uncounted(spending: Spending) -> Iterator[str]:
    """What is not in the sum, and why."""
    if spending.total["problem"]:
        yield str(spending.total["problem"])
    without = [run for run in spending.runs if run["unit"] != spending.total["unit"] and run["currency"] is None]
    if spending.total["currency"] is None and without:
        hours = formatting.amount(sum(run["spent"] for run in without))
        plural = len(without) > 1
        runs = f"{len(without)} run{'s' * plural} without GPUs, with {hours} {without[0]['unit']}"
        yield f"{runs}, {_VERBS[plural]} not in the sum"
    for each in spending.unpriced:
        hours, unit = (each["gpu_hours"], "GPU-hours") if each["gpu_hours"] else (each["node_hours"], "node-hours")
        plural = each["runs"] != 1
        runs = f"{each['runs']} run{'s' * plural} with {formatting.amount(hours)} {unit}"
        yield f"{runs} {_VERBS[plural]} not in the sum: {each['problem']}"


def _amount(cost: Record, name: str) -> str:
    value = cost[name]
    return "-" if value is None else formatting.amount(value, cost["currency"])


def _purpose_rows(total: Record) -> Iterator[tuple[str, str, str, str]]:
    """A row for each purpose: its name, the amount, the share of all, and what is known about it."""
    count = total["interruptions"]
    causes = ", ".join(f"{number} {cause}" for cause, number in total["interruptions_by_cause"].items())
    lost = f"{count} interruption{'s' * (count != 1)} ({causes}), {_amount(total, 'cost_of_interruption')} each"
    for purpose in ("training", "saving", "starting", "stopping", "lost"):
        if total[purpose]:
            share = f"{100 * total[purpose] / total['spent']:.1f} %"
            yield purpose, _amount(total, purpose), share, lost if purpose == "lost" and count else ""
    if total["idle"]:
        yield "idle", _amount(total, "idle"), "", "so far, on idle nodes; partly included above"
    if total["waiting_seconds"]:
        yield "waiting", "0", "", f"{formatting.duration(total['waiting_seconds'])} in the queue"


def describe_comparison(cost: Record) -> Iterator[str]:
    """What the same would have cost on demand, and when that pays, in sentences.

    Args:
        cost: The field ``cost`` of a run.
    """
    if cost["saved_by_spot"] is None:
        return
    saved = cost["saved_by_spot"]
    by_how_much = f"{formatting.amount(abs(saved), cost['currency'])} {cost['unit']}"
    verdict = f"spot saved {by_how_much}" if saved >= 0 else f"on demand would have saved {by_how_much}"
    yield f"on demand, without interruptions: {_amount(cost, 'on_demand')} {cost['unit']}; {verdict}"
    rate = cost["break_even_interruptions_per_hour"]
    if rate is not None and cost["interruptions"]:
        lasting = formatting.duration(cost["hours_of_interruption"] * 3600)
        now = formatting.amount(cost["interruptions_per_hour"])
        yield (
            f"on demand is cheaper above {formatting.amount(rate)} interruptions an hour on nodes, at {lasting} "
            f"lost to each; there were {now}"
        )


_COLUMNS = (
    Column("SPENT", lambda cost: f"{_amount(cost, 'spent')} {cost['unit']}"),
    Column("LOST", lambda cost: _amount(cost, "lost")),
    Column("SAVING", lambda cost: _amount(cost, "saving"), rank=3),
    Column("STARTING", lambda cost: _amount(cost, "starting"), rank=2),
    Column("ON DEMAND", lambda cost: _amount(cost, "on_demand"), rank=1),
    Column("INTERRUPTIONS", lambda cost: str(cost["interruptions"]), rank=2),
    Column("NODE-HOURS", lambda cost: formatting.amount(cost["node_hours"]), rank=4),
    Column("GPU-HOURS", lambda cost: formatting.amount(cost["gpu_hours"]), rank=4),
)
_RUN_COLUMNS = (
    Column("ID", lambda run: run["id"]),
    Column("NAME", lambda run: run["name"], 10, 1),
    Column("STATE", lambda run: run["state"]),
)
