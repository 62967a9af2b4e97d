"""``slurmtrain show``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import click

from slurmtrain.cli import describe, formatting, options, output, tables
from slurmtrain.model.environment import describe_variables
from slurmtrain.model.run.lineage import AFTER, Parent
from slurmtrain.ops.shared.workspace import Workspace

# How many checkpoints, relatives and unreadable lines are shown; --json has all.
_SHOWN = 5
_RANKS_LISTED = 8
# Of so many runs the lines 'after' and 'before' say all.
_SMALL_CHAIN = 2
# Cells before the text of a fact.
_INDENT = 12


@options.command("show @last", looks=True)
@options.run_argument
@click.option(
    "-v", "--nodes", "each_node", is_flag=True, help="List each node, and the networks of all attempts; omit nothing."
)
@options.json_option
def show_command(workspace: Workspace, run: str, each_node: bool, as_json: bool) -> int:
    """Show all about RUN: attempts and why they ended, checkpoints, metrics.

    Nodes that have something in common share a line. Networks and clocks are the newest attempt's.
    """
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
        from slurmtrain.ops.unmirrored import describe_refused, describe_unmirrored

        print_run(facts, each_node=each_node)
        for line in (*describe_unmirrored(workspace, [facts]), *describe_refused(facts)):
            output.note(line)
    return 0


def print_run(run: dict[str, Any], *, each_node: bool = False) -> None:
    """Print all about a ``run``: RUN of the JSON contract with its attempts and checkpoints.

    ``each_node``: what was measured on each node too.
    """
    for name, value in _run_facts(run):
        if value and value != "-":
            output.paragraph(f"{name:<11} {value}", " " * _INDENT)
    has_one = len({attempt.get("code") for attempt in run["attempts"]}) <= 1
    for each in run["attempts"]:
        attempt = {**each, "code": None} if has_one else each
        _print_attempt(attempt, measured=each_node or each is run["attempts"][-1], each_node=each_node)
    _print_relatives(run)
    if lines := describe.finding_lines(run["attempts"]):
        output.echo("", "findings")
        for line in lines:
            output.paragraph(f"  {line}", " " * 8)
    shown = run["checkpoints"] if each_node else run["checkpoints"][-_SHOWN:]
    if shown:
        output.echo("", "checkpoints")
        # Paths as in the run directory; one that is elsewhere stays whole.
        paths = [each["path"].removeprefix(f"{run['dir']}/") for each in shown]
        columns = [{**each, "path": path} for each, path in zip(shown, paths, strict=True)]
        tables.print_checkpoints("step size saved files path", columns)
        if earlier := len(run["checkpoints"]) - len(shown):
            output.echo(f"and {earlier} earlier; 'slurmtrain checkpoints {run['id']}' lists all")
    if run["garbage"]:
        output.echo("", f"{len(run['garbage'])} unreadable or partly unreadable lines of journals; --json shows all")
        for bad in run["garbage"][:_SHOWN]:
            output.echo(f"  {bad['journal']}:{bad['number']}: {bad['why']}")


def _run_facts(run: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is known about a run, each with its name; ``-`` or nothing where there is none."""
    reason = f": {formatting.localized(run['reason'])}" if run["reason"] else ""
    ahead = f"  {formatting.rate(run)}, {formatting.duration(run['eta_seconds'])} to go" if run["eta_seconds"] else ""
    # Lines of their own say what is merely before or after a run.
    parents, children = ([each for each in run[kind] if each["relation"] != AFTER] for kind in ("parents", "children"))
    led_to = [
        f"{child['run']} ({child['relation']}" + (")" if child["step"] is None else f" at step {child['step']})")
        for child in children
    ]
    yield "run", f"{run['id']}  {run['name']}"
    yield "state", run["state"] + reason
    yield "step", formatting.steps(run) + ahead
    unknown = run["lost_steps"] is None and run["step"] is not None
    yield "lost steps", "?" if unknown else formatting.number(run["lost_steps"])
    yield "time", describe.describe_time(run["seconds"], run["goodput"])
    yield "params", formatting.params(run["params"])
    yield "metrics", formatting.metrics(run, limit=100)
    yield "checkpoint", formatting.newest_checkpoint(run)
    yield "submitted", f"{formatting.when(run['submitted_at'])}  (executor {run['executor']})"
    yield "ended", formatting.when(run["ended_at"])
    yield "command", run["command"]
    yield "sweep", run["sweep"]
    yield "from", "; ".join(Parent.from_dict(parent).phrase for parent in parents)
    # The newest come last.
    yield "led to", (f"{len(led_to) - _SHOWN} more, " if len(led_to) > _SHOWN else "") + ", ".join(led_to[-_SHOWN:])
    for name in ("after", "before"):
        yield name, ", ".join(describe.first_of([_chained(each) for each in run[name]], _SHOWN))
    yield "tags", " ".join(run["tags"])
    yield "note", run["note"]
    yield "archived", "'status' lists it with --all only" if run["archived"] else ""
    yield "deleted", formatting.when(run["deleted_at"])
    yield "git", describe.describe_git_state(run["git"] or {})
    if code := run["code"]:
        size = f"{formatting.files(code['files'])}, {formatting.size(code['bytes'])}"
        yield "code", f"snapshot {code['snapshot'][:12]} of {code['root']} ({size}), run in {code['dir']}"
    yield "plan", run["plan_hash"]
    yield "mlflow run", run["mlflow_run_id"]
    yield "directory", run["dir"]


