"""``slurmtrain resume``."""

from __future__ import annotations

from collections.abc import Sequence

import click

from slurmtrain.cli.shared import options, output
from slurmtrain.errors import SubmitFailed
from slurmtrain.ops.shared.workspace import Workspace


@click.command(
    "resume",
    short_help="Resume a run from its newest checkpoint.",
    epilog=options.examples("resume digits params.steps=4000", "resume --failed SWEEP resources.mem=64GB"),
)
@options.run_argument
@options.overrides_argument
@click.option("--from-start", is_flag=True, help="Set the run's checkpoints aside and start from the beginning.")
@click.option(
    "--step", type=click.IntRange(min=1), metavar="N", help="Go on from step N, and set later checkpoints aside."
)
@click.option(
    "--code", type=click.Choice(["now"]), help="Execute the code as it is now, not as it was when RUN was submitted."
)
@click.option(
    "--failed", is_flag=True, help="Resume those of several runs that have failed or are lost; RUN may be a sweep."
)
@click.option("--cancelled", is_flag=True, help="With --failed: also those that were cancelled.")
@click.option("--dry-run", is_flag=True, help="With --failed: list these runs; start nothing.")
@click.option("--wait", "waits", is_flag=True, help="Wait until the run has ended; exit with its outcome.")
@options.json_option
@options.in_workspace
def command(
    workspace: Workspace,
    run: str,
    overrides: tuple[str, ...],
    from_start: bool,
    step: int | None,
    code: str | None,
    failed: bool,
    cancelled: bool,
    dry_run: bool,
    waits: bool,
    as_json: bool,
) -> int:
    """Start a new attempt of RUN from its newest complete checkpoint.

    KEY=VALUE overrides, such as params.steps=4000 or resources.time=02:00:00, apply to this and later attempts.

    With --failed, RUN may be a sweep or a pattern, and there may be several: runs that have failed start again, on
    Slurm as one job array if they request the same. Runs without a checkpoint begin again.
    """
    if failed:
        if from_start or code or step is not None:
            raise click.UsageError("--failed excludes --from-start, --step and --code")
        names = [run, *(word for word in overrides if "=" not in word)]
        changes = [word for word in overrides if "=" in word]
        return _resume_failed(workspace, names, changes, (cancelled, dry_run, waits, as_json))
    if cancelled or dry_run:
        raise click.UsageError("--cancelled and --dry-run are for --failed")
    from slurmtrain.ops.resume import resume

    if from_start and step is not None:
        raise click.UsageError("--from-start and --step exclude each other")
    run_id, notes = resume(workspace, run, overrides, from_start=from_start, step=step, code_of_now=code == "now")
    output.warn(notes)
    if waits:
        from slurmtrain.cli.shared.wait_for_runs import wait_for_runs

        return wait_for_runs(workspace, [run_id], as_json=as_json)
    _print(workspace, [run_id], as_json=as_json)
    return 0


def _resume_failed(
    workspace: Workspace, names: Sequence[str], overrides: Sequence[str], flags: tuple[bool, bool, bool, bool]
) -> int:
    """Resume runs that have failed. ``flags``: --cancelled, --dry-run, --wait and --json."""
    from slurmtrain.ops.resume import find_failed, resume_failed

    cancelled, dry_run, waits, as_json = flags
    run_ids = find_failed(workspace, names, cancelled=cancelled)
    if dry_run:
        _print(workspace, run_ids, as_json=as_json, with_state=True)
        return 0
    try:
        resumed = resume_failed(workspace, run_ids, overrides)
    except SubmitFailed as error:
        _print(workspace, error.run_ids, as_json=as_json)
        raise
    output.warn([*resumed.notes, *resumed.problems])
    code = 1 if resumed.problems else 0
    if waits:
        from slurmtrain.cli.shared.wait_for_runs import wait_for_runs

        return wait_for_runs(workspace, resumed.run_ids, as_json=as_json) or code
    _print(workspace, resumed.run_ids, as_json=as_json)
    output.note(f"{len(resumed.run_ids)} runs were started again")
    return code


def _print(workspace: Workspace, run_ids: Sequence[str], *, as_json: bool, with_state: bool = False) -> None:
    """Print runs: their ids, or a table ``with_state``, or JSON."""
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import run_json, runs_json

    if not (as_json or with_state):
        if run_ids:
            output.echo(*run_ids)
        return
    runs = observe(workspace, run_ids, ask_slurm=False).runs
    if as_json:
        output.print_json(runs_json(workspace, {run_id: runs[run_id] for run_id in run_ids}))
        return
    from slurmtrain.cli.shared.run_table import print_runs

    print_runs([run_json(workspace, runs[run_id]) for run_id in run_ids])
