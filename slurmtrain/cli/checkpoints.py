"""``slurmtrain checkpoints``."""

from __future__ import annotations

from typing import Any

import click

from slurmtrain.cli import common, text
from slurmtrain.ops.shared.workspace import Workspace

_HEADERS = ("STEP", "SIZE", "SAVED", "SECONDS", "STALL", "WHY", "FILES", "KEPT")


@click.command("checkpoints", short_help="List the checkpoints of a run.")
@common.run_argument
@click.option("--all", "everything", is_flag=True, help="Those that were pruned too.")
@common.json_option
@common.in_workspace
def command(workspace: Workspace, run: str, everything: bool, as_json: bool) -> int:
    """List the checkpoints of RUN: why each was saved, what that took, and why it is kept.

    SECONDS is how long the save took, STALL how long training stood still for it. A complete one of a session's that is
    kept for no reason goes when the run next saves.
    """
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import checkpoints_json

    [run_id], _ = find(workspace, [run])
    common.warn_of(observe(workspace, [run_id], thorough=True))
    loaded = workspace.store.load(run_id)
    assert loaded is not None
    facts = checkpoints_json(workspace, loaded, everything=everything)
    if as_json:
        common.print_json(facts)
    elif facts["checkpoints"]:
        text.print_table(_HEADERS, [_row(one) for one in facts["checkpoints"]])
    else:
        click.echo(f"run {run_id} has no checkpoint" + ("" if everything else " on disk"), err=True)
    return 0


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        text.number(one["step"]), text.size(one["bytes"]), one["saved_at"], text.number(one["seconds"]),
        text.number(one["stall_s"]), one["why"] or "-", text.files(one), one["kept"] or "-",
    )  # fmt: skip
