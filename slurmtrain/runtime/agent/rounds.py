"""The rounds of an attempt: ranks are started, end, and may be started again without giving the nodes back.

When a round has ended on all nodes, node 0 says who has ranks in the next one, or that there is none. Nodes that are
lost drop out, where the spec allows for fewer or holds spare ones; node 0 cannot, for it keeps the store, and is where
the batch script runs.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.diagnosis.hang import RankState, find_culprits
from slurmtrain.model.interruption.exit_report import (
    AttemptOutcome,
    ExitReport,
    HangEvidence,
    LostNodes,
    StopRequest,
    amend,
    attempt_report,
    report_exits,
    report_signal,
    report_standby,
)
from slurmtrain.model.interruption.members import choose
from slurmtrain.model.interruption.policy import Decision, PriorEnd
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.model.spec.spec import Spec
from slurmtrain.runtime.agent.control_store import ControlStore
from slurmtrain.runtime.agent.job_query import JobQuery
from slurmtrain.runtime.agent.kernel_log import KernelState
from slurmtrain.runtime.agent.monitor import RankMonitor
from slurmtrain.runtime.agent.rendezvous import MeetingPoint, meet
from slurmtrain.runtime.agent.workers import Workers
from slurmtrain.runtime.job.heartbeat import Board
from slurmtrain.runtime.job.signals import StopFlag
from slurmtrain.system.journal import Journal

# What may follow in the same allocation; all else ends the attempt.
_RESTARTED = frozenset({"crash", "hang", "node_fail"})
_POLL_S = 0.02
_LEAVING_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all rounds have in common. ``hosts``: what nodes are called; ``executor`` is where they are.

    ``deadline``: when to ask for a stop, by the monotonic clock, ``lead_s`` before the time limit. ``prepare`` makes
    ready what ranks inherit, for the attempt's round, with the checkpoint to go on from and the path of their board,
    and returns what they run. ``resume_from`` finds that checkpoint. ``committed``: the step of the newest one.
    ``listen`` binds a port of an address for the ranks of a round.
    """

    attempt: AttemptDir
    spec: Spec
    journal: Journal
    flag: StopFlag
    point: MeetingPoint
    node: int
    nodes: int
    hosts: Mapping[int, str]
    address: str
    inquiry: JobQuery
    deadline: float | None
    lead_s: float
    prepare: Callable[[AttemptDir, str | None, str], list[str]]
    resume_from: Callable[[], str | None]
    committed: Callable[[], int]
    ask_policy: Callable[[PriorEnd], Decision]
    listen: Callable[[str, int], socket.socket]
    note_workers: Callable[[Mapping[int, int], str | None], None]


