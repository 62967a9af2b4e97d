"""``slurmtrain submit``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli.shared import complete, options, output
from slurmtrain.cli.spec_command import SpecCommand
from slurmtrain.errors import OutputError, SlurmtrainError, SubmitFailed, UserError
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.specfile import SpecFile


@click.command(
    "submit",
    cls=SpecCommand,
    short_help="Submit the runs of a spec.",
    epilog=options.examples(
        "submit exp.yaml params.lr=0.1 --wait", "submit exp.yaml --sweep params.lr=0.03,0.1,0.3 --dry-run"
    ),
)
@options.spec_argument
@options.specs_and_overrides_argument
@options.sweep_option
@click.option("--parallel", type=click.IntRange(min=1), metavar="N", help="Run at most N runs of the sweep at once.")
@click.option(
    "--pack", type=click.IntRange(min=2), metavar="N", help="Let N runs of the sweep share a job, on one node of Slurm."
)
@click.option(
    "--after",
    metavar="RUN",
    multiple=True,
    help="Start after this run has completed, as the key 'after' says it; repeatable.",
    shell_complete=complete.complete_run,
)
@click.option("--from", "start_from", metavar="RUN[:STEP|:best]", help="Begin with a checkpoint of another run.")
@click.option("--weights-only", is_flag=True, help="With --from: begin at step 0, with the checkpoint's weights.")
@options.executor_option
@click.option(
    "--idempotency-key", "key", metavar="KEY", help="Submit once: a later submit with this key returns the same runs."
)
@click.option("--dry-run", is_flag=True, help="Print the runs, and what they may cost; submit nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before submitting a large sweep.")
@click.option("--wait", "waits", is_flag=True, help="Wait until the runs have ended; exit with their outcome.")
@options.json_option
@options.in_workspace
def command(
    workspace: Workspace,
    spec: Path,
    overrides: tuple[str, ...],
    sweep: tuple[str, ...],
    parallel: int | None,
    pack: int | None,
    after: tuple[str, ...],
    start_from: str | None,
    weights_only: bool,
    executor: str | None,
    key: str | None,
    dry_run: bool,
    yes: bool,
    waits: bool,
    as_json: bool,
) -> int:
    """Submit the runs of SPEC, a YAML file, with KEY=VALUE overrides such as resources.nodes=2.

    Several SPECs are submitted together: each may name others in its key 'after', whose runs it starts after.

    Prints the ids of the runs and returns at once; the runs continue when the terminal closes. If something fails, the
    ids of the runs that exist all the same are printed.
    """
    from slurmtrain.ops.submit import load_all, merge_specs, split_words, submit_specs
    from slurmtrain.ops.unmirrored import describe_next

    limits = {"parallel": parallel, "pack": pack}
    sweep = (*sweep, *(f"{key}={value}" for key, value in limits.items() if value is not None))
    more, keys = split_words(overrides)
    keys = [*keys, *_start_overrides(start_from, weights_only=weights_only)]
    specs = load_all([spec, *more], keys, sweep, after, max_runs=workspace.config.sweep_max_runs)
    loaded = merge_specs(specs)
    chosen = workspace.config.choose_executor(executor)
    if dry_run:
        return _print_preview(loaded, chosen, as_json=as_json)
    if not (yes or is_affordable(workspace, loaded)) or (key is None and not _is_meant(workspace, loaded)):
        output.echo("nothing was submitted", err=True)
        return 1
    try:
        run_ids, notes, swept = submit_specs(workspace, specs, executor=chosen, key=key)
    except SubmitFailed as error:
        if error.run_ids:
            print_submitted(workspace, error.run_ids, as_json=as_json)
        raise
    output.warn(notes)
    if waits:
        from slurmtrain.cli.shared.wait_for_runs import wait_for_runs

        return wait_for_runs(workspace, run_ids, as_json=as_json)
    print_submitted(workspace, run_ids, as_json=as_json)
    if not as_json:
        _print_next_commands(loaded, run_ids, swept)
        output.note(describe_next(workspace, [run.plan for run in loaded.runs]))
    return 0


def _print_next_commands(spec: SpecFile, run_ids: Sequence[str], sweep: str | None) -> None:
    """Say how what was submitted can be followed."""
    from slurmtrain.model.spec.chain import dependencies_of

    lists = "'slurmtrain status' lists runs"
    if sweep is not None:
        kind = "search" if spec.search is not None else f"sweep of {len(run_ids)} runs"
        lists = f"'slurmtrain status {sweep}' lists this {kind}"
    elif any(dependencies_of(run.plan.spec) for run in spec.runs):
        lists = f"'slurmtrain status --tree {run_ids[-1]}' shows what waits for what"
    output.echo(f"submitted; 'slurmtrain logs -f {run_ids[-1]}' follows it, {lists}", err=True)
    if spec.search is not None:
        output.note("the next runs are submitted by 'slurmtrain watch', or each 'slurmtrain sync'")


def _start_overrides(start_from: str | None, *, weights_only: bool) -> list[str]:
    """What --from and --weights-only change in the spec. Raises click.UsageError."""
    if start_from is None:
        if weights_only:
            raise click.UsageError("--weights-only needs --from RUN")
        return []
    from slurmtrain.ops.submit.start_points import start_overrides

    return start_overrides(start_from, weights_only=weights_only)


def _print_preview(spec: SpecFile, executor: str, *, as_json: bool) -> int:
    from slurmtrain.cli.shared.sweep_table import print_preview
    from slurmtrain.ops.submit.preview import preview

    previewed = preview(spec, executor)
    output.warn(previewed.notes)
    if as_json:
        output.print_json(previewed.to_json())
    else:
        print_preview(previewed)
    return 0


def is_affordable(workspace: Workspace, spec: SpecFile) -> bool:
    """Whether a large sweep is to be submitted: asked on a terminal. Raises UserError where nobody can be asked."""
    from slurmtrain.ops.submit.preview import large_sweep

    large = large_sweep(workspace.config, spec)
    if not large:
        return True
    if output.is_terminal(sys.stdin) and output.is_terminal(sys.stderr):
        return output.confirm(f"{large}; submit it?")
    raise UserError(f"{large}; where there is no terminal to ask, that needs --yes; nothing was submitted")


def _is_meant(workspace: Workspace, spec: SpecFile) -> bool:
    """Whether a plan that was submitted a moment ago is to be submitted again: asked on a terminal, else assumed."""
    from slurmtrain.ops.submit.submitted_before import find_recent

    recent = find_recent(workspace, spec)
    if recent is None:
        return True
    if output.is_terminal(sys.stdin) and output.is_terminal(sys.stderr):
        return output.confirm(f"{recent}; submit it again?")
    output.warn([f"{recent}; --idempotency-key keeps a repeated command from submitting twice"])
    return True


def print_submitted(workspace: Workspace, run_ids: Sequence[str], *, as_json: bool) -> None:
    """Print runs that exist. Raises SubmitFailed if that is not possible.

    Args:
        workspace: Where they are.
        run_ids: Their ids.
        as_json: Print their JSON, and not only the ids.
    """
    try:
        output.print_json(_facts(workspace, run_ids)) if as_json else output.echo(*run_ids)
    except OutputError as error:
        raise SubmitFailed(f"{', '.join(run_ids)}: submitted, but {error}", run_ids) from error


def _facts(workspace: Workspace, run_ids: Sequence[str]) -> dict[str, Any]:
    """The JSON of runs that exist. Raises SubmitFailed if they cannot be read."""
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import runs_json

    try:
        runs = observe(workspace, run_ids, ask_slurm=False).runs
        return runs_json(workspace, {run_id: runs[run_id] for run_id in run_ids})
    except (SlurmtrainError, OSError) as error:
        raise SubmitFailed(f"runs exist, but cannot be shown: {', '.join(run_ids)} ({error})", run_ids) from error
