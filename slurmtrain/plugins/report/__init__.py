"""``slurmtrain report``: what is known of a run, a sweep or many runs, as one HTML file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from slurmtrain.cli import options, output
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.query.select import Question
    from slurmtrain.ops.shared.observe import Observed
    from slurmtrain.plugins.report.pages import Facts


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
    """Write a page about RUN, a sweep, or many runs: one HTML file that needs no network and no server.

    The page of a run shows where the time of each attempt went, metrics, checkpoints, steps, nodes and the environment.
    The page of a sweep compares its runs. Several names, --since or --where select the runs of a page about many runs;
    without any of these, it is about all runs.
    """
    from slurmtrain.ops.query.select import Question
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.plugins.report.pages import build_page, write_page

    observed = observe(workspace)
    output.warn_about(observed)
    facts = choose_facts(workspace, observed, Question(names=names, since=since, where=where, for_programs=True))
    if target == "-":
        output.document(build_page(facts))
        return 0
    output.verbatim(str(write_page(facts, target)))
    return 0


def choose_facts(workspace: Workspace, observed: Observed, question: Question) -> Facts:
    """The facts of the page that a user means.

    Args:
        workspace: Where the runs are.
        observed: The state of all runs.
        question: What the user asks: one name without conditions means a run or a sweep.

    Raises:
        RunNotFound: A name refers to no run.
        QueryError: A condition means nothing.
        UserError: There is no run to show.
    """
    from slurmtrain.ops.shared.find import choose_all, is_pattern

    if len(question.names) == 1 and not question.has_conditions and not is_pattern(question.names[0]):
        ids = choose_all(workspace, observed.runs, question.names)
        sweeps = {listed.sweep for listed in observed.runs.fetch(ids).values()}
        if len(ids) == 1:
            from slurmtrain.plugins.report.run_facts import run_facts

            return run_facts(workspace, observed, ids[0])
        if len(sweeps) == 1 and (sweep := sweeps.pop()) is not None:
            from slurmtrain.plugins.report.sweep_facts import sweep_facts

            return sweep_facts(workspace, observed, sweep)
    from slurmtrain.plugins.report.many_facts import many_facts

    return many_facts(workspace, observed, question)
