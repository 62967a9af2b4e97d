"""The facts of a sweep's page."""

from __future__ import annotations

from slurmtrain.ops.query.select import Question, select_runs
from slurmtrain.ops.shared.observe import Observed
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.report.facts import Facts, begin_facts


def sweep_facts(workspace: Workspace, observed: Observed, sweep: str) -> Facts:
    """The facts of a sweep's page.

    Args:
        workspace: Where its runs are.
        observed: The state of all runs.
        sweep: Its id.
    """
    selection = select_runs(workspace, observed.runs, Question(sweep=sweep, for_programs=True))
    runs = [dict(run) for run in selection.runs]
    return {**begin_facts("sweep", sweep, f"{runs[0]['name']} (sweep {sweep})"), "runs": runs}
