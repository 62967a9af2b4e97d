"""Watches the ranks of a node by their heartbeats, and notices when one hangs, or all of the job was stopped."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slurmtrain.model.diagnosis.hang import Beat, Phase, RankState, computing_culprits, hang_limit, longest_limit
from slurmtrain.model.run.events.agent_events import JobSuspended
from slurmtrain.model.run.events.base import Payload
from slurmtrain.runtime.job.heartbeat import Board
from slurmtrain.runtime.peers.control_store import ControlStore
from slurmtrain.runtime.peers.peer_store import CoordinatorGone

# The median step time is taken over this many of the last looks that found newly finished steps.
_KEPT = 120
_LOOK_S = 1.0
# If two looks are further apart than this, the agent itself was stopped: by a signal to the whole job, or its machine.
_SUSPENDED_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """Ranks of a node have made no progress for too long.

    ``node``: this node. ``why``: which ranks finished no step, and for how long. ``limit_s``: the limit that the first
    of them has exceeded; ``most_s``: the longest that it may become.
    """

    node: int
    why: str
    limit_s: float
    most_s: float


class Watchdog:
    """Watches one set of ranks from start to end; the ranks of another round have another watchdog."""

    def __init__(
        self,
        board: Board,
        ranks: Sequence[int],
        hang_after: float | None,
        node: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch ``ranks``, the global ranks by local rank, whose heartbeats are on ``board``.

        ``hang_after``: seconds, from the spec; None: judged by their step times. ``node``: this one. ``now``: the
        monotonic clock.
        """
        self._board = board
        self._ranks = tuple(ranks)
        self._hang_after = hang_after
        self._node = node
        self._now = now
        self._looked = self._since = self._excused_at = now()
        self._times = 1.0
        self._beats: list[Beat] = []
        self._finished = 0
        self._steps_s: deque[float] = deque(maxlen=_KEPT)

    def look(self) -> Suspicion | None:
        """A suspicion, if ranks seem to hang; else None. Costs next to nothing when called more than once a second."""
        now = self._now()
        if now - self._looked < _LOOK_S:
            return None
        if now - self._looked > _SUSPENDED_S:
            # This process, and so probably the ranks too, was suspended: none could make progress meanwhile.
            self._since = now
        self._looked = now
        self._beats = self._board.read()
        finished = sum(beat.step for beat in self._beats)
        steps_s = [beat.step_s for beat in self._beats if beat.step_s > 0]
        if steps_s and finished != self._finished:
            self._steps_s.append(statistics.median(steps_s))
        self._finished = finished
        idle_s = self._idle()
        over = {rank: limits for rank, limits in self._limits().items() if idle_s[rank] > limits[0]}
        if not over:
            return None
        limit_s, most_s = next(iter(over.values()))
        ranks = f"rank{'s' if len(over) > 1 else ''} {', '.join(map(str, over))}"
        why = f"{ranks} did not finish a step for {limit_s:.0f} s"
        return Suspicion(node=self._node, why=why, limit_s=limit_s, most_s=most_s)

    def raise_limits(self) -> None:
        """From now on, ranks may take twice as long, but no longer than :func:`longest_limit` allows."""
        self._times *= 2

    def excuse(self, until: float) -> bool:
        """Hold no time before ``until`` against ranks that are not paused: they have waited for one that was.

        Returns whether that changes anything.
        """
        if until <= self._excused_at:
            return False
        self._excused_at = until
        return True

    def pauses(self) -> dict[int, Beat]:
        """The last heartbeats of the ranks that are paused, and for no longer than they may be, by global rank."""
        limits, idle_s = self._limits(), self._idle()
        return {
            rank: beat
            for rank, beat in zip(self._ranks, self._beats, strict=False)
            if beat.phase is Phase.PAUSED and idle_s[rank] <= limits[rank][0]
        }

    def half_over(self) -> list[int]:
        """The global ranks that have used half of their time."""
        idle_s = self._idle()
        return [rank for rank, (limit_s, _) in self._limits().items() if idle_s[rank] > limit_s / 2]

    def paces(self) -> dict[int, tuple[int, float]]:
        """For each rank that trains: its finished steps, and its own time per step (seconds; 0: not known)."""
        return {
            rank: (beat.step, beat.own_s)
            for rank, beat in zip(self._ranks, self._beats, strict=False)
            if beat.phase is Phase.TRAINING
        }

    def _limits(self) -> dict[int, tuple[float, float]]:
        """The limit of each watched rank, in seconds, and the longest that it can get."""
        median_s = statistics.median(self._steps_s) if self._steps_s else 0.0
        limits = {}
        for rank, beat in zip(self._ranks, self._beats, strict=False):
            limit_s = hang_limit(self._hang_after, beat, median_s)
            if limit_s is not None:
                most_s = longest_limit(self._hang_after, limit_s)
                limits[rank] = min(limit_s * self._times, most_s), most_s
        return limits

    def _idle(self) -> dict[int, float]:
        """Seconds since the last progress of each rank that may be held against it."""
        return {
            rank: self._looked - max(beat.at, self._since, 0.0 if beat.phase is Phase.PAUSED else self._excused_at)
            for rank, beat in zip(self._ranks, self._beats, strict=False)
        }


