"""``slurmtrain export``."""

from __future__ import annotations

from pathlib import Path

import click

from slurmtrain.cli.shared import formatting, options, output
from slurmtrain.ops.shared.workspace import Workspace


@click.command(
    "export",
    short_help="Write the model of a checkpoint to a single file.",
    epilog=options.examples("export digits --to model.safetensors"),
)
@options.run_argument
@click.option(
    "--to",
    metavar="FILE",
    type=click.Path(path_type=Path),
    required=True,
    help="The file; its suffix, .safetensors or .pt, selects the format.",
)
@click.option("--step", metavar="N", type=click.IntRange(min=0), help="The checkpoint; by default the newest.")
@click.option(
    "--object",
    "name",
    metavar="NAME",
    help="The module, by its name in run.checkpoint(); required if there are several.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option(
    "--register",
    "model",
    metavar="MODEL",
    help="Register the file in MLflow as a new version of MODEL, with the run's id, step and hash.",
)
@options.json_option
@options.in_workspace
def command(
    workspace: Workspace,
    run: str,
    to: Path,
    step: int | None,
    name: str | None,
    force: bool,
    model: str | None,
    as_json: bool,
) -> int:
    """Write a module of a checkpoint of RUN to one file, which loads without slurmtrain, on any number of processes.

    Names are as in the module's own state_dict. The export needs as much memory as the module.
    """
    from slurmtrain.cli.shared.progress import byte_progress
    from slurmtrain.ops.export import ExportRequest, export
    from slurmtrain.ops.register import export_registered
    from slurmtrain.ops.shared.find import find

    [run_id], _ = find(workspace, [run], ask_slurm=False)
    with byte_progress() as show_bytes:
        request = ExportRequest(to=to, step=step, object=name, force=force)
        registered = export_registered(workspace, run_id, request, model, show_bytes) if model else None
        exported = registered.exported if registered else export(workspace, run_id, request, show_bytes)
    if exported.left_out:
        output.warn([f"left out, since a .safetensors file holds dense tensors alone: {', '.join(exported.left_out)}"])
    if as_json:
        output.print_json((registered or exported).to_dict())
    else:
        output.verbatim(str(exported.to))
        amount = f"{exported.tensors} tensors, {formatting.size(exported.bytes)}"
        output.echo(f"{exported.object!r} of step {exported.step}: {amount}", err=True)
        if registered:
            output.echo(f"registered in MLflow as {registered.uri}", err=True)
    return 0
