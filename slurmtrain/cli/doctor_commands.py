"""``slurmtrain doctor``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmtrain.cli import complete, formatting, options, output, tables
from slurmtrain.model.environment import describe_variables
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.diagnosis.root_cause import PatternMatch
    from slurmtrain.model.interruption.outlook import Outlook
    from slurmtrain.model.interruption.site_findings import SiteFinding
    from slurmtrain.ops.diagnose.attempt import AttemptDiagnosis
    from slurmtrain.ops.doctor import DoctorReport

# A missing file with one of these suffixes is reported as a missing spec, not as an unknown run.
_SPECS = (".yaml", ".yml")
_STARTS = {
    "agent": "its own agent",
    "slurm": "Slurm",
    "watch": "slurmtrain watch",
    "itself": "resumes by itself",
    "nobody": "nobody",
}
_HEADERS = ("PARTITION", "INTERRUPTION", "SECONDS", "STARTED AGAIN BY", "AFTER", "WORST")
# How many of the other matches are shown.
_OTHERS = 10


@options.command("doctor exp.yaml", "doctor @last", looks=True)
@click.argument("target", metavar="[SPEC|RUN]", required=False, shell_complete=complete.complete_run_or_spec)
@options.overrides_argument
@click.option(
    "--attempt", type=click.IntRange(min=1), help="The attempt of RUN to explain; by default the last that failed."
)
@options.executor_option
@options.json_option
def doctor(
    workspace: Workspace, target: str | None, overrides: tuple[str, ...], attempt: int | None, executor: str | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Predict what happens to a run of SPEC at a preemption, a time limit or a node failure; or say why RUN failed.

    Without an argument, covers each partition that you may use. SPEC is a file, or ends in .yaml or .yml; anything else
    is a RUN. Exits with 1 if something prevents runs from being restarted.
    """
    if target is None or _is_spec(target):
        if attempt is not None:
            raise click.UsageError("--attempt belongs to a RUN")
        return _examine(workspace, target, overrides, executor, as_json=as_json)
    if overrides or executor:
        raise click.UsageError(f"KEY=VALUE and --executor belong to a SPEC; {target!r} is not a file, hence a RUN")
    return _diagnose(workspace, target, attempt, as_json=as_json)


def _is_spec(target: str) -> bool:
    # Unlike Path.is_file(), this accepts any text, such as a name that is too long for a file.
    return target.endswith(_SPECS) or os.path.isfile(target)  # noqa: PTH113


# --- doctor SPEC ----------------------------------------------------------------------------------------------------


def _examine(
    workspace: Workspace, path: str | None, overrides: tuple[str, ...], executor: str | None, *, as_json: bool,
) -> int:  # fmt: skip
    # Here rather than at the top: ``doctor RUN`` need not load it.
    from slurmtrain.ops.doctor import examine

    chosen = workspace.config.choose_executor(executor)
    report = examine(workspace, Path(path) if path is not None else None, overrides, chosen)
    if as_json:
        output.print_json(report.to_dict())
    elif path is None and report.executor == "slurm":
        _print_table(report)
    else:
        _print_outlooks(report)
    return 0 if report.good else 1


def _print_table(report: DoctorReport) -> None:
    from slurmtrain.model.interruption.site_findings import worst_severity

    rows = [
        (
            outlook.partition,
            case.event,
            "-" if case.seconds is None else f"{case.seconds:.0f}",
            _STARTS[case.starts],
            formatting.duration(case.delay_s),
            worst_severity(outlook.findings),
        )
        for outlook in report.outlooks
        for case in outlook.cases
    ]
    tables.print_table(_HEADERS, rows)
    _print_report_findings(report)
    _print_unknown(report)


def _print_report_findings(report: DoctorReport) -> None:
    _print_findings([("", finding) for finding in report.findings] + _merge_findings(report.outlooks))


def _merge_findings(outlooks: Sequence[Outlook]) -> list[tuple[str, SiteFinding]]:
    """Each finding once, with the partitions that it applies to; no partitions if it applies to all."""
    partitions: dict[SiteFinding, list[str]] = {}
    for outlook in outlooks:
        for finding in outlook.findings:
            partitions.setdefault(finding, []).append(outlook.partition)
    return [("" if len(names) == len(outlooks) else ", ".join(names), finding) for finding, names in partitions.items()]


