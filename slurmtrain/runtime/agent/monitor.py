"""Watching the ranks of a node during one round: whether one hangs, and which ranks slow down the others.

It also notes how busy the node is, and how long logs were at what time: lines of JSON, in files of their own. Nothing
depends on these notes: what cannot be measured or written is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurmtrain.model.diagnosis.hang import Beat, RankState, Stragglers
from slurmtrain.model.diagnosis.rank_groups import describe_apart, describe_fewer, groups_of
from slurmtrain.model.experiment.launcher import known_launcher
from slurmtrain.model.interruption.exit_report import StopRequest
from slurmtrain.model.run.events.agent_events import (
    HangDetected,
    HangLimitRaised,
    RanksApart,
    RanksPaused,
    RanksResumed,
    StragglerDetected,
)
from slurmtrain.runtime.agent.gauges import Gauges
from slurmtrain.runtime.agent.hang_watch import HangInquiry, HangVerdict, Watchdog
from slurmtrain.runtime.agent.workers import RankPlacement
from slurmtrain.runtime.job import stacks
from slurmtrain.runtime.job.heartbeat import Board
from slurmtrain.runtime.job.stacks import ThreadUse
from slurmtrain.runtime.peers.control_store import ControlStore
from slurmtrain.runtime.peers.peer_store import CoordinatorGone
from slurmtrain.system.files import FILE_MODE
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

# How often nodes compare the speed of their ranks. Not often, since a straggler stays slow for minutes.
_COMPARE_S = 10.0
# What was found out about the ranks this long ago is still true when the run is stopped for it.
_RECENT_S = 60.0
# A longer pause is journaled, since waiting users want to know.
_LASTING_S = 10.0


class RankMonitor:
    """Watches the ranks of one node. Node 0 also compares the ranks of all nodes."""

    def __init__(self, placement: RankPlacement, board: Board, control: ControlStore, journal: Journal) -> None:
        """Watch the ranks of a ``placement`` by their heartbeats on ``board``.

        ``control``: through which nodes compare their ranks. ``journal``: this node's.
        """
        spec = placement.config.spec
        self._placement = placement
        self._own_ranks = placement.own_ranks
        self._watchdog = Watchdog(board, self._own_ranks, spec.requeue.hang_after, placement.config.node)
        self._board = board
        self._control = control
        self._journal = journal
        self._inquiry = HangInquiry(placement.config.node, placement.members, control, self._examine)
        self._stragglers = Stragglers()
        self._pids: Mapping[int, int] = {}
        self._started: Mapping[int, int] = {}
        self._used: dict[int, ThreadUse] = {}
        self._has_pauses = False
        self._pause: Beat | None = None
        self._next_comparison = time.monotonic() + _COMPARE_S
        self._examined_at: float | None = None
        self._separation = Separation(placement, control, journal)
        logs = [placement.log_of(rank) for rank in self._own_ranks]
        self._log_sizes = LogSizes(placement.attempt.log_sizes(placement.config.node), {log.name: log for log in logs})
        self.states: list[RankState] = []
        """What the ranks of this node were doing when the run hung."""

    def set_pids(self, pids: Mapping[int, int]) -> None:
        """Set the process ids of what was started, by global rank, or of the command that starts this node's ranks."""
        self._started = pids
        is_one = self._placement.config.spec.per_node
        self._pids = dict.fromkeys(self._own_ranks, *pids.values()) if is_one else pids

    def find_hang(self) -> StopRequest | None:
        """A request to stop because a rank hangs, if one does. Call it repeatedly: it also compares speeds."""
        self._log_sizes.note()
        self._separation.look(self._started)
        suspicion = self._watchdog.look()
        self._measure_slow_ranks()
        self._announce_pauses()
        # If a pause excuses ranks, they are judged anew at the next look.
        if suspicion is not None and self._watchdog.excuse(self._last_pause()):
            suspicion = None
        verdict = self._inquiry.advance(suspicion)
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
        self._journal.write(
            HangDetected(node=self._placement.config.node, ranks=[state.to_dict() for state in self.states])
        )

    # --- whether a rank hangs -----------------------------------------------------------------------------------------

    def _examine(self) -> list[RankState]:
        """What the ranks of this node are doing."""
        beats = dict(zip(self._own_ranks, self._board.read(), strict=True))
        logs = {rank: self._placement.log_of(rank) for rank in self._pids}
        cpu = stacks.cpu_shares(self._processes(beats), self._used)
        self.states = stacks.rank_states(self._placement.config.node, beats, self._pids, logs, cpu)
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
        pids = self._processes(dict(zip(self._own_ranks, self._board.read(), strict=True)))
        for rank in set(slow) - set(self._used):
            if rank in pids and (use := ThreadUse.now(pids[rank])):
                self._used[rank] = use

    def _announce_pauses(self) -> None:
        """Tell the other nodes when ranks of this node pause and go on: theirs may wait for them."""
        pauses = self._watchdog.pauses()
        if bool(pauses) != self._has_pauses:
            self._has_pauses = bool(pauses)
            self._control.publish(
                f"paused/{self._placement.config.node}", {"paused": self._has_pauses, "at": time.time()}
            )
        if self._placement.config.node != 0:
            return
        # A pause that lasts is journaled, and its end.
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
            messages = self._control.read_each(f"paused/{node}" for node in self._placement.members)
        except CoordinatorGone:
            return 0.0
        for message in messages.values():
            # The preflight has compared the wall clocks of nodes.
            ago_s = 0.0 if message["paused"] else max(0.0, time.time() - message["at"])
            last = max(last, now - ago_s)
        return last

    def _raise_limits(self, verdict: HangVerdict) -> None:
        """Give ranks more time, on all nodes, since the ranks that others wait for compute."""
        self._watchdog.raise_limits()
        # Their computing from now on decides the next time.
        self._used = {}
        if self._placement.config.node == 0:
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
        placement, paces = self._placement, self._watchdog.paces()
        self._control.publish(f"pace/{placement.config.node}", {str(rank): pace for rank, pace in paces.items()})
        if placement.config.node != 0:
            return
        own_s: dict[int, float] = {}
        # Nodes publish at their own times: this may be the pace of ten seconds ago, recent enough to find stragglers.
        for message in self._control.read_each(f"pace/{node}" for node in placement.members).values():
            own_s.update({int(rank): float(seconds) for rank, (_, seconds) in message.items()})
        for slow in self._stragglers.look(own_s):
            node = placement.members[placement.ranks.place_of(slow.rank)]
            self._journal.write(
                StragglerDetected(
                    rank=slow.rank,
                    host=placement.config.hosts.get(node, f"node {node}"),
                    ratio=round(slow.ratio, 3),
                    own_s=round(slow.own_s, 6),
                    median_s=round(slow.median_s, 6),
                    step=self.last_step(),
                )
            )


