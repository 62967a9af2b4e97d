"""``slurmtrain registry``."""

from __future__ import annotations

import click

from slurmtrain.cli.shared import options, output
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.inherited import current_directory


@click.group("registry", short_help="Manage the registry.", epilog=options.examples("registry rebuild"))
def command() -> None:
    """Manage the registry, a projection of the run directories that can be deleted and rebuilt."""


@command.command(
    "rebuild",
    short_help="Rebuild the registry from the run directories.",
    epilog=options.examples("registry rebuild"),
)
@options.json_option
@options.in_workspace
def rebuild(workspace: Workspace, as_json: bool) -> int:
    """Rebuild the registry from the run directories.

    A file that is not a registry is kept next to it as registry.db.old, a damaged one as registry.db.damaged.
    """
    from slurmtrain.cli.shared.progress import count_progress
    from slurmtrain.ops.rebuild import rebuild

    with count_progress("runs") as show:
        observed = rebuild(workspace, show)
    output.warn_about(observed)
    if as_json:
        output.print_json({"schema": 1, "runs": len(observed.runs), "registry": str(workspace.config.registry)})
    else:
        output.echo(f"{len(observed.runs)} runs in {workspace.config.registry}", err=True)
    return 0


@command.command(
    "copy",
    short_help="Copy the registry to another database.",
    epilog=options.examples("registry copy runs/registry.db postgresql+psycopg://me@db.site/runs"),
)
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@options.json_option
@options.in_workspace
def copy(workspace: Workspace, source: str, target: str, as_json: bool) -> int:
    """Copy a registry to another database, and compare both.

    FROM and TO are SQLite files or databases on a PostgreSQL server, as 'registry' in slurmtrain.yaml names them. TO
    gets all that FROM has, also what was sent to trackers, or nothing; it is refused if it has runs that FROM does not
    have. Set 'registry' to TO afterwards.
    """
    from slurmtrain.ops.copy_registry import copy_registry

    copied = copy_registry(workspace, source, target, current_directory())
    if as_json:
        output.print_json({"schema": 1, "from": copied.source, "to": copied.target, "rows": dict(copied.rows)})
    else:
        output.echo(f"{copied.rows['run']} runs copied to {copied.target}, {sum(copied.rows.values())} rows", err=True)
    return 0


@command.command(
    "check",
    short_help="Say whether the registry is intact.",
    epilog=options.examples("registry check", "registry check --deep --json"),
)
@click.option("--deep", is_flag=True, help="Also read all runs again, and compare.")
@options.json_option
@options.in_workspace
def check(workspace: Workspace, deep: bool, as_json: bool) -> int:
    """Say whether the registry's file can be read and, with --deep, equals what the run directories say.

    Changes nothing in an intact file but what every command does: it takes in what is new. Exits with 1 if something is
    wrong; 'slurmtrain registry repair' puts damage right, 'slurmtrain registry rebuild' everything else.
    """
    from slurmtrain.cli.shared.progress import count_progress
    from slurmtrain.ops.registry_care import check

    with count_progress("runs") as show:
        problems = check(workspace, deep=deep, show=show)
    registry = str(workspace.config.registry)
    if as_json:
        output.print_json({"schema": 1, "registry": registry, "intact": not problems, "problems": problems})
    else:
        for problem in problems:
            output.echo(problem)
        output.echo(f"{registry} is {'damaged' if problems else 'intact'}", err=True)
    return 1 if problems else 0


@command.command("repair", short_help="Replace a damaged registry.", epilog=options.examples("registry repair"))
@options.json_option
@options.in_workspace
def repair(workspace: Workspace, as_json: bool) -> int:
    """Replace a damaged registry by one that is read from the run directories.

    The damaged file is kept beside it, as registry.db.damaged. What was sent to trackers, which is not in the run
    directories, is taken over as far as it can be read. Does nothing to a registry that is intact.
    """
    from slurmtrain.cli.shared.progress import count_progress
    from slurmtrain.ops.registry_care import repair

    with count_progress("runs") as show:
        repaired = repair(workspace, show)
    registry, kept = str(workspace.config.registry), None if repaired.kept is None else str(repaired.kept)
    if as_json:
        facts = {"registry": registry, "damage": repaired.damage, "kept": kept, "runs": repaired.runs}
        output.print_json({"schema": 1, **facts, "sent": repaired.sent, "all_sent": repaired.all_sent})
    else:
        output.echo(str(repaired), err=True)
    return 0


@command.command(
    "backup", short_help="Copy the registry to a file.", epilog=options.examples("registry backup runs.bak")
)
@click.argument("target", metavar="DEST")
@options.json_option
@options.in_workspace
def backup(workspace: Workspace, target: str, as_json: bool) -> int:
    """Copy the registry, as it is at one moment, to the file DEST, which must not exist."""
    from slurmtrain.ops.registry_care import back_up

    place = current_directory() / target
    size = back_up(workspace, place)
    if as_json:
        output.print_json({"schema": 1, "registry": str(workspace.config.registry), "to": str(place), "bytes": size})
    else:
        output.echo(f"{workspace.config.registry} copied to {place}, {size} bytes", err=True)
    return 0


@command.command("vacuum", short_help="Shrink the registry's file.", epilog=options.examples("registry vacuum"))
@options.json_option
@options.in_workspace
def vacuum(workspace: Workspace, as_json: bool) -> int:
    """Give the space of runs that are gone back to the file system. It takes as much free space as the registry."""
    from slurmtrain.ops.registry_care import vacuum

    before, after = vacuum(workspace)
    if as_json:
        facts = {"registry": str(workspace.config.registry), "bytes_before": before, "bytes_after": after}
        output.print_json({"schema": 1, **facts})
    else:
        output.echo(f"{workspace.config.registry} has {after} bytes, {before} before", err=True)
    return 0
