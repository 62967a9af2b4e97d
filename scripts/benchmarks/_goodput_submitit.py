"""Submit the training with submitit alone, as its documentation shows it: a callable with ``checkpoint()``.

Prints the job's id. What a job runs is imported by name, so that the folder of this file must be on PYTHONPATH.
"""

from __future__ import annotations

import sys

import submitit
from _goodput_train import Task, train


class Checkpointable:
    """Trains; earlier progress is in a file, so a requeued job needs no arguments."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self) -> None:
        import torch

        torch.set_num_threads(1)
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        train(self._task)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Called by submitit before it requeues the job, on the signal before the time limit."""
        return submitit.helpers.DelayedSubmission(self)


def main() -> None:
    task = Task.parse(sys.argv[1:])
    name, nodes, partition, minutes = sys.argv[5:]

    from _goodput_submitit import Checkpointable as ByName  # not __main__, which is another module in the job

    executor = submitit.AutoExecutor(folder=task.out / "submitit", cluster="slurm")
    executor.update_parameters(
        name=name,
        nodes=int(nodes),
        tasks_per_node=1,
        cpus_per_task=1,
        timeout_min=int(minutes),
        slurm_partition=partition,
        slurm_additional_parameters={"requeue": True},
    )
    print(executor.submit(ByName(task)).job_id)


if __name__ == "__main__":
    main()
