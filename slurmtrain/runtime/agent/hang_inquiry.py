"""Before ranks are ended because one hangs: what are all ranks of the run doing?

A rank that computes for long, in an evaluation for example, finishes no step, and neither do ranks that wait for it, on
this node and on others. So the node whose ranks have exceeded their limit asks all nodes to look at theirs. Node 0
collects the answers, finds the ranks that all others wait for, and decides: if these compute, all nodes raise their
limits, and otherwise the run hangs.

Inquiries of a round are numbered. Each is a few messages among the agents: ``inquiry/<n>`` by the first node that
asks, ``examined/<n>/<node>`` by all, ``verdict/<n>`` by node 0. If node 0 does not decide, another node does, by what
it knows of its own ranks; the first verdict counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slurmtrain.model.diagnosis.hang import RankState, computing_culprits
from slurmtrain.runtime.peers.control_store import ControlStore
from slurmtrain.runtime.peers.store import CoordinatorGone

# How often a node looks whether another one asks.
_LOOK_S = 1.0
# For how long node 0 waits for answers: longer than it takes to find out what ranks are doing.
_PATIENCE_S = 20.0
# How much longer other nodes wait for its verdict.
_MARGIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """Why a node asks.

    ``node``: this node. ``why``: which ranks finished no step, and for how long. ``limit_s``: the limit that they
    exceeded; ``most_s``: the longest that it may become.
    """

    node: int
    why: str
    limit_s: float
    most_s: float


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
            self._control.publish_first(name, asdict(suspicion))
        elif now < self._next_look:
            return False
        self._next_look = now + _LOOK_S
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
        self._control.publish_first(f"verdict/{self._number}", message)

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