def _print_relatives(run: dict[str, Any]) -> None:
    """The runs that it comes from and that come from it, as a tree, unless the lines above say all of that."""
    near = {run["id"], *(each["run"] for each in (*run["parents"], *run["children"]))}
    near |= {each["id"] for each in run["chain"]}
    if any(each["id"] not in near for each in run["lineage"]):
        output.echo("", "lineage")
        for each in run["lineage"]:
            origin = "; ".join(Parent.from_dict(parent).phrase for parent in each["parents"])
            mark = "  <" if each["id"] == run["id"] else ""
            summary = f"{each['name']}  {each['state']}" if each["state"] else "deleted"
            line = f"{each['id']}  {summary}" + (f"  {origin}" if origin else "") + mark
            output.echo("  " * (each["depth"] + 1) + line)
    elif len(run["chain"]) > _SMALL_CHAIN:
        output.echo("", "chain")
        for each in run["chain"]:
            mark = "  <" if each["id"] == run["id"] else ""
            output.echo("  " * (each["depth"] + 1) + _chained(each) + mark)


def _chained(other: dict[str, Any]) -> str:
    """A run that this one starts after, or that starts after this one."""
    if other["state"] is None:
        return f"{other['id']} (deleted)"
    at = f", step {other['step']}" if other["step"] is not None and other["state"] == "running" else ""
    return f"{other['id']} {other['name']} ({other['state']}{at})"


def _print_attempt(attempt: dict[str, Any], *, measured: bool, each_node: bool) -> None:
    """Print what is known about an attempt; ``measured``: also what the preflight has measured on all nodes."""
    why = f" ({attempt['cause']})" if attempt["cause"] not in (None, attempt["state"]) else ""
    output.echo(
        "", f"attempt {attempt['number']}  {attempt['state']}{why}  job {attempt['job_id']}.{attempt['restart']}"
    )
    facts = [*_attempt_facts(attempt), *(_preflight_facts(attempt) if measured else ()), *_problems(attempt)]
    for name, value in facts:
        if value:
            output.paragraph(f"  {name:<9} {value}", " " * _INDENT)
    if measured:
        tables.print_network(attempt["network"])
    if each_node and attempt["nodes"]:
        output.echo()
        tables.print_table(describe.NODE_HEADERS, describe.node_rows(attempt))
    for failure in attempt["failures"][:1]:
        for line in failure.get("last_lines") or ():
            output.echo(f"  | {line}")


def _attempt_facts(attempt: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is known about an attempt as a whole, each with its name; nothing where there is none."""
    begin, end, last = attempt["started_at"], attempt["ended_at"], attempt["last_step"]
    yield "reason", formatting.localized(attempt["reason"])
    yield "nodes", describe.count_and_nodes(attempt["nodes"])
    if begin:
        length = f" ({formatting.duration(formatting.between(begin, end))})" if end else ""
        yield "from", f"{formatting.calendar(begin)} to {formatting.calendar(end) if end else 'now'}{length}"
    if last is not None:
        yield "steps", f"up to {last}" if attempt["first_step"] is None else f"{attempt['first_step']} to {last}"
    yield "code", f"snapshot {attempt['code'][:12]}" if attempt.get("code") else ""
    for line in attempt.get("environment_changes", ()):
        yield "environ", line
    bound = [f"rank {rank}: {cpus}" for rank, cpus in (attempt.get("cpus") or {}).items()]
    yield "cpus", ", ".join(describe.first_of(bound, _RANKS_LISTED))
    yield "lost", f"{attempt['lost_steps']} steps" if attempt["lost_steps"] else ""
    yield "time", describe.describe_time(attempt["seconds"])
    yield "master", f"{attempt['master_addr']}:{attempt['master_port']}" if attempt["master_addr"] else ""


def _preflight_facts(attempt: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What an attempt has learned of its nodes, each with its name; nothing where there is none."""
    yield "network", (attempt["network"] or {}).get("elected") or ""
    yield "interface", describe.describe_values(attempt["interfaces"])
    yield "clocks", describe.describe_clocks(attempt["clock"])
    yield "checks", describe.describe_count(attempt["checks"])
    yield "saves", describe.describe_interval(attempt["interval"])
    yield "shares", describe.describe_shares(attempt.get("shares"))
    hardware = attempt.get("hardware") or {}
    yield "backend", f"{hardware['backend']}: {hardware['backend_why']}" if hardware.get("backend") else ""
    counts = Counter(zip(hardware.get("precisions", ()), hardware.get("names", ()), strict=False))
    yield "precision", ", ".join(f"{precision} on {count} x {name}" for (precision, name), count in counts.items())


def _problems(attempt: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What held an attempt up or was done about it, each with its name; nothing where there was none."""
    yield "unsaved", attempt["save_problem"]
    for name, moments, phrase in (
        ("in place", attempt["restarts"], describe.describe_restart),
        ("passed by", attempt["passed_over"], describe.describe_passed_over),
        ("hang", attempt["hangs"], describe.describe_hang),
        ("limit", attempt["raised_limits"], describe.describe_raised_limit),
        ("slow", attempt["stragglers"], describe.describe_straggler),
    ):
        for line in describe.newest_lines(map(phrase, moments)):
            yield name, line
    yield "evidence", describe.describe_evidence(attempt["evidence"])
    yield "pack", f"{attempt['pack']} runs share its job" if attempt["pack"] > 1 else ""
    yield "shell", describe_variables(attempt.get("inherited", {}))
    yield "without", formatting.describe_nodes(attempt["without"])
    yield "overrides", " ".join(attempt["overrides"])
