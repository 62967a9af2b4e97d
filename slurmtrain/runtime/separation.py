"""Notices ranks that do not know each other: each would train for itself, and all exit with 0."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.model.diagnosis.rank_groups import describe_apart, describe_fewer, groups_of
from slurmtrain.model.run.events.agent_events import RanksApart
from slurmtrain.runtime.peers.control_store import ControlStore
from slurmtrain.runtime.peers.peer_store import CoordinatorGone
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import (
    descend,
    established,
    has_loaded,
    read_table,
    sockets_of,
    variable_of,
    was_connected,
)

_LIBRARIES = ("/libtorch", "/jaxlib/", "/libtensorflow")
# Looks come ever less often: after this share of the time since the start, and this many seconds at least and at most.
_SHARE, _LEAST_S, _MOST_S = 0.1, 1.0, 60.0
_GIVE_UP_S = 1800.0
# How long all ranks must have had the library: with steps to be seen; without, as while each prepares data; at the end.
_WITH_STEPS_S, _WITHOUT_STEPS_S, _AT_END_S = 30.0, 180.0, 8.0
# More messages than these would be much to read.
_MOST_NODES = 64
_MOST_CONNECTIONS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparationConfig:
    """Whom to watch.

    ``node``: this node; ``members``: the nodes that have ranks. ``ranks``: the number of ranks of the run.
    ``per_node``: the command starts the ranks, once per node. ``port``: where ranks meet if they do as torchrun's.
    ``launched``: the launcher that the command is; empty: none that is known. ``metrics``: the file of the run's steps.
    """

    node: int
    members: Sequence[int]
    ranks: int
    per_node: bool
    port: int
    launched: str
    metrics: Path


class Separation:
    """Watches whether the ranks of a round are connected."""

    def __init__(self, config: SeparationConfig, control: ControlStore, journal: Journal) -> None:
        """Watch the ranks in ``config``.

        ``control``: carries the observations of nodes. ``journal``: node 0 writes its conclusions there.
        """
        self._config = config
        self._control = control
        self._journal = journal
        self._began = time.monotonic()
        self._next = self._began + _LEAST_S
        self._connections: dict[int, set[tuple[str, str]]] = {}
        self._loaded: dict[int, float] = {}
        self._started: set[str] = set()
        self._reported = ""
        self._is_over = config.ranks < 2 or len(config.members) > _MOST_NODES

    def look(self, pids: Mapping[int, int]) -> None:
        """Look if it is time to. ``pids``: what was started, by rank or, with ``per_node``, by the node's place."""
        now = time.monotonic()
        if self._is_over or now < self._next or not pids:
            return
        since = now - self._began
        self._next = now + min(_MOST_S, max(_LEAST_S, _SHARE * since))
        self._is_over = since > _GIVE_UP_S
        self._see(pids)
        with contextlib.suppress(CoordinatorGone):
            if self._config.node != 0:
                self._is_over = self._is_over or self._control.read("together") is not None
            else:
                has_steps = self._config.metrics.exists() and self._config.metrics.stat().st_size > 0
                self._judge(_WITH_STEPS_S if has_steps else _WITHOUT_STEPS_S)

    def end(self) -> None:
        """Judge by what was seen until the ranks have completed their work, on node 0.

        They may have met and ended between two looks.
        """
        if not self._is_over and self._config.node == 0 and not was_connected(self._config.port):
            with contextlib.suppress(CoordinatorGone):
                self._judge(_AT_END_S)

    def _see(self, pids: Mapping[int, int]) -> None:
        """Look at the processes of this node, and tell node 0."""
        table, now = read_table(), time.monotonic()
        by_inode = established(next(iter(pids.values())))
        for number, pid in pids.items():
            tree = [pid, *(entry.pid for entry in descend(table, pid) if not entry.ended)]
            own = {by_inode[inode] for each in tree for inode in sockets_of(each) if inode in by_inode}
            within = {ends for ends in own if ends[::-1] in own}
            self._connections.setdefault(number, set()).update(own - within)
            if number not in self._loaded and any(has_loaded(each, _LIBRARIES) for each in tree):
                self._loaded[number] = now
            if self._config.launched:
                self._started.update(rank for each in tree[1:] if (rank := variable_of(each, "RANK")) is not None)
        loaded = [self._loaded.get(number) for number in pids]
        message = {
            "ends": {str(n): sorted(ends)[:_MOST_CONNECTIONS] for n, ends in self._connections.items()},
            "loaded_s": None if None in loaded else min(now - at for at in loaded if at is not None),
            "started": len(self._started),
        }
        self._control.publish(f"links/{self._config.node}", message)

    def _judge(self, after_s: float) -> None:
        """Conclude if all ranks have had a library for so many seconds. Raises CoordinatorGone."""
        config = self._config
        messages = self._control.read_each(f"links/{node}" for node in config.members)
        ages = [message["loaded_s"] for message in messages.values()]
        if len(messages) < len(config.members) or None in ages:
            return
        why = self._describe(messages.values())
        if not why:
            self._is_over = True
            self._control.publish("together", {})
        if why == self._reported or (why and min(ages) < after_s):
            return
        self._reported = why
        self._journal.write(RanksApart(why=why))

    def _describe(self, messages: Any) -> str:
        """What is wrong, as a sentence; empty if nothing is."""
        config = self._config
        connections = {
            int(number): {(str(local), str(remote)) for local, remote in ends}
            for message in messages
            for number, ends in message["ends"].items()
        }
        started = sum(int(message["started"]) for message in messages)
        if config.launched and not started:
            return describe_fewer(config.launched, started, config.ranks)
        groups = groups_of(connections)
        if len(groups) > 1:
            return describe_apart(groups, per_node=config.per_node)
        return describe_fewer(config.launched, started, config.ranks) if 0 < started < config.ranks else ""
