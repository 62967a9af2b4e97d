"""``slurmtrain why``: the one answer to why a run is in its state; ``doctor RUN`` prints the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from slurmtrain.cli import formatting, options, output
from slurmtrain.model.environment import describe_variables
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.diagnosis.root_cause import PatternMatch
    from slurmtrain.ops.diagnose import AttemptDiagnosis
    from slurmtrain.ops.why import Explanation

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


def explain_run(workspace: Workspace, name: str, attempt: int | None, *, as_json: bool) -> int:
    """Print why a run is in its state.

    Args:
        workspace: Where it is.
        name: What a person calls it.
        attempt: The attempt to explain, counted from 1; None: the run as it is now.
        as_json: Print JSON.
    """
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.why import explain

    [run_id], observed = find(workspace, [name], prefer=("failed", "lost"))
    output.warn_about(observed)
    explanation = explain(workspace, observed.runs, run_id, attempt)
    if as_json:
        output.print_json(explanation.to_dict())
    else:
        _print_explanation(explanation)
    return 0


def _print_explanation(explanation: Explanation) -> None:
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
