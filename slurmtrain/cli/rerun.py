"""``slurmtrain rerun``."""

from __future__ import annotations

import click

from slurmtrain.cli.shared import options, output
from slurmtrain.cli.submit import is_affordable, print_submitted
from slurmtrain.errors import SubmitFailed
from slurmtrain.ops.shared.workspace import Workspace


@click.command(
    "rerun",
    short_help="Submit a run again: the same plan and code.",
    epilog=options.examples("rerun digits", "rerun digits seed=8 --wait"),
)
@options.run_argument
@options.overrides_argument
@click.option(
    "--code", type=click.Choice(["now"]), help="Execute the code as it is now, not as it was when RUN was submitted."
)
@options.executor_option
@click.option("-y", "--yes", is_flag=True, help="Do not ask before submitting a large sweep again.")
@click.option("--wait", "waits", is_flag=True, help="Wait until the runs have ended; exit with their outcome.")
@options.json_option
@options.in_workspace
def command(
    workspace: Workspace,
    run: str,
    overrides: tuple[str, ...],
    code: str | None,
    executor: str | None,
    yes: bool,
    waits: bool,
    as_json: bool,
) -> int:
    """Submit RUN again as a new run, from the beginning: the same plan, the same snapshot of its code.

    RUN may also be the id of a sweep. KEY=VALUE overrides, such as seed=8, apply to the new runs. What differs from
    what RUN had, such as packages, is noted. By default the new runs go where RUN went, to Slurm or this machine.
    """
    from slurmtrain.ops.rerun import plan_again
    from slurmtrain.ops.submit import submit_spec

    again = plan_again(workspace, run, overrides, code_of_now=code == "now")
    output.warn(again.notes)
    if not (yes or is_affordable(workspace, again.spec)):
        output.echo("nothing was submitted", err=True)
        return 1
    chosen = workspace.config.choose_executor(executor) if executor else again.executor
    try:
        run_ids, notes, _ = submit_spec(workspace, again.spec, executor=chosen)
    except SubmitFailed as error:
        if error.run_ids:
            print_submitted(workspace, error.run_ids, as_json=as_json)
        raise
    output.warn(notes)
    if waits:
        from slurmtrain.cli.shared.wait_for_runs import wait_for_runs

        return wait_for_runs(workspace, run_ids, as_json=as_json)
    print_submitted(workspace, run_ids, as_json=as_json)
    return 0
