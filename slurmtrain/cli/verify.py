"""``slurmtrain verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from slurmtrain.cli.shared import formatting, options, output, tables
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.verify import Verified

_HEADERS = ("STEP", "SIZE", "RESULT", "REASON")


@click.command(
    "verify",
    short_help="Check checkpoints against their manifests.",
    epilog=options.examples("verify digits --step 600"),
)
@options.run_argument
@click.option("--step", metavar="N", type=click.IntRange(min=0), help="Only the checkpoint of this step.")
@click.option("--sizes", is_flag=True, help="Compare only sizes, and read no file.")
@options.json_option
@options.in_workspace
def command(workspace: Workspace, run: str, step: int | None, sizes: bool, as_json: bool) -> int:
    """Compare the files of RUN's checkpoints with the sizes and hashes of their manifests.

    Checkpoints that the script saves by itself are checked as far as their formats describe their files.

    Exits with 0 if all are good, with 1 if one is bad. Nothing is renamed or deleted.
    """
    from slurmtrain.cli.shared.progress import byte_progress
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.verify import verify

    [run_id], _ = find(workspace, [run], ask_slurm=False)
    with byte_progress() as show_bytes:
        verified = verify(workspace, run_id, step=step, hashes=not sizes, show=show_bytes)
    output.warn(verified.problems)
    if as_json:
        output.print_json(verified.to_dict())
    else:
        rows = [
            (formatting.number(checked.step), formatting.size(checked.bytes), checked.result, checked.reason or "-")
            for checked in verified.checked
        ]
        tables.print_table(_HEADERS, rows)
    if not verified.all_good:
        output.echo(_advice(verified, step), err=True)
    return 0 if verified.all_good else 1


def _advice(verified: Verified, step: int | None) -> str:
    run_id, good = verified.run.id, verified.newest
    if not verified.bad:
        return f"'slurmtrain checkpoints {run_id}' lists what is there now"
    if step is not None:
        return f"'slurmtrain resume {run_id}' passes it over; 'slurmtrain verify {run_id}' looks at the others"
    if good is None:
        return f"none is good; 'slurmtrain resume --from-start {run_id}' begins again"
    older = verified.checked.index(good) > max(map(verified.checked.index, verified.bad))
    passed = "the bad ones are older" if older else "what is newer is passed over"
    at = good.path.name if good.step is None else f"step {good.step}"
    starts = "when it starts again, the run" if not verified.run.ended else f"'slurmtrain resume {run_id}'"
    return f"{starts} continues from {at}; {passed}"
