"""The store that the agents of an attempt and their workers share, and torch elastic's way of joining it.

Node 0 has bound the port beforehand and hands the listening socket to the store, so no port can be taken in between.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from slurmtrain.errors import LaunchError

_TIMEOUT_S = 300.0


@dataclass(slots=True)
class MeetingPoint:
    """The shared store, and where it listens."""

    store: TCPStore
    address: str
    port: int


def meet(master: tuple[str, int], node: int, nodes: int, listener: socket.socket | None) -> MeetingPoint:
    """Open the store: node 0, which has the listener, hosts it, the others join it. Raises LaunchError."""
    address, port = master
    try:
        store = TCPStore(
            address,
            port,
            nodes,
            listener is not None,
            timedelta(seconds=_TIMEOUT_S),
            wait_for_workers=False,
            multi_tenant=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
    except RuntimeError as error:
        where = f"{address} port {port}"
        raise LaunchError(f"node {node} cannot reach node 0 at {where}: {_first_line(error)}") from error
    return MeetingPoint(store, address, port)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class FixedRendezvous(RendezvousHandler):
    """Torch elastic's rendezvous for nodes that already know their rank: node i is group rank i."""

    def __init__(self, point: MeetingPoint, where: tuple[str, int], node: int, nodes: int, run_id: str) -> None:
        """``point``: where agents meet. ``where``: address and port of the store that the ranks are to meet at."""
        self._point = point
        self._where = where
        self._node = node
        self._nodes = nodes
        self._run_id = run_id

    def get_backend(self) -> str:
        return "slurmtrain"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        where = RendezvousStoreInfo(*self._where)
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
