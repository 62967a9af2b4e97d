"""``slurmtrain checkpoints``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from slurmtrain.cli.shared import formatting, options, output, tables, times
from slurmtrain.ops.shared.workspace import Workspace

_HEADERS = ("STEP", "SIZE", "SAVED", "SECONDS", "STALL", "WHY", "FILES", "KEPT")
_OWN_HEADERS = ("STEP", "SIZE", "SAVED", "FORMAT", "FILES", "PATH")


@click.command(
    "checkpoints",
    short_help="List the checkpoints of a run.",
    epilog=options.examples("checkpoints digits"),
)
@options.run_argument
@click.option("--all", "with_pruned", is_flag=True, help="Include pruned checkpoints.")
@options.json_option
@options.in_workspace
@options.looks
def command(workspace: Workspace, run: str, with_pruned: bool, as_json: bool) -> int:
    """List the checkpoints of RUN: why and how fast each was saved, and why it is kept.

    SECONDS is the duration of the save, STALL how long training stood still for it. A complete checkpoint of a session
    that no rule keeps (KEPT) is deleted after the next save. Checkpoints that the script saves have a FORMAT. FORKS, if
    there are any, are runs that began with a checkpoint, and have their own copy of it.
    """
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.shared.observe import check_readable, observe
    from slurmtrain.ops.shared.run_details import checkpoints_json

    [run_id], _ = find(workspace, [run])
    output.warn_about(observe(workspace, [run_id], thorough=True))
    loaded = workspace.store.load(run_id)
    assert loaded is not None
    check_readable(loaded)
    facts = checkpoints_json(workspace, loaded, deleted_too=with_pruned)
    if as_json:
        output.print_json(facts)
    elif any(checkpoint["format"] for checkpoint in facts["checkpoints"]):
        _print_table(_OWN_HEADERS, _own_row, facts["checkpoints"])
    elif facts["checkpoints"]:
        _print_table(_HEADERS, _row, facts["checkpoints"])
    else:
        output.echo(f"run {run_id} has no checkpoint" + ("" if with_pruned else " on disk"), err=True)
    return 0


def _print_table(
    headers: tuple[str, ...], row: Callable[[dict[str, Any]], tuple[str, ...]], checkpoints: Sequence[dict[str, Any]]
) -> None:
    rows = list(map(row, checkpoints))
    if any(checkpoint["forks"] for checkpoint in checkpoints):
        headers = (*headers, "FORKS")
        forks = [", ".join(checkpoint["forks"]) or "-" for checkpoint in checkpoints]
        rows = [(*cells, runs) for cells, runs in zip(rows, forks, strict=True)]
    tables.print_table(headers, rows)


def _row(checkpoint: dict[str, Any]) -> tuple[str, ...]:
    return (
        formatting.number(checkpoint["step"]),
        formatting.size(checkpoint["bytes"]),
        times.when(checkpoint["saved_at"]),
        formatting.number(checkpoint["seconds"]),
        formatting.number(checkpoint["stall_s"]),
        checkpoint["why"] or "-",
        formatting.checkpoint_state(checkpoint),
        checkpoint["kept"] or "-",
    )


def _own_row(checkpoint: dict[str, Any]) -> tuple[str, ...]:
    """A row for a checkpoint that the run's script saved by itself."""
    return (
        formatting.checkpoint_step(checkpoint),
        formatting.size(checkpoint["bytes"]),
        times.when(checkpoint["saved_at"]),
        checkpoint["format"] or "-",
        f"incomplete: {checkpoint['problem']}" if checkpoint["problem"] else formatting.checkpoint_state(checkpoint),
        checkpoint["path"],
    )
