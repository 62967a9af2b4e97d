"""Watching the ranks of a node during one round: whether one hangs, and which ranks slow down the others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.model.diagnosis.hang import Beat, RankState
from slurmtrain.model.diagnosis.stragglers import Stragglers
from slurmtrain.model.interruption.exit_report import StopRequest
from slurmtrain.model.run.events.agent import (
    HangDetected,
    HangLimitRaised,
    RanksPaused,
    RanksResumed,
    StragglerDetected,
)
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.model.spec.launcher import NodeRanks
from slurmtrain.runtime.agent.hang import Hang, HangInquiry, HangVerdict, Suspicion, Watchdog
from slurmtrain.runtime.job import stacks
from slurmtrain.runtime.job.heartbeat import Board
from slurmtrain.runtime.job.stacks import ThreadUse
from slurmtrain.runtime.node_notes import LogSizes
from slurmtrain.runtime.peers.control_store import ControlStore
from slurmtrain.runtime.peers.store import CoordinatorGone
from slurmtrain.runtime.separation import Separation, SeparationConfig
from slurmtrain.system.journal import Journal

# How often nodes compare the speed of their ranks. Not often, since a straggler stays slow for minutes.
_COMPARE_S = 10.0
# What was found out about the ranks this long ago is still true when the run is stopped for it.
_RECENT_S = 60.0
# A longer pause is journaled, since waiting users want to know.
_LASTING_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """What the monitor of a round needs to know.

    ``attempt`` names the round. ``node``: this node. ``hosts``: the names of nodes. ``members``: the nodes that have
    ranks; ``ranks_by_node``: how many each of these has. ``per_node``: the run's command was started once per node, and
    starts the ranks; ``launched``: the launcher that it is, if that is known. ``port``: of node 0, where ranks meet.
    ``hang_after``: seconds, from the spec; None: judged by the step times.
    """

    attempt: AttemptDir
    node: int
    hosts: Mapping[int, str]
    members: Sequence[int]
    ranks_by_node: NodeRanks
    per_node: bool
    port: int
    hang_after: float | None
    launched: str = ""

    @property
    def ranks(self) -> range:
        """The global ranks of this node."""
        return self.ranks_by_node.ranks_of(self.members.index(self.node))

    @property
    def logs(self) -> dict[str, Path]:
        """The logs of this node, by name."""
        attempt = self.attempt
        paths = [attempt.node_log(self.node)] if self.per_node else [attempt.rank_log(rank) for rank in self.ranks]
        return {path.name: path for path in paths}


class RankMonitor:
    """Watches the ranks of one node. Node 0 also compares the ranks of all nodes."""

    def __init__(self, config: MonitorConfig, board: Board, control: ControlStore, journal: Journal) -> None:
        """Watch the ranks in ``config`` by their heartbeats on ``board``.

        ``control``: through which nodes compare their ranks. ``journal``: this node's.
        """
        self._config = config
        self._watchdog = Watchdog(board, config.ranks, config.hang_after)
        self._board = board
        self._control = control
        self._journal = journal
        self._inquiry = HangInquiry(config.node, config.members, control, self._examine)
        self._stragglers = Stragglers()
        self._pids: Mapping[int, int] = {}
        self._started: Mapping[int, int] = {}
        self._used: dict[int, ThreadUse] = {}
        self._has_pauses = False
        self._pause: Beat | None = None
        self._next_comparison = time.monotonic() + _COMPARE_S
        self._examined_at: float | None = None
        self._separation = Separation(
            SeparationConfig(
                node=config.node,
                members=config.members,
                ranks=config.ranks_by_node.world_size,
                per_node=config.per_node,
                port=config.port,
                launched=config.launched,
                metrics=config.attempt.metrics,
            ),
            control,
            journal,
        )
        self._log_sizes = LogSizes(config.attempt.log_sizes(config.node), config.logs)
        self.states: list[RankState] = []
        """What the ranks of this node were doing when the run hung."""

    def set_pids(self, pids: Mapping[int, int]) -> None:
        """Set the process ids of what was started, by global rank, or of the command that starts this node's ranks."""
        config = self._config
        self._started = pids
        self._pids = dict.fromkeys(config.ranks, *pids.values()) if config.per_node else pids

    def find_hang(self) -> StopRequest | None:
        """A request to stop because a rank hangs, if one does. Call it repeatedly: it also compares speeds."""
        self._log_sizes.note()
        self._separation.look(self._started)
        hang = self._watchdog.look()
        self._measure_slow_ranks()
        self._announce_pauses()
        if hang is not None:
            # If that excuses ranks, they are judged anew at the next look.
            hang = None if self._watchdog.excuse(self._last_pause()) else hang
        verdict = self._inquiry.advance(self._suspicion(hang) if hang is not None else None)
        if verdict is not None and verdict.hangs:
            suspicion = verdict.suspicion
            return StopRequest(cause="hang", why=suspicion.why, at=time.time(), node=suspicion.node)
        if verdict is not None:
            self._raise_limits(verdict)
        if time.monotonic() >= self._next_comparison:
            self._next_comparison = time.monotonic() + _COMPARE_S
            self._compare_paces()
        return None

    def judge_hang_elsewhere(self) -> None:
        """On node 0, whose ranks have ended: take part in the inquiries of other nodes."""
        verdict = self._inquiry.advance(None, own_states=())
        if verdict is not None and not verdict.hangs:
            self._raise_limits(verdict)

    def completed(self) -> None:
        """Called when all ranks of this node have ended by themselves, with 0."""
        self._separation.end()

    def last_step(self) -> int | None:
        """The last step that a rank of this node has finished; None if no rank has a heartbeat."""
        steps = [beat.step for beat in self._board.read() if beat.pid]
        return max(steps) if steps else None

    def examine_hang(self) -> None:
        """Find out and journal what the ranks of this node are doing. May take seconds."""
        if self._examined_at is None or time.monotonic() - self._examined_at > _RECENT_S:
            self._examine()
        self._journal.write(HangDetected(node=self._config.node, ranks=[state.to_dict() for state in self.states]))

    # --- whether a rank hangs -----------------------------------------------------------------------------------------

    def _examine(self) -> list[RankState]:
        """What the ranks of this node are doing."""
        config = self._config
        beats = dict(zip(config.ranks, self._board.read(), strict=True))
        node_log = config.attempt.node_log(config.node) if config.per_node else None
        logs = {rank: node_log or config.attempt.rank_log(rank) for rank in self._pids}
        cpu = stacks.shares(self._processes(beats), self._used)
        self.states = stacks.rank_states(config.node, beats, self._pids, logs, cpu)
        self._examined_at = time.monotonic()
        return self.states

    def _processes(self, beats: Mapping[int, Beat]) -> dict[int, int]:
        """The process of each rank: the one of its last heartbeat, or else the one started for it."""
        return {rank: beats[rank].pid or pid for rank, pid in self._pids.items() if rank in beats}

    def _measure_slow_ranks(self) -> None:
        """Measure ranks that have used half of their time, to know later how much they compute in the other half."""
        slow = self._watchdog.half_over()
        self._used = {rank: use for rank, use in self._used.items() if rank in slow}
        if len(self._used) == len(slow):
            return
        pids = self._processes(dict(zip(self._config.ranks, self._board.read(), strict=True)))
        for rank in set(slow) - set(self._used):
            if rank in pids and (use := ThreadUse.now(pids[rank])):
                self._used[rank] = use

    def _announce_pauses(self) -> None:
        """Tell the other nodes when ranks of this node pause and go on: theirs may wait for them."""
        pauses = self._watchdog.pauses()
        if bool(pauses) != self._has_pauses:
            self._has_pauses = bool(pauses)
            self._control.publish(f"paused/{self._config.node}", {"paused": self._has_pauses, "at": time.time()})
        if self._config.node == 0:
            self._journal_pause(pauses)

    def _journal_pause(self, pauses: Mapping[int, Beat]) -> None:
        """Journal a pause that lasts, and its end."""
        now = time.monotonic()
        if self._pause is None:
            lasting = {rank: beat for rank, beat in pauses.items() if now - beat.at > _LASTING_S}
            if lasting:
                self._pause = next(iter(lasting.values()))
                event = RanksPaused(ranks=list(lasting), step=self._pause.step, activity=self._pause.activity)
                self._journal.write(event)
        elif not pauses:
            self._journal.write(RanksResumed(seconds=round(now - self._pause.at, 1)))
            self._pause = None

    def _last_pause(self) -> float:
        """When a rank of the run was last paused, by this machine's monotonic clock; 0 if none ever was."""
        now, last = time.monotonic(), 0.0
        try:
            messages = self._control.read_each(f"paused/{node}" for node in self._config.members)
        except CoordinatorGone:
            return 0.0
        for message in messages.values():
            # The preflight has compared the wall clocks of nodes.
            ago_s = 0.0 if message["paused"] else max(0.0, time.time() - message["at"])
            last = max(last, now - ago_s)
        return last

    def _suspicion(self, hang: Hang) -> Suspicion:
        return Suspicion(node=self._config.node, why=_describe(hang), limit_s=hang.limit_s, most_s=hang.most_s)

    def _raise_limits(self, verdict: HangVerdict) -> None:
        """Give ranks more time, on all nodes, since the ranks that others wait for compute."""
        self._watchdog.raise_limits()
        # Their computing from now on decides the next time.
        self._used = {}
        if self._config.node == 0:
            suspicion = verdict.suspicion
            self._journal.write(
                HangLimitRaised(
                    node=suspicion.node,
                    limit_s=suspicion.limit_s,
                    raised_s=min(2 * suspicion.limit_s, suspicion.most_s),
                    ranks=verdict.computing,
                    why=verdict.why,
                )
            )

    # --- which ranks slow down the others -----------------------------------------------------------------------------

    def _compare_paces(self) -> None:
        """Tell node 0 how fast the ranks are here; on node 0, journal ranks that slow down the others."""
        config, paces = self._config, self._watchdog.paces()
        self._control.publish(f"pace/{config.node}", {str(rank): pace for rank, pace in paces.items()})
        if config.node != 0:
            return
        own_s: dict[int, float] = {}
        # Nodes publish at their own times: this may be the pace of ten seconds ago, recent enough to find stragglers.
        for message in self._control.read_each(f"pace/{node}" for node in config.members).values():
            own_s.update({int(rank): float(seconds) for rank, (_, seconds) in message.items()})
        for slow in self._stragglers.look(own_s):
            node = config.members[config.ranks_by_node.place_of(slow.rank)]
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
