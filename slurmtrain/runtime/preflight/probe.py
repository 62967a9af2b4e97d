"""Proving a network: real connections between its exact addresses, in both directions, with a full packet's load.

What training does later is done here first: connect to the other's address and let the kernel choose the way. It must
choose this node's own address in the same network, the one who answers must be who it should be, and a message larger
than the largest packet must get through both ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence

from slurmtrain.model.preflight.election import Network, NetworkProblem
from slurmtrain.runtime.preflight.channel import AuthenticationError, Channel, ChannelClosed, accept, connect
from slurmtrain.runtime.preflight.sockets import BACKLOG, listen, listen_anywhere, source_towards

_AT_ONCE = 64
# What is sent to learn the rate between two nodes, in messages of one chunk.
RATE_BYTES = 2 << 20
_CHUNK = 1 << 16


class Prober:
    """Answers the probes of other nodes, and makes this node's own."""

    def __init__(self, node: int, secret: bytes, *, bind_source: bool = False) -> None:
        """``bind_source``: connect from the node's own address, whatever the kernel's routes say."""
        self._node = node
        self._secret = secret
        self._bind_source = bind_source
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._limit = asyncio.Semaphore(_AT_ONCE)
        self.made = 0
        """Connections made."""

    async def listen(self, address: str | None = None) -> int:
        """Answer probes from now on, on all addresses of this node or on one; returns the port."""
        listener = listen_anywhere(0) if address is None else listen(address, 0)
        self._server = await asyncio.start_server(self._answer, sock=listener, backlog=BACKLOG)
        return int(listener.getsockname()[1])

    async def prove(
        self, network: Network, ports: Mapping[int, int], targets: Sequence[int], timeout_s: float
    ) -> list[NetworkProblem]:
        """Connect to these nodes over a network, and say what was wrong."""
        found = await asyncio.gather(*(self._probe(network, ports[node], node, timeout_s) for node in targets))
        return [problem for problem in found if problem is not None]

    async def rate(self, network: Network, port: int, target: int, timeout_s: float) -> float | None:
        """Bytes a second to another node over a network; None where it did not get through in time."""
        address = network.members[target].address
        load = "x" * _CHUNK
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.closing(await connect(address, port, self._secret)) as channel:
                    began = time.perf_counter()
                    for _ in range(RATE_BYTES // _CHUNK):
                        await channel.send(load)
                    await channel.send({"from": self._node, "pad": ""})
                    await channel.receive()
                    return RATE_BYTES / (time.perf_counter() - began)
        except (OSError, AuthenticationError, ChannelClosed):  # a TimeoutError is an OSError
            return None

    async def close(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _probe(self, network: Network, port: int, target: int, timeout_s: float) -> NetworkProblem | None:
        async with self._limit:
            self.made += 1
            why = await self._try(network, port, target, timeout_s)
        return None if why is None else NetworkProblem(source=self._node, target=target, why=why)

    async def _try(self, network: Network, port: int, target: int, timeout_s: float) -> str | None:
        """What is wrong with the way to a node; None if nothing is."""
        mine, address = network.members[self._node].address, network.members[target].address
        source = mine if self._bind_source else source_towards(address)
        if source != mine:
            return f"the kernel goes to {address} from {source or 'nowhere'}, not from {mine}"
        channel = None
        try:
            async with asyncio.timeout(timeout_s):
                channel = await connect(address, port, self._secret, mine if self._bind_source else None)
                await channel.send({"from": self._node, "pad": "x" * (2 * network.mtu)})
                said = await channel.receive()
        except TimeoutError:
            got = "connects, but loses larger packets" if channel is not None else "does not answer"
            return f"{address} {got} within {timeout_s:g} s"
        except AuthenticationError as error:
            return f"at {address} {error}"
        except (ChannelClosed, OSError) as error:
            return f"{address}: {getattr(error, 'strerror', None) or error}"
        finally:
            if channel is not None:
                channel.close()
        if said["node"] != target:
            return f"at {address} node {said['node']} answers"
        if said["you"] != mine:
            return f"it is seen as {said['you']} at {address}, not as {mine}"
        return None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._serve(await accept(reader, writer, self._secret))
        except (AuthenticationError, ChannelClosed):
            pass  # a stranger is no business of ours, and a node that has left is missed by whoever gathers
        except asyncio.CancelledError:
            writer.close()
        finally:
            self._serving.discard(task)

    async def _serve(self, channel: Channel) -> None:
        """Answer the last message of a connection; what comes before it is load."""
        with contextlib.closing(channel):
            said = await channel.receive()
            while isinstance(said, str):
                said = await channel.receive()
            await channel.send({"node": self._node, "you": channel.there, "pad": said["pad"]})