class SuspensionWatch:
    """Notices that all processes of the job were stopped for a while, this agent among them.

    A thread waits for a second again and again: it is late only if it could not run, unlike one that waits for files.
    """

    def __init__(
        self,
        write: Callable[[Payload], object],
        now: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        """``write`` journals an event. ``now``: a clock in seconds that also runs while the machine sleeps."""
        self._write = write
        self._now = now
        self._looked = now()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin to watch, until the agent ends."""
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """Journal nothing any more."""
        self._stopped.set()

    def look(self) -> None:
        """Journal a suspension if the last look is too long ago."""
        before, self._looked = self._looked, self._now()
        if self._looked - before > _LOOK_S + _SUSPENDED_S:
            self._write(JobSuspended(since=time.time() - (self._looked - before)))

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            self.look()


# --- what all ranks of the run are doing ------------------------------------------------------------------------------
# A rank that computes for long, in an evaluation for example, finishes no step, and neither do ranks that wait for it,
# on this node and on others. So the node whose ranks have exceeded their limit asks all nodes to look at theirs. Node 0
# collects the answers, finds the ranks that all others wait for, and decides: if these compute, all nodes raise their
# limits, and otherwise the run hangs.
#
# Inquiries of a round are numbered. Each is a few messages among the agents: ``inquiry/<n>`` by the first node that
# asks, ``examined/<n>/<node>`` by all, ``verdict/<n>`` by node 0. If node 0 does not decide, another node does, by what
# it knows of its own ranks; the first verdict counts.


# How often a node looks whether another one asks.
_ASK_S = 1.0
# For how long node 0 waits for answers: longer than it takes to find out what ranks are doing.
_PATIENCE_S = 20.0
# How much longer other nodes wait for its verdict.
_MARGIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """What node 0 decided: whether the run hangs; if not, the ``computing`` ranks, and the same in words."""

    suspicion: Suspicion
    hangs: bool
    computing: Sequence[int] = ()
    why: str = ""


class HangInquiry:
    """One node's part of the inquiries of a round."""

    def __init__(
        self, node: int, members: Sequence[int], control: ControlStore, examine: Callable[[], list[RankState]]
    ) -> None:
        """Take part for ``node``, one of the nodes ``members``, which exchange messages through ``control``.

        ``examine``: finds out what the ranks of this node are doing, within seconds; called in a thread.
        """
        self._node = node
        self._members = members
        self._control = control
        self._examine = examine
        self._number = 0
        self._suspicion: Suspicion | None = None
        self._examination: _Examination | None = None
        self._answered = False
        self._give_up_at = 0.0
        self._next_look = 0.0

    def advance(
        self, suspicion: Suspicion | None, *, own_states: Sequence[RankState] | None = None
    ) -> HangVerdict | None:
        """Take the next step of the inquiry, if there is one, and return its verdict once. Call it repeatedly.

        ``suspicion``: this node's reason to ask; None: it has none. ``own_states``: what this node's ranks are doing,
        if that need not be found out.
        """
        try:
            if self._suspicion is None and not self._begin(suspicion, own_states):
                return None
            self._answer()
            if self._node == 0 or time.monotonic() >= self._give_up_at + _MARGIN_S:
                self._decide()
            return self._end()
        except CoordinatorGone:
            # Node 0 is gone, which ends the round.
            return None

    def _begin(self, suspicion: Suspicion | None, own_states: Sequence[RankState] | None) -> bool:
        """Ask, or notice that another node has asked. Returns whether there is an inquiry."""
        name, now = f"inquiry/{self._number}", time.monotonic()
        if suspicion is not None:
            self._control.publish(name, asdict(suspicion), first=True)
        elif now < self._next_look:
            return False
        self._next_look = now + _ASK_S
        message = self._control.read(name)
        if message is None:
            return False
        self._suspicion = Suspicion(**message)
        self._give_up_at = now + _PATIENCE_S
        self._examination = _Examination(self._examine if own_states is None else lambda: list(own_states))
        return True

    def _answer(self) -> None:
        """Publish what the ranks of this node are doing, once it is known."""
        assert self._examination is not None
        states = self._examination.states
        if states is not None and not self._answered:
            self._answered = True
            self._control.publish(self._examined(self._node), {"states": [state.to_dict() for state in states]})

    def _decide(self) -> None:
        """Decide once all nodes have answered that still can."""
        assert self._examination is not None
        # Only node 0 has the answers of others.
        answers = self._control.read_each(map(self._examined, self._members))
        missing = {node for node in self._members if self._examined(node) not in answers}
        missing -= set(self._control.silent_nodes())
        if missing and time.monotonic() < self._give_up_at:
            return
        states = [RankState.from_dict(state) for answer in answers.values() for state in answer["states"]]
        states = states if self._node == 0 else self._examination.states or []
        computing, why = computing_culprits(states)
        assert self._suspicion is not None
        if self._suspicion.limit_s >= self._suspicion.most_s:
            computing, why = [], ""
        message: dict[str, Any] = {"hangs": not computing, "computing": computing, "why": why}
        self._control.publish(f"verdict/{self._number}", message, first=True)

    def _end(self) -> HangVerdict | None:
        message = self._control.read(f"verdict/{self._number}")
        if message is None:
            return None
        assert self._suspicion is not None
        verdict = HangVerdict(suspicion=self._suspicion, **message)
        self._number += 1
        self._suspicion, self._examination, self._answered = None, None, False
        return verdict

    def _examined(self, node: int) -> str:
        return f"examined/{self._number}/{node}"


class _Examination(threading.Thread):
    """Finds out what the ranks of a node are doing. Nobody waits for it: files may be on a server that hangs too."""

    def __init__(self, examine: Callable[[], list[RankState]]) -> None:
        super().__init__(daemon=True)
        self._examine = examine
        self.states: list[RankState] | None = None
        self.start()

    def run(self) -> None:
        self.states = self._examine()
