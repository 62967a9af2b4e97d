"""Where a rank computes, and the process group that it joins, unless its script has joined one."""

from __future__ import annotations

import json
import logging
import socket
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from slurmtrain.errors import LaunchError
from slurmtrain.model.environment.backend import GLOO, NCCL, ElectedBackend, RankHardware, elect_backend
from slurmtrain.model.run.events.rank_events import HardwareCompared
from slurmtrain.runtime.environment.node import Worker
from slurmtrain.runtime.environment.variables import use_loopback
from slurmtrain.runtime.strategies.forward import hardware_of

_log = logging.getLogger("slurmtrain")


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


def join_group(
    worker: Worker, device: torch.device, backend: str | None, timeout: timedelta | None, *, elects: bool = False
) -> tuple[bool, ElectedBackend | None]:
    """Join the process group of the run, unless this process is in one.

    Args:
        worker: Where this process runs.
        device: Where it computes.
        backend: torch's name of one; None: gloo, and NCCL for GPUs.
        timeout: How long a collective may take; None: torch's default.
        elects: Whether processes may have unequal hardware, and so find out first whether all of them can use NCCL.

    Returns:
        Whether it has joined the group here, and what was elected, if anything.
    """
    if dist.is_initialized():
        return False, None
    if worker.launched:
        store, rank, world_size = _open_store(worker, timeout)
    else:
        use_loopback()
        store, rank, world_size = dist.HashStore(), 0, 1
    elected = None
    if backend is None and elects and world_size > 1:
        own = RankHardware(host=socket.gethostname(), **describe_rank(device))
        ranks = exchange(dist.PrefixStore("slurmtrain/hardware", store), rank, world_size, own)
        elected = elect_backend(ranks)
        if rank == 0 and elected.name == GLOO and any(each.has_gpu for each in ranks):
            _log.warning("gloo reduces gradients, which is slower than NCCL: %s", elected.why)
    if backend is None:
        uses_nccl = device.type == "cuda" and (elected is None or elected.name == NCCL)
        backend = "cpu:gloo,cuda:nccl" if uses_nccl else GLOO
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return True, elected


def _open_store(worker: Worker, timeout: timedelta | None) -> tuple[dist.Store, int, int]:
    """The store at which ranks meet, the number of this one, and how many there are.

    If the agent has started the ranks, rank 0 listens on the address of the elected network only: a store believes
    whoever connects. Under a launcher it is what ``init_process_group`` takes if it gets no store.

    Args:
        worker: Where this process runs.
        timeout: How long to wait for rank 0; None: torch's default.

    Raises:
        LaunchError: This is rank 0, and it cannot listen.
    """
    if worker.meets_at is None:
        store, rank, world_size = next(rendezvous("env://"))
        return store, rank, world_size
    is_first = worker.rank == 0
    listener = _listen(worker.meets_at, worker.world_size) if is_first else None
    opened = dist.TCPStore(
        *worker.meets_at,
        None,
        is_first,
        timeout or default_pg_timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    return opened, worker.rank, worker.world_size


def _listen(address: tuple[str, int], world_size: int) -> int:
    """A socket at which the other ranks find rank 0. Raises LaunchError.

    The agent has reserved the port, so that only sockets which may share it can be bound to it.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=world_size).detach()
    except OSError as error:
        place = f"port {address[1]} of {address[0]}"
        raise LaunchError(f"rank 0 cannot listen for the other ranks at {place}: {error.strerror}") from error


def exchange(store: dist.Store, rank: int, world_size: int, own: RankHardware) -> list[RankHardware]:
    """The hardware of all ranks, by rank; each calls it with its ``own``.

    Args:
        store: Where all of them leave it, and nothing else is.
        rank: This one.
        world_size: How many there are.
        own: This one's.
    """
    keys = [str(number) for number in range(world_size)]
    store.set(str(rank), json.dumps(asdict(own)))
    store.wait(keys)
    return [RankHardware(**json.loads(text)) for text in store.multi_get(keys)]


def describe_rank(device: torch.device) -> dict[str, Any]:
    """What :class:`RankHardware` holds of a rank that computes on a ``device``, but for its host."""
    facts: dict[str, Any] = {"name": hardware_of(device)[0], "has_gpu": device.type == "cuda"}
    if device.type == "cuda" and dist.is_nccl_available():
        # AMD's library has the same interface, and versions of its own that look alike.
        facts["library"] = "NCCL" if torch.version.hip is None else "RCCL"
        facts["version"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return facts


def with_backend(compared: HardwareCompared | None, elected: ElectedBackend | None) -> HardwareCompared | None:
    """What to journal: what was ``compared`` for precisions, with the backend that was ``elected``; None if nothing."""
    if elected is None:
        return compared
    return replace(compared or HardwareCompared(), backend=elected.name, backend_why=elected.why)
