"""Starting runs: ``submit``, ``render``, which shows what that would do, ``rerun`` and ``resume``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli import formatting, options, output, tables
from slurmtrain.errors import OutputError, SlurmtrainError, SubmitFailed, UserError
from slurmtrain.model.query.fields import write_value
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.render import Rendered
    from slurmtrain.specfile import SpecFile


_RENDER = "'slurmtrain render SPEC' prints what would be submitted"
# What other programs call a look before the act, such as sbatch's --test-only.
_OTHER_WORDS = dict.fromkeys(("dry_run", "dryrun", "test_only", "print", "check"), _RENDER)


class SpecCommand(click.Command):
    """A command with KEY=VALUE arguments: who writes ``--nodes 2`` is told ``resources.nodes=2``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's, with its ``ctx`` and ``args``. Raises click.UsageError."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            cure = _cure(error.option_name.lstrip("-"), list(error.possibilities or ()))
            raise click.UsageError(f"no such option {error.option_name}; {cure}", ctx) from error


def _cure(name: str, possibilities: list[str]) -> str:
    """What to write instead of an option, as half a sentence; ``possibilities``: options with similar names."""
    # It imports what reads specs, which is only needed for mistakes.
    import slurmtrain.model.experiment.spec  # noqa: F401 (it makes its keys known)
    from slurmtrain.model.experiment.kinds import hint_for_unknown_key, nearest

    key = tuple(name.replace("-", "_").split("."))
    if instead := _OTHER_WORDS.get(key[0]):
        return instead
    near = nearest(f"--{name}", possibilities, 0.75)
    if near is not None:
        return f"did you mean {near}?"
    if len(name) == 1:
        return "keys of the spec are set as in resources.nodes=2"
    meant = key if len(key) > 1 else hint_for_unknown_key(key, ()).key
    if meant == ("sweep",):
        return "write --sweep params.lr=0.1,0.3"
    if meant and meant[0] != "params":
        return f"write {'.'.join(meant)}=... to set that key of the spec"
    return f"write params.{key[-1]}=... to set a parameter"


_code_option = click.option(
    "--code", type=click.Choice(["now"]), help="Use the code as it is now, not as it was when RUN was submitted."
)


# --- submit -----------------------------------------------------------------------------------------------------------


@options.command(
    "submit exp.yaml params.lr=0.1 --wait", "submit exp.yaml --sweep params.lr=0.03,0.1,0.3 --dry-run", cls=SpecCommand
)
@options.spec_argument
@click.argument(
    "overrides", metavar="[SPEC]... [KEY=VALUE]...", nargs=-1, shell_complete=options.complete_spec_or_override
)
@options.sweep_option
@click.option("--parallel", type=click.IntRange(min=1), metavar="N", help="Run at most N runs of the sweep at once.")
@click.option(
    "--pack", type=click.IntRange(min=2), metavar="N", help="Let N runs of the sweep share a job, on one node of Slurm."
)
@click.option(
    "--after", metavar="RUN", multiple=True,
    help="Start after this run has completed, as with the key 'after'; repeatable.",
    shell_complete=options.complete_run,
)  # fmt: skip
@click.option("--from", "start_from", metavar="RUN[:STEP|:best]", help="Begin with a checkpoint of another run.")
@click.option("--weights-only", is_flag=True, help="With --from: begin at step 0, with the checkpoint's weights.")
@options.executor_option
@click.option(
    "--idempotency-key", "key", metavar="KEY", help="Submit once: a later submit with this key returns the same runs."
)
@click.option("--dry-run", is_flag=True, help="Print the runs and their possible cost; submit nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before submitting a large sweep.")
@options.wait_option
@options.json_option
def submit_command(
    workspace: Workspace, spec: Path, overrides: tuple[str, ...], sweep: tuple[str, ...], parallel: int | None,
    pack: int | None, after: tuple[str, ...], start_from: str | None, weights_only: bool, executor: str | None,
    key: str | None, dry_run: bool, yes: bool, waits: bool, as_json: bool,
) -> int:  # fmt: skip
    """Submit the runs of SPEC, a YAML file, with KEY=VALUE overrides such as resources.nodes=2.

    Several SPECs are submitted together: the key 'after' of one may name others, and its run starts after theirs.

    Prints the ids of the runs and returns at once; the runs continue when the terminal closes. If something fails, it
    prints the ids of the runs that were created anyway.
    """
    from slurmtrain.ops.shared.trackers import describe_next
    from slurmtrain.ops.submit import load_all, merge_specs, split_sources, submit_specs
    from slurmtrain.ops.submit.chained_runs import start_overrides
    from slurmtrain.ops.submit.previews import preview

    limits = {"parallel": parallel, "pack": pack}
    sweep = (*sweep, *(f"{key}={value}" for key, value in limits.items() if value is not None))
    more, keys = split_sources(overrides)
    if start_from is not None:
        keys = [*keys, *start_overrides(start_from, weights_only=weights_only)]
    elif weights_only:
        raise click.UsageError("--weights-only needs --from RUN")
    specs = load_all([spec, *more], keys, sweep, after, max_runs=workspace.config.sweep_max_runs)
    loaded = merge_specs(specs)
    chosen = workspace.config.choose_executor(executor)
    if dry_run:
        previewed = preview(workspace, loaded, chosen)
        output.warn(previewed.notes)
        output.print_json(previewed.to_json()) if as_json else tables.print_preview(previewed)
        return 0
    # With a key, submitting the same again is no mistake to ask about: it returns the first submission's runs.
    if not (yes or is_affordable(workspace, loaded)) or (key is None and not _is_meant(workspace, loaded)):
        output.echo("nothing was submitted", err=True)
        return 1
    with reporting(workspace, as_json=as_json):
        run_ids, notes, swept = submit_specs(workspace, specs, executor=chosen, key=key)
    code = _finish(workspace, run_ids, notes, waits=waits, as_json=as_json)
    if not (waits or as_json):
        _print_next_commands(loaded, run_ids, swept)
        output.note(describe_next(workspace, [run.plan for run in loaded.runs]))
    return code


