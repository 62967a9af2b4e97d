"""``slurmtrain show``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from slurmtrain.cli import describe, formatting, options, output, tables
from slurmtrain.model.environment import describe_variables
from slurmtrain.model.run.lineage import AFTER, Parent
from slurmtrain.ops.shared.workspace import Workspace

_GARBAGE_SHOWN = 5
_CHECKPOINTS_SHOWN = 5
_CHILDREN_SHOWN = 5
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
def show(workspace: Workspace, run: str, each_node: bool, as_json: bool) -> int:
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
        _print_attempt(attempt, newest=each is run["attempts"][-1], each_node=each_node)
    if _has_generations(run):
        _print_lineage(run)
    elif len(run["chain"]) > _SMALL_CHAIN:
        output.echo("", "chain")
        for each in run["chain"]:
            mark = "  <" if each["id"] == run["id"] else ""
            output.echo("  " * (each["depth"] + 1) + _chained(each) + mark)
    if lines := describe.finding_lines(run["attempts"]):
        output.echo("", "findings")
        for line in lines:
            output.paragraph(f"  {line}", " " * 8)
    _print_checkpoints(run, limit=None if each_node else _CHECKPOINTS_SHOWN)
    if run["garbage"]:
        _print_garbage(run["garbage"])


def _run_facts(run: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is known about a run, each with its name; ``-`` or nothing where there is none."""
    reason = f": {formatting.localized(run['reason'])}" if run["reason"] else ""
    ahead = f"  {formatting.rate(run)}, {formatting.duration(run['eta_seconds'])} to go" if run["eta_seconds"] else ""
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
    yield "from", "; ".join(Parent.from_dict(parent).phrase for parent in _without_chain(run["parents"]))
    yield "led to", _children(_without_chain(run["children"]))
    yield "after", _chain(run["after"])
    yield "before", _chain(run["before"])
    yield "tags", " ".join(run["tags"])
    yield "note", run["note"]
    yield "archived", "'status' lists it with --all only" if run["archived"] else ""
    yield "deleted", formatting.when(run["deleted_at"])
    yield "git", _git(run["git"])
    yield "code", _code(run["code"])
    yield "plan", run["plan_hash"]
    yield "mlflow run", run["mlflow_run_id"]
    yield "directory", run["dir"]


def _children(children: Sequence[dict[str, Any]]) -> str:
    """The runs that come from a run, the newest last."""
    more = len(children) - _CHILDREN_SHOWN
    shown = [f"{child['run']} ({_relation(child)})" for child in children[-_CHILDREN_SHOWN:]]
    return (f"{more} more, " if more > 0 else "") + ", ".join(shown)


def _relation(child: dict[str, Any]) -> str:
    step = child["step"]
    return str(child["relation"]) if step is None else f"{child['relation']} at step {step}"


def _has_generations(run: dict[str, Any]) -> bool:
    """Whether the lines 'from' and 'led to', and the chain, do not say all of where a run comes from and leads to."""
    near = {run["id"], *(each["run"] for each in (*run["parents"], *run["children"]))}
    near |= {each["id"] for each in run["chain"]}
    return any(each["id"] not in near for each in run["lineage"])


def _print_lineage(run: dict[str, Any]) -> None:
    """The runs that it comes from and that come from it, as a tree."""
    output.echo("", "lineage")
    for each in run["lineage"]:
        origin = "; ".join(Parent.from_dict(parent).phrase for parent in each["parents"])
        mark = "  <" if each["id"] == run["id"] else ""
        summary = f"{each['name']}  {each['state']}" if each["state"] else "deleted"
        output.echo("  " * (each["depth"] + 1) + f"{each['id']}  {summary}" + (f"  {origin}" if origin else "") + mark)


