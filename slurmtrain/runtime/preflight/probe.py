"""Probes of a network: real connections between its exact addresses, both ways, with more data than fits in a packet.

This tries what training does later: connect to the other node's address and let the kernel choose the route. It
must choose this node's own address in the same network, the node that answers must be the expected one, and a message
larger than the largest packet must get through both ways: smaller ones also pass where jumbo frames are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence

from slurmtrain.model.preflight.election import Network, NetworkProblem
from slurmtrain.runtime.peers.channel import (
    AuthenticationError,
    Channel,
    ChannelClosed,
    PeerListener,
    Refusals,
    connect,
)
from slurmtrain.runtime.preflight.ports import listen, listen_anywhere, source_towards

# Concurrent probes: each holds a file descriptor, and a process may be limited to 1,024 of them.
_MAX_CONCURRENT = 64
# What is sent to measure the rate between two nodes: batches of messages of one chunk. A slow network shows in half of
# them, for which it has this time.
RATE_BYTES = 2 << 20
_BATCH_BYTES = 1 << 19
_CHUNK_BYTES = 1 << 16
_ENOUGH_S = 0.05


class Prober:
    """Answers the probes of other nodes, and makes this node's own.

    A probe sends ``{"from": node, "pad": text}``; messages of text alone before it are load for measuring a rate, for
    which it may send several on a connection. The answer is ``{"node": number, "you": address, "pad": text}`` with the
    address that the answering node sees.
    """

    def __init__(
        self, node: int, secret: bytes, *, nodes: int = 1, bind_source: bool = False, refusals: Refusals | None = None
    ) -> None:
        """Probe as one node of an attempt.

        Args:
            node: This node's number.
            secret: The attempt's secret.
            nodes: How many nodes the attempt has.
            bind_source: Connect from the node's own address, whatever the kernel's routes say.
            refusals: Counts connections of others.
        """
        self._node = node
        self._nodes = nodes
        self._secret = secret
        self._bind_source = bind_source
        self._refusals = refusals or Refusals()
        self._gate: PeerListener | None = None
        self._limit = asyncio.Semaphore(_MAX_CONCURRENT)
        self.made = 0
        """Connections made."""

    async def listen(self, address: str | None = None) -> int:
        """Answer probes from now on, on all addresses of this node or on one; returns the port."""
        listener = listen_anywhere(0) if address is None else listen(address, 0)
        self._gate = PeerListener(listener, self._secret, self._nodes, self._answer, self._refusals)
        self._gate.open()
        return int(listener.getsockname()[1])

    async def probe(
        self, network: Network, ports: Mapping[int, int], targets: Sequence[int], timeout_s: float
    ) -> list[NetworkProblem]:
        """Connect to some nodes over a network, and return the problems.

        Args:
            network: The network, with the nodes' addresses.
            ports: The port where each node answers.
            targets: The nodes to connect to.
            timeout_s: Seconds for each of them.
        """

        async def probe_node(target: int) -> NetworkProblem | None:
            async with self._limit:
                self.made += 1
                reason = await self._find_problem(network, ports[target], target, timeout_s)
            return None if reason is None else NetworkProblem(source=self._node, target=target, reason=reason)

        results = await asyncio.gather(*map(probe_node, targets))
        return [problem for problem in results if problem is not None]

    async def measure_rate(self, network: Network, port: int, target: int, timeout_s: float) -> float | None:
        """Measure the rate to another node over a network.

        Args:
            network: The network, with the nodes' addresses.
            port: The port where the node answers.
            target: The node.
            timeout_s: Seconds in total.

        Returns:
            Bytes a second, of the batch that was disturbed least; None if the load did not get through in time.
        """
        address = network.members[target].address
        rates: list[float] = []
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.closing(await connect(address, port, self._secret)) as channel:
                    began = time.perf_counter()
                    while len(rates) < RATE_BYTES // _BATCH_BYTES:
                        batch_began = time.perf_counter()
                        for _ in range(_BATCH_BYTES // _CHUNK_BYTES):
                            await channel.send("x" * _CHUNK_BYTES)
                        # What was sent may still be in buffers: only the answer shows that all of it has arrived.
                        await channel.send({"from": self._node, "pad": ""})
                        await channel.receive()
                        rates.append(_BATCH_BYTES / (time.perf_counter() - batch_began))
                        if len(rates) >= RATE_BYTES // _BATCH_BYTES // 2 and time.perf_counter() - began > _ENOUGH_S:
                            break
                    return max(rates)
        except (OSError, AuthenticationError, ChannelClosed):  # a TimeoutError is an OSError
            return None

    async def close(self) -> None:
        """Stop answering probes."""
        if self._gate is not None:
            await self._gate.close()

    async def _find_problem(self, network: Network, port: int, target: int, timeout_s: float) -> str | None:
        """Why training could not reach a node; None if it could."""
        own_address, address = network.members[self._node].address, network.members[target].address
        source = own_address if self._bind_source else source_towards(address)
        if source != own_address:
            return f"the kernel goes to {address} from {source or 'nowhere'}, not from {own_address}"
        channel: Channel | None = None
        try:
            async with asyncio.timeout(timeout_s):
                channel = await connect(address, port, self._secret, own_address if self._bind_source else None)
                await channel.send({"from": self._node, "pad": "x" * (2 * network.mtu)})
                answer = await channel.receive()
        except TimeoutError:
            symptom = (
                "accepts the connection, but larger packets are lost" if channel is not None else "does not answer"
            )
            return f"{address} {symptom} within {timeout_s:g} s"
        except AuthenticationError as error:
            return f"at {address} {error}"
        except (ChannelClosed, OSError) as error:
            return f"{address}: {getattr(error, 'strerror', None) or error}"
        finally:
            if channel is not None:
                channel.close()
        if answer["node"] != target:
            return f"node {answer['node']} answers at {address}"
        # The addresses differ if something in between translates them, which training would not survive.
        if answer["you"] != own_address:
            return f"it is seen as {answer['you']} at {address}, not as {own_address}"
        return None

    async def _answer(self, channel: Channel) -> None:
        """Answer the messages of a connection until it is closed; text messages are load."""
        # Node 0 notices lost nodes.
        with contextlib.suppress(ChannelClosed):
            while True:
                message = await channel.receive()
                if not isinstance(message, str):
                    pad = message.get("pad") if isinstance(message, dict) else None
                    await channel.send({"node": self._node, "you": channel.remote_address, "pad": pad})
