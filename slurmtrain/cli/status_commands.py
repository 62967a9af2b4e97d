"""``slurmtrain status`` lists runs, ``slurmtrain show`` prints all about one."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli import formatting, options, output, tables
from slurmtrain.ops.query.select import NEWEST, Question
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.query.select import Selection
    from slurmtrain.ops.query.trials import SearchSummary


@options.command(
    "status",
    "status 'cnn*' --all",
    "status --where 'params.lr < 0.1 and state = completed' --sort -metrics.acc --limit 5",
    looks=True,
)
@options.some_runs_argument
@options.question_options
@click.option("--all", "all_runs", is_flag=True, help=f"List all runs, not only open ones and the newest {NEWEST}.")
@click.option("--no-fold", "unfolded", is_flag=True, help="List each run of a sweep, not one entry for all of them.")
@click.option("--tree", is_flag=True, help="Print below each run those that start after it, with all of its chain.")
@click.option("--watch", is_flag=True, help="Refresh until interrupted.")
@options.interval_option
@options.csv_option
@options.json_option
def status_command(
    workspace: Workspace, names: tuple[str, ...], question: Question, all_runs: bool, unfolded: bool, tree: bool,
    watch: bool, interval: float, as_csv: bool, as_json: bool,
) -> int:  # fmt: skip
    """List runs: first the runs that may still change, then the newest.

    RUN may also be a pattern such as 'cnn*', or the id of a sweep. If nothing is asked, a sweep is one entry: how many
    of its runs are in each state, the values that it tries, its best run and the commonest error. Fields in --where,
    --sort and --columns have the names of the JSON; docs/queries.md explains conditions.

    On a terminal each run is one line; columns that do not fit are named below, and runs that are not listed counted.
    Elsewhere everything is printed. It only reads journals and checks processes; it never starts or ends anything.
    --all also lists archived and deleted runs and, where a group shares the runs root, the other users' runs.
    """
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other")
    from slurmtrain.ops.shared.trackers import describe_unmirrored

    # Other programs want all runs, people the runs that matter now.
    for_programs = as_csv or as_json
    folds = not (unfolded or for_programs)
    question = replace(question, names=names, all_runs=all_runs, for_programs=for_programs, folds=folds, tree=tree)
    if not watch:
        selection = _look(workspace, question)
        if not selection.runs and selection.total:
            output.note(f"none of {selection.total} runs matches; 'slurmtrain status --all' lists all")
        elif not selection.runs:
            output.note(f"no runs in {workspace.root.path}; 'slurmtrain submit' starts one")
        _print_selection(workspace, question, selection, as_csv=as_csv, as_json=as_json)
        if not for_programs:
            _describe_rest(workspace, names, selection)
            for line in describe_unmirrored(workspace, selection.runs):
                output.note(line)
        return 0
    workspace = workspace.looking_again()
    if output.is_terminal(sys.stdout) and not for_programs:
        from rich.live import Live

        # Without a thread of its own that draws: nothing changes between two looks.
        with Live(console=tables.console(), auto_refresh=False, screen=False) as live:
            while True:
                selection = _look(workspace, question)
                lines, size = _indented(selection.lines), (live.console.width, live.console.height)
                columns = tables.columns_of(lines, selection.fields, question.columns)
                live.update(tables.screen(lines, columns, size, _states_of_unlisted(selection)), refresh=True)
                time.sleep(interval)
    # Both loops go on until Ctrl-C, or until the reader of a pipe is gone: main() has exit codes for these.
    while True:
        _print_selection(workspace, question, _look(workspace, question), as_csv=as_csv, as_json=as_json)
        sys.stdout.flush()
        time.sleep(interval)


def _look(workspace: Workspace, question: Question) -> Selection:
    from slurmtrain.ops.query.select import select_runs
    from slurmtrain.ops.shared.observe import observe

    observed = observe(workspace)
    output.warn_about(observed)
    selection = select_runs(workspace, observed.runs, question)
    output.warn(selection.notes)
    return selection


def _describe_rest(workspace: Workspace, names: Sequence[str], selection: Selection) -> None:
    """Say below the runs what is not there, and how to see it; sum up the sweeps that were named."""
    from slurmtrain.model.query.folding import fold_sweep, is_folded
    from slurmtrain.ops.query.select import objectives_of

    if unlisted := _states_of_unlisted(selection):
        of_all = "'slurmtrain status --all' lists all, 'slurmtrain status NAME' the runs of that name"
        remedy = "--limit lists more" if selection.cut else of_all
        output.note(f"{tables.describe_others(unlisted)}; {remedy}")
    if folded := [line["id"] for line in selection.lines if is_folded(line)]:
        sweep = folded[0] if len(folded) == 1 else "SWEEP"
        output.note(f"'slurmtrain status {sweep}' lists the runs of {'the' if len(folded) == 1 else 'a'} sweep")
    for sweep in _named_sweeps(names, selection):
        runs = [run for run in selection.runs if run["sweep"] == sweep]
        # Of a part of them, the best run and the ranges would be wrong.
        if not selection.cut:
            goals = objectives_of(workspace, {sweep: runs[0]["id"]})
            output.note(f"sweep {sweep}: {' '.join(formatting.sweep_parts(fold_sweep(runs, goals.get(sweep))))}")
        for search in _searches(workspace, [sweep], selection):
            output.note(str(search))


def _states_of_unlisted(selection: Selection) -> Sequence[str]:
    return selection.cut or [state for state, count in selection.unlisted.items() for _ in range(count)]


def _searches(workspace: Workspace, names: Sequence[str], selection: Selection) -> Sequence[SearchSummary]:
    """The searches that were named. ``selection``: what is listed."""
    sweeps = _named_sweeps(names, selection)
    if not sweeps:
        return []
    from slurmtrain.ops.query.trials import summarize

    return summarize(workspace, sweeps)


def _named_sweeps(names: Sequence[str], selection: Selection) -> list[str]:
    """The sweeps of listed runs that were named, by their id or by the name of their runs."""
    swept = (run for run in selection.runs if names and run["sweep"])
    return list(dict.fromkeys(run["sweep"] for run in swept if run["sweep"] in names or run["name"] in names))


def _print_selection(
    workspace: Workspace, question: Question, selection: Selection, *, as_csv: bool, as_json: bool
) -> None:
    if as_csv:
        tables.print_runs_csv(selection.runs, question.columns)
        return
    if as_json:
        from slurmtrain.model.query.fields import value_of
        from slurmtrain.ops.shared.views import SCHEMA, now_iso

        runs: Sequence[Mapping[str, Any]] = selection.runs
        if question.columns:
            runs = [{name: value_of(run, name) for name in question.columns} for run in runs]
        searches = [search.to_json() for search in _searches(workspace, question.names, selection)]
        answer = {"schema": SCHEMA, "as_of": now_iso(), "runs": [dict(run) for run in runs]}
        output.print_json({**answer, "searches": searches} if searches else answer)
        return
    if question.columns:
        tables.print_runs(selection.runs, only=question.columns)
    elif selection.runs:
        tables.print_runs(_indented(selection.lines), selection.fields)


def _indented(lines: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Lines of runs with their names as in a tree."""
    return [{**line, "name": "  " * line["depth"] + line["name"]} if line.get("depth") else line for line in lines]


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
    from slurmtrain.ops.why import shown_json

    [run_id], _ = find(workspace, [run])
    observed = observe(workspace, [run_id], thorough=True)
    output.warn_about(observed)
    facts = shown_json(workspace, observed.runs, run_id)
    if as_json:
        output.print_json({"schema": 1, "run": facts})
    else:
        from slurmtrain.ops.shared.trackers import describe_refused, describe_unmirrored

        print_run(facts, each_node=each_node)
        for line in (*describe_unmirrored(workspace, [facts]), *describe_refused(facts)):
            output.note(line)
    return 0


