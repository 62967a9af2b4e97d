"""What keeps runs going, waits for them, and ends them: ``sync``, ``watch``, ``wait`` and ``cancel``."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli import formatting, options, output
from slurmtrain.errors import OutputError
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run
    from slurmtrain.ops.shared.observe import Observed
    from slurmtrain.ops.watch.lock import WatchHolder
    from slurmtrain.ops.watch.report import WatchEvent

_INTERRUPTED = 130


@options.command("watch", "watch --once")
@click.option(
    "--every", metavar="S", type=options.Seconds(10), default=60.0, show_default=True,
    help="Seconds between two rounds, at least 10.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Do a single round, as for cron; exit with 1 if something went wrong.")
@options.json_option
def watch(workspace: Workspace, every: float, once: bool, as_json: bool) -> int:
    """Repeat what sync does until SIGTERM or Ctrl-C: a process for a login node.

    It prints a line for each action and each problem, and when a problem is over. If another watch is running for these
    runs, it says which and exits with 0.
    """
    from slurmtrain.ops.shared.interrupt import StopSignal
    from slurmtrain.ops.watch.loop import watch, watch_once

    problems: list[str] = []

    def report(event: WatchEvent) -> None:
        if once and event.kind == "problem":
            problems.append(event.message)
        _print(event, as_json=as_json)

    if once:
        _print_holder(workspace, watch_once(workspace.config, every, report))
        return 1 if problems else 0
    with StopSignal() as stop:
        _print_holder(workspace, watch(workspace.config, every, report, stop))
        return _INTERRUPTED if stop.raised == signal.SIGINT else 0


def _print(event: WatchEvent, *, as_json: bool) -> None:
    """Print one line. If it cannot be written, for example because the disk is full, the watch continues."""
    try:
        if as_json:
            output.print_json(event.to_dict(), on_a_line=True)
        else:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
            message = formatting.localized(" ".join(event.message.split()))
            output.echo(f"{at} {'problem: ' if event.kind == 'problem' else ''}{message}")
    except OutputError:
        return


def _print_holder(workspace: Workspace, holder: WatchHolder | None) -> None:
    if holder is not None:
        output.echo(f"{workspace.root.path} is watched already, by {holder}; nothing was done", err=True)


@options.command("sync")
@options.json_option
def sync(workspace: Workspace, as_json: bool) -> int:
    """Read new events, complete what a killed command left unfinished, restart runs, and mirror them to MLflow.

    Repeating it is harmless. Exits with 1 if something could not be done; the next sync tries again.
    """
    from slurmtrain.ops.sync import sync

    synced = sync(workspace)
    output.warn_about(synced.observed)
    output.warn([*synced.notes, *synced.problems])
    actions = {
        "started": synced.started,
        "released": synced.released,
        "cancelled": synced.cancelled,
        "ended": synced.ended,
        "mirrored": synced.mirrored,
    }
    if as_json:
        output.print_json({"schema": 1, "runs": len(synced.observed.runs), **actions, "problems": synced.problems})
    else:
        counts = [f"{len(ids)} {action}" for action, ids in actions.items() if ids]
        output.echo(
            f"{len(synced.observed.runs)} runs" + (f": {', '.join(counts)}" if counts else "; nothing to do"), err=True
        )
    return 1 if synced.problems else 0


@options.command("wait digits cnn")
@options.runs_argument
@options.json_option
def wait(workspace: Workspace, names: tuple[str, ...], as_json: bool) -> int:
    """Wait until each RUN has ended. Exits with 0 if all completed, else with 1."""
    from slurmtrain.cli.progress_bars import wait_for_runs
    from slurmtrain.ops.shared.find import find_all

    run_ids, _ = find_all(workspace, names)
    return wait_for_runs(workspace, run_ids, as_json=as_json)


@options.command("cancel @last", "cancel 'cnn-*' --yes")
@options.some_runs_argument
@click.option("--all", "all_runs", is_flag=True, help="Cancel all runs that have not ended.")
@click.option("--force", is_flag=True, help="Kill immediately, without letting the run save.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before cancelling several runs.")
@options.json_option
def cancel(workspace: Workspace, names: tuple[str, ...], all_runs: bool, force: bool, yes: bool, as_json: bool) -> int:
    """Cancel each RUN: let it save and exit, and kill processes that do not exit.

    A RUN may be a pattern such as 'cnn-*', for all runs of such names that have not ended. On a terminal you are asked
    before several are cancelled by a pattern or --all. Works from any terminal of the machine; for Slurm jobs, from
    any machine of the cluster.
    """
    from slurmtrain.ops.cancel import cancel
    from slurmtrain.ops.shared.family import describe_blocked, open_dependents

    run_ids, before = _choose(workspace, names, all_runs=all_runs)
    if len(run_ids) > len(names) and not yes and output.can_ask():
        runs = before.runs.fetch(run_ids)
        lines = [f"{run_id}  {runs[run_id].name}  {runs[run_id].state}" for run_id in run_ids]
        output.require_consent(f"cancel these {len(run_ids)} runs?", lines)
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
