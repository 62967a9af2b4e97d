"""What Slurm runs on each node: the node agent, which can requeue its own job."""

from __future__ import annotations

from slurmtrain.runtime.agent.agent import run_node as run_agent
from slurmtrain.slurm.requeue import SlurmQueue


def run_node(submission: str) -> None:
    """Run the agent of this node, as a task of submitit. ``submission``: the submission's directory."""
    run_agent(submission, queue=SlurmQueue())
