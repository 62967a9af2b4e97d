"""What Slurm runs on each node: the node agent, which can requeue its own job.

Agents are imported where they run: what submits these functions as tasks needs none.
"""

from __future__ import annotations

import os
from pathlib import Path


def run_node(submission: str) -> None:
    """Run the agent of this node, as a task of submitit. ``submission``: the submission's directory."""
    from slurmtrain.runtime.agent.agent import run_node as run_agent
    from slurmtrain.slurm.requeue import SlurmQueue

    run_agent(submission, queue=SlurmQueue())


def run_element(elements: str) -> None:
    """Run the agent of this node for one element of a job array. ``elements``: the directory of links to the runs."""
    from slurmtrain.runtime.environment.node import enter_element

    run_node(str(enter_element(Path(elements)).path))


def run_packed(elements: str) -> None:
    """Run the agent of one of the runs that share the job. ``elements``: the directory of links to the runs."""
    from slurmtrain.runtime.agent.agent import run_node as run_agent
    from slurmtrain.runtime.environment.node import enter_element
    from slurmtrain.slurm.requeue import PackQueue

    submission = enter_element(Path(elements), packed=True)
    # Not by the batch script, as for other elements: the tasks of a pack belong to different runs.
    os.chdir(submission.run.path)
    run_agent(str(submission.path), queue=PackQueue(submission))
