"""The facts of a page about many runs."""

from __future__ import annotations

from slurmtrain.errors import UserError
from slurmtrain.ops.query.select import Question, select_runs
from slurmtrain.ops.shared.observe import Observed
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.report.facts import Facts, begin_facts


def many_facts(workspace: Workspace, observed: Observed, question: Question) -> Facts:
    """The facts of a page about the runs that a question chooses.

    Args:
        workspace: Where the runs are.
        observed: The state of all runs.
        question: The question.

    Raises:
        UserError: It chooses no run.
    """
    selection = select_runs(workspace, observed.runs, question)
    if not selection.runs:
        raise UserError("there is no run to report on; 'slurmtrain status --all' lists all")
    runs = [dict(run) for run in selection.runs]
    return {**begin_facts("many", "runs", f"{len(runs)} runs"), "runs": runs}
