"""``slurmtrain scale``: how training speeds up with more nodes, under other strategies, and on mixed hardware."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli import formatting, options, output, tables
from slurmtrain.cli.log_commands import draw_charts
from slurmtrain.cli.start_commands import SpecCommand, is_affordable, reporting
from slurmtrain.model.query.fields import iso
from slurmtrain.model.run.layout import created_ms
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.plugins.scale.studies import ScalingStudy, StudySpec
    from slurmtrain.plugins.scale.study_points import StudyRequest
    from slurmtrain.plugins.scale.study_text import TableText

_SUFFIXES = (".yaml", ".yml")
# Options that only a spec can have, in the order of the arguments of the command.
_FOR_SPECS = ("--again", "--dry-run", "--parallel", "--executor")


class Counts(click.ParamType[tuple[int, ...]]):
    """Different whole numbers of at least 1, which commas separate."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers in ``value``; a usage error names ``param`` in ``ctx``."""
        words = [word.strip() for word in str(value).split(",")]
        counts = tuple(int(word) for word in words if word.isdecimal() and int(word) > 0)
        if len(counts) < len(words):
            self.fail(f"expected whole numbers of at least 1, such as 1,2,4, found {value!r}", param, ctx)
        if len(set(counts)) < len(counts):
            self.fail(f"{value!r} has a number twice", param, ctx)
        return counts


@options.command(
    "scale exp.yaml --nodes 1,2,4 --strategies ddp,fsdp,zero1", "scale exp-scale --markdown", cls=SpecCommand
)
@click.argument("subject", metavar="SPEC|STUDY", shell_complete=options.complete_run_or_spec)
@options.overrides_argument
@click.option("--nodes", type=Counts(), metavar="N,N", help="Numbers of nodes, such as 1,2,4.")
@click.option("--procs", type=Counts(), metavar="N,N", help="Numbers of processes per node, each with its GPUs.")
@click.option(
    "--strategies", metavar="NAME,NAME", callback=options.split_words,
    help="Strategies, such as ddp,fsdp,zero1,zero2,ddp+bf16.",
)  # fmt: skip
@click.option(
    "--hardware",
    is_flag=True,
    help="Compare nodes of resources.components: one, equal, mixed, and with shares by speed.",
)
@click.option(
    "--batch", type=click.Choice(["strong", "weak"]),
    help="Keep the total batch (strong, the default), or the batch per process (weak).",
)  # fmt: skip
@click.option(
    "--batch-key", metavar="KEY", help="The key of the batch size; by default a parameter such as params.batch_size."
)
@click.option(
    "--batch-of", type=click.Choice(["total", "process"]),
    help="Whether it is the total or per process; by default its name decides.",
)  # fmt: skip
@click.option("--parallel", type=click.IntRange(min=1), metavar="N", help="Run at most N runs at once.")
@click.option("--again", is_flag=True, help="Submit a new study even if the same one was submitted before.")
@options.executor_option
@click.option("--dry-run", is_flag=True, help="Print the runs and their possible cost; submit nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before submitting a large study.")
@options.wait_option
@click.option("--markdown", is_flag=True, help="Print the tables as Markdown.")
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the study as an HTML page."
)
@options.json_option
def scale_command(
    workspace: Workspace, subject: str, overrides: tuple[str, ...], executor: str | None, parallel: int | None,
    batch_key: str | None, batch_of: str | None, again: bool, dry_run: bool, yes: bool, waits: bool, markdown: bool,
    html: Path | None, as_json: bool, **varied: Any,
) -> int:  # fmt: skip
    """Run SPEC in several sizes, and print the tables of a scaling study.

    The runs are a sweep with the tag 'scale', which status, cancel, compare and other commands accept. The same command
    continues an interrupted study: it submits missing runs, and resumes those that ended early. STUDY is the id or name
    of a study, or any other runs; the command then only prints the tables.

    There are three tables: sizes with speed-up, efficiency and communication; strategies with memory, time and
    utilization; equal and mixed hardware with throughput and cost efficiency. A law fitted to the sizes says how many
    GPUs are worth their cost.
    """
    if as_json and markdown:
        raise click.UsageError("--json and --markdown exclude each other")
    from slurmtrain.plugins.scale.studies import find_study, read_study
    from slurmtrain.plugins.scale.study_points import StudyRequest

    form = "json" if as_json else "markdown" if markdown else "text"
    request = StudyRequest(
        batch_key=batch_key, batch_of=batch_of, **{name: value for name, value in varied.items() if value}
    )
    if Path(subject).suffix not in _SUFFIXES and not Path(subject).is_file():
        needless = [*overrides, *(f"--{name}" for name, value in varied.items() if value)]
        flags = zip(_FOR_SPECS, (again, dry_run, parallel, executor), strict=True)
        needless += [name for name, value in flags if value]
        if needless:
            raise click.UsageError(
                f"{subject} is not a spec, and only a spec can be run: leave {', '.join(needless)} out"
            )
        study = find_study(workspace, subject)
        return _show(workspace, study, request, form, waits=waits, html=html)
    chosen = workspace.config.choose_executor(executor)
    spec = read_study(workspace, Path(subject), (*overrides,), request, (chosen, parallel), again=again)
    if dry_run:
        return _preview(workspace, spec, as_json=as_json)
    begun = _begin_study(workspace, spec, yes=yes, as_json=as_json)
    if begun is None:
        output.echo("nothing was submitted", err=True)
        return 1
    return _show(workspace, begun, request, form, waits=waits, html=html)