def print_run(run: dict[str, Any], *, each_node: bool = False) -> None:
    """Print all about a ``run``: RUN of the JSON contract with its attempts and checkpoints.

    ``each_node``: what was measured on each node too.
    """
    from slurmtrain.cli import describe

    for name, value in _run_facts(run):
        if value and value != "-":
            output.paragraph(f"{name:<11} {value}", " " * _INDENT)
    # One line about the run says it if all attempts executed the same code.
    has_one = len({attempt.get("code") for attempt in run["attempts"]}) <= 1
    for each in run["attempts"]:
        attempt = {**each, "code": None} if has_one else each
        _print_attempt(attempt, measured=each_node or each is run["attempts"][-1], each_node=each_node)
    _print_relatives(run)
    if run["profiles"]:
        output.echo("", "profiles")
        for line in map(describe.describe_profile, run["profiles"]):
            output.paragraph(f"  {line}", " " * 8)
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
    # Imported here: ``status`` needs none of it.
    from slurmtrain.cli import describe
    from slurmtrain.model.run.lineage import AFTER, Parent

    reason = f": {formatting.reason(run)}" if run["reason"] else ""
    ahead = f"  {formatting.rate(run)}, {formatting.duration(run['eta_seconds'])} to go" if run["eta_seconds"] else ""
    # Lines of their own say what is merely before or after a run.
    parents, children = ([each for each in run[kind] if each["relation"] != AFTER] for kind in ("parents", "children"))
    led_to = [
        f"{child['run']} ({child['relation']}" + (")" if child["step"] is None else f" at step {child['step']})")
        for child in children
    ]
    yield "run", f"{run['id']}  {run['name']}"
    # The preflight's run has no answer of its own.
    yield "state", run["state"] + (reason if run["reason"] not in run.get("why", "") else "")
    yield "why", formatting.localized(run.get("why", ""))
    yield "step", formatting.steps(run) + ahead
    unknown = run["lost_steps"] is None and run["step"] is not None
    yield "lost steps", "?" if unknown else formatting.number(run["lost_steps"])
    yield "time", describe.describe_time(run["seconds"], run["goodput"])
    # This machine has no price unless it is configured, and gives what was not asked for, too.
    on_cluster = run["executor"] == "slurm"
    if on_cluster or run["cost"]["currency"]:
        yield "cost", describe.describe_cost(run["cost"])
    for usage in run["usage"]:
        # "time" says where it went.
        if on_cluster or usage["asked"] is not None:
            yield usage["resource"].replace("time", "limit"), usage["why"]
    yield "speed", describe.describe_speed(run["measures"])
    yield "slow ranks", describe.describe_slow_ranks(run["measures"])
    yield "params", formatting.params(run["params"])
    guessed = "  (guessed from its output; docs/scripts.md)" if run["metrics_from"] else ""
    yield "metrics", formatting.metrics(run, limit=100) + guessed
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
    from slurmtrain.model.run.lineage import Parent

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
    from slurmtrain.cli import describe

    why = f" ({attempt['cause']})" if attempt["cause"] not in (None, attempt["state"]) else ""
    output.echo(
        "", f"attempt {attempt['number']}  {attempt['state']}{why}  job {attempt['job_id']}.{attempt['restart']}"
    )
    for name, value in (*attempt_facts(attempt, measured=measured), *attempt_problems(attempt)):
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


def attempt_facts(attempt: dict[str, Any], *, measured: bool) -> Iterator[tuple[str, str]]:
    """What is known about an attempt, each with its name; ``measured``: also the measurements of its nodes."""
    from slurmtrain.cli import describe

    begin, end, last = attempt["started_at"], attempt["ended_at"], attempt["last_step"]
    yield "reason", formatting.reason(attempt)
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
    if not measured:
        return
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


def attempt_problems(attempt: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What held an attempt up or was done about it, each with its name; nothing where there was none."""
    from slurmtrain.cli import describe
    from slurmtrain.model.environment import describe_variables

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
