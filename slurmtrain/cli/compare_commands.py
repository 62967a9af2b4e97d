"""Runs side by side: ``compare``, ``best`` and ``diff``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli import formatting, options, output, tables
from slurmtrain.cli.drawing import GAP, Column, cell_len, shorten_names
from slurmtrain.cli.options import over_option, split_words, where_option
from slurmtrain.cli.tables import field_column, run_columns
from slurmtrain.model.query.comparison import count_states
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.query.comparison import Compared, SeedGroup
    from slurmtrain.ops.query.compare import Answer, RankedGroup, Ranking
    from slurmtrain.ops.query.diff import CodeDifference, RunDifference

# Cells of a run, and of what differs, in a table with a line for each difference, before they are cut.
_LEAST_OF_RUN, _ROOM_OF_NAMES = 16, 24
# Cells of a setting, or of a name, in a table with a line for each run.
_ROOM = 8
# How much of a commit is shown.
_COMMIT = 12


@options.command(
    "compare 'cnn*'", "compare 0k2f 0k2g --metrics val_loss,acc --by acc", "compare cnn --html cnn.html", looks=True
)
@options.runs_argument
@click.option(
    "--metrics", metavar="NAME[,NAME]", callback=split_words, shell_complete=options.complete_metrics,
    help="The metrics to compare.",
)  # fmt: skip
@click.option(
    "--by", metavar="METRIC", shell_complete=options.complete_metric,
    help="The metric to sort by; by default the first of those compared.",
)  # fmt: skip
@options.larger_option
@over_option
@where_option
@click.option("--performance", is_flag=True, help="Compare speed, and the resources that it took.")
@click.option(
    "--baseline", metavar="RUN", shell_complete=options.complete_run,
    help="With --performance: the run to compare the others with; by default the one with the fewest GPUs.",
)  # fmt: skip
@click.option(
    "--html", "page", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help="Write an HTML page, which also has curves and performance.",
)  # fmt: skip
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values, a line for each run.")
@options.json_option
def compare_command(
    workspace: Workspace, names: tuple[str, ...], metrics: tuple[str, ...], by: str | None, larger: bool | None,
    over: tuple[str, ...], where: tuple[str, ...], performance: bool, baseline: str | None, page: Path | None,
    as_csv: bool, as_json: bool,
) -> int:  # fmt: skip
    """Compare runs: the settings that differ among them, and their metrics, the best run first.

    RUN may also be a pattern such as 'cnn*', or a sweep. If the newest run of a name was submitted alone, the name
    alone stands for all runs of that name. Settings are the keys of the spec, the commit of the code, and the versions
    that the preflight saw. Runs that differ only in a seed, or in what --over names, are one line, with the mean of
    each metric and its standard deviation. A metric's newest value is compared; "best" is the best one that remained
    after interruptions, with its step. METRIC may also be min:loss, max:acc, last:loss, area:loss, or loss@1000 for the
    value at a step.

    With --performance: steps and samples in a second, seconds of an epoch, the memory and utilization of GPUs (or
    processes), GPU-hours for 1000 steps, and the speed-up against the baseline, also as a percentage of the ideal one.
    """
    if (as_csv and as_json) or (page is not None and (as_csv or as_json or performance)):
        raise click.UsageError("--csv, --json and --html exclude each other, and --html has --performance anyway")
    if baseline is not None and not performance and page is None:
        raise click.UsageError("--baseline takes --performance or --html")
    if performance and (metrics or by or over or larger is not None):
        raise click.UsageError("--performance excludes --metrics, --by, --over, --max and --min")
    from slurmtrain.ops.query.compare import put_side_by_side
    from slurmtrain.ops.query.select import Question
    from slurmtrain.ops.shared.observe import observe

    observed = observe(workspace)
    output.warn_about(observed)
    # A run alone cannot be compared with anything.
    question = Question(names=names, namesakes=len(names) == 1, where=where, over=over, for_programs=True)
    if performance:
        from slurmtrain.ops.query.performance import compare_performance_of

        compared = compare_performance_of(workspace, observed.runs, question, baseline)
        for note in compared.notes:
            output.note(note)
        rows = [each.to_dict() for each in compared.runs]
        if as_json:
            output.print_json(compared.to_json())
        elif as_csv:
            output.print_csv([[*rows[0]], *([*row.values()] for row in rows)])
        else:
            output.note(f"compared with {compared.baseline.id} ({compared.baseline.name})")
            # Figures that few runs have take no room where none has them.
            columns = [each for each in _PERFORMANCE_COLUMNS if each not in _SELDOM or {*map(each.cell, rows)} != {"-"}]
            tables.print_lines(columns, rows)
        return 0
    answer = put_side_by_side(workspace, observed.runs, question, metrics, by, larger)
    output.warn(answer.notes)
    if page is not None:
        from slurmtrain.ops.query.performance import compare_performance_of
        from slurmtrain.system.interpreter import PAGES, load_plugin

        compared = compare_performance_of(workspace, observed.runs, question, baseline)
        load_plugin(PAGES, "compare")(workspace, observed, answer, compared, page)
        output.verbatim(str(page))
    elif as_json:
        output.print_json(answer.to_json())
    elif as_csv:
        output.print_csv(_comparison_rows(answer))
    else:
        _print_comparison(answer)
    return 0


_SELDOM = (
    Column("TOKENS/S", lambda run: formatting.figures(run["tokens_per_second"]), rank=5),
    Column("DATA", lambda run: formatting.as_percent(run["data_wait_share"]), rank=5),
    Column("COMM", lambda run: formatting.as_percent(run["communication_share"]), rank=5),
    Column("MFU", lambda run: formatting.as_percent(run["mfu"]), rank=5),
    Column("KWH", lambda run: formatting.figures(run["energy_kwh"]), rank=6),
)
# Of runs of ``compare --performance --json``. DATA and COMM: the parts of steps that ranks waited for data, and
# communicated. IDEAL: the speed-up in percent of the ideal one. HOURS/1000: GPU-hours (or
# process-hours) for 1000 steps.
_PERFORMANCE_COLUMNS = (
    Column("ID", lambda run: run["id"]),
    Column("NAME", lambda run: run["name"], 10, 1),
    Column("STATE", lambda run: run["state"]),
    Column("NODES", lambda run: formatting.number(run["nodes"]), rank=4),
    Column("PROCS", lambda run: formatting.number(run["processes"]), rank=2),
    Column("GPUS", lambda run: formatting.number(run["gpus"]), rank=2),
    Column("STEPS/S", lambda run: formatting.figures(run["steps_per_second"]), rank=1),
    Column("SAMPLES/S", lambda run: formatting.figures(run["samples_per_second"]), rank=3),
    Column("P50", lambda run: formatting.step_time(run["step_p50_s"]), rank=5),
    Column("P95", lambda run: formatting.step_time(run["step_p95_s"]), rank=5),
    Column("S/EPOCH", lambda run: formatting.figures(run["epoch_seconds"]), rank=3),
    Column("TOTAL", lambda run: formatting.duration(run["total_seconds"]), rank=4),
    Column("MEMORY", lambda run: formatting.size(run["memory_bytes"]), rank=2),
    Column("UTIL", lambda run: formatting.percent(run["utilization"]), rank=3),
    *_SELDOM,
    Column("HOURS/1000", lambda run: formatting.figures(run["hours_per_1000_steps"]), rank=4),
    Column("SPEED-UP", lambda run: "-" if run["speedup"] is None else f"{run['speedup']:.2f}"),
    Column("IDEAL", lambda run: formatting.as_percent(run["of_ideal"]), rank=1),
)


# A line of the table: runs that differ in nothing but seeds, and whether it is their mean below lines for each.
_Line = tuple["SeedGroup", bool]


def _print_comparison(answer: Answer) -> None:
    """Print a line for each group; if there is only one, for each of its runs, and for all of them."""
    if not answer.comparison.differs:
        output.echo("the runs have the same settings", err=True)
    if answer.criterion is not None:
        output.echo(str(answer.criterion), err=True)
    lines: list[_Line] = []
    groups = answer.comparison.groups
    for group in groups:
        if len(groups) > 1 or len(group.runs) == 1:
            lines.append((group, False))
        else:
            lines += [*((replace(group, runs=[run]), False) for run in group.runs), (group, True)]
    columns = _comparison_columns(answer, lines)
    if output.is_terminal(sys.stdout):
        cells = [[column.title for column in columns], *([column.cell(line) for column in columns] for line in lines)]
        upright, width = list(zip(*cells, strict=True)), tables.console().width
        # Neither ids nor states are cut.
        rooms = [_ROOM_OF_NAMES, *(max(_LEAST_OF_RUN, *map(len, (row[0], row[2]))) for row in cells[1:])]
        widths = (max(map(cell_len, line)) for line in zip(*upright, strict=True))
        whole = sum(max(map(cell_len, column)) + GAP for column in upright) - GAP
        narrowed = sum(min(room, wide) + GAP for room, wide in zip(rooms, widths, strict=True)) - GAP
        # With a line for each difference, not for each run, more of it may fit.
        if whole > width and narrowed <= width:
            columns = [
                Column(title, itemgetter(index), room, fitted=partial(tables.fit_names, index))
                for index, (title, room) in enumerate(zip(upright[0], rooms, strict=True))
            ]
            tables.print_lines(columns, upright[1:])
            return
    tables.print_lines(columns, lines)


def _states(states: Sequence[str]) -> str:
    """The state of a run, or of all runs of a group; else how many have not completed, by state."""
    if len(set(states)) == 1:
        return states[0]
    return count_states([state for state in states if state != "completed"])


def _comparison_columns(answer: Answer, lines: Sequence[_Line]) -> list[Column]:
    """The columns: on a narrow terminal the sort criterion, and the settings of runs, are shown first."""
    by = answer.criterion.name.removeprefix("metrics.") if answer.criterion else ""

    def fact(title: str, cell: Callable[[Sequence[Compared]], str], *widths: int) -> Column:
        return Column(title, lambda line: "-" if line[1] else cell(line[0].runs), *widths)

    def identity(line: _Line) -> str:
        runs = line[0].runs
        return "mean" if line[1] else f"{runs[0].id} +{len(runs) - 1}" if len(runs) > 1 else runs[0].id

    def setting(name: str, runs: Sequence[Compared]) -> str:
        values = dict.fromkeys(formatting.setting(run.settings.get(name)) for run in runs)
        return ",".join(value[:_COMMIT] if name == "git.commit" else value for value in values)

    def best(metric: str, line: _Line) -> str:
        group, _ = line
        step = group.runs[0].scores[metric].best_step if len(group.runs) == 1 else None
        return formatting.spread(group.spread(metric, best=True)) + ("" if step is None else f" @{step}")

    def newest(metric: str, line: _Line) -> str:
        return formatting.spread(line[0].spread(metric))

    def measured(title: str, cell: Callable[[_Line], str], rank: int) -> Column:
        # The title may be cut, and no value.
        return Column(title, cell, max(len(cell(line)) for line in lines), rank)

    def named(lines: Sequence[_Line], width: int) -> list[str]:
        return shorten_names([group.runs[0].name for group, _ in lines], width)

    rank_of_name = 0 if len({group.runs[0].name for group, _ in lines}) > 1 else 6
    titles = [name.removeprefix("params.") for name in answer.comparison.differs]
    columns = [
        Column("ID", identity),
        Column("NAME", lambda line: "-" if line[1] else line[0].runs[0].name, _ROOM, rank_of_name, fitted=named),
        fact("STATE", lambda runs: _states([run.state for run in runs])),
        *(
            replace(fact(title, partial(setting, name), _ROOM, 3 if name in answer.comparison.over else 1), short=short)
            for name, title, short in zip(answer.comparison.differs, titles, shorten_names(titles, _ROOM), strict=True)
        ),
    ]
    for metric in answer.metrics:
        rank = 0 if metric == by else 3
        columns.append(measured(metric, partial(newest, metric), rank))
        if metric in answer.ranged:
            columns.append(measured(f"best {metric}", partial(best, metric), rank + 2))
    return columns


def _comparison_rows(answer: Answer) -> Iterator[Sequence[Any]]:
    metrics = [
        header
        for metric in answer.metrics
        for header in (metric, *([f"best {metric}", f"best {metric} step"] if metric in answer.ranged else []))
    ]
    yield ["id", "name", "state", *answer.comparison.differs, *metrics]
    # Each run, also where the table has a mean: programs can average by themselves.
    for group in answer.comparison.groups:
        for run in group.runs:
            values: list[float | None] = []
            for metric in answer.metrics:
                score = run.scores[metric]
                values += [score.last, score.best, score.best_step] if metric in answer.ranged else [score.last]
            settings = [tables.csv_cell(run.settings.get(name)) for name in answer.comparison.differs]
            yield [run.id, run.name, run.state, *settings, *values]


@options.command(
    "best 'cnn*' --by acc",
    "best --by min:val_loss --top 5 --where 'state = completed'",
    "best --by acc --over seed",
    looks=True,
)
@options.some_runs_argument
@click.option(
    "--by", metavar="METRIC", shell_complete=options.complete_metric,
    help="The metric, or min:METRIC, METRIC@STEP, ...; by default the search's, keep.best's, or the only one.",
)  # fmt: skip
@options.larger_option
@click.option("--top", metavar="N", type=click.IntRange(min=1), default=1, show_default=True, help="How many runs.")
@over_option
@where_option
@options.json_option
def best_command(
    workspace: Workspace, names: tuple[str, ...], by: str | None, larger: bool | None, top: int,
    over: tuple[str, ...], where: tuple[str, ...], as_json: bool,
) -> int:  # fmt: skip
    """Print the best run by the newest value of a metric, with the parameters that differ among the runs.

    RUN may also be a pattern such as 'cnn*', or a sweep; without it, all runs are compared. If the newest run of a name
    was submitted alone, the name alone stands for all runs of that name. METRIC may also be min:loss, max:acc,
    last:loss, area:loss, or loss@1000 for the value at a step. Exits with 1 if none of the runs has a value.
    """
    from slurmtrain.ops.query.compare import rank
    from slurmtrain.ops.query.select import Question
    from slurmtrain.ops.query.trials import summarize
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import SCHEMA

    observed = observe(workspace)
    output.warn_about(observed)
    searches = summarize(workspace, names)
    question = Question(names=names, namesakes=len(names) == 1, where=where, over=over, for_programs=True)
    ranking = rank(workspace, observed.runs, question, by, larger)
    criterion, runs, groups = ranking.criterion, ranking.runs[:top], ranking.groups[:top]
    best = [group.runs[0] for group in groups] if over else runs
    _describe_ranking(ranking, best)
    if as_json:
        # The best run of each group, so that a program finds runs in the same place with and without --over.
        shown = [dict(run) for run in best]
        answer = {"schema": SCHEMA, "by": criterion.name, "better": criterion.better, "runs": shown}
        if over:
            answer |= {"over": list(over), "groups": [group.to_json() for group in groups]}
        if searches:
            answer["searches"] = [search.to_json() for search in searches]
        output.print_json(answer)
    elif groups:
        _print_groups(criterion.name, groups, ranking.params)
    elif runs:
        id_to_state, params_to_age = (
            run_columns("id name state", ""),
            run_columns("params step age", "params step age", ranking.params),
        )
        tables.print_lines([*id_to_state, field_column(criterion.name), *params_to_age], runs)
    if not as_json:
        for search in searches:
            output.note(str(search))
    return 0 if runs else 1


def _describe_ranking(ranking: Ranking, best: Sequence[Mapping[str, Any]]) -> None:
    """Say how runs were ranked, which were not, and which of the ``best`` have not completed."""
    criterion = ranking.criterion
    if criterion.guessed:
        output.note(f"{criterion}, by its name; --max and --min choose")
    if not best:
        output.note(f"none of {ranking.without} runs has a value of {criterion.name}")
    elif ranking.without:
        output.note(f"{ranking.without} run(s) without {criterion.name} are left out")
    open_ones = [
        f"run {run['id']} has not completed: it is {run['state']}" for run in best if run["state"] != "completed"
    ]
    output.notes(output.few(open_ones))


def _print_groups(name: str, groups: Sequence[RankedGroup], params: Sequence[str]) -> None:
    """Print a line for each group: its best run, how many there are, and the mean and deviation of a field.

    Args:
        name: The field.
        groups: The groups.
        params: The parameters that differ among all runs.
    """
    columns = (
        Column("BEST", lambda group: group.runs[0]["id"]),
        Column("RUNS", lambda group: str(len(group.runs))),
        Column("STATE", lambda group: _states([run["state"] for run in group.runs])),
        Column("NAME", lambda group: group.runs[0]["name"], 20),
        Column(f"mean {name.removeprefix('metrics.')}", lambda group: formatting.spread(group.spread)),
        Column("PARAMS", lambda group: formatting.params(group.params, params) or "-", 14, 1),
    )
    tables.print_lines(columns, groups)


# How many files or packages are listed; --json has all.
_SHOWN = 20


@options.command("diff 6am5hhj838 6am6erpw4z", "diff digits @last --code", looks=True)
@click.argument("first", metavar="A", shell_complete=options.complete_run)
@click.argument("second", metavar="B", shell_complete=options.complete_run)
@click.option("--code", "lines", is_flag=True, help="Also print the differing lines of text files of the code.")
@options.json_option
def diff_command(workspace: Workspace, first: str, second: str, lines: bool, as_json: bool) -> int:
    """Show how runs A and B differ: in their specs, code, environments and results, and whether checkpoints are equal.

    A run is named by its id, the beginning of its id, its name or @last. What was changed by 'resume' counts as it was
    in the newest attempt.
    """
    from slurmtrain.ops.query.diff import diff

    difference = diff(workspace, first, second, lines=lines)
    output.warn(difference.notes)
    if as_json:
        output.print_json(difference.to_json())
    else:
        _print_difference(difference)
    return 0


def _print_difference(difference: RunDifference) -> None:
    # Names may be long, and ids are whole.
    names = shorten_names([run["name"] for run in difference.runs], _LEAST_OF_RUN)
    headers = [f"{run['id']} {name}" for run, name in zip(difference.runs, names, strict=True)]
    _print_section("SPEC", headers, [(key, *map(formatting.setting, pair)) for key, pair in difference.spec.items()])
    _print_code(difference.code)
    # Without any difference, one line has to say so.
    for kind, changes in (difference.environment or {"": {}}).items():
        rows = [(name, *map(_text, pair)) for name, pair in changes.items()]
        _print_section(f"ENVIRONMENT: {kind}" if kind else "ENVIRONMENT", headers, rows)
    results = []
    for name, pair in difference.result.items():
        if any(value not in (None, 0) for value in pair) or name in ("state", "step"):
            texts = [formatting.duration(value) if name == "seconds" else _text(value) for value in pair]
            # By how much the second is larger, if both are figures.
            is_change = pair[0] != pair[1] and not any(isinstance(value, str | None) for value in pair)
            title = name.replace("_", " ") if name in ("gpu_hours", "lost_steps") else name
            results.append((title, *texts, f"{pair[1] - pair[0]:+.4g}" if is_change else ""))
    _print_section("RESULT", [*headers, "DIFFERENCE"], results)
    differing = [
        # With all their digits: values that differ in the last bit would look equal otherwise.
        (name, str(each.step), *map(repr, each.values), f"{each.steps} steps")
        for name, each in difference.metrics.items()
        if each.values is not None
    ]
    if differing:
        _print_section("FIRST DIFFERENCE", ["STEP", *headers, "BOTH HAVE"], differing)
    same = [name for name, each in difference.metrics.items() if each.values is None and each.steps]
    if same:
        output.echo("", f"METRICS: equal at all steps that both have: {', '.join(same)}")
    checkpoints = difference.checkpoints
    outcome = "are equal, bit for bit"
    if not checkpoints.equal:
        outcome = "differ: in weights, or in states of optimizers or random numbers"
    sentence = checkpoints.why if checkpoints.equal is None else f"both of step {checkpoints.step} {outcome}"
    output.echo("", f"CHECKPOINTS: {sentence}")


def _print_section(title: str, headers: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    """A table with a line for each difference, or a line that says that there is none."""
    if not rows:
        output.echo("", f"{title}: no difference")
        return
    output.echo("")
    tables.print_table((title, *headers), rows[:_SHOWN])
    if len(rows) > _SHOWN:
        output.echo(f"and {len(rows) - _SHOWN} more; --json has all")


def _print_code(code: CodeDifference) -> None:
    why = f" ({code.why})" if code.why else ""
    if code.same:
        output.echo("", f"CODE: no difference: {code.versions[0]}{why}")
        return
    output.echo("", f"CODE: {code.versions[0]} and {code.versions[1]}{why}")
    if code.files is not None:
        for change, paths in code.files._asdict().items():
            for path in paths[:_SHOWN]:
                output.echo(f"  {change:<8} {path}")
            if len(paths) > _SHOWN:
                output.echo(f"  and {len(paths) - _SHOWN} more {change}; --json has all")
    for line in code.lines:
        output.verbatim(line)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return formatting.number(value) if isinstance(value, float) else str(value)