# --- ranks that do not know each other: each would train for itself, and all exit with 0 ------------------------------
_LIBRARIES = ("/libtorch", "/jaxlib/", "/libtensorflow")
# Looks come ever less often: after this share of the time since the start, and this many seconds at least and at most.
_SHARE, _LEAST_S, _MOST_S = 0.1, 1.0, 60.0
_GIVE_UP_S = 1800.0
# How long all ranks must have had the library: with steps to be seen; without, as while each prepares data; at the end.
_WITH_STEPS_S, _WITHOUT_STEPS_S, _AT_END_S = 30.0, 180.0, 8.0
# More messages than these would be much to read.
_MOST_NODES = 64
_MOST_CONNECTIONS = 256


class Separation:
    """Watches whether the ranks of a round are connected."""

    def __init__(self, placement: RankPlacement, control: ControlStore, journal: Journal) -> None:
        """Watch the ranks of a ``placement``.

        ``control``: carries the observations of nodes. ``journal``: node 0 writes its conclusions there.
        """
        spec = placement.config.spec
        self._placement = placement
        self._world_size = placement.ranks.world_size
        # The launcher that the command is; empty: none that is known.
        self._launched = known_launcher(spec.command) if spec.calls_launcher else ""
        self._control = control
        self._journal = journal
        self._began = time.monotonic()
        self._next = self._began + _LEAST_S
        self._connections: dict[int, set[tuple[str, str]]] = {}
        self._loaded: dict[int, float] = {}
        self._started: set[str] = set()
        self._reported = ""
        self._is_over = self._world_size < 2 or len(placement.members) > _MOST_NODES

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
            if self._placement.config.node != 0:
                self._is_over = self._is_over or self._control.read("together") is not None
            else:
                metrics = self._placement.attempt.metrics
                has_steps = metrics.exists() and metrics.stat().st_size > 0
                self._judge(_WITH_STEPS_S if has_steps else _WITHOUT_STEPS_S)

    def end(self) -> None:
        """Judge by what was seen until the ranks have completed their work, on node 0.

        They may have met and ended between two looks.
        """
        if not self._is_over and self._placement.config.node == 0 and not was_connected(self._placement.port):
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
            if self._launched:
                self._started.update(rank for each in tree[1:] if (rank := variable_of(each, "RANK")) is not None)
        loaded = [self._loaded.get(number) for number in pids]
        message = {
            "ends": {str(n): sorted(ends)[:_MOST_CONNECTIONS] for n, ends in self._connections.items()},
            "loaded_s": None if None in loaded else min(now - at for at in loaded if at is not None),
            "started": len(self._started),
        }
        self._control.publish(f"links/{self._placement.config.node}", message)

    def _judge(self, after_s: float) -> None:
        """Conclude if all ranks have had a library for so many seconds. Raises CoordinatorGone."""
        members = self._placement.members
        messages = self._control.read_each(f"links/{node}" for node in members)
        ages = [message["loaded_s"] for message in messages.values()]
        if len(messages) < len(members) or None in ages:
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
        connections = {
            int(number): {(str(local), str(remote)) for local, remote in ends}
            for message in messages
            for number, ends in message["ends"].items()
        }
        started = sum(int(message["started"]) for message in messages)
        if self._launched and not started:
            return describe_fewer(self._launched, started, self._world_size)
        groups = groups_of(connections)
        if len(groups) > 1:
            return describe_apart(groups, per_node=self._placement.config.spec.per_node)
        return describe_fewer(self._launched, started, self._world_size) if 0 < started < self._world_size else ""