def _preview(workspace: Workspace, study: StudySpec, *, as_json: bool) -> int:
    """Print what would be submitted."""
    from slurmtrain.ops.submit.previews import preview

    previewed = preview(workspace, study.spec, study.executor)
    output.warn(previewed.notes)
    output.print_json(previewed.to_json()) if as_json else tables.print_preview(previewed)
    if study.runs:
        output.note(
            f"{len(study.runs)} of these runs exist, and the study continues with them; --again submits a new study"
        )
    return 0


def _begin_study(workspace: Workspace, study: StudySpec, *, yes: bool, as_json: bool) -> ScalingStudy | None:
    """Submit what is missing, and resume what has ended early; None: a person has declined."""
    from slurmtrain.plugins.scale.studies import continue_study

    if not (study.complete or yes or is_affordable(workspace, study.spec)):
        return None
    with reporting(workspace, as_json=as_json):
        begun = continue_study(workspace, study)
    if study.runs:
        count = len(begun.resumed)
        again = f"; {count} {'run was' if count == 1 else 'runs were'} started again" if count else ""
        age = formatting.age(iso(created_ms(study.runs[0]) / 1000))
        output.note(f"study {begun.name} was submitted {age} ago{again}; --again submits a new one")
    else:
        output.note(f"study {begun.name} was submitted: {len(begun.runs)} runs")
    return begun


def _wait_for_study(workspace: Workspace, study: ScalingStudy) -> None:
    """Wait until all runs have ended."""
    from slurmtrain.cli.watch_commands import run_progress
    from slurmtrain.ops.watch import wait

    try:
        with run_progress(workspace) as show:
            _, synced = wait(workspace, study.runs, show)
    except KeyboardInterrupt:
        rest = f"'slurmtrain scale {study.name}' prints its tables, 'slurmtrain cancel {study.name}' ends it"
        output.echo(f"stopped waiting; the study continues: {rest}", err=True)
        raise
    output.warn_about(synced.observed)
    output.warn([*synced.notes, *synced.problems])


def _show(
    workspace: Workspace, study: ScalingStudy, request: StudyRequest, form: str, *, waits: bool, html: Path | None
) -> int:
    """Print the tables of a study, and say what is missing; returns the exit code.

    Args:
        workspace: Where its runs are.
        study: The study.
        request: It says which key is the batch.
        form: ``text``, ``markdown`` or ``json``.
        waits: Whether to wait for its runs first.
        html: Where to write a page; None: nowhere.
    """
    from slurmtrain.plugins.scale.studies import read_tables
    from slurmtrain.plugins.scale.study_text import TableText

    output.warn(study.notes)
    study.notes.clear()
    if waits:
        _wait_for_study(workspace := workspace.looking_again(), study)
    made = read_tables(workspace, study, request.batch_key, request.batch_of)
    output.notes(study.notes)
    text = TableText(made)
    if html is not None:
        from slurmtrain.plugins.report.pages import write_page

        write_page(text.facts(study.name), html)
        output.note(f"{html} was written")
    if form == "json":
        output.print_json(made.to_json(study.name))
    elif form == "markdown" and made.is_measured:
        output.verbatim(*text.markdown())
    elif made.is_measured:
        _print_tables(text)
    output.note(study.missing(made))
    return 0 if made.is_complete or not waits else 1


def _print_tables(text: TableText) -> None:
    """Print the tables, the chart, and what follows from both."""
    for title, columns, records in text.parts():
        output.echo(title)
        tables.print_lines(columns, records)
        output.echo("")
    if (chart := text.chart()) is not None:
        # Half of a screen, since the tables are worth the other half.
        draw_charts(lambda _: [chart], 2)
        output.echo("")
    for sentence in text.sentences():
        output.paragraph(sentence, "  ")
