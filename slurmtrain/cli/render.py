"""``slurmtrain render``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli.shared import formatting, options, output
from slurmtrain.cli.shared.sweep_table import print_preview
from slurmtrain.cli.shared.tables import print_table
from slurmtrain.cli.spec_command import SpecCommand
from slurmtrain.model.query.differing import write_value
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.render import Rendered


@click.command(
    "render",
    cls=SpecCommand,
    short_help="Print what submit would submit.",
    epilog=options.examples("render exp.yaml resources.nodes=4", "render exp.yaml --executor local"),
)
@options.spec_argument
@options.overrides_argument
@options.sweep_option
@options.executor_option
@click.option("--sources", is_flag=True, help="Print where each value of the plan comes from.")
@options.json_option
@options.in_workspace
def command(
    workspace: Workspace,
    spec: Path,
    overrides: tuple[str, ...],
    sweep: tuple[str, ...],
    executor: str | None,
    sources: bool,
    as_json: bool,
) -> int:
    """Print the plan of SPEC, and the batch script that submit sends to Slurm; nothing is created.

    For a sweep, the runs and their possible cost are printed first.

    With --sources it prints each value of the plan with the file and line, the argument, or the key of the sweep that
    sets it.

    With --executor local it prints what this machine does instead: the lines of setup, and the command.

    This machine needs no Slurm. RUN-ID stands for the id that submit will assign.
    """
    from slurmtrain.ops.render import render

    # Unless another one is named it prints what a cluster gets, also on a machine without Slurm.
    script_for = executor or "slurm"
    rendered, preview, notes = render(
        workspace,
        spec,
        overrides,
        sweep,
        executor=workspace.config.choose_executor(executor),
        script_for=script_for,
    )
    output.warn(notes)
    if sources:
        _print_sources(rendered, as_json=as_json)
    elif as_json:
        output.print_json({**preview.to_json(), "runs": [_run_json(run, script_for) for run in rendered]})
    else:
        if len(rendered) > 1 or preview.search is not None:
            print_preview(preview)
            output.echo("")
        for run in rendered:
            _print_run(run, script_for)
    return 0


def _print_run(run: Rendered, script_for: str) -> None:
    """Print a plan, and what one executor does with it."""
    output.echo(f"# plan {run.plan.hash}", f"# code {_code(run)}")
    output.verbatim(*json.dumps(run.plan.to_json(), indent=2, ensure_ascii=False).split("\n"))
    output.echo("", "# batch script" if script_for == "slurm" else "# on this machine")
    output.verbatim(*run.script.split("\n"))


def _run_json(run: Rendered, script_for: str) -> dict[str, Any]:
    """The same for ``--json``."""
    return {
        "plan": run.plan.to_json(),
        "overrides": list(run.overrides),
        "batch_script": run.script if script_for == "slurm" else None,
        **({} if script_for == "slurm" else {"local_script": run.script}),
        "code": _code_json(run),
    }


def _print_sources(rendered: Sequence[Rendered], *, as_json: bool) -> None:
    """Print where each value of each run comes from."""
    if as_json:
        runs = [
            {"plan_hash": run.plan.hash, "sources": [asdict(each) for each in run.find_sources()]} for run in rendered
        ]
        output.print_json({"schema": 1, "runs": runs})
        return
    for index, run in enumerate(rendered):
        if index:
            output.echo("")
        output.echo(f"# plan {run.plan.hash}")
        rows = [[each.key, _shown(each.value), str(each)] for each in run.find_sources()]
        print_table(["KEY", "VALUE", "FROM"], rows)


def _code(run: Rendered) -> str:
    """Which code a run would execute, in a line."""
    if run.code is None:
        return f"as it is when the run starts, in {run.directory}"
    size = f"{formatting.files(run.code.files)}, {formatting.size(run.code.bytes)}"
    return f"as it is now: a copy of {run.code.root} ({size}), run in {run.directory}"


def _code_json(run: Rendered) -> dict[str, Any] | None:
    """The same for ``--json``, as ``show --json`` has it; null if the run would execute what is there by then."""
    if run.code is None:
        return None
    return {"root": run.code.root, "files": run.code.files, "bytes": run.code.bytes, "dir": str(run.directory)}


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else write_value(value)
