"""``slurmtrain doctor``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmtrain.cli.shared import formatting, options, output, tables
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.diagnosis.root_cause import PatternMatch
    from slurmtrain.model.interruption.outlook import Outlook, SiteFinding
    from slurmtrain.ops.diagnose import AttemptDiagnosis
    from slurmtrain.ops.doctor import DoctorReport

_SPECS = (".yaml", ".yml")
_STARTS = {
    "agent": "its own agent",
    "slurm": "Slurm",
    "watch": "slurmtrain watch",
    "itself": "it goes on",
    "nobody": "nobody",
}
_HEADERS = ("PARTITION", "INTERRUPTION", "SECONDS", "STARTED AGAIN BY", "AFTER", "WORST")
_OTHERS = 10


@click.command("doctor", short_help="Say whether runs come back here, or why one failed.")
@click.argument("what", metavar="[SPEC|RUN]", required=False)
@options.overrides_argument
@click.option("--attempt", type=click.IntRange(min=1), help="This attempt of RUN; by default the last that went wrong.")
@options.executor_option
@options.json_option
@options.in_workspace
def command(
    workspace: Workspace,
    what: str | None,
    overrides: tuple[str, ...],
    attempt: int | None,
    executor: str | None,
    as_json: bool,
) -> int:
    """Say what becomes of the run of a SPEC at a preemption, a time limit, the loss of a node; or why a RUN failed.

    Without an argument it tells of each partition that you may use. SPEC is a file, or ends in .yaml or .yml; anything
    else is a RUN. Exits with 1 if something prevents runs from coming back.
    """
    if what is None or _is_spec(what):
        if attempt is not None:
            raise click.UsageError("--attempt belongs to a RUN")
        return _examine(workspace, what, overrides, executor, as_json=as_json)
    if overrides or executor:
        raise click.UsageError(f"KEY=VALUE and --executor belong to a SPEC; {what!r} is no file, and so a RUN")
    return _diagnose(workspace, what, attempt, as_json=as_json)


def _is_spec(what: str) -> bool:
    return what.endswith(_SPECS) or Path(what).is_file()


# --- doctor SPEC ----------------------------------------------------------------------------------------------------


def _examine(
    workspace: Workspace, what: str | None, overrides: tuple[str, ...], executor: str | None, *, as_json: bool
) -> int:
    from slurmtrain.ops.doctor import examine

    chosen = options.default_executor(executor or workspace.config.executor)
    examined = examine(workspace, Path(what) if what is not None else None, overrides, chosen)
    if as_json:
        output.print_json(examined.to_dict())
    elif what is None and examined.executor == "slurm":
        _print_table(examined)
    else:
        _print_outlooks(examined)
    return 0 if examined.good else 1


def _print_table(examined: DoctorReport) -> None:
    from slurmtrain.model.interruption.outlook import worst

    rows = [
        (
            one.partition,
            case.event,
            "-" if case.seconds is None else f"{case.seconds:.0f}",
            _STARTS[case.starts],
            formatting.duration(case.delay_s),
            worst(one.findings),
        )
        for one in examined.outlooks
        for case in one.cases
    ]
    tables.print_table(_HEADERS, rows)
    _print_findings(_shared(examined.outlooks))
    _print_unknown(examined)


def _shared(outlooks: Sequence[Outlook]) -> list[tuple[str, SiteFinding]]:
    """Findings, each once, with the partitions that it is of; those of all partitions without names."""
    places: dict[SiteFinding, list[str]] = {}
    for one in outlooks:
        for finding in one.findings:
            places.setdefault(finding, []).append(one.partition)
    return [("" if len(names) == len(outlooks) else ", ".join(names), one) for one, names in places.items()]


def _print_outlooks(examined: DoctorReport) -> None:
    for one in examined.outlooks:
        click.echo(f"partition {one.partition}" if one.partition else "on this machine")
        for case in one.cases:
            click.echo(_wrapped(f"  {case.event}: {case.text}", "    "))
        click.echo()
    _print_findings([("", one) for one in examined.findings] + _shared(examined.outlooks))
    _print_unknown(examined)


def _print_findings(findings: list[tuple[str, SiteFinding]]) -> None:
    for where, one in findings:
        click.echo(_wrapped(f"{one.severity:<5}{f'[{where}] ' if where else ''}{one.text}", " " * 5))
        if one.fix:
            click.echo(_wrapped(f"     -> {one.fix}", " " * 8))


def _wrapped(line: str, indent: str) -> str:
    """A line as a paragraph on a terminal; elsewhere it stays a line, to be searched."""
    if not tables.is_terminal(sys.stdout):
        return line
    from shutil import get_terminal_size
    from textwrap import fill

    return fill(line, get_terminal_size().columns, subsequent_indent=indent, break_on_hyphens=False)


def _print_unknown(examined: DoctorReport) -> None:
    output.warn(f"not known: {one}" for one in examined.unknown)


# --- doctor RUN -----------------------------------------------------------------------------------------------------


def _diagnose(workspace: Workspace, name: str, attempt: int | None, *, as_json: bool) -> int:
    from slurmtrain.ops.diagnose import diagnose
    from slurmtrain.ops.shared.find import find

    [run_id], observed = find(workspace, [name])
    output.warn_about(observed)
    diagnosed = diagnose(workspace, run_id, attempt)
    if as_json:
        output.print_json(diagnosed.to_dict())
    else:
        _print_diagnosis(diagnosed)
    return 0


def _print_diagnosis(diagnosed: AttemptDiagnosis) -> None:
    from slurmtrain.ops.diagnose import OUTCOME

    run, attempt, found = diagnosed.run, diagnosed.attempt, diagnosed.diagnosis
    if attempt is None:
        click.echo(f"run {run.id} is {run.state}, and was never started: {run.reason or 'there is nothing to read'}")
        return
    said = f": {attempt.reason}" if attempt.reason else ""
    of = f" of {len(run.attempts)}" if len(run.attempts) > 1 else ""
    click.echo(_wrapped(f"run {run.id}, attempt {attempt.number}{of}: {attempt.cause or attempt.state}{said}", "  "))
    if found.root is not None:
        click.echo("\nroot cause")
        _print_found(found.root)
    else:
        logs = "1 log was" if diagnosed.read == 1 else f"{diagnosed.read} logs were"
        click.echo(f"\nno known pattern explains it ({logs} read)")
    if found.laggard is not None:
        click.echo(f"\nbehind: {found.laggard.why}")
    if found.root is None and diagnosed.failing is not None:
        one = diagnosed.failing
        click.echo(f"\nrank {one.rank}{f' on {one.host}' if one.host else ''} failed first: it {one.description}")
        for line in one.last_lines:
            click.echo(f"  | {line}")
    # What the attempt ended with stands above already.
    others = [one for one in found.others if one.first.name != OUTCOME]
    if others:
        click.echo("\nalso, in order" if found.ordered else "\nalso, by log and line")
    for other in others[:_OTHERS]:
        _print_found(other)
    if len(others) > _OTHERS:
        click.echo(f"  and {len(others) - _OTHERS} more; --json has them")
    if not found.ordered:
        click.echo("\nnot all of these lines say when they were written: which came first is not known for certain")
    output.warn(f"not read: {problem}" for problem in diagnosed.problems)
    if diagnosed.partly:
        click.echo(f"note: of {len(diagnosed.partly)} long log(s) only beginning and end were read", err=True)


def _print_found(found: PatternMatch) -> None:
    first = found.first
    where = ", ".join(
        filter(
            None,
            (
                f"rank {first.rank}" if first.rank is not None else "",
                f"on {first.host}" if first.host else "",
                _when(found),
                f"{found.count} times" if found.count > 1 else "",
            ),
        )
    )
    click.echo(f"  {first.role}: {first.cause}{f' ({where})' if where else ''}")
    if first.text:
        click.echo(f"    | {first.text}")
    if first.fix:
        click.echo(f"    -> {first.fix}")


def _when(found: PatternMatch) -> str:
    from slurmtrain.ops.shared.views import iso

    if found.first.at is None:
        return ""
    return f"{'at' if found.first.exact else 'before'} {iso(found.first.at)}"