def _print_next_commands(spec: SpecFile, run_ids: Sequence[str], sweep: str | None) -> None:
    """Say how what was submitted can be followed."""
    from slurmtrain.model.experiment.chain import dependencies_of

    lists = "'slurmtrain status' lists runs"
    if sweep is not None:
        kind = "search" if spec.search is not None else f"sweep of {len(run_ids)} runs"
        lists = f"'slurmtrain status {sweep}' lists this {kind}"
    elif any(dependencies_of(run.plan.spec) for run in spec.runs):
        lists = f"'slurmtrain status --tree {run_ids[-1]}' shows what waits for what"
    output.echo(f"submitted; 'slurmtrain logs -f {run_ids[-1]}' follows it, {lists}", err=True)
    if spec.search is not None:
        output.note("the next runs are submitted by 'slurmtrain watch', or each 'slurmtrain sync'")


def is_affordable(workspace: Workspace, spec: SpecFile) -> bool:
    """Whether a large sweep is to be submitted: asked on a terminal. Raises UserError where nobody can be asked.

    ``workspace``: where the runs would go. ``spec``: the sweep.
    """
    from slurmtrain.ops.submit.previews import large_sweep

    large = large_sweep(workspace.config, spec)
    if not large:
        return True
    if output.can_ask():
        return output.confirm(f"{large}; submit it?")
    raise UserError(f"{large}; nothing was submitted: without a terminal, confirm with --yes")


def _is_meant(workspace: Workspace, spec: SpecFile) -> bool:
    """Whether a plan that was submitted a moment ago is to be submitted again: asked on a terminal, else assumed."""
    from slurmtrain.ops.submit.entrances import find_recent

    recent = find_recent(workspace, spec)
    if recent is None:
        return True
    if output.can_ask():
        return output.confirm(f"{recent}; submit it again?")
    output.warn([f"{recent}; --idempotency-key keeps a repeated command from submitting twice"])
    return True


@contextmanager
def reporting(workspace: Workspace, *, as_json: bool) -> Iterator[None]:
    """If a submission fails, print the runs that exist all the same.

    ``workspace``: where they are. ``as_json``: print their JSON, and not only the ids.
    """
    try:
        yield
    except SubmitFailed as error:
        if error.run_ids:
            _print_submitted(workspace, error.run_ids, as_json=as_json)
        raise


def _finish(workspace: Workspace, run_ids: Sequence[str], notes: Iterable[str], *, waits: bool, as_json: bool) -> int:
    """Print runs that were started, or wait for them; returns the exit code. ``notes``: what to warn about."""
    output.warn(notes)
    if waits:
        from slurmtrain.cli.watch_commands import wait_for_runs

        return wait_for_runs(workspace, run_ids, as_json=as_json)
    _print_submitted(workspace, run_ids, as_json=as_json)
    return 0


