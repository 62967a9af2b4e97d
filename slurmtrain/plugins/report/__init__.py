"""``slurmtrain report``: what is known of a run, a sweep or many runs, as one HTML file."""

from __future__ import annotations

import click

from slurmtrain.cli import options, output
from slurmtrain.ops.shared.workspace import Workspace


@options.command("report @last", "report digits -o digits.html", "report --since 2w -o runs.html", looks=True)
@options.some_runs_argument
@options.since_option
@options.where_option
@click.option(
    "-o",
    "--output",
    "target",
    metavar="FILE",
    help="Where to write it; '-' is standard output. [default: report-ID.html]",
)
def report_command(
    workspace: Workspace, names: tuple[str, ...], since: str | None, where: tuple[str, ...], target: str | None
) -> int:
    """Write a page about RUN, a sweep, or many runs: one HTML file, which needs no network and no server.

    Of a run, it shows the time of each attempt by cause, metrics, checkpoints, steps, nodes and the environment. The
    name or id of a sweep gives a page that compares its runs; several names, --since or --where a page about all runs
    that they choose, and nothing at all a page about all runs.
    """
    from slurmtrain.ops.query.select import Question
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.plugins.report.facts import find_facts
    from slurmtrain.plugins.report.pages import build_page, write_page

    observed = observe(workspace)
    output.warn_about(observed)
    facts = find_facts(workspace, observed, Question(names=names, since=since, where=where, for_programs=True))
    if target == "-":
        output.document(build_page(facts))
        return 0
    output.verbatim(str(write_page(facts, target)))
    return 0
