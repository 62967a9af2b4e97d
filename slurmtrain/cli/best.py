"""``slurmtrain best``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from slurmtrain.cli.shared import complete, formatting, options, output, run_table
from slurmtrain.cli.shared.fit import Column
from slurmtrain.cli.shared.question_options import over_option, where_option
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.query.best import RankedGroup


@click.command(
    "best",
    short_help="Print the best run by a metric.",
    epilog=options.examples(
        "best 'cnn*' --by acc",
        "best --by min:val_loss --top 5 --where 'state = completed'",
        "best --by acc --over seed",
    ),
)
@options.some_runs_argument
@click.option(
    "--by",
    metavar="METRIC",
    shell_complete=complete.complete_metric,
    help="The metric, or min:METRIC, METRIC@STEP, ...; by default that of a search, or the only one that runs have.",
)
@click.option("--max/--min", "larger", default=None, help="Larger or smaller is better; by default by its name.")
@click.option("--top", metavar="N", type=click.IntRange(min=1), default=1, show_default=True, help="How many runs.")
@over_option
@where_option
@options.json_option
@options.in_workspace
@options.looks
def command(
    workspace: Workspace,
    names: tuple[str, ...],
    by: str | None,
    larger: bool | None,
    top: int,
    over: tuple[str, ...],
    where: tuple[str, ...],
    as_json: bool,
) -> int:
    """Print the best run by the newest value of a metric, with the parameters that differ among the runs.

    RUN is a name, for all runs of that name, a pattern such as 'cnn*', or a sweep; without it, all runs are compared.
    METRIC may also be min:loss, max:acc, last:loss, area:loss, or loss@1000 for the value at a step. Exits with 1 if
    none of the runs has a value.
    """
    from slurmtrain.ops.query.best import rank
    from slurmtrain.ops.query.select import Question
    from slurmtrain.ops.search.summary import summarize
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import SCHEMA

    observed = observe(workspace)
    output.warn_about(observed)
    searches = summarize(workspace, names)
    if by is None and len(names) == len(searches) == 1:
        # What a search is for says what is best.
        [search] = searches
        by, larger = search.metric, search.larger if larger is None else larger
    question = Question(names=names, namesakes=True, where=where, over=over, for_programs=True)
    ranking = rank(workspace, observed.runs, question, by, larger)
    criterion, runs = ranking.criterion, ranking.runs[:top]
    if criterion.guessed:
        output.echo(f"{criterion}, by its name; --max and --min choose", err=True)
    if not runs:
        output.echo(f"none of {ranking.without} runs has a value of {criterion.name}", err=True)
    elif ranking.without:
        output.echo(f"{ranking.without} run(s) without {criterion.name} are left out", err=True)
    groups = ranking.groups[:top]
    if as_json:
        shown = [dict(run) for run in ([group.runs[0] for group in groups] if over else runs)]
        answer = {"schema": SCHEMA, "by": criterion.name, "better": criterion.better, "runs": shown}
        if over:
            answer |= {"over": list(over), "groups": [group.to_json() for group in groups]}
        if searches:
            answer["searches"] = [search.to_json() for search in searches]
        output.print_json(answer)
    elif groups:
        _print_groups(criterion.name, groups, ranking.params)
    elif runs:
        columns = [Column("ID"), Column("NAME", room=20), Column("STATE"), Column(criterion.name)]
        columns += [Column("PARAMS", rank=1, room=14), Column("STEP", rank=2), Column("AGE", rank=3)]
        run_table.print_rows(
            columns,
            [
                (
                    run["id"], run["name"], run["state"], run_table.field_cell(run, criterion.name),
                    formatting.params(run["params"], ranking.params) or "-", formatting.steps(run),
                    formatting.age(run["submitted_at"]),
                )
                for run in runs
            ],
        )  # fmt: skip
    if not as_json:
        for search in searches:
            output.note(str(search))
    return 0 if runs else 1


def _print_groups(name: str, groups: Sequence[RankedGroup], params: Sequence[str]) -> None:
    """Print a line for each group: its best run, how many there are, and the mean and deviation of a field.

    Args:
        name: The field.
        groups: The groups.
        params: The parameters that differ among all runs.
    """
    columns = [Column("BEST"), Column("RUNS"), Column("NAME", room=20), Column(f"mean {name.removeprefix('metrics.')}")]
    run_table.print_rows(
        [*columns, Column("PARAMS", rank=1, room=14)],
        [
            (
                group.runs[0]["id"], str(len(group.runs)), group.runs[0]["name"], formatting.spread(group.spread),
                formatting.params(group.params, params) or "-",
            )
            for group in groups
        ],
    )  # fmt: skip
