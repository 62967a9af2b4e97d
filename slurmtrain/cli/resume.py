"""``slurmtrain resume``."""

from __future__ import annotations

import click

from slurmtrain.cli.shared import options, output
from slurmtrain.ops.shared.workspace import Workspace


@click.command(
    "resume",
    short_help="Resume a run from its newest checkpoint.",
    epilog=options.examples("resume digits params.steps=4000"),
)
@options.run_argument
@options.overrides_argument
@click.option("--from-start", is_flag=True, help="Set the run's checkpoints aside and start from the beginning.")
@click.option(
    "--code", type=click.Choice(["now"]), help="Execute the code as it is now, not as it was when RUN was submitted."
)
@click.option("--wait", "waits", is_flag=True, help="Wait until the run has ended; exit with its outcome.")
@options.json_option
@options.in_workspace
def command(
    workspace: Workspace,
    run: str,
    overrides: tuple[str, ...],
    from_start: bool,
    code: str | None,
    waits: bool,
    as_json: bool,
) -> int:
    """Start a new attempt of RUN from its newest complete checkpoint.

    KEY=VALUE overrides, such as params.steps=4000 or resources.time=02:00:00, apply to this and later attempts.
    """
    from slurmtrain.ops.resume import resume
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import runs_json

    run_id, notes = resume(workspace, run, overrides, from_start=from_start, code_of_now=code == "now")
    output.warn(notes)
    if waits:
        from slurmtrain.cli.shared.wait_for_runs import wait_for_runs

        return wait_for_runs(workspace, [run_id], as_json=as_json)
    runs = observe(workspace, [run_id], ask_slurm=False).runs
    if as_json:
        output.print_json(runs_json(workspace, {run_id: runs[run_id]}))
    else:
        output.echo(run_id)
    return 0
