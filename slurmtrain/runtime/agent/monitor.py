"""Watching the ranks of a node through one round: whether one hangs, and which ranks of the run hold the others up."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from slurmtrain.model.diagnosis.hang import RankState
from slurmtrain.model.diagnosis.stragglers import Stragglers
from slurmtrain.model.interruption.exit_report import StopRequest
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.runtime.agent.control_store import ControlStore
from slurmtrain.runtime.agent.watchdog import Hang, Watchdog
from slurmtrain.runtime.job import stacks
from slurmtrain.runtime.job.heartbeat import Board
from slurmtrain.system.journal import Journal

_PACE_S = 10.0


class RankMonitor:
    """One node's part. Node 0 compares the ranks of all."""

    def __init__(
        self,
        *,
        board: Board,
        attempt: AttemptDir,
        peers: ControlStore,
        journal: Journal,
        node: int,
        hosts: Mapping[int, str],
        members: Sequence[int],
        local_world_size: int,
        hang_after: float | None,
    ) -> None:
        """``hosts``: what nodes are called. ``hang_after``: seconds, as the spec has it."""
        first = members.index(node) * local_world_size
        self._ranks = range(first, first + local_world_size)
        self._dog = Watchdog(board, self._ranks, hang_after)
        self._board = board
        self._attempt = attempt
        self._peers = peers
        self._journal = journal
        self._node = node
        self._hosts = hosts
        self._members = members
        self._per_node = local_world_size
        self._stragglers = Stragglers()
        self._pids: Mapping[int, int] = {}
        self._next_pace = time.monotonic() + _PACE_S
        self.states: list[RankState] = []
        """What was found out about the ranks of this node when the run hung."""

    def started(self, pids: Mapping[int, int]) -> None:
        """These processes are the ranks of this node, by global rank."""
        self._pids = pids

    def look(self) -> StopRequest | None:
        """Whether the ranks are to be ended because one hangs."""
        hang = self._dog.look()
        if hang is not None:
            return StopRequest(cause="hang", why=_in_words(hang), at=time.time(), node=self._node)
        if time.monotonic() >= self._next_pace:
            self._next_pace = time.monotonic() + _PACE_S
            self._compare()
        return None

    def reached(self) -> int | None:
        """The last step that a rank of this node has finished; None where none has said so."""
        steps = [beat.step for beat in self._board.read() if beat.pid]
        return max(steps) if steps else None

    def examine(self) -> None:
        """Find out what the ranks of this node are doing, for the log and for telling who is to blame."""
        beats = dict(zip(self._ranks, self._board.read(), strict=True))
        logs = {rank: self._attempt.rank_log(rank) for rank in self._pids}
        self.states = stacks.rank_states(self._node, beats, self._pids, logs)
        self._journal.write("hang", node=self._node, ranks=[state.to_dict() for state in self.states])

    def _compare(self) -> None:
        """Tell node 0 how fast the ranks are here; at node 0, find those that hold the others up."""
        paces = self._dog.paces()
        self._peers.say(f"pace/{self._node}", {str(rank): pace for rank, pace in paces.items()})
        if self._node != 0:
            return
        told: dict[int, float] = {}
        for node in self._members:
            try:
                said = self._peers.hear(f"pace/{node}") or {}
            except RuntimeError:
                return
            told.update({int(rank): float(own_s) for rank, (_, own_s) in said.items()})
        for slow in self._stragglers.look(told):
            node = self._members[slow.rank // self._per_node]
            self._journal.write(
                "straggler",
                rank=slow.rank,
                host=self._hosts.get(node, f"node {node}"),
                ratio=round(slow.ratio, 3),
                own_s=round(slow.own_s, 6),
                median_s=round(slow.median_s, 6),
                step=self.reached(),
            )


def _in_words(hang: Hang) -> str:
    ranks = ", ".join(map(str, hang.over))
    return f"rank{'s' if len(hang.over) > 1 else ''} {ranks} finished no step for {hang.limit_s:.0f} s"
