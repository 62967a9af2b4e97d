"""``slurmtrain verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from slurmtrain.cli.shared import formatting, options, output, tables
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.verify import Verified

_HEADERS = ("STEP", "SIZE", "RESULT", "REASON")


@click.command("verify", short_help="Look whether checkpoints are what was written.")
@options.run_argument
@click.option("--step", metavar="N", type=click.IntRange(min=0), help="That of this step alone.")
@click.option("--sizes", is_flag=True, help="Look at sizes alone, and read no file.")
@options.json_option
@options.in_workspace
def command(workspace: Workspace, run: str, step: int | None, sizes: bool, as_json: bool) -> int:
    """Hold the files of RUN's checkpoints against the sizes and hashes of their manifests.

    Exits with 0 if all are good, with 1 if one is bad. Nothing is renamed or deleted.
    """
    from slurmtrain.cli.shared.progress import byte_progress
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.verify import verify

    [run_id], _ = find(workspace, [run], ask_slurm=False)
    with byte_progress() as show_bytes:
        found = verify(workspace, run_id, step=step, hashes=not sizes, tell=show_bytes)
    output.warn(found.problems)
    if as_json:
        output.print_json(found.to_dict())
    else:
        rows = [(str(one.step), formatting.size(one.bytes), one.result, one.reason or "-") for one in found.checked]
        tables.print_table(_HEADERS, rows)
    if not found.all_good:
        click.echo(_advice(found, step), err=True)
    return 0 if found.all_good else 1


def _advice(found: Verified, step: int | None) -> str:
    run_id, good = found.run.id, found.newest_good
    if not found.bad:
        return f"'slurmtrain checkpoints {run_id}' lists what is there now"
    if step is not None:
        return f"'slurmtrain resume {run_id}' passes it over; 'slurmtrain verify {run_id}' looks at the others"
    if good is None:
        return f"none is good; 'slurmtrain resume --from-start {run_id}' begins again"
    passed = "the bad ones are older" if good > max(one.step for one in found.bad) else "what is newer is passed over"
    starts = "when it starts again, the run" if not found.run.ended else f"'slurmtrain resume {run_id}'"
    return f"{starts} goes on from step {good}; {passed}"