# --- notes while the ranks train --------------------------------------------------------------------------------------

_EVERY_S = 15.0
# The first line comes sooner: of many short runs it is the only one.
_FIRST_S = 3.0
# So many lines are as far apart; the next as many are twice as far. A month has about 7,500 lines, or 2 MB.
_EQUAL = 1000
# A driver or file system that hangs must not keep the agent from ending.
_END_S = 1.0
# Twenty thousand lines a week, if the logs grow all the time.
_LOGS_EVERY_S = 30.0


def _append_note(path: Path, note: Mapping[str, Any]) -> None:
    """Append a ``note`` with the time in seconds since 1970, if that is possible."""
    line = json.dumps({"t": round(time.time(), 3), **note}) + "\n"
    with suppress(OSError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)


class LogSizes:
    """Notes that logs of a node have grown, by which ``logs --since`` finds lines: logs have no times of their own."""

    def __init__(self, notes: Path, logs: Mapping[str, Path], every_s: float = _LOGS_EVERY_S) -> None:
        """Note the sizes of ``logs``, by name, in the file ``notes``, at most every ``every_s`` seconds."""
        self._notes = notes
        self._logs = logs
        self._every_s = every_s
        self._due = time.monotonic() + every_s
        self._sizes: dict[str, int] = {}

    def note(self) -> None:
        """Append a line if it is time to, and something has grown. Call it repeatedly."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._every_s
        grown = {}
        for name, path in self._logs.items():
            with suppress(OSError):
                size = path.stat().st_size
                if size != self._sizes.get(name, 0):
                    grown[name] = size
        if grown:
            self._sizes |= grown
            _append_note(self._notes, {"sizes": grown})


class Sampler:
    """Measures in a thread of its own, since a driver may take long to answer; use it as a context.

    A line has the figures as ``metrics``, and finished steps as ``step`` from the first heartbeat of a rank on.
    """

    def __init__(
        self, path: Path, gauges: Callable[[], Gauges], step: Callable[[], int | None], every_s: float = _EVERY_S
    ) -> None:
        """Prepare to measure.

        Args:
            path: The file to append to, in a folder that exists.
            gauges: Makes what measures, in the thread.
            step: Returns how many steps are finished; None if that is unknown.
            every_s: How often to measure, in seconds.
        """
        self._path = path
        self._gauges = gauges
        self._step = step
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system metrics", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        # Libraries of drivers raise anything, and no figure is worth a traceback among the agent's output.
        with suppress(Exception):
            gauges = self._gauges()
            try:
                self._measure(gauges)
            finally:
                gauges.close()

    def _measure(self, gauges: Gauges) -> None:
        every_s, lines, at = self._every_s, 0, {}
        while not self._ended.wait(every_s if lines else min(_FIRST_S, every_s)):
            metrics = gauges.read()
            # Ranks that are about to be started have no heartbeat yet: a step never goes back to unknown.
            if (step := self._step()) is not None:
                at = {"step": step}
            _append_note(self._path, {**at, "metrics": metrics})
            lines += 1
            if lines % _EQUAL == 0:
                every_s *= 2
