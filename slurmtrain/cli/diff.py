"""``slurmtrain diff``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli.shared import complete, formatting, options, output, tables
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.metrics.divergence import Divergence
    from slurmtrain.ops.query.diff import CheckpointEquality, CodeDifference, RunDifference

# How many files or packages are listed; --json has all.
_SHOWN = 20


@click.command(
    "diff",
    short_help="Show how two runs differ: spec, code, environment, result.",
    epilog=options.examples("diff 6am5hhj838 6am6erpw4z", "diff digits @last --code"),
)
@click.argument("first", metavar="A", shell_complete=complete.complete_run)
@click.argument("second", metavar="B", shell_complete=complete.complete_run)
@click.option("--code", "lines", is_flag=True, help="Also print the lines in which text files of the code differ.")
@options.json_option
@options.in_workspace
@options.looks
def command(workspace: Workspace, first: str, second: str, lines: bool, as_json: bool) -> int:
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
        _print(difference)
    return 0


def _print(difference: RunDifference) -> None:
    headers = [f"{run['id']} {run['name']}" for run in difference.runs]
    _section("SPEC", headers, [(key, *map(formatting.setting, pair)) for key, pair in difference.spec.items()])
    _print_code(difference.code)
    for kind, changes in difference.environment.items():
        rows = [(name, *map(_text, pair)) for name, pair in changes.items()]
        _section(f"ENVIRONMENT: {kind}", headers, rows)
    if not difference.environment:
        _section("ENVIRONMENT", headers, [])
    _section("RESULT", [*headers, "DIFFERENCE"], list(_results(difference.result)))
    _print_metrics(difference.metrics, headers)
    output.echo("", f"CHECKPOINTS: {_describe_checkpoints(difference.checkpoints)}")


def _section(title: str, headers: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
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


def _print_metrics(metrics: Mapping[str, Divergence], headers: Sequence[str]) -> None:
    """At which step metrics begin to differ, and in a line how many do not."""
    differing = {name: each for name, each in metrics.items() if each.values is not None}
    rows = [
        (name, str(each.step), *map(repr, each.values or ()), f"{each.steps} steps") for name, each in differing.items()
    ]
    if rows:
        _section("FIRST DIFFERENCE", ["STEP", *headers, "BOTH HAVE"], rows)
    same = [name for name, each in metrics.items() if each.values is None and each.steps]
    if same:
        output.echo("", f"METRICS: equal at all steps that both have: {', '.join(same)}")


def _results(result: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for name, pair in result.items():
        if any(value not in (None, 0) for value in pair) or name in ("state", "step"):
            first, second = (formatting.duration(value) if name == "seconds" else _text(value) for value in pair)
            yield name.replace("_", " ") if name in ("gpu_hours", "lost_steps") else name, first, second, _change(pair)


def _change(pair: Sequence[Any]) -> str:
    """By how much the second of two figures is larger; nothing if they are equal, or no figures."""
    first, second = pair
    if any(isinstance(value, str | None) for value in pair) or first == second:
        return ""
    return f"{second - first:+.4g}"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return formatting.number(value) if isinstance(value, float) else str(value)


def _describe_checkpoints(checkpoints: CheckpointEquality) -> str:
    if checkpoints.equal is None:
        return checkpoints.why
    if checkpoints.equal:
        return f"those of step {checkpoints.step} are equal, bit for bit"
    return f"those of step {checkpoints.step} differ: in weights, or in states of optimizers or random numbers"
