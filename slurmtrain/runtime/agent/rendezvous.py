"""The store that the agents of an attempt and their ranks share, and torch elastic's way of joining it.

Node 0 has bound the port beforehand and hands the listening socket to the store, so no port can be taken in between.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from slurmtrain.errors import LaunchError

# Nodes import torch at their own pace, minutes apart on a busy file server.
_TIMEOUT_S = 300.0


@dataclass(slots=True)
class MeetingPoint:
    """The shared store, and where it listens."""

    store: TCPStore
    address: str
    port: int


def open_store(master: tuple[str, int], node: int, nodes: int, listener: socket.socket | None) -> MeetingPoint:
    """Open the store at ``master``, an address and port of node 0. Raises LaunchError where it cannot be reached.

    ``node``: this node, of ``nodes`` nodes. ``listener``: the bound socket, which makes this node the one that serves
    the store; None to join it.
    """
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
        raise LaunchError(f"node {node} cannot reach node 0 at {address} port {port}: {_first_line(error)}") from error
    return MeetingPoint(store, address, port)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class FixedRendezvous(RendezvousHandler):
    """Torch elastic's rendezvous for nodes that already know their rank: node i is group rank i."""

    def __init__(self, agents: MeetingPoint, ranks: tuple[str, int], node: int, nodes: int, run_id: str) -> None:
        """For the node with group rank ``node``, of ``nodes`` nodes with ranks.

        ``agents``: where agents meet. ``ranks``: address and port of the store that the ranks are to meet at.
        ``run_id``: sets keys of this round apart from those of others.
        """
        self._agents = agents
        self._ranks = ranks
        self._node = node
        self._nodes = nodes
        self._run_id = run_id

    def get_backend(self) -> str:
        """A name for torch's messages."""
        return "slurmtrain"

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks join the store of the agents, rather than start one of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The same each time: there is no second one, a round has its own."""
        store = PrefixStore(self._run_id, self._agents.store)
        return RendezvousInfo(store, self._node, self._nodes, RendezvousStoreInfo(*self._ranks))

    def is_closed(self) -> bool:
        """It never closes."""
        return False

    def set_closed(self) -> None:
        """Nothing joins later, so there is nothing to close."""

    def num_nodes_waiting(self) -> int:
        """None, so torch elastic never restarts ranks to let a node in."""
        return 0

    def get_run_id(self) -> str:
        """What sets this round apart."""
        return self._run_id

    def shutdown(self) -> bool:
        """There is nothing to shut down: the store lives as long as the attempt."""
        return True
