"""The link of an agent to the messages at node 0, as the preflight has prepared it."""

from __future__ import annotations

from collections.abc import Callable

from slurmtrain.runtime.environment.node import Node
from slurmtrain.runtime.peers.channel import Refusals
from slurmtrain.runtime.peers.peer_store import Link, MessageStore, StoreClient
from slurmtrain.runtime.preflight.participant import PreflightOutcome

# Nodes import torch at their own pace, minutes apart on a busy file server.
_CONNECT_S = 300.0


def open_link(
    preflight: PreflightOutcome, address: str, node: Node, refusals: Refusals, give_up: Callable[[], bool]
) -> Link:
    """Open the link to the messages at node 0, which has this ``address``.

    Args:
        preflight: The result of the preflight.
        address: Address of node 0.
        node: This node.
        refusals: Counts connections that do not come from nodes of the attempt.
        give_up: Called repeatedly while node 0 does not answer; True ends the wait.

    Raises:
        LaunchError: Nothing answers.
    """
    if preflight.control_port is None or preflight.control_listener is not None:
        store = MessageStore()
        if preflight.control_listener is not None:
            store.serve(preflight.control_listener, preflight.secret, node.count, refusals)
        return store
    client = StoreClient((address, preflight.control_port), preflight.secret, node.index, node.count)
    client.wait_until_connected(_CONNECT_S, give_up=give_up)
    return client
