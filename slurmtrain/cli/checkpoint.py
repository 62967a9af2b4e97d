"""``slurmtrain checkpoint``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from slurmtrain.cli.shared import formatting, options, output
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.checkpoint import RequestOutcome, SaveRequest


@click.command("checkpoint", short_help="Have a run save now.", epilog=options.examples("checkpoint @last"))
@options.run_argument
@click.option("--no-wait", is_flag=True, help="Return without waiting for the checkpoint.")
@click.option(
    "--timeout",
    metavar="S",
    type=options.Seconds(),
    default=600.0,
    show_default=True,
    help="Seconds to wait for the checkpoint.",
)
@options.json_option
@options.in_workspace
def command(workspace: Workspace, run: str, no_wait: bool, timeout: float, as_json: bool) -> int:
    """Ask RUN to save at the end of its current step, wait until it has, and print where the checkpoint is.

    Training continues. Exits with 1 if the run could not save, ended without saving, or has not saved in time.
    """
    from slurmtrain.ops.checkpoint import RequestOutcome, request_checkpoint, wait_for_checkpoint
    from slurmtrain.ops.shared.find import find

    [run_id], _ = find(workspace, [run], ask_slurm=False)
    request = request_checkpoint(workspace, run_id)
    try:
        outcome = RequestOutcome("asked") if no_wait else wait_for_checkpoint(workspace, request, timeout)
    except KeyboardInterrupt:
        output.echo(f"no longer waiting; the run still saves ('slurmtrain checkpoints {run_id}' lists it)", err=True)
        raise
    if as_json:
        output.print_json(outcome.to_dict(workspace, request))
    elif outcome.checkpoint is not None:
        output.verbatim(str(workspace.root.run(run_id).path / outcome.checkpoint.path))
    output.echo(describe_outcome(outcome, request, timeout), err=True)
    return 0 if outcome.outcome in ("asked", "saved") or outcome.checkpoint is not None else 1


def describe_outcome(outcome: RequestOutcome, request: SaveRequest, timeout: float) -> str:
    """What became of a request, in a sentence.

    Args:
        outcome: What became of it.
        request: The request.
        timeout: How many seconds it was waited for.
    """
    run_id, saved = request.run_id, outcome.checkpoint
    if saved is not None:
        stall = f"; training stood still for {formatting.number(saved.stall_s)} s" if saved.stall_s is not None else ""
        ended = f"{outcome.reason}; it saved before it left: " if outcome.outcome == "ended" else ""
        return f"{ended}step {saved.step}, {formatting.size(saved.bytes)}{stall}"
    hint = f"'slurmtrain checkpoints {run_id}' lists what it has saved"
    return {
        "asked": f"run {run_id} was asked; {hint}",
        "saved": f"run {run_id} has saved",
        "failed": f"run {run_id} could not save: {outcome.reason}; it trains on, with its earlier checkpoints intact",
        "ended": f"{outcome.reason}, and has saved nothing since it was asked; {hint}",
        "late": f"run {run_id} has not saved within {timeout:g} s; it still does so at the end of a step: {hint}. "
        f"If its steps never end, 'slurmtrain logs {run_id}' may show why",
    }[outcome.outcome]
