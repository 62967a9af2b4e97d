"""``slurmtrain cancel``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli.shared import options, output
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run
    from slurmtrain.ops.shared.observe import Observed

# How many runs are listed before you are asked.
_LISTED = 20


@click.command("cancel", short_help="Cancel runs.", epilog=options.examples("cancel @last", "cancel 'cnn-*' --yes"))
@options.some_runs_argument
@click.option("--all", "all_runs", is_flag=True, help="Cancel all runs that have not ended.")
@click.option("--force", is_flag=True, help="Kill immediately, without letting the run save.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before cancelling several runs.")
@options.json_option
@options.in_workspace
def command(workspace: Workspace, names: tuple[str, ...], all_runs: bool, force: bool, yes: bool, as_json: bool) -> int:
    """Cancel each RUN: let it save and exit, and kill processes that do not exit.

    A RUN may be a pattern such as 'cnn-*', for all runs of such names that have not ended. On a terminal you are asked
    before several are cancelled by a pattern or --all. Works from any terminal of the machine; for Slurm jobs, from
    any machine of the cluster.
    """
    from slurmtrain.ops.cancel import cancel
    from slurmtrain.ops.shared.chain.waiting import describe_blocked, open_dependents

    run_ids, before = _choose(workspace, names, all_runs=all_runs)
    if len(run_ids) > len(names) and not yes:
        _confirm(before, run_ids)
    over = {run_id for run_id, listed in before.runs.fetch(run_ids).items() if listed.ended}
    waiting = open_dependents(workspace, before, run_ids)
    ended = cancel(workspace, run_ids, force=force)
    if as_json:
        output.print_json(_as_json(workspace, ended))
    for run_id, run in ended.items():
        if run_id in over:
            output.echo(f"run {run_id} had ended already: {run.state}", err=True)
        else:
            output.echo(
                f"run {run_id} is {run.state}" + (f": {run.reason}" if run.reason not in ("", run.state) else ""),
                err=True,
            )
    for line in describe_blocked(workspace, waiting):
        output.echo(line, err=True)
    for line in _others_of_these_names(before, run_ids, names):
        output.echo(line, err=True)
    return 0 if all(run.ended for run in ended.values()) else 1


def _choose(workspace: Workspace, names: Sequence[str], *, all_runs: bool) -> tuple[list[str], Observed]:
    """The runs to cancel, and what is known of all runs."""
    from slurmtrain.errors import UserError
    from slurmtrain.ops.cancel import find_runs
    from slurmtrain.ops.shared.observe import observe

    if names and all_runs:
        raise UserError("give either runs or --all, which cancels all of them")
    if not names and not all_runs:
        raise UserError("name the runs to cancel; --all cancels all that have not ended")
    if names:
        return find_runs(workspace, names)
    observed = observe(workspace, ask_slurm=False)
    return [run_id for run_id, row in observed.runs.index.items() if not row.ended], observed


def _confirm(observed: Observed, run_ids: Sequence[str]) -> None:
    """Ask on a terminal whether to cancel these runs. Raises click.Abort if not."""
    if not _can_ask():
        return
    for run_id in run_ids[:_LISTED]:
        listed = observed.runs[run_id]
        output.echo(f"{run_id}  {listed.name}  {listed.state}", err=True)
    if len(run_ids) > _LISTED:
        output.echo(f"and {len(run_ids) - _LISTED} more", err=True)
    if not output.confirm(f"cancel these {len(run_ids)} runs?"):
        raise click.Abort


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _others_of_these_names(observed: Observed, run_ids: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """A line for each name that other runs which go on have, too."""
    from slurmtrain.ops.shared.find import namesakes

    runs = observed.runs.index
    for run_id in run_ids:
        if run_id in runs and runs[run_id].name in names and (others := set(namesakes(runs, run_id)) - set(run_ids)):
            listed = ", ".join(sorted(others))
            yield f"not cancelled, and also named {runs[run_id].name}: {listed}"


def _as_json(workspace: Workspace, ended: Mapping[str, Run]) -> dict[str, Any]:
    """The runs as they are now, which need not be what their journals say: a full disk, or a deleted directory.

    Of a run that the registry does not know there are only ``id``, ``state`` and ``reason``.
    """
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import runs_json

    listed = observe(workspace, ended, ask_slurm=False).runs.fetch(ended)
    answer = runs_json(workspace, listed)
    facts = {run["id"]: run for run in answer["runs"]}
    for run_id, run in ended.items():
        if run_id not in facts or facts[run_id]["state"] != run.state:
            facts[run_id] = {**facts.get(run_id, {}), "id": run_id, "state": run.state, "reason": run.reason}
    return {**answer, "runs": [facts[run_id] for run_id in ended]}
