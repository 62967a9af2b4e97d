"""``slurmtrain compare``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli.shared import complete, formatting, options, output, run_table, tables
from slurmtrain.cli.shared.fit import GAP, Column
from slurmtrain.cli.shared.question_options import over_option, split_words, where_option
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.query.comparison import Compared, SeedGroup
    from slurmtrain.ops.query.compare import Answer
    from slurmtrain.ops.query.select import Question
    from slurmtrain.ops.shared.observe import ListedRuns

# Cells of a run in a table with a line for each difference, before it is cut.
_LEAST_OF_RUN = 16
# How much of a commit is shown.
_COMMIT = 12


@click.command(
    "compare",
    short_help="Compare runs: what differs, and the metrics.",
    epilog=options.examples("compare 'cnn*'", "compare 0k2f 0k2g --metrics val_loss,acc --by acc"),
)
@options.runs_argument
@click.option(
    "--metrics",
    metavar="NAME[,NAME]",
    callback=split_words,
    shell_complete=complete.complete_metrics,
    help="The metrics to compare.",
)
@click.option(
    "--by",
    metavar="METRIC",
    shell_complete=complete.complete_metric,
    help="The metric to sort by; by default the first of those compared.",
)
@click.option("--max/--min", "larger", default=None, help="Larger or smaller is better; by default by its name.")
@over_option
@where_option
@click.option("--performance", is_flag=True, help="Compare how fast the runs were, and what they needed for it.")
@click.option(
    "--baseline",
    metavar="RUN",
    shell_complete=complete.complete_run,
    help="With --performance: the run to compare the others with; by default the one with the fewest GPUs.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values, a line for each run.")
@options.json_option
@options.in_workspace
@options.looks
def command(
    workspace: Workspace,
    names: tuple[str, ...],
    metrics: tuple[str, ...],
    by: str | None,
    larger: bool | None,
    over: tuple[str, ...],
    where: tuple[str, ...],
    performance: bool,
    baseline: str | None,
    as_csv: bool,
    as_json: bool,
) -> int:
    """Compare runs: the settings that differ among them, and their metrics, the best run first.

    RUN may also be a pattern such as 'cnn*', or a sweep; a single name stands for all runs of that name. Settings are
    the keys of the spec, the commit of the code, and the versions that the preflight saw. Runs that differ only in a
    seed, or in what --over names, are one line, with the mean of each metric and its standard deviation. A metric's
    newest value is compared; "best" is the best one that remained after interruptions, with its step. METRIC may also
    be min:loss, max:acc, last:loss, area:loss, or loss@1000 for the value at a step.

    With --performance: steps and samples in a second, seconds of an epoch, the memory and utilization of GPUs (or
    processes), GPU-hours for 1000 steps, and the speed-up against the baseline, also as a percentage of the ideal one.
    """
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other")
    if baseline is not None and not performance:
        raise click.UsageError("--baseline takes --performance")
    if performance and (metrics or by or over or larger is not None):
        raise click.UsageError("--performance excludes --metrics, --by, --over, --max and --min")
    from slurmtrain.ops.query.compare import compare
    from slurmtrain.ops.query.select import Question
    from slurmtrain.ops.shared.observe import observe

    observed = observe(workspace)
    output.warn_about(observed)
    # A run alone cannot be compared with anything.
    question = Question(names=names, namesakes=len(names) == 1, where=where, over=over, for_programs=True)
    if performance:
        return _compare_performance(workspace, observed.runs, question, baseline, as_csv=as_csv, as_json=as_json)
    answer = compare(workspace, observed.runs, question, metrics, by, larger)
    output.warn(answer.notes)
    if as_json:
        output.print_json(answer.to_json())
    elif as_csv:
        output.print_csv(_csv_rows(answer))
    else:
        _print(answer)
    return 0


def _compare_performance(
    workspace: Workspace, runs: ListedRuns, question: Question, baseline: str | None, *, as_csv: bool, as_json: bool
) -> int:
    from slurmtrain.cli.describe.performance import PERFORMANCE_COLUMNS, performance_row
    from slurmtrain.ops.query.performance import compare_performance_of, row_json

    answer = compare_performance_of(workspace, runs, question, baseline)
    for note in answer.notes:
        output.note(note)
    rows = [row_json(each) for each in answer.runs]
    if as_json:
        output.print_json(answer.to_json())
    elif as_csv:
        output.print_csv([[*rows[0]], *([*row.values()] for row in rows)])
    else:
        output.note(f"compared with {answer.baseline.id} ({answer.baseline.name})")
        run_table.print_rows(PERFORMANCE_COLUMNS, [performance_row(row) for row in rows])
    return 0


def _print(answer: Answer) -> None:
    if not answer.comparison.differs:
        output.echo("the runs have the same settings", err=True)
    if answer.criterion is not None:
        output.echo(str(answer.criterion), err=True)
    columns, rows = _columns(answer), list(_rows(answer))
    lines = [tuple(column.header for column in columns), *rows]
    if output.is_terminal(sys.stdout) and _is_better_upright(lines, tables.console().width):
        first, *others = zip(*lines, strict=True)
        columns, rows = [Column(first[0]), *(Column(header, room=_LEAST_OF_RUN) for header in first[1:])], others
    run_table.print_rows(columns, rows)


def _is_better_upright(lines: Sequence[Sequence[str]], width: int) -> bool:
    """Whether a table should have a line for each difference, not for each run: then more of it fits.

    Args:
        lines: The table with a line for each run, header first.
        width: How wide the terminal is.
    """
    upright = list(zip(*lines, strict=True))
    names = _width([line[:1] for line in upright])
    return _width(lines) > width and (
        _width(upright) <= width or names + (len(lines) - 1) * (GAP + _LEAST_OF_RUN) <= width
    )


def _width(lines: Sequence[Sequence[str]]) -> int:
    """How wide a table is, in cells."""
    from rich.cells import cell_len

    return sum(max(map(cell_len, column)) + GAP for column in zip(*lines, strict=True)) - GAP


def _columns(answer: Answer) -> list[Column]:
    """The columns: on a narrow terminal the sort criterion, and the settings of runs, are shown first."""
    by = answer.criterion.name.removeprefix("metrics.") if answer.criterion else ""
    settings = [
        Column(name.removeprefix("params."), rank=3 if name in answer.comparison.over else 1, room=8)
        for name in answer.comparison.differs
    ]
    metrics = [
        Column(header, rank=rank + (0 if metric == by else 3))
        for metric in answer.metrics
        for header, rank in ((metric, 0), *([(f"best {metric}", 2)] if metric in answer.ranged else []))
    ]
    return [Column("ID"), Column("NAME", rank=6, room=8), Column("STATE", rank=6), *settings, *metrics]


def _rows(answer: Answer) -> Iterator[tuple[str, ...]]:
    """A row for each group; if there is only one, for each of its runs, and for all of them."""
    groups = answer.comparison.groups
    for group in groups:
        if len(groups) > 1 or len(group.runs) == 1:
            yield _row(answer, group)
            continue
        for run in group.runs:
            yield _row(answer, type(group)([run]))
        yield ("mean", *["-"] * (2 + len(answer.comparison.differs)), *_scores(answer, group))


def _row(answer: Answer, group: SeedGroup) -> tuple[str, ...]:
    first, *others = group.runs
    states = ",".join(dict.fromkeys(run.state for run in group.runs))
    settings = [_setting(name, group.runs) for name in answer.comparison.differs]
    return (
        f"{first.id} +{len(others)}" if others else first.id,
        first.name,
        states,
        *settings,
        *_scores(answer, group),
    )


def _setting(name: str, runs: Sequence[Compared]) -> str:
    values = dict.fromkeys(formatting.setting(run.settings.get(name)) for run in runs)
    return ",".join(value[:_COMMIT] if name == "git.commit" else value for value in values)


def _scores(answer: Answer, group: SeedGroup) -> list[str]:
    cells = []
    for metric in answer.metrics:
        step = group.runs[0].scores[metric].best_step if len(group.runs) == 1 else None
        at = "" if step is None else f" @{step}"
        cells.append(formatting.spread(group.spread(metric)))
        if metric in answer.ranged:
            cells.append(formatting.spread(group.spread(metric, best=True)) + at)
    return cells


def _csv_rows(answer: Answer) -> Iterator[Sequence[Any]]:
    metrics = [
        header
        for metric in answer.metrics
        for header in (metric, *([f"best {metric}", f"best {metric} step"] if metric in answer.ranged else []))
    ]
    yield ["id", "name", "state", *answer.comparison.differs, *metrics]
    for group in answer.comparison.groups:
        for run in group.runs:
            values: list[float | None] = []
            for metric in answer.metrics:
                score = run.scores[metric]
                values += [score.last, score.best, score.best_step] if metric in answer.ranged else [score.last]
            settings = [formatting.setting(run.settings.get(name)) for name in answer.comparison.differs]
            yield [run.id, run.name, run.state, *settings, *values]