def _print_submitted(workspace: Workspace, run_ids: Sequence[str], *, as_json: bool) -> None:
    """Print runs that exist. Raises SubmitFailed if that is not possible.

    Args:
        workspace: Where they are.
        run_ids: Their ids.
        as_json: Print their JSON, and not only the ids.
    """
    try:
        if as_json:
            output.print_json(_facts(workspace, run_ids))
        elif run_ids and output.is_terminal(sys.stdout):
            output.echo(*output.few(run_ids))
        elif run_ids:
            output.echo(*run_ids)
    except OutputError as error:
        # The ids go into the error: whoever learned only that printing had failed would submit all of it again.
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


@options.command("render exp.yaml resources.nodes=4", "render exp.yaml --executor local", cls=SpecCommand)
@options.spec_argument
@options.overrides_argument
@options.sweep_option
@options.executor_option
@click.option("--sources", is_flag=True, help="Print where each value of the plan comes from.")
@options.json_option
def render_command(
    workspace: Workspace, spec: Path, overrides: tuple[str, ...], sweep: tuple[str, ...], executor: str | None,
    sources: bool, as_json: bool,
) -> int:  # fmt: skip
    """Print the plan of SPEC and the batch script that submit would send to Slurm; create nothing.

    For a sweep, the runs and their possible cost are printed first.

    With --sources it prints each value of the plan with the file and line, the argument, or the key of the sweep that
    sets it.

    With --executor local it prints what this machine would run instead: the lines of setup, and the command.

    It works without Slurm on this machine. RUN-ID stands for the id that submit will assign.
    """
    from slurmtrain.ops.render import render

    # Unless another one is named it prints what a cluster gets, also on a machine without Slurm.
    script_for = executor or "slurm"
    rendered, preview, notes = render(
        workspace,
        spec,
        overrides,
        sweep,
        executor=workspace.config.choose_executor(executor),
        script_for=script_for,
    )
    output.warn(notes)
    if sources:
        _print_sources(rendered, as_json=as_json)
    elif as_json:
        runs = [
            {
                "plan": run.plan.to_json(),
                "overrides": list(run.overrides),
                "batch_script": run.script if script_for == "slurm" else None,
                **({} if script_for == "slurm" else {"local_script": run.script}),
                # As in ``show --json``; null if the run would execute what is there by then.
                "code": run.code
                and {
                    "root": run.code.root, "files": run.code.files, "bytes": run.code.bytes, "dir": str(run.directory)
                },
            }
            for run in rendered
        ]  # fmt: skip
        output.print_json({**preview.to_json(), "runs": runs})
    else:
        if len(rendered) > 1 or preview.search is not None:
            tables.print_preview(preview)
            output.echo("")
        elif price := tables.describe_estimate(preview.price):
            output.echo(f"# {price}")
        for run in rendered:
            code = f"as it is when the run starts, in {run.directory}"
            if run.code is not None:
                size = f"{formatting.files(run.code.files)}, {formatting.size(run.code.bytes)}"
                code = f"as it is now: a copy of {run.code.root} ({size}), run in {run.directory}"
            output.echo(f"# plan {run.plan.hash}", f"# code {code}")
            output.verbatim(*json.dumps(run.plan.to_json(), indent=2, ensure_ascii=False).split("\n"))
            output.echo("", "# batch script" if script_for == "slurm" else "# on this machine")
            output.verbatim(*run.script.split("\n"))
    return 0


def _print_sources(rendered: Sequence[Rendered], *, as_json: bool) -> None:
    """Print where each value of each run comes from."""
    if as_json:
        runs = [
            {"plan_hash": run.plan.hash, "sources": [asdict(each) for each in run.find_sources()]} for run in rendered
        ]
        output.print_json({"schema": 1, "runs": runs})
        return
    for index, run in enumerate(rendered):
        if index:
            output.echo("")
        output.echo(f"# plan {run.plan.hash}")
        rows = []
        for each in run.find_sources():
            text = isinstance(each.value, str)
            # All figures: this is what the run gets.
            exact = repr(each.value) if isinstance(each.value, float) else write_value(each.value)
            value = json.dumps(each.value, ensure_ascii=False) if text else exact
            rows.append([each.key, value, str(each)])
        tables.print_table(["KEY", "VALUE", "FROM"], rows)


