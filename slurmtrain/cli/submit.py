"""``slurmtrain submit``."""

from __future__ import annotations

from pathlib import Path

import click

from slurmtrain.cli.shared import options, output
from slurmtrain.ops.shared.workspace import Workspace


@click.command("submit", short_help="Submit the runs of a spec.")
@options.spec_argument
@options.overrides_argument
@options.sweep_option
@options.executor_option
@click.option("--wait", "waits", is_flag=True, help="Wait until the runs have ended; exit with their outcome.")
@options.json_option
@options.in_workspace
def command(
    workspace: Workspace,
    spec: Path,
    overrides: tuple[str, ...],
    sweep: tuple[str, ...],
    executor: str | None,
    waits: bool,
    as_json: bool,
) -> int:
    """Submit the runs of SPEC, a YAML file, with KEY=VALUE overrides such as resources.nodes=2.

    Prints the ids of the runs and returns at once; the runs continue when the terminal closes.
    """
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import runs_json
    from slurmtrain.ops.submit import submit

    chosen = options.default_executor(executor or workspace.config.executor)
    run_ids, notes = submit(workspace, spec, overrides, sweep, executor=chosen)
    output.warn(notes)
    if waits:
        from slurmtrain.cli.shared.wait_for_runs import wait_for_runs

        return wait_for_runs(workspace, run_ids, as_json=as_json)
    runs = observe(workspace, run_ids, ask_slurm=False).runs
    if as_json:
        output.print_json(runs_json(workspace, {run_id: runs[run_id] for run_id in run_ids}))
    else:
        click.echo("\n".join(run_ids))
        click.echo(
            f"submitted; 'slurmtrain logs -f {run_ids[-1]}' follows it, 'slurmtrain status' lists runs", err=True
        )
    return 0
