"""``slurmtrain logs``."""

from __future__ import annotations

import click

from slurmtrain.cli.shared import options, output
from slurmtrain.ops.shared.workspace import Workspace


@click.command("logs", short_help="Print the logs of a run.")
@options.run_argument
@click.option("-f", "--follow", is_flag=True, help="Print new lines until the run has ended; exit with its outcome.")
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank.")
@click.option("--attempt", type=click.IntRange(min=1), help="This attempt; by default the newest.")
@options.in_workspace
def command(workspace: Workspace, run: str, follow: bool, rank: int | None, attempt: int | None) -> int:
    """Print the output of the ranks of RUN. Each line begins with its attempt and rank, unless --rank selects one."""
    from slurmtrain.ops.logs import read_logs
    from slurmtrain.ops.shared.find import find

    [run_id], _ = find(workspace, [run], ask_slurm=False)
    lines = read_logs(
        workspace,
        run_id,
        rank=rank,
        attempt=attempt,
        follow=follow,
        waits=lambda reason: output.warn([f"run {run_id} waits: {reason}"]),
    )
    for line in lines:
        output.log_line("" if rank is not None else f"[{line.attempt}/{line.origin}] ", line.text)
    if not follow:
        return 0
    _, observed = find(workspace, [run_id], ask_slurm=False)
    return 0 if observed.runs[run_id].state == "completed" else 1
