"""What is wrong, or may go wrong: ``why`` explains, ``doctor`` predicts, ``preflight`` checks nodes, ``nodes`` lists.

``why`` is the one answer to why a run is in its state; ``doctor RUN`` prints the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli import describe, formatting, options, output, tables
from slurmtrain.model.environment import describe_variables
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.diagnosis.root_cause import PatternMatch
    from slurmtrain.model.interruption.outlook import SiteFinding
    from slurmtrain.ops.diagnose import AttemptDiagnosis
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
# How many of the other matches are shown.
_OTHERS = 10
attempt_option = click.option(
    "--attempt", type=click.IntRange(min=1), help="The attempt of RUN to explain; by default the run as it is now."
)


@options.command("why @last", "why cnn --attempt 2", looks=True)
@options.run_argument
@attempt_option
@options.json_option
def why_command(workspace: Workspace, run: str, attempt: int | None, as_json: bool) -> int:
    """Say why RUN is in its state, and what to do: why it waits, is slow, was interrupted, or failed.

    The first line is the answer. For a job that waits, Slurm is asked what would start sooner.
    """
    return explain_run(workspace, run, attempt, as_json=as_json)


def explain_run(workspace: Workspace, name: str, attempt_number: int | None, *, as_json: bool) -> int:
    """Print why a run is in its state.

    Args:
        workspace: Where it is.
        name: What a person calls it.
        attempt_number: The attempt to explain, counted from 1; None: the run as it is now.
        as_json: Print JSON.
    """
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.why import explain

    [run_id], observed = find(workspace, [name], prefer=("failed", "lost"))
    output.warn_about(observed)
    explanation = explain(workspace, observed.runs, run_id, attempt_number)
    if as_json:
        output.print_json(explanation.to_dict())
        return 0
    diagnosed = explanation.diagnosis
    output.paragraph(formatting.localized(explanation.headline), "  ")
    run, attempt = diagnosed.run, diagnosed.attempt
    number = "" if attempt is None else f", attempt {attempt.number} of {len(run.attempts)}"
    cause = "" if attempt is None or attempt.cause in (None, run.state) else f": {attempt.cause}"
    output.paragraph(f"  run {run.id} {run.name}, {run.state}{number}{cause}", "    ")
    if attempt is not None and attempt.reason and attempt.reason not in explanation.headline and attempt.ended:
        output.paragraph(f"  {formatting.localized(attempt.reason)}", "    ")
    for line in explanation.details:
        output.paragraph(f"  {formatting.localized(line)}", "    ")
    for line in explanation.advice:
        output.paragraph(f"  -> {formatting.localized(line)}", "     ")
    if explanation.unanswered:
        output.warn([f"Slurm did not answer: {explanation.unanswered}"])
    if attempt is not None and attempt.inherited:
        output.paragraph(f"  from the shell that submitted it: {describe_variables(attempt.inherited)}", "    ")
    if attempt is not None and attempt.ended and attempt.cause not in ("completed", "cancelled"):
        _print_diagnosis(diagnosed)
    elif matches := [
        match
        for match in (diagnosed.diagnosis.root, *diagnosed.diagnosis.others)
        if match is not None and match.first.cause != explanation.headline
    ]:
        output.echo("", "its logs and journals say")
        for match in matches[:_OTHERS]:
            _print_match(match)
    return 0


def _print_diagnosis(diagnosed: AttemptDiagnosis) -> None:
    from slurmtrain.ops.diagnose import OUTCOME

    diagnosis = diagnosed.diagnosis
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
    from slurmtrain.model.query.fields import iso

    first = match.first
    where = [f"rank {first.rank}"] if first.rank is not None else []
    where += [f"on {first.host}"] if first.host else []
    if first.at is not None:
        # A line without a time of its own came before the one whose time it has.
        where.append(f"{'' if first.exact else 'before '}{formatting.calendar(iso(first.at), seconds=True)}")
    where += [f"{match.count} times"] if match.count > 1 else []
    output.echo(f"  {first.role}: {formatting.localized(first.cause)}" + (f" ({', '.join(where)})" if where else ""))
    if first.text:
        output.echo(f"    | {first.text}")
    if first.fix:
        output.echo(f"    -> {first.fix}")


# --- doctor -----------------------------------------------------------------------------------------------------------


@options.command("doctor exp.yaml", "doctor @last", looks=True)
@click.argument("target", metavar="[SPEC|RUN]", required=False, shell_complete=options.complete_run_or_spec)
@options.overrides_argument
@attempt_option
@options.executor_option
@options.json_option
def doctor_command(
    workspace: Workspace, target: str | None, overrides: tuple[str, ...], attempt: int | None, executor: str | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Predict what a preemption, a time limit or a node failure does to a run of SPEC; or say why RUN is as it is.

    Without an argument, it covers each partition that you may use. SPEC is a file, or ends in .yaml or .yml; anything
    else is a RUN. Exits with 1 if something prevents runs from being restarted.
    """
    # Unlike Path.is_file(), os.path.isfile() accepts any text, such as a name that is too long for a file.
    if target is not None and not (target.endswith(_SPECS) or os.path.isfile(target)):  # noqa: PTH113
        if overrides or executor:
            raise click.UsageError(
                f"KEY=VALUE and --executor need a SPEC, and {target!r} names a RUN: there is no such file"
            )
        return explain_run(workspace, target, attempt, as_json=as_json)
    if attempt is not None:
        raise click.UsageError("--attempt needs a RUN, not a SPEC")
    # Here rather than at the top: ``doctor RUN`` need not load it.
    from slurmtrain.ops.doctor import examine

    chosen = workspace.config.choose_executor(executor)
    report = examine(workspace, Path(target) if target is not None else None, overrides, chosen)
    if as_json:
        output.print_json(report.to_dict())
    else:
        _print_outlooks(report, as_table=target is None and report.executor == "slurm")
    return 0 if report.good else 1