class Rounds:
    """This node's part in all of them."""

    def __init__(self, setting: Setting) -> None:
        self._of = setting
        self._peers = ControlStore(setting.point.store, setting.node, setting.nodes)
        self._board = Board(setting.spec.resources.local_world_size)
        self._number = 0
        self._members: Sequence[int] = range(min(setting.nodes, setting.spec.resources.nodes.max))
        self._lost: set[int] = set()
        self._blamed: list[int] = []
        self._began_at_step = 0
        self._states: list[RankState] = []
        self._store: Any = None  # of the ranks, as long as their round lasts
        self._reached: int | None = None

    def run(self) -> AttemptOutcome | None:
        """Start ranks until they need not be started again. None: stopped by a signal before the first began."""
        try:
            while True:
                self._peers.begin(self._number, self._members)
                self._peers.gather("here", given_up=lambda: self._of.flag.raised is not None)
                if self._of.flag.raised is not None and self._number == 0:
                    self._say_stopped()
                    return None
                own = self._take_part() if self._of.node in self._members else None
                outcome = self._next_of_all(own) if self._of.node == 0 else self._next_by_node_0(own)
                if outcome is not None:
                    return outcome
        finally:
            self._leave()
            self._board.close()

    # --- one round ------------------------------------------------------------------------------------------------

    def _say_stopped(self) -> None:
        """Tell the others, some of which may have begun, that a signal came before this node had."""
        stopped = self._without_node_0()
        at, node = stopped.failed_at or time.time(), self._of.node
        request = StopRequest(cause=stopped.cause, why=stopped.reason, at=at, node=node, signal=stopped.signal)
        self._peers.publish_stop(request)
        self._peers.say(f"ended/{node}", {"ending": stopped.to_dict(), "states": []})

    def _take_part(self) -> ExitReport:
        """This node's ranks, from start to end. What keeps them from starting ends the round everywhere."""
        node = self._of.node
        try:
            return self._train()
        except SlurmtrainError as error:
            if node == 0 and self._peers.hear("begin") is None:
                raise  # the others still wait for a word, and end when this node leaves
            why, now = str(error), time.time()
            self._peers.publish_stop(StopRequest(cause="crash", why=why, at=now, node=node))
            return ExitReport(cause="crash", reason=why, failed_at=now)

    def _train(self) -> ExitReport:
        of, spec = self._of, self._of.spec
        attempt = replace(of.attempt, round=self._number)
        if of.node == 0:
            self._began_at_step = self._peers.meanwhile(of.committed)
            resume_from = self._peers.meanwhile(of.resume_from)
            self._peers.say("begin", {"port": self._open_store(), "resume_from": resume_from})
        told = self._hear("begin")
        if told is None:
            return self._without_node_0()
        resume_from = told["resume_from"]
        self._board.reset()
        argv = self._peers.meanwhile(lambda: of.prepare(attempt, resume_from, self._board.path))
        vigil = RankMonitor(
            board=self._board,
            attempt=attempt,
            peers=self._peers,
            journal=of.journal,
            node=of.node,
            hosts=of.hosts,
            members=self._members,
            local_world_size=spec.resources.local_world_size,
            hang_after=spec.requeue.hang_after,
        )
        kernel = KernelState.now()

        def started(pids: Mapping[int, int]) -> None:
            vigil.started(pids)
            of.note_workers(pids, resume_from)

        workers = Workers(
            argv=argv,
            count=spec.resources.local_world_size,
            attempt=attempt,
            point=of.point,
            where=(of.point.address, told["port"]),
            peers=self._peers,
            node=of.node,
            members=self._members,
            local_addr=of.address,
            flag=of.flag,
            deadline=of.deadline,
            stop_by=signal.Signals[spec.requeue.signal],
            grace=self._until,
            hang=vigil.look,
            started=started,
            stopping=lambda request: self._stopping(request, vigil),
        )
        workers.run()
        self._states, self._reached = vigil.states, vigil.reached()
        return amend(report_exits(workers.exits(), workers.request, of.node), kernel.changes())

    def _open_store(self) -> int:
        """The port of the store that ranks meet at: the agents' own at first, then one that knows nothing of before."""
        if self._number == 0:
            return self._of.point.port
        address = self._of.point.address
        listener = self._of.listen(address, self._number)
        port = int(listener.getsockname()[1])
        self._store = meet((address, port), 0, self._of.nodes, listener).store
        return port

    def _stopping(self, request: StopRequest, vigil: RankMonitor) -> None:
        """The ranks are about to be asked to stop, or ended."""
        self._of.journal.write("stopping", cause=request.cause, why=request.why, signal=request.signal)
        if request.signal is not None and self._of.node == 0:
            self._of.inquiry.begin()
        if request.cause == "hang":
            self._peers.meanwhile(vigil.examine)

    def _until(self) -> float:
        """Until when ranks may take to save and leave, by the monotonic clock."""
        if self._of.flag.raised is None and self._of.deadline is not None and time.monotonic() >= self._of.deadline:
            return self._of.deadline + self._of.lead_s - 1.0
        until = self._of.inquiry.stop_by()
        if self._of.node == 0:
            # Clocks of the nodes have been compared.
            self._peers.say("until", {"at": time.time() + until - time.monotonic()})
            return until
        told = self._heard("until")
        return until if told is None else time.monotonic() + told["at"] - time.time()

    # --- what follows -----------------------------------------------------------------------------------------------

    def _next_of_all(self, own: ExitReport | None) -> AttemptOutcome | None:
        """At node 0: hear how the round ended everywhere, and have another one, if it may be."""
        assert own is not None  # node 0 always has ranks
        endings, states, lost = self._collect(own)
        root = self._root(endings, states, lost)
        self._lost |= set(lost)
        blamed = self._to_blame(root, endings, states)
        members = self._again(root, blamed, lost) if root.cause in _RESTARTED else None
        said = {"members": members, "lost": sorted(lost), "root": root.to_dict()}
        self._peers.say("next", said)
        self._peers.forget(lost)
        if members is None:
            # What a lost node or a hang has caused, node 0 says for all.
            return AttemptOutcome(root if lost or root.cause == "hang" else own, root)
        self._go_on(members)
        return None

    def _next_by_node_0(self, own: ExitReport | None) -> AttemptOutcome | None:
        """Elsewhere: say how the round ended here, and hear what node 0 makes of it."""
        if own is not None:
            said = {"ending": own.to_dict(), "states": [state.to_dict() for state in self._states]}
            self._peers.say(f"ended/{self._of.node}", said)
        told = self._hear("next")
        if told is None:
            ending = own if own is not None and own.cause == "completed" else self._without_node_0()
            return AttemptOutcome(ending, ending)
        if told["members"] is None or self._of.node in told["lost"]:
            root = ExitReport.from_dict(told["root"])
            ending = own if own is not None else report_standby(root)
            return AttemptOutcome(ending, root)
        self._go_on(told["members"])
        return None

    def _go_on(self, members: Sequence[int]) -> None:
        self._members = members
        self._number += 1

    def _collect(self, own: ExitReport) -> tuple[dict[int, ExitReport], list[RankState], list[int]]:
        """How the round ended on each node, what ranks were doing if it hung, and which nodes were lost."""
        endings, states = {self._of.node: own}, list(self._states)
        waiting = set(self._members) - {self._of.node}
        asked = False
        while waiting - set(self._peers.silent()):
            self._peers.keep_alive()
            for node in list(waiting):
                said = self._peers.hear(f"ended/{node}")
                if said is not None:
                    waiting.discard(node)
                    endings[node] = ExitReport.from_dict(said["ending"])
                    states += [RankState.from_dict(plain) for plain in said["states"]]
            if self._of.flag.raised is not None and not asked:
                asked = True
                name = self._of.flag.raised.name
                why = f"stopped by {name}"
                request = StopRequest(cause="preempted", why=why, at=time.time(), node=self._of.node, signal=name)
                self._peers.publish_stop(request)
            time.sleep(_POLL_S)
        return endings, states, sorted({*waiting, *self._peers.silent()})

    def _root(
        self, endings: Mapping[int, ExitReport], states: Sequence[RankState], lost: Collection[int]
    ) -> ExitReport:
        """Why the round ended."""
        gone = sorted(set(lost) & set(self._members))
        return attempt_report(
            list(endings.values()),
            HangEvidence(find_culprits(states)[1]) if states else None,
            LostNodes(
                names=[self._of.hosts.get(node, f"node {node}") for node in gone],
                hosts=[self._of.hosts[node] for node in gone if node in self._of.hosts],
                at=time.time(),
            )
            if gone
            else None,
        )

    def _to_blame(
        self, root: ExitReport, endings: Mapping[int, ExitReport], states: Sequence[RankState]
    ) -> Collection[int]:
        """The nodes on which ranks have failed, or hang while those of others wait for them."""
        blamed = {node for node, ending in endings.items() if ending is root or ending.gpu_failed}
        if root.cause == "hang":
            ranks = find_culprits(states)[0]
            hanging = {state.node for state in states if state.rank in ranks}
            blamed |= hanging if len(hanging) < len(self._members) else set()
        return blamed

    def _again(self, root: ExitReport, blamed: Collection[int], lost: Sequence[int]) -> list[int] | None:
        """The nodes that have ranks in the next round; None if there is to be none. Journals why there is."""
        of, requeue = self._of, self._of.spec.requeue
        if self._number >= requeue.restarts_in_place or of.flag.raised is not None or not requeue.enabled:
            return None
        if of.deadline is not None and time.monotonic() >= of.deadline:
            return None
        end = PriorEnd.of_report(
            root,
            at=time.time(),
            began_at_step=self._began_at_step,
            committed=self._peers.meanwhile(of.committed),
            reached=self._reached,
            in_place=True,
        )
        if not self._peers.meanwhile(lambda: of.ask_policy(end)).again:
            return None
        self._blamed += blamed
        members = choose(of.nodes, of.spec.resources.nodes, lost=self._lost, blamed=self._blamed)
        if members is None:
            return None
        of.journal.write(
            "restart",
            round=self._number + 1,
            members=members,
            cause=root.cause,
            why=root.reason,
            failures=list(root.failures),
            lost=list(lost),
            reached=self._reached,
            past=end.to_dict(),
        )
        return members

    # --- the store --------------------------------------------------------------------------------------------------

    def _hear(self, name: str) -> dict[str, Any] | None:
        """Wait for a word of node 0's; None where it is gone."""
        try:
            while (said := self._peers.hear(name)) is None:
                self._peers.keep_alive()
                if self._peers.hear("left/0") is not None:
                    return self._peers.hear(name)  # it may just have said it
                if 0 in self._peers.silent():
                    return None
                time.sleep(_POLL_S)
        except RuntimeError:
            return None
        return said

    def _heard(self, name: str) -> dict[str, Any] | None:
        """A word of node 0's, if it has said it."""
        with contextlib.suppress(RuntimeError):
            return self._peers.hear(name)
        return None

    def _without_node_0(self) -> ExitReport:
        if self._of.flag.name is not None:
            return report_signal(self._of.flag.name, at=time.time())
        return ExitReport(cause="node_fail", reason="node 0 no longer answers", failed_at=time.time(), cascade=True)

    def _leave(self) -> None:
        """Stay until the other nodes have ended too, so that the store outlives whoever uses it."""
        deadline = time.monotonic() + _LEAVING_S
        self._peers.gather("left", given_up=lambda: time.monotonic() > deadline)