def _without_chain(relatives: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The relatives that are not merely before or after a run, which lines of their own say."""
    return [relative for relative in relatives if relative["relation"] != AFTER]


def _chain(others: Sequence[dict[str, Any]]) -> str:
    more = len(others) - _CHILDREN_SHOWN
    return ", ".join(_chained(each) for each in others[:_CHILDREN_SHOWN]) + (f", {more} more" if more > 0 else "")


def _chained(other: dict[str, Any]) -> str:
    """A run that this one starts after, or that starts after this one."""
    if other["state"] is None:
        return f"{other['id']} (deleted)"
    at = f", step {other['step']}" if other["step"] is not None and other["state"] == "running" else ""
    return f"{other['id']} {other['name']} ({other['state']}{at})"


def _print_checkpoints(run: dict[str, Any], *, limit: int | None) -> None:
    """The newest checkpoints on disk, at most ``limit``, with their paths in the run directory."""
    shown = run["checkpoints"][-limit:] if limit else run["checkpoints"]
    if not shown:
        return
    output.echo("", "checkpoints")
    tables.print_checkpoints(
        "step size saved files path", [{**each, "path": _relative(each["path"], run["dir"])} for each in shown]
    )
    if earlier := len(run["checkpoints"]) - len(shown):
        output.echo(f"and {earlier} earlier; 'slurmtrain checkpoints {run['id']}' lists all")


def _print_garbage(garbage: Sequence[dict[str, Any]]) -> None:
    output.echo("", f"{len(garbage)} unreadable or partly unreadable lines of journals; --json shows all")
    for bad in garbage[:_GARBAGE_SHOWN]:
        output.echo(f"  {bad['journal']}:{bad['number']}: {bad['why']}")


def _print_attempt(attempt: dict[str, Any], *, newest: bool, each_node: bool) -> None:
    why = f" ({attempt['cause']})" if attempt["cause"] not in (None, attempt["state"]) else ""
    output.echo(
        "", f"attempt {attempt['number']}  {attempt['state']}{why}  job {attempt['job_id']}.{attempt['restart']}"
    )
    facts = [*_attempt_facts(attempt), *(_node_facts(attempt) if newest or each_node else ()), *_problems(attempt)]
    for name, value in facts:
        if value:
            output.paragraph(f"  {name:<9} {value}", " " * _INDENT)
    if newest or each_node:
        _print_network(attempt["network"])
    if each_node and attempt["nodes"]:
        output.echo()
        tables.print_table(describe.NODE_HEADERS, describe.node_rows(attempt))
    for failure in attempt["failures"][:1]:
        for line in failure.get("last_lines") or ():
            output.echo(f"  | {line}")


def _attempt_facts(attempt: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is known about an attempt as a whole, each with its name; nothing where there is none."""
    yield "reason", formatting.localized(attempt["reason"])
    yield "nodes", describe.count_and_nodes(attempt["nodes"])
    yield "from", _period(attempt["started_at"], attempt["ended_at"])
    yield "steps", _steps(attempt["first_step"], attempt["last_step"])
    yield "code", f"snapshot {attempt['code'][:12]}" if attempt.get("code") else ""
    for line in attempt.get("environment_changes", ()):
        yield "environ", line
    yield "cpus", _bound_cpus(attempt.get("cpus") or {})
    yield "lost", f"{attempt['lost_steps']} steps" if attempt["lost_steps"] else ""
    yield "time", describe.describe_time(attempt["seconds"])
    yield "master", f"{attempt['master_addr']}:{attempt['master_port']}" if attempt["master_addr"] else ""


def _bound_cpus(cpus: dict[str, str]) -> str:
    """The CPUs that ranks are bound to, of the first few."""
    phrases = [f"rank {rank}: {bound}" for rank, bound in cpus.items()]
    more = len(phrases) - _RANKS_LISTED
    return ", ".join(phrases[:_RANKS_LISTED]) + (f", and {more} more" if more > 0 else "")


def _node_facts(attempt: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What the preflight of an attempt learned of its nodes, each with its name; nothing where there is none."""
    yield "network", (attempt["network"] or {}).get("elected") or ""
    yield "interface", describe.describe_values(attempt["interfaces"])
    yield "clocks", describe.describe_clocks(attempt["clock"])
    yield "checks", describe.describe_count(attempt["checks"])
    yield "saves", formatting.interval(attempt["interval"])
    yield "shares", formatting.shares(attempt.get("shares"))
    yield "backend", formatting.backend(attempt.get("hardware"))
    yield "precision", formatting.precisions(attempt.get("hardware"))


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


def _print_network(network: dict[str, Any] | None) -> None:
    if rows := describe.network_rows(network):
        output.echo()
        tables.print_table(describe.NETWORK_HEADERS, rows)
        for line in describe.excluded_addresses(network):
            output.paragraph(f"left out: {line}", "  ")


def _period(begin: str | None, end: str | None) -> str:
    """When an attempt ran; empty if it has not started."""
    if not begin:
        return ""
    if not end:
        return f"{formatting.calendar(begin)} to now"
    length = formatting.duration(formatting.between(begin, end))
    return f"{formatting.calendar(begin)} to {formatting.calendar(end)} ({length})"


def _steps(first: int | None, last: int | None) -> str:
    """Which steps an attempt finished, as far as its journals have them."""
    if last is None:
        return ""
    return f"up to {last}" if first is None else f"{first} to {last}"


def _relative(path: str, directory: str) -> str:
    """A path as in the run directory; one that is elsewhere stays whole."""
    return str(Path(path).relative_to(directory)) if Path(path).is_relative_to(directory) else path


def _git(git: dict[str, Any] | None) -> str:
    """A revision, its branch, and whether files differ from it."""
    if not git or not git.get("commit"):
        return "-"
    modified = git.get("modified")
    changes = f"{modified} modified" if modified else "with changes"
    state = (changes if git["dirty"] else "clean") if "dirty" in git else ""
    branch = f" ({git['branch']})" if git.get("branch") else ""
    return ", ".join(filter(None, (f"{str(git['commit'])[:12]}{branch}", state)))


def _code(code: dict[str, Any] | None) -> str:
    """The snapshot that a run executes, and where the run has its own copy of it."""
    if code is None:
        return ""
    size = f"{formatting.files(code['files'])}, {formatting.size(code['bytes'])}"
    return f"snapshot {code['snapshot'][:12]} of {code['root']} ({size}), run in {code['dir']}"