@options.command("rerun digits", "rerun digits seed=8 --wait")
@options.run_argument
@options.overrides_argument
@_code_option
@options.executor_option
@click.option("-y", "--yes", is_flag=True, help="Do not ask before submitting a large sweep again.")
@options.wait_option
@options.json_option
def rerun_command(
    workspace: Workspace, run: str, overrides: tuple[str, ...], code: str | None, executor: str | None, yes: bool,
    waits: bool, as_json: bool,
) -> int:  # fmt: skip
    """Submit RUN again as a new run, from the beginning: the same plan, the same snapshot of its code.

    For a sweep, by its id or its name, it submits all runs again. KEY=VALUE overrides, such as seed=8, apply to the new
    runs. A note lists what is different now, such as packages. By default the new runs go where RUN went, to Slurm or
    this machine.
    """
    from slurmtrain.ops.rerun import plan_again
    from slurmtrain.ops.submit import submit_spec

    again = plan_again(workspace, run, overrides, code_of_now=code == "now")
    output.warn(again.notes)
    if not (yes or is_affordable(workspace, again.spec)):
        output.echo("nothing was submitted", err=True)
        return 1
    chosen = workspace.config.choose_executor(executor) if executor else again.executor
    with reporting(workspace, as_json=as_json):
        run_ids, notes, _ = submit_spec(workspace, again.spec, executor=chosen)
    return _finish(workspace, run_ids, notes, waits=waits, as_json=as_json)


@options.command("resume digits params.steps=4000", "resume --failed SWEEP resources.mem=64GB")
@options.run_argument
@options.overrides_argument
@click.option("--from-start", is_flag=True, help="Set the run's checkpoints aside and start from the beginning.")
@click.option(
    "--step", type=click.IntRange(min=1), metavar="N", help="Continue from step N, and set later checkpoints aside."
)
@_code_option
@click.option("--failed", is_flag=True, help="Resume only runs that failed or are lost; RUN may be a sweep.")
@click.option("--cancelled", is_flag=True, help="With --failed: also resume cancelled runs.")
@click.option("--dry-run", is_flag=True, help="With --failed: list the runs, and start nothing.")
@options.wait_option
@options.json_option
def resume_command(
    workspace: Workspace, run: str, overrides: tuple[str, ...], from_start: bool, step: int | None, code: str | None,
    failed: bool, cancelled: bool, dry_run: bool, waits: bool, as_json: bool,
) -> int:  # fmt: skip
    """Start a new attempt of RUN from its newest complete checkpoint; one that has never saved begins again.

    KEY=VALUE overrides, such as params.steps=4000 or resources.time=02:00:00, apply to this and later attempts.

    For a sweep, it starts all runs again that failed, were lost or were cancelled, on Slurm as one job array if they
    request the same resources. --failed takes several RUNs and patterns, and leaves cancelled runs alone.
    """
    if failed:
        if from_start or code or step is not None:
            raise click.UsageError("--failed excludes --from-start, --step and --code")
        # click takes the first word alone for RUN: further runs end up among the KEY=VALUE arguments.
        names = [run, *(word for word in overrides if "=" not in word)]
        changes = [word for word in overrides if "=" in word]
        return _resume_failed(workspace, names, changes, (cancelled, dry_run, waits, as_json))
    if cancelled or dry_run:
        raise click.UsageError("--cancelled and --dry-run are for --failed")
    from slurmtrain.ops.resume import resume
    from slurmtrain.ops.shared.find import find_all

    if from_start and step is not None:
        raise click.UsageError("--from-start and --step exclude each other")
    run_ids, _ = find_all(workspace, [run])
    if len(run_ids) > 1:
        if from_start or code or step is not None:
            raise click.UsageError(f"{run} is {len(run_ids)} runs; --from-start, --step and --code are for one of them")
        output.note(f"{run}: {len(run_ids)} runs; all that failed, were lost or were cancelled start again")
        return _resume_failed(workspace, [run], overrides, (True, False, waits, as_json))
    run_id, notes = resume(
        workspace, run_ids[0], overrides, from_start=from_start, step=step, code_of_now=code == "now"
    )
    return _finish(workspace, [run_id], notes, waits=waits, as_json=as_json)


def _resume_failed(
    workspace: Workspace, names: Sequence[str], overrides: Sequence[str], flags: tuple[bool, bool, bool, bool]
) -> int:
    """Resume runs that have failed. ``flags``: --cancelled, --dry-run, --wait and --json."""
    from slurmtrain.ops.resume import find_failed, resume_failed

    cancelled, dry_run, waits, as_json = flags
    run_ids = find_failed(workspace, names, cancelled=cancelled)
    if dry_run:
        if as_json:
            _print_submitted(workspace, run_ids, as_json=True)
        else:
            tables.print_runs(_facts(workspace, run_ids)["runs"])
        return 0
    with reporting(workspace, as_json=as_json):
        resumed = resume_failed(workspace, run_ids, overrides)
    notes = output.few([*resumed.notes, *resumed.problems])
    code = _finish(workspace, resumed.run_ids, notes, waits=waits, as_json=as_json)
    if not waits:
        output.note(f"{len(resumed.run_ids)} runs were started again")
    return code or (1 if resumed.problems else 0)
