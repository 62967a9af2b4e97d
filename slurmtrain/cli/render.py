"""``slurmtrain render``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from slurmtrain.cli.shared import options, output
from slurmtrain.cli.shared.sweep_table import print_preview
from slurmtrain.cli.spec_command import SpecCommand
from slurmtrain.ops.shared.workspace import Workspace


@click.command(
    "render",
    cls=SpecCommand,
    short_help="Print what submit would submit.",
    epilog=options.examples("render exp.yaml resources.nodes=4"),
)
@options.spec_argument
@options.overrides_argument
@options.sweep_option
@options.json_option
@options.in_workspace
def command(workspace: Workspace, spec: Path, overrides: tuple[str, ...], sweep: tuple[str, ...], as_json: bool) -> int:
    """Print the plan of SPEC, and the batch script that submit sends to Slurm; nothing is created.

    Of a sweep, the runs and what they may cost are printed first.

    This machine needs no Slurm. RUN-ID stands for the id that submit will assign.
    """
    from slurmtrain.ops.render import render

    executor = workspace.config.choose_executor()
    rendered, preview = render(workspace, spec, overrides, sweep, executor=executor)
    output.warn(preview.notes)
    if as_json:
        runs = [
            {"plan": run.plan.to_json(), "overrides": list(run.overrides), "batch_script": run.script}
            for run in rendered
        ]
        output.print_json({**preview.to_json(), "runs": runs})
        return 0
    if len(rendered) > 1:
        print_preview(preview)
        output.echo("")
    for run in rendered:
        output.echo(f"# plan {run.plan.hash}")
        output.echo(*json.dumps(run.plan.to_json(), indent=2, ensure_ascii=False).split("\n"))
        output.echo("", "# batch script")
        output.echo(*run.script.split("\n"))
    return 0