def _print_outlooks(report: DoctorReport, *, as_table: bool) -> None:
    """What interruptions do on each partition, and below that what was found, each finding once."""
    from slurmtrain.model.interruption.outlook import worst_severity

    if as_table:
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
        tables.print_table(("PARTITION", "INTERRUPTION", "SECONDS", "STARTED AGAIN BY", "AFTER", "WORST"), rows)
    else:
        for outlook in report.outlooks:
            output.echo(f"partition {outlook.partition}" if outlook.partition else "on this machine")
            for case in outlook.cases:
                output.paragraph(f"  {case.event}: {case.text}", "    ")
            output.echo()
    partitions: dict[SiteFinding, list[str]] = {}
    for outlook in report.outlooks:
        for finding in outlook.findings:
            partitions.setdefault(finding, []).append(outlook.partition)
    for finding, names in [*((each, []) for each in report.findings), *partitions.items()]:
        # What applies to all partitions names none.
        prefix = f"[{', '.join(names)}] " if 0 < len(names) < len(report.outlooks) else ""
        output.paragraph(f"{finding.severity:<5}{prefix}{finding.text}", " " * 5)
        if finding.fix:
            output.paragraph(f"     -> {finding.fix}", " " * 8)
    output.warn(f"unknown: {question}" for question in report.unknown)


# --- nodes ------------------------------------------------------------------------------------------------------------


