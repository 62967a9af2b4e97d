"""Connected nodes, with a clock that tests control."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from slurmtrain.runtime.preflight.connections import (
    CoordinatorConnection,
    Endpoint,
    ParticipantConnections,
)
from slurmtrain.runtime.preflight.ports import listen

SECRET, OTHER = bytes(32), bytes(range(32))


# Longer than any test: nothing here waits until it has passed.
LONG_S = 60.0


class Clock:
    """Replaces the monotonic clock of the connections: it runs by itself, and jumps on request."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self.time = time.time

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def jump(self, seconds: float) -> None:
        self._ahead += seconds


@contextlib.asynccontextmanager
async def listening_coordinator(
    nodes: int, secret: bytes = SECRET, now: Callable[[], float] = time.time
) -> AsyncIterator[tuple[ParticipantConnections, Endpoint]]:
    """Node 0, and its endpoint."""
    coordinator, listener = ParticipantConnections(secret, nodes, now), listen("127.0.0.1", 0)
    await coordinator.listen(listener)
    try:
        yield coordinator, Endpoint("127.0.0.1", listener.getsockname()[1], secret)
    finally:
        await coordinator.close()


async def wait_until_received(participant: CoordinatorConnection) -> None:
    """Wait until node 0 has received everything that this participant has sent: it answers in order."""
    await participant.exchange_clock_stamps(LONG_S)


async def wait_for_disconnects(coordinator: ParticipantConnections, remaining: int) -> None:
    """Wait until node 0 has noticed the end of all but this many connections."""
    assert coordinator._gate is not None
    while len(coordinator._gate.tasks) > remaining:
        await asyncio.sleep(0.001)