def _print_outlooks(report: DoctorReport) -> None:
    for outlook in report.outlooks:
        output.echo(f"partition {outlook.partition}" if outlook.partition else "on this machine")
        for case in outlook.cases:
            output.paragraph(f"  {case.event}: {case.text}", "    ")
        output.echo()
    _print_report_findings(report)
    _print_unknown(report)


def _print_findings(findings: list[tuple[str, SiteFinding]]) -> None:
    for partitions, finding in findings:
        prefix = f"[{partitions}] " if partitions else ""
        output.paragraph(f"{finding.severity:<5}{prefix}{finding.text}", " " * 5)
        if finding.fix:
            output.paragraph(f"     -> {finding.fix}", " " * 8)


def _print_unknown(report: DoctorReport) -> None:
    output.warn(f"unknown: {question}" for question in report.unknown)


# --- doctor RUN -----------------------------------------------------------------------------------------------------


def _diagnose(workspace: Workspace, name: str, attempt: int | None, *, as_json: bool) -> int:
    from slurmtrain.ops.diagnose.attempt import diagnose
    from slurmtrain.ops.shared.find import find

    [run_id], observed = find(workspace, [name])
    output.warn_about(observed)
    diagnosed = diagnose(workspace, run_id, attempt, observed.runs[run_id].live)
    if as_json:
        output.print_json(diagnosed.to_dict())
    else:
        _print_diagnosis(diagnosed)
    return 0


def _print_diagnosis(diagnosed: AttemptDiagnosis) -> None:
    from slurmtrain.ops.diagnose.journals import OUTCOME

    run, attempt, diagnosis = diagnosed.run, diagnosed.attempt, diagnosed.diagnosis
    if attempt is None:
        output.echo(f"run {run.id} is {run.state}, and was never started: {run.reason or 'there is nothing to read'}")
        return
    reason = f": {formatting.localized(attempt.reason)}" if attempt.reason else ""
    total = f" of {len(run.attempts)}" if len(run.attempts) > 1 else ""
    end = f"{attempt.cause or attempt.state}{reason}"
    output.paragraph(f"run {run.id}, attempt {attempt.number}{total}: {end}", "  ")
    if attempt.inherited:
        output.paragraph(f"from the shell that submitted it: {describe_variables(attempt.inherited)}", "  ")
    if diagnosis.root is not None:
        output.echo("", "root cause")
        _print_match(diagnosis.root)
    else:
        # The number of logs read distinguishes "nothing known" from "nothing to read".
        logs = "1 log was" if diagnosed.read == 1 else f"{diagnosed.read} logs were"
        output.echo("", f"no known pattern explains it ({logs} read)")
    if diagnosis.laggard is not None:
        output.echo("", f"behind: {diagnosis.laggard.why}")
    if diagnosis.root is None and diagnosed.failing is not None:
        failing = diagnosed.failing
        on = f" on {failing.host}" if failing.host else ""
        subject = f"rank {failing.rank}" if failing.rank is not None else "the command"
        output.echo("", f"{subject}{on} failed first: it {failing.description}")
        for line in failing.last_lines:
            output.echo(f"  | {line}")
    # The first line already says how the attempt ended.
    others = [match for match in diagnosis.others if match.first.name != OUTCOME]
    if others:
        output.echo("", "also, in order" if diagnosis.ordered else "also, by log and line")
    for other in others[:_OTHERS]:
        _print_match(other)
    if len(others) > _OTHERS:
        output.echo(f"  and {len(others) - _OTHERS} more; --json has them")
    if not diagnosis.ordered:
        output.echo("", "not all of these lines have times: which came first is uncertain")
    output.warn(f"not read: {problem}" for problem in diagnosed.problems)
    if diagnosed.partly:
        output.echo(f"note: only the beginning and end of {len(diagnosed.partly)} long log(s) were read", err=True)


def _print_match(match: PatternMatch) -> None:
    first = match.first
    where = ", ".join(
        filter(
            None,
            (
                f"rank {first.rank}" if first.rank is not None else "",
                f"on {first.host}" if first.host else "",
                _when(match),
                f"{match.count} times" if match.count > 1 else "",
            ),
        )
    )
    output.echo(f"  {first.role}: {formatting.localized(first.cause)}{f' ({where})' if where else ''}")
    if first.text:
        output.echo(f"    | {first.text}")
    if first.fix:
        output.echo(f"    -> {first.fix}")


def _when(match: PatternMatch) -> str:
    from slurmtrain.model.query.fields import iso

    if match.first.at is None:
        return ""
    return f"{'at' if match.first.exact else 'before'} {formatting.calendar(iso(match.first.at), seconds=True)}"