@options.command("preflight --nodes 4 slurm.partition=spot")
@options.overrides_argument
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes; by default the spec's, else 1.")
@click.option("--spec", metavar="FILE", type=click.Path(path_type=Path), help="A spec with the nodes and checks.")
@options.executor_option
@click.option("--local", "executor", flag_value="local", help="The same as --executor local.")
@options.json_option
def preflight_command(
    workspace: Workspace, overrides: tuple[str, ...], nodes: int | None, spec: Path | None, executor: str | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Run only the preflight, as a job of its own, and print its findings.

    KEY=VALUE overrides a key of the spec, such as slurm.nodelist=node3 or preflight.bandwidth=fail. Exits with 0 if no
    check failed, else with 1. It also uses nodes that earlier failed a preflight. Ctrl-C ends the job.
    """
    from slurmtrain.cli.watch_commands import run_progress
    from slurmtrain.ops.cancel import cancel
    from slurmtrain.ops.preflight import submit_preflight
    from slurmtrain.ops.shared.run_details import findings_json, show_json
    from slurmtrain.ops.watch import wait
    from slurmtrain.system.process import StopSignal

    chosen = workspace.config.choose_executor(executor)
    # Before anything is submitted: a Ctrl-C right after that would leave a job that nobody waits for or ends.
    with StopSignal() as stop:
        run_id, notes = submit_preflight(workspace, spec, overrides, nodes=nodes, executor=chosen)
        output.warn(notes)
        workspace = workspace.looking_again()
        with run_progress(workspace) as report:
            completed, synced = wait(workspace, [run_id], report, stop)
        # Interrupted: nothing else waits for the job's findings.
        if not synced.observed.runs[run_id].ended:
            cancel(workspace, [run_id])
            output.echo(f"run {run_id} was cancelled", err=True)
            raise KeyboardInterrupt
    output.warn_about(synced.observed)
    loaded = workspace.store.load(run_id)
    assert loaded is not None
    run, findings = show_json(workspace, synced.observed.runs[run_id], loaded), findings_json(workspace, loaded)
    if as_json:
        output.print_json({"schema": 1, "run": run, "checks": findings})
        return 0 if completed and not describe.has_failed(findings) else 1
    if findings:
        tables.print_table(describe.CHECK_HEADERS, describe.check_rows(findings))
    for newest in run["attempts"][-1:]:
        tables.print_network(newest["network"])
        if newest["clock"]:
            output.echo("", f"clocks ahead of node 0's: {describe.describe_clocks(newest['clock'])}")
    if run["state"] != "completed":
        output.echo(f"run {run_id} is {run['state']}: {formatting.localized(run['reason'])}", err=True)
    elif not findings:
        output.echo(f"run {run_id} reported no checks", err=True)
    return 0 if completed and not describe.has_failed(findings) else 1


@options.command("nodes --all", cls=click.Group, invoke_without_command=True)
@click.option("--all", "inactive_too", is_flag=True, help="List all findings, also expired and forgiven ones.")
@options.json_option
def nodes_command(workspace: Workspace, inactive_too: bool, as_json: bool) -> int:
    """List the nodes that failed a preflight and that submissions exclude, each with its last finding.

    A finding expires after a day, or node_expiry_hours of slurmtrain.yaml.
    """
    # click calls the function of a group before each of its subcommands too.
    if click.get_current_context().invoked_subcommand is not None:
        return 0
    from slurmtrain.ops.shared.ledger_file import nodes_json
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import now_iso

    output.warn_about(observe(workspace, ask_slurm=False))
    nodes = nodes_json(workspace, inactive_too=inactive_too)
    if as_json:
        output.print_json({"schema": 1, "as_of": now_iso(), "nodes": nodes})
    elif nodes:
        tables.print_table(("NODE", "STATE", "SEEN", "COUNTS UNTIL", "RUN (ATTEMPT)", "REASON"), node_lines(nodes))
    else:
        output.echo("no node has failed a preflight" + ("" if inactive_too else " lately"), err=True)
    return 0


def node_lines(nodes: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for all nodes with the same finding, whatever its figures. ``nodes``: as the JSON has them."""
    alike: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for node in nodes:
        seen_at, until = formatting.when(node["seen_at"]), formatting.when(node["expires_at"])
        reason = formatting.localized(node["reason"])
        finding = (node["state"], seen_at, until, f"{node['run_id']} ({node['attempt']})")
        alike.setdefault((*finding, describe.pattern(reason)), []).append((node["host"], reason))
    return [
        (formatting.describe_nodes(host for host, _ in reasons), *finding, describe.merge(reasons))
        for (*finding, _), reasons in alike.items()
    ]


@options.command("nodes forgive node[3-4]", group=nodes_command, short_help="Use nodes again.")
@click.argument("names", metavar="NODE...", nargs=-1, required=True)
def forgive_command(workspace: Workspace, names: tuple[str, ...]) -> int:
    """Use each NODE again, until a later preflight fails there. NODE may be a list such as node[1-3]."""
    from slurmtrain.ops.shared.ledger_file import forgive
    from slurmtrain.ops.shared.observe import observe

    output.warn_about(observe(workspace, ask_slurm=False))
    output.echo(f"forgiven: {', '.join(forgive(workspace, names))}", err=True)
    return 0
