"""The store that the agents of an attempt and their ranks share, and the rendezvous by which torch elastic joins it.

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
    """Open the store at ``master``, an address and port of node 0. Raises LaunchError if it cannot be reached.

    ``node``: this node, of ``nodes`` nodes. ``listener``: the bound socket, if this node is to serve the store; None to
    join it.
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

    def __init__(
        self, agents: MeetingPoint, ranks: tuple[str, int], node: int, nodes: int, run_id: str, *, own_store: bool
    ) -> None:
        """For the node with group rank ``node``, of ``nodes`` nodes with ranks.

        ``agents``: the store of the agents. ``ranks``: address and port of the store that the ranks use. ``run_id``:
        distinguishes the keys of this round from those of others. ``own_store``: rank 0 is to open that store.
        """
        self._agents = agents
        self._ranks = ranks
        self._own_store = own_store
        self._node = node
        self._nodes = nodes
        self._run_id = run_id

    def get_backend(self) -> str:
        """A name for torch's messages."""
        return "slurmtrain"

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks join a store that an agent serves, rather than start one of their own."""
        return not self._own_store

    def next_rendezvous(self) -> RendezvousInfo:
        """The result of the only rendezvous: each round has its own handler."""
        store = PrefixStore(self._run_id, self._agents.store)
        return RendezvousInfo(store, self._node, self._nodes, RendezvousStoreInfo(*self._ranks))

    def is_closed(self) -> bool:
        """It never closes."""
        return False

    def set_closed(self) -> None:
        """Nothing joins later, so there is nothing to close."""

    def num_nodes_waiting(self) -> int:
        """Always 0, so torch elastic never restarts ranks to let a node join."""
        return 0

    def get_run_id(self) -> str:
        """The id that distinguishes this round."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to shut down: the store lives as long as the attempt."""
        return True
