"""``slurmtrain best``."""

from __future__ import annotations

import click

from slurmtrain.cli.shared import complete, formatting, options, output, run_table
from slurmtrain.cli.shared.fit import Column
from slurmtrain.cli.shared.question_options import where_option
from slurmtrain.ops.shared.workspace import Workspace


@click.command(
    "best",
    short_help="Print the best run by a metric.",
    epilog=options.examples("best 'cnn*' --by acc", "best --by val_loss --top 5 --where 'state = completed'"),
)
@options.some_runs_argument
@click.option(
    "--by",
    metavar="METRIC",
    shell_complete=complete.complete_metric,
    help="The metric; by default the only one that the runs have.",
)
@click.option("--max/--min", "larger", default=None, help="Larger or smaller is better; by default by its name.")
@click.option("--top", metavar="N", type=click.IntRange(min=1), default=1, show_default=True, help="How many runs.")
@where_option
@options.json_option
@options.in_workspace
def command(
    workspace: Workspace,
    names: tuple[str, ...],
    by: str | None,
    larger: bool | None,
    top: int,
    where: tuple[str, ...],
    as_json: bool,
) -> int:
    """Print the best run by the newest value of a metric, with the parameters in which the runs differ.

    RUN is a name, for all runs of that name, a pattern such as 'cnn*', or a sweep; without it, all runs are compared.
    Exits with 1 if none of them has a value.
    """
    from slurmtrain.ops.query.best import rank
    from slurmtrain.ops.query.select import Question
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import SCHEMA

    observed = observe(workspace)
    output.warn_about(observed)
    question = Question(names=names, namesakes=True, where=where, for_programs=True)
    ranking = rank(workspace, observed.runs, question, by, larger)
    criterion, runs = ranking.criterion, ranking.runs[:top]
    if criterion.guessed:
        output.echo(f"{criterion}, by its name; --max and --min choose", err=True)
    if not runs:
        output.echo(f"none of {ranking.without} runs has a value of {criterion.name}", err=True)
    elif ranking.without:
        output.echo(f"{ranking.without} run(s) without {criterion.name} are left out", err=True)
    if as_json:
        shown = [dict(run) for run in runs]
        output.print_json({"schema": SCHEMA, "by": criterion.name, "better": criterion.better, "runs": shown})
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
    return 0 if runs else 1
