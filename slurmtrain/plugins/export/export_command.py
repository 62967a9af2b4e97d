"""``slurmtrain export``."""

from __future__ import annotations

from pathlib import Path

import click

from slurmtrain.cli import formatting, options, output, tables
from slurmtrain.ops.shared.workspace import Workspace


@options.command("export digits --to model.safetensors")
@options.run_argument
@click.option(
    "--to", metavar="FILE", type=click.Path(path_type=Path), required=True,
    help="The file; its suffix, .safetensors or .pt, selects the format.",
)  # fmt: skip
@click.option("--step", metavar="N", type=click.IntRange(min=0), help="The checkpoint; by default the newest.")
@click.option(
    "--object", "name", metavar="NAME",
    help="The module, by its name in run.checkpoint(); required if there are several.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option(
    "--register", "model", metavar="MODEL",
    help="Register the file in MLflow as a new version of MODEL, with the run's id, step and hash.",
)  # fmt: skip
@options.json_option
def export_command(
    workspace: Workspace, run: str, to: Path, step: int | None, name: str | None, force: bool, model: str | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Write a module of a checkpoint of RUN to one file, which loads without slurmtrain, on any number of processes.

    Names are as in the module's own state_dict. The export needs as much memory as the module.
    """
    from slurmtrain.ops.shared.find import find
    from slurmtrain.plugins.export.export import ExportRequest, export, export_registered

    [run_id], _ = find(workspace, [run], ask_slurm=False)
    with tables.byte_progress() as show_bytes:
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
