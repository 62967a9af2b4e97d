"""Where a rank computes, and the process group that it joins, unless its script has joined one."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist

from slurmtrain.runtime.environment.variables import use_loopback
from slurmtrain.runtime.environment.worker import Worker
from slurmtrain.system.interpreter import without_collection


def pick_device(local_rank: int) -> torch.device:
    """The device of a rank, which becomes torch's current one: a GPU if there is any, else the CPU.

    Args:
        local_rank: The rank on its node, from 0.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join_group(worker: Worker, device: torch.device, backend: str | None, timeout: timedelta | None) -> bool:
    """Join the process group of the run, unless this process is in one; returns whether it has joined it here.

    Args:
        worker: Where this process runs.
        device: Where it computes.
        backend: torch's name of one; None: gloo, and NCCL for GPUs.
        timeout: How long a collective may take; None: torch's default.
    """
    if dist.is_initialized():
        return False
    if worker.attempt is not None:
        # If imported later, this would keep a reference to the group, whose threads would outlive the group.
        with without_collection():
            import_module("torch.distributed.checkpoint")
    backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if worker.launched:
        dist.init_process_group(backend, timeout=timeout)
    else:
        use_loopback()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return True
