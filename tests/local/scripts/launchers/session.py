"""A session in a process that does not get its rank from its environment: the script starts its ranks itself."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import slurmtrain


def rank_main(rank: int, world_size: int) -> None:
    address = f"tcp://{os.environ['SLURMTRAIN_MASTER_ADDR']}:{os.environ['SLURMTRAIN_MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    with slurmtrain.session(params={"steps": 20, "step_ms": 0}) as run:
        torch.manual_seed(0)  # nothing else makes the replicas equal
        model = torch.nn.Linear(4, 1)
        run.checkpoint(model=model)
        for _ in run.steps(run.params["steps"]):
            threading.Event().wait(run.params["step_ms"] / 1000)
            run.log(loss=float(run.rank))
        # One write, where unbuffered print makes several: the ranks share a log.
        sys.stdout.write(f"rank {run.rank} of {run.world_size}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    # Torch interrupts the ranks when this process dies.
    signal.signal(signal.SIGTERM, lambda *_: None)
    mp.spawn(rank_main, args=(2,), nprocs=2)
