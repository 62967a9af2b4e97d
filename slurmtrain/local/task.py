"""What the local executor runs for each node: the node agent."""

from __future__ import annotations


def run_node(submission: str) -> None:
    """Run an agent, as a task of submitit. ``submission``: the submission's directory."""
    # Here, as what submits the task needs this function but no agent.
    from slurmtrain.runtime.agent.agent import run_node as run_agent

    run_agent(submission)
