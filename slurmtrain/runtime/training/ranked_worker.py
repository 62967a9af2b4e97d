"""Which rank this process is, also where the run's command has started it without saying so in the environment."""

from __future__ import annotations

import sys
from dataclasses import replace

from slurmtrain.errors import LaunchError
from slurmtrain.model.spec.launcher import RANKS
from slurmtrain.runtime.environment.worker import Worker, this_worker


def this_ranked_worker() -> Worker:
    """What this process knows about itself, from its environment, or else from its script's process group.

    Raises LaunchError if its rank cannot be known, or if it must not train: two processes that took themselves for the
    same rank would write to the same journal, and the same checkpoints.
    """
    worker = this_worker()
    if worker.launcher_restarts > 0:
        raise LaunchError(
            "the launcher has restarted this rank by itself (--max-restarts), and slurmtrain cannot tell it from the "
            "one before: leave the option out, slurmtrain restarts ranks (requeue.restarts_in_place)"
        )
    if worker.launched or worker.launcher == RANKS:
        return worker
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank()
        return replace(
            worker,
            rank=rank,
            local_rank=rank - worker.first_rank,
            world_size=distributed.get_world_size(),
            launched=True,
        )
    if worker.expected > 1:
        raise LaunchError(
            f"it is not known which rank this process is: with 'launcher: {worker.launcher}' the command must start "
            "the ranks, as torchrun does, and set RANK, or call torch.distributed.init_process_group before slurmtrain"
        )
    return worker
