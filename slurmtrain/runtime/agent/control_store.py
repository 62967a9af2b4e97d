"""What the agents of an attempt tell each other while ranks train: that they live, and that all must stop.

They talk through the store of node 0, which all of them reach. Node 0 watches all others, the others watch node 0.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store

from slurmtrain.model.interruption.exit_report import StopRequest

# Seconds without a sign of life after which another node's agent counts as dead.
NODE_SILENCE_S = 15.0
_BEAT_S = 1.0
_POLL_S = 0.02
T = TypeVar("T")


class ControlStore:
    """One agent's side of it. What is said belongs to a round of ranks; being alive does not."""

    def __init__(self, store: Store, node: int, nodes: int) -> None:
        self._store = PrefixStore("agents", store)
        self._node = node
        self._others = [other for other in range(nodes) if other != node] if node == 0 else [0]
        self._others = self._others if nodes > 1 else []
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._next_beat = 0.0
        self._beat = 0
        self._round = 0
        self._members: Collection[int] = range(nodes)

    def begin(self, number: int, members: Collection[int]) -> None:
        """What is said from now on is of this round, in which these nodes have ranks."""
        self._round = number
        self._members = members

    # --- stopping -------------------------------------------------------------------------------------------------

    def publish_stop(self, request: StopRequest) -> None:
        """Tell all nodes to stop; the first request of a round stands."""
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(self._key("stop"), "", json.dumps(asdict(request)))

    def stop_request(self) -> StopRequest | None:
        """What another node asked for, or that one with ranks has died. Never raises."""
        if not self._others:
            return None
        try:
            self._exchange_beats()
            if self._store.check([self._key("stop")]):
                return StopRequest(**json.loads(self._store.get(self._key("stop"))))
        except RuntimeError:
            return StopRequest(cause="node_fail", why="node 0 no longer answers", at=time.time(), node=0)
        for other in self.silent():
            if other in self._members:
                why = f"node {other} has not been heard of for {NODE_SILENCE_S:.0f} s"
                return StopRequest(cause="node_fail", why=why, at=time.time(), node=other)
        return None

    # --- being alive ----------------------------------------------------------------------------------------------

    def keep_alive(self) -> None:
        """Tell the others that this agent lives, while it waits for something else. Never raises."""
        with contextlib.suppress(RuntimeError):
            self._exchange_beats()

    def meanwhile(self, work: Callable[[], T]) -> T:
        """Do something that may take long, as on a slow file server, without being taken for dead by the others."""
        with ThreadPoolExecutor(1) as pool:
            doing = pool.submit(work)
            while not doing.done():
                self.keep_alive()
                wait([doing], timeout=_BEAT_S / 4)
            return doing.result()

    def silent(self) -> list[int]:
        """The nodes that have not been heard of for long: at node 0 any of them, at the others node 0."""
        now = time.monotonic()
        return [other for other, (_, heard) in self._beats.items() if now - heard > NODE_SILENCE_S]

    def forget(self, nodes: Collection[int]) -> None:
        """These are lost: nobody waits for them any more."""
        self._others = [other for other in self._others if other not in nodes]
        for node in nodes:
            self._beats.pop(node, None)

    def gather(self, place: str, *, given_up: Callable[[], bool]) -> None:
        """Wait until every node has come to this place, has fallen silent, or until ``given_up()``. Never raises."""
        with contextlib.suppress(RuntimeError):
            self.say(f"{place}/{self._node}", {})
            waiting = set(self._others)
            while waiting and not given_up():
                self._exchange_beats()
                waiting = {other for other in waiting if not self._store.check([self._key(f"{place}/{other}")])}
                waiting -= set(self.silent())
                time.sleep(_POLL_S)

    def _exchange_beats(self) -> None:
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + _BEAT_S
        self._beat += 1
        self._store.set(f"beat/{self._node}", str(self._beat))
        for other in self._others:
            key = f"beat/{other}"
            said = self._store.get(key) if self._store.check([key]) else b""
            known = self._beats.get(other)
            if known is None or known[0] != said:
                self._beats[other] = (said, now)

    # --- what else they tell --------------------------------------------------------------------------------------

    def say(self, name: str, what: Mapping[str, Any]) -> None:
        """Leave word under a name of this round's. Never raises: who listens notices that node 0 is gone."""
        with contextlib.suppress(RuntimeError):
            self._store.set(self._key(name), json.dumps(what))

    def hear(self, name: str) -> dict[str, Any] | None:
        """What was said under a name; None if nothing was. Raises RuntimeError where node 0 is gone."""
        if not self._store.check([self._key(name)]):
            return None
        said: dict[str, Any] = json.loads(self._store.get(self._key(name)))
        return said

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"
