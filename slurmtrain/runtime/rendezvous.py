"""How the agents of an attempt find each other, and the store that they and their workers share.

Node 0 binds a free port first and hands the listening socket to the store, so no port can be taken in between; the
others learn the address from a file in the attempt's directory.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from slurmtrain.errors import LaunchError
from slurmtrain.model.layout import AttemptDir
from slurmtrain.system.files import read_json, write_json

_TIMEOUT_S = 300.0
_POLL_S = 0.02


@dataclass(slots=True)
class MeetingPoint:
    """The shared store, and where it listens."""

    store: TCPStore
    address: str
    port: int


def meet(
    attempt: AttemptDir, node: int, nodes: int, address: str | None, stopped: Callable[[], bool]
) -> MeetingPoint | None:
    """Open the store: node 0 hosts it on ``address``, the others, which give none, join it.

    Returns None when ``stopped()`` became true first. Raises LaunchError if node 0 cannot be found or reached.
    """
    if address is not None:
        return _host(attempt, nodes, address)
    deadline = time.monotonic() + _TIMEOUT_S
    while (said := read_json(attempt.rendezvous)) is None:
        if stopped():
            return None
        if time.monotonic() > deadline:
            raise LaunchError(
                f"node 0 did not say within {_TIMEOUT_S:.0f} s where it listens (in {attempt.rendezvous})"
            )
        time.sleep(_POLL_S)
    try:
        store = TCPStore(said["address"], said["port"], nodes, False, timedelta(seconds=_TIMEOUT_S), False)
    except RuntimeError as error:
        where = f"{said['address']}:{said['port']}"
        raise LaunchError(f"node {node} cannot reach node 0 at {where}: {_first_line(error)}") from error
    return MeetingPoint(store, said["address"], said["port"])


def _host(attempt: AttemptDir, nodes: int, address: str) -> MeetingPoint:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=max(128, 2 * nodes))
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        nodes,
        True,
        timedelta(seconds=_TIMEOUT_S),
        wait_for_workers=False,
        multi_tenant=False,
        master_listen_fd=listener.detach(),
    )
    write_json(attempt.rendezvous, {"address": address, "port": port})
    return MeetingPoint(store, address, port)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class FixedRendezvous(RendezvousHandler):
    """Torch elastic's rendezvous for nodes that already know their rank: node i is group rank i."""

    def __init__(self, point: MeetingPoint, node: int, nodes: int, run_id: str) -> None:
        self._point = point
        self._node = node
        self._nodes = nodes
        self._run_id = run_id

    def get_backend(self) -> str:
        return "slurmtrain"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        where = RendezvousStoreInfo(self._point.address, self._point.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._point.store), self._node, self._nodes, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing joins later, so there is nothing to close."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
