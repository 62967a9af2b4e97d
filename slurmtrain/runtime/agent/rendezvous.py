"""The store at which the ranks of a round meet, and the rendezvous by which torch elastic learns where that is.

Node 0 has bound the port beforehand and hands the listening socket to the store, so no port can be taken in between.
The agents use neither: what they tell each other is authenticated (:mod:`slurmtrain.runtime.peers`), a store is not.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from slurmtrain.errors import LaunchError
from slurmtrain.runtime.peers.board import Link

_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where the nodes of an attempt meet.

    ``link``: the agents' messages. ``address``: node 0's. ``port``: where ranks meet in the first round; ``listener``:
    the socket that is bound to it, on node 0; None on other nodes.
    """

    link: Link
    address: str
    port: int
    listener: socket.socket | None = None


def serve_store(listener: socket.socket) -> TCPStore:
    """A store for ranks, which listens on this socket until it is garbage-collected. Raises LaunchError."""
    address, port = listener.getsockname()[:2]
    try:
        return TCPStore(
            address,
            port,
            None,
            True,
            timedelta(seconds=_TIMEOUT_S),
            wait_for_workers=False,
            multi_tenant=False,
            master_listen_fd=listener.detach(),
        )
    except RuntimeError as error:
        raise LaunchError(f"node 0 cannot serve a store at {address} port {port}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class FixedRendezvous(RendezvousHandler):
    """Torch elastic's rendezvous for nodes that already know their rank: node i is group rank i.

    Torch elastic exchanges nothing through its own store, since nodes know how many ranks each has
    (:class:`~.workers.Workers`).
    """

    def __init__(self, ranks: tuple[str, int], node: int, nodes: int, run_id: str, *, own_store: bool) -> None:
        """For the node with group rank ``node``, of ``nodes`` nodes with ranks.

        ``ranks``: address and port of the store that the ranks use. ``run_id``: names this round. ``own_store``: rank 0
        is to open that store.
        """
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
        return RendezvousInfo(HashStore(), self._node, self._nodes, RendezvousStoreInfo(*self._ranks))

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
        """Nothing to shut down."""
        return True
