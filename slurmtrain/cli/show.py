"""``slurmtrain show``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from slurmtrain.cli.shared import attempt_problems, check_tables, formatting, options, output, tables
from slurmtrain.ops.shared.workspace import Workspace

_GARBAGE_SHOWN = 5


@click.command("show", short_help="Show all about a run.")
@options.run_argument
@options.json_option
@options.in_workspace
def command(workspace: Workspace, run: str, as_json: bool) -> int:
    """Show all about RUN: attempts and why they ended, checkpoints, metrics."""
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.run_details import show_json

    [run_id], _ = find(workspace, [run])
    observed = observe(workspace, [run_id], thorough=True)
    output.warn_about(observed)
    loaded = workspace.store.load(run_id)
    assert loaded is not None
    facts = show_json(workspace, observed.runs[run_id], loaded)
    if as_json:
        output.print_json({"schema": 1, "run": facts})
    else:
        _print(facts)
    return 0


def _print(run: dict[str, Any]) -> None:
    pairs = [
        ("run", f"{run['id']}  {run['name']}"),
        ("state", run["state"] + (f": {run['reason']}" if run["reason"] else "")),
        (
            "step",
            formatting.steps(run)
            + (
                f"  {formatting.rate(run)}, {formatting.duration(run['eta_seconds'])} to go"
                if run["eta_seconds"]
                else ""
            ),
        ),
        ("lost steps", formatting.number(run["lost_steps"])),
        ("time", attempt_problems.describe_time(run["seconds"], run["goodput"]) or "-"),
        ("params", formatting.params(run["params"]) or "-"),
        ("metrics", formatting.metrics(run, limit=100)),
        ("checkpoint", formatting.newest_checkpoint(run)),
        ("submitted", f"{run['submitted_at']}  ({run['executor']})"),
        ("ended", run["ended_at"] or "-"),
        ("command", run["command"] or "-"),
        *_marks(run),
        ("git", _git(run["git"])),
        ("plan", run["plan_hash"] or "-"),
        ("mlflow run", run["mlflow_run_id"] or "-"),
        ("directory", run["dir"]),
    ]
    for name, value in pairs:
        output.echo(f"{name:<11} {value}")
    for attempt in run["attempts"]:
        _print_attempt(attempt, newest=attempt is run["attempts"][-1])
    if run["checkpoints"]:
        output.echo("", "checkpoints")
        rows = [
            (
                formatting.number(c["step"]),
                formatting.size(c["bytes"]),
                c["saved_at"],
                formatting.checkpoint_state(c),
                c["path"],
            )
            for c in run["checkpoints"]
        ]
        tables.print_table(("STEP", "SIZE", "SAVED", "FILES", "PATH"), rows)
    if run["garbage"]:
        _print_garbage(run["garbage"])


def _print_garbage(garbage: Sequence[dict[str, Any]]) -> None:
    output.echo("", f"{len(garbage)} unreadable or partly unreadable lines of journals; --json shows all")
    for bad in garbage[:_GARBAGE_SHOWN]:
        output.echo(f"  {bad['journal']}:{bad['number']}: {bad['why']}")


def _print_attempt(attempt: dict[str, Any], *, newest: bool) -> None:
    why = f" ({attempt['cause']})" if attempt["cause"] not in (None, attempt["state"]) else ""
    output.echo(
        "", f"attempt {attempt['number']}  {attempt['state']}{why}  job {attempt['job_id']}.{attempt['restart']}"
    )
    facts = [
        ("reason", attempt["reason"]),
        ("nodes", ", ".join(attempt["nodes"])),
        ("from", f"{attempt['started_at']} to {attempt['ended_at'] or 'now'}" if attempt["started_at"] else ""),
        ("steps", f"{attempt['first_step']} to {attempt['last_step']}" if attempt["last_step"] is not None else ""),
        ("lost", f"{attempt['lost_steps']} steps" if attempt["lost_steps"] else ""),
        ("time", attempt_problems.describe_time(attempt["seconds"])),
        ("master", f"{attempt['master_addr']}:{attempt['master_port']}" if attempt["master_addr"] else ""),
        ("network", (attempt["network"] or {}).get("elected") or ""),
        ("interface", ", ".join(f"{node} {name}" for node, name in sorted(attempt["interfaces"].items()))),
        ("clocks", check_tables.describe_clocks(attempt["clock"])),
        ("checks", check_tables.describe_count(attempt["checks"])),
        ("saves", formatting.interval(attempt["interval"]) if newest else ""),
        ("unsaved", attempt["save_problem"]),
        *(
            ("in place", line)
            for line in attempt_problems.newest_lines(map(attempt_problems.describe_restart, attempt["restarts"]))
        ),
        *(
            ("passed by", line)
            for line in attempt_problems.newest_lines(
                map(attempt_problems.describe_passed_over, attempt["passed_over"])
            )
        ),
        *(
            ("hang", line)
            for line in attempt_problems.newest_lines(map(attempt_problems.describe_hang, attempt["hangs"]))
        ),
        *(
            ("limit", line)
            for line in attempt_problems.newest_lines(
                map(attempt_problems.describe_raised_limit, attempt["raised_limits"])
            )
        ),
        *(
            ("slow", line)
            for line in attempt_problems.newest_lines(map(attempt_problems.describe_straggler, attempt["stragglers"]))
        ),
        ("evidence", attempt_problems.describe_evidence(attempt["evidence"])),
        ("without", ", ".join(attempt["without"])),
        ("overrides", " ".join(attempt["overrides"])),
    ]
    for name, value in facts:
        if value:
            output.echo(f"  {name:<9} {value}")
    if notable := check_tables.notable(attempt["checks"]):
        output.echo()
        tables.print_table(check_tables.CHECK_HEADERS, notable)
    if rows := check_tables.network_rows(attempt["network"]):
        output.echo()
        tables.print_table(check_tables.NETWORK_HEADERS, rows)
        for line in check_tables.excluded_addresses(attempt["network"]):
            output.echo(f"left out: {line}")
    for failure in attempt["failures"][:1]:
        for line in failure.get("last_lines") or ():
            output.echo(f"  | {line}")


def _marks(run: dict[str, Any]) -> list[tuple[str, str]]:
    """What most runs have not got, so that only those that are there get a line."""
    marks = [
        ("sweep", run["sweep"]),
        ("tags", " ".join(run["tags"])),
        ("note", run["note"]),
        ("archived", "'status' lists it with --all only" if run["archived"] else ""),
        ("deleted", run["deleted_at"]),
    ]
    return [(name, value) for name, value in marks if value]


def _git(git: dict[str, Any] | None) -> str:
    return (
        f"{str(git['commit'])[:12]}{' with changes' if git.get('dirty') else ''}" if git and git.get("commit") else "-"
    )
