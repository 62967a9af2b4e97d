"""The facts of a run's page: RUN of ``show --json``, and what its files show besides."""

from __future__ import annotations

from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.why import shown_json
from slurmtrain.plugins.report.facts import Facts, begin_facts


def run_facts(workspace: Workspace, observed: Observed, run_id: str) -> Facts:
    """The facts of a run's page.

    Args:
        workspace: Where the run is.
        observed: The state of all runs.
        run_id: The run.

    Raises:
        RunNotFound: Its directory was deleted meanwhile.
    """
    # As 'show' does: also what a command that lists runs need not look at.
    observed = observe(workspace, [run_id], thorough=True)
    shown = shown_json(workspace, observed.runs, run_id)
    return {**begin_facts("run", run_id, f"{shown['name']} ({run_id})"), "run": shown}
