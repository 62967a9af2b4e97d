"""Watching the ranks of a node during one round: whether one hangs, and which ranks slow down the others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmtrain.model.diagnosis.hang import RankState
from slurmtrain.model.diagnosis.stragglers import Stragglers
from slurmtrain.model.interruption.exit_report import StopRequest
from slurmtrain.model.run.events.agent import HangDetected, StragglerDetected
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.runtime.agent.control_store import ControlStore
from slurmtrain.runtime.agent.watchdog import Hang, Watchdog
from slurmtrain.runtime.job import stacks
from slurmtrain.runtime.job.heartbeat import Board
from slurmtrain.system.journal import Journal

# How often nodes compare the speed of their ranks. Not often, since a straggler stays slow for minutes.
_COMPARE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """What the monitor of a round needs to know.

    ``attempt`` names the round. ``node``: this node. ``hosts``: the names of nodes. ``members``: the nodes that have
    ranks, ``ranks_per_node`` each. ``hang_after``: seconds, from the spec; None: judged by the step times.
    """

    attempt: AttemptDir
    node: int
    hosts: Mapping[int, str]
    members: Sequence[int]
    ranks_per_node: int
    hang_after: float | None

    @property
    def ranks(self) -> range:
        """The global ranks of this node."""
        first = self.members.index(self.node) * self.ranks_per_node
        return range(first, first + self.ranks_per_node)


class RankMonitor:
    """Watches the ranks of one node. Node 0 also compares those of all nodes."""

    def __init__(self, config: MonitorConfig, board: Board, control: ControlStore, journal: Journal) -> None:
        """Watch the ranks in ``config`` by their heartbeats on ``board``.

        ``control``: the store through which nodes compare their ranks. ``journal``: this node's.
        """
        self._config = config
        self._watchdog = Watchdog(board, config.ranks, config.hang_after)
        self._board = board
        self._control = control
        self._journal = journal
        self._stragglers = Stragglers()
        self._pids: Mapping[int, int] = {}
        self._next_comparison = time.monotonic() + _COMPARE_S
        self.states: list[RankState] = []
        """What the ranks of this node were doing when the run hung."""

    def set_pids(self, pids: Mapping[int, int]) -> None:
        """Set the process ids of this node's ranks, by global rank, once they have started."""
        self._pids = pids

    def find_hang(self) -> StopRequest | None:
        """A request to stop because a rank hangs, if one does. Call it repeatedly: it also compares speeds."""
        hang = self._watchdog.look()
        if hang is not None:
            return StopRequest(cause="hang", why=_describe(hang), at=time.time(), node=self._config.node)
        if time.monotonic() >= self._next_comparison:
            self._next_comparison = time.monotonic() + _COMPARE_S
            self._compare_paces()
        return None

    def last_step(self) -> int | None:
        """The last step that a rank of this node has finished; None if no rank has a heartbeat."""
        steps = [beat.step for beat in self._board.read() if beat.pid]
        return max(steps) if steps else None

    def examine_hang(self) -> None:
        """Find out and journal what the ranks of this node are doing. May take seconds."""
        config = self._config
        beats = dict(zip(config.ranks, self._board.read(), strict=True))
        logs = {rank: config.attempt.rank_log(rank) for rank in self._pids}
        self.states = stacks.rank_states(config.node, beats, self._pids, logs)
        self._journal.write(HangDetected(node=config.node, ranks=[state.to_dict() for state in self.states]))

    def _compare_paces(self) -> None:
        """Tell node 0 how fast the ranks are here; on node 0, journal those that slow down the others."""
        config, paces = self._config, self._watchdog.paces()
        self._control.publish(f"pace/{config.node}", {str(rank): pace for rank, pace in paces.items()})
        if config.node != 0:
            return
        own_s: dict[int, float] = {}
        for node in config.members:
            try:
                # Nodes publish at their own times: this may be the pace of ten seconds ago, recent enough to find
                # stragglers.
                message = self._control.read(f"pace/{node}") or {}
            except RuntimeError:
                return
            own_s.update({int(rank): float(seconds) for rank, (_, seconds) in message.items()})
        for slow in self._stragglers.look(own_s):
            node = config.members[slow.rank // config.ranks_per_node]
            self._journal.write(
                StragglerDetected(
                    rank=slow.rank,
                    host=config.hosts.get(node, f"node {node}"),
                    ratio=round(slow.ratio, 3),
                    own_s=round(slow.own_s, 6),
                    median_s=round(slow.median_s, 6),
                    step=self.last_step(),
                )
            )


def _describe(hang: Hang) -> str:
    ranks = ", ".join(map(str, hang.over))
    return f"rank{'s' if len(hang.over) > 1 else ''} {ranks} finished no step for {hang.limit_s:.0f} s"
