"""What the agents of an attempt exchange while ranks train: heartbeats, stop requests, and messages of a round.

Everything goes through node 0 (:mod:`.store`). Node 0 watches all other nodes, the others watch node 0.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any, TypeVar

from slurmtrain.model.interruption.exit_report import StopRequest
from slurmtrain.runtime.peers.peer_store import CoordinatorGone, Link

# Seconds without a heartbeat after which another node's agent counts as dead: several times longer than a busy machine
# or a short network outage delays one.
NODE_SILENCE_S = 15.0
_BEAT_S = 1.0
# An agent that has not looked for this long was suspended, or waited for a file server.
_SUSPENDED_S = 5.0
_FIRST_POLL_S, _POLL_S = 0.001, 0.02
T = TypeVar("T")


class ControlStore:
    """One agent's access to the messages. Those and stop requests belong to a round of ranks; heartbeats do not."""

    def __init__(self, link: Link, node: int, nodes: int) -> None:
        """For the agent of ``node``, one of ``nodes`` nodes, which reaches the messages through ``link``."""
        self._link = link
        self._node = node
        self._watched = [other for other in range(nodes) if other != node] if node == 0 else [0]
        self._watched = self._watched if nodes > 1 else []
        # The newest heartbeat of each node, and when it was first seen, by this machine's monotonic clock.
        self._beats: dict[int, tuple[int, float]] = {}
        self._next_beat = 0.0
        self._beat = 0
        self._round = 0
        self._members: Collection[int] = range(nodes)

    def begin_round(self, number: int, members: Collection[int]) -> None:
        """Read and publish messages of round ``number`` from now on; the nodes ``members`` have ranks in it."""
        self._round = number
        self._members = members

    # --- stopping -------------------------------------------------------------------------------------------------

    def publish_stop(self, request: StopRequest) -> None:
        """Tell all nodes to stop. Only the first request of a round counts: later ones follow from it. Never raises."""
        self.publish("stop", asdict(request), first=True)

    def stop_request(self) -> StopRequest | None:
        """A node's published request, or one because a node with ranks has died; None if neither. Never raises."""
        if not self._watched:
            return None
        try:
            self._exchange_beats()
            message = self.read("stop")
            if message is not None:
                return StopRequest(**message)
        except CoordinatorGone:
            return StopRequest(cause="node_fail", why="node 0 no longer answers", at=time.time(), node=0)
        for other in self.silent_nodes():
            if other in self._members:
                why = f"node {other} has not sent a heartbeat for {NODE_SILENCE_S:.0f} s"
                return StopRequest(cause="node_fail", why=why, at=time.time(), node=other)
        return None

    # --- heartbeats -----------------------------------------------------------------------------------------------

    def keep_alive(self) -> None:
        """Send a heartbeat if one is due, while this agent waits for something else. Never raises."""
        with contextlib.suppress(CoordinatorGone):
            self._exchange_beats()

    def call_alive(self, work: Callable[[], T]) -> T:
        """Call ``work``, which may take long (on a slow file server, say), and send heartbeats meanwhile."""
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(work)
            while not call.done():
                self.keep_alive()
                wait([call], timeout=_BEAT_S / 4)
            return call.result()

    def silent_nodes(self) -> list[int]:
        """The watched nodes that have sent no heartbeat for too long: node 0 watches all others, they watch node 0."""
        now = time.monotonic()
        return [node for node, (_, changed_at) in self._beats.items() if now - changed_at > NODE_SILENCE_S]

    def drop_nodes(self, nodes: Collection[int]) -> None:
        """Stop watching ``nodes``, which are lost, so that no agent waits for them."""
        self._watched = [other for other in self._watched if other not in nodes]
        for node in nodes:
            self._beats.pop(node, None)

    def gather(self, place: str, *, give_up: Callable[[], bool]) -> None:
        """Wait until all nodes have reached the same place in the program. Never raises.

        ``place``: its name, the same on all nodes. ``give_up``: called repeatedly; True ends the wait. Silent nodes are
        not waited for.
        """
        with contextlib.suppress(CoordinatorGone):
            self.publish(f"{place}/{self._node}", {})
            missing, pauses = set(self._watched), _pauses()
            while missing and not give_up():
                self._exchange_beats()
                arrived = self.read_each(f"{place}/{other}" for other in missing)
                missing = {other for other in missing if f"{place}/{other}" not in arrived} - set(self.silent_nodes())
                if missing:
                    time.sleep(next(pauses))

    def _exchange_beats(self) -> None:
        """Increment this node's heartbeat, and note whose count has changed. Other nodes' clocks do not matter."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        late_s = now - self._next_beat if self._beat else 0.0
        self._next_beat = now + _BEAT_S
        self._beat += 1
        self._link.beat(self._node, self._beat)
        for other in self._watched:
            # A node that has sent no heartbeat yet counts as just heard from when it is first looked for.
            beat, last = self._link.beats_of(other), self._beats.get(other)
            if last is None or last[0] != beat:
                self._beats[other] = (beat, now)
            elif late_s > _SUSPENDED_S:
                # What has arrived meanwhile has not been taken in yet: nobody was silent while nobody listened.
                self._beats[other] = (beat, last[1] + late_s)

    # --- messages -------------------------------------------------------------------------------------------------

    def publish(self, name: str, message: Mapping[str, Any], *, first: bool = False) -> None:
        """Publish a ``message`` under a ``name`` in this round, replacing any; with ``first``, unless there is one.

        Never raises: an agent that waits for the message notices by itself that node 0 is gone.
        """
        with contextlib.suppress(CoordinatorGone):
            # As it arrives at other nodes: with lists for tuples, for example.
            self._link.publish(self._key(name), json.loads(json.dumps(message)), first=first)

    def read(self, name: str) -> Mapping[str, Any] | None:
        """The message under a name in this round; None if there is none. Raises CoordinatorGone."""
        return self._link.read(self._key(name))

    def read_each(self, names: Iterable[str]) -> dict[str, Mapping[str, Any]]:
        """The messages under these names in this round, as far as there are any. Raises CoordinatorGone."""
        keys = {self._key(name): name for name in names}
        return {keys[key]: message for key, message in self._link.read_each(keys).items()}

    def wait_for(self, name: str) -> Mapping[str, Any] | None:
        """Wait for a message from node 0; None if node 0 is gone or leaves without publishing it. Never raises."""
        pauses = _pauses()
        try:
            while (message := self.read(name)) is None:
                self.keep_alive()
                if self.read("left/0") is not None:
                    # Node 0 may have published it between the two reads, just before it left.
                    return self.read(name)
                if 0 in self.silent_nodes():
                    return None
                time.sleep(next(pauses))
        except CoordinatorGone:
            return None
        return message

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"


def _pauses() -> Iterator[float]:
    """How long to wait before each look: mostly, what is looked for comes at once."""
    pause = _FIRST_POLL_S
    while True:
        yield pause
        pause = min(2 * pause, _POLL_S)
