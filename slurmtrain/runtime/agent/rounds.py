"""The rounds of an attempt: ranks start, end, and may be restarted without giving up the allocation.

When a round has ended on all nodes, node 0 decides which nodes have ranks in the next one, or that there is none, and
publishes that. Lost nodes drop out if the spec allows fewer nodes or requests spare ones. Node 0 cannot drop out: the
agents' messages go through it, and the batch script runs there.

If nodes of another job can join (``model/interruption/members``), the rounds end with the next stage of the
attempt: its agents then have a preflight, connections and rounds of their own. Nodes of another job that leave,
because that job is preempted, drop out like lost ones.

The ranks of each round meet at a store that rank 0 opens, at another port, since torch keeps the addresses of a process
group in it. Each round also has its own journals and unfinished checkpoints, so that a rank still alive on a lost node
does no harm.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.diagnosis.hang import RankState, find_culprits
from slurmtrain.model.experiment.spec import NODE_0
from slurmtrain.model.interruption.exit_report import (
    NODE_0_COMPLETED,
    AttemptOutcome,
    ExitReport,
    LostNodes,
    NodeZeroCompleted,
    StopRequest,
    amend,
    report_attempt,
    report_signal,
    report_standby,
)
from slurmtrain.model.interruption.members import Stage, choose_members
from slurmtrain.model.interruption.policy import Newest, PriorEnd
from slurmtrain.model.run.events.agent_events import CommandCompleted, NodesJoined, NodesLeft, RanksRestarted
from slurmtrain.model.run.run import GROW
from slurmtrain.runtime.agent.hang_watch import SuspensionWatch
from slurmtrain.runtime.agent.helpers import STOPPED_S
from slurmtrain.runtime.agent.node_round import Begin, Context, NodeResult, Round, RoundConfig
from slurmtrain.runtime.environment.setup_script import TEARDOWN_S
from slurmtrain.runtime.job.heartbeat import Board
from slurmtrain.runtime.peers.control_store import ControlStore
from slurmtrain.runtime.peers.peer_store import CoordinatorGone, Link
from slurmtrain.runtime.preflight.ports import reserve_port
from slurmtrain.system.directories import DeletionWatch

if TYPE_CHECKING:
    from slurmtrain.runtime.agent.agent import NodeAgent

# Causes after which ranks may be restarted in the same allocation; any other cause ends the attempt.
_RESTARTABLE = frozenset({"crash", "hang", "node_fail"})
_POLL_S = 0.02
# How long an agent waits for the others at the end: they get node 0's last message from it.
_LEAVING_S = 30.0
# How much longer than node 0's command the commands of other nodes may run before that is worth a sentence.
_LONG_S = 30.0


class Rounds:
    """Runs this node's part of all rounds of an attempt."""

    def __init__(self, config: RoundConfig, host: NodeAgent, link: Link) -> None:
        """Nothing is started before :meth:`run`.

        ``config``: what is fixed. ``host``: the agent. ``link``: the agents' messages.
        """
        self._context = Context(
            config=config,
            host=host,
            control=ControlStore(link, config.node, config.nodes),
            board=Board(config.spec.resources.local_world_size),
            directory=DeletionWatch(config.attempt.run.path, config.attempt.run.plan.name),
        )
        self._config = config
        self._host = host
        self._control = self._context.control
        self._flag = host.flag
        self._number = config.stage.round
        self._restarts = config.stage.restarts
        self._growth = host.growth
        self._is_dropped = False
        self._members: Sequence[int] = range(min(config.nodes, config.spec.resources.nodes.max))
        self._lost: set[int] = set()
        # Contains a node once for each round that failed because of it.
        self._blamed: list[int] = []
        self._began = Newest()
        self._completed_before: NodeZeroCompleted | None = None
        self._round: Round | None = None
        # What keeps the port where ranks meet free for rank 0.
        self._reserved_port = config.reserved

    def run(self) -> AttemptOutcome | Stage | None:
        """Run all rounds, and return how the attempt ended, or the stage that follows.

        Returns None if a signal stopped it before the first of these rounds.
        """
        goes_on = False
        suspensions = SuspensionWatch(self._host.journal.write)
        if self._config.node == 0:
            suspensions.start()
        try:
            while True:
                self._control.begin_round(self._number, self._members)
                is_first = self._number == self._config.stage.round
                report = self._control.call_alive(self._host.set_up_node) if is_first else None
                if report is not None:
                    self._control.publish("unready", report.to_dict(), first=True)
                # Agents leave the preflight, or the previous round, at different times. Ranks that started earlier
                # would wait for the ranks of a node that a signal may be stopping right now.
                self._control.gather("here", give_up=lambda: self._flag.raised is not None)
                if is_first and (name := self._flag.name) is not None:
                    # Other nodes may have started their ranks already.
                    self._publish_stop(name)
                    self._publish_result(NodeResult(report=report_signal(name, at=time.time())))
                    return None
                unready = self._read_unready()
                if unready is not None:
                    return AttemptOutcome(unready, unready)
                result = self._take_part() if self._config.node in self._members else None
                # Others need not wait for each other, but for node 0, which leaves if one of them is unready.
                unready = self._read_unready() if result is not None and result.report.cascade else None
                if unready is not None:
                    return AttemptOutcome(unready, unready)
                outcome = self._decide_next(result) if self._config.node == 0 else self._follow_node_0(result)
                if outcome is not None:
                    goes_on = isinstance(outcome, Stage)
                    return outcome
        finally:
            if not goes_on:
                until = time.monotonic() + TEARDOWN_S
                if self._must_stop():
                    # Within what the stop leaves.
                    until = self._round.stop_by() if self._round is not None else time.monotonic() + STOPPED_S
                self._control.call_alive(lambda: self._host.tear_down_node(until))
            suspensions.stop()
            self._leave()

    def _leave(self) -> None:
        """Wait until the other nodes have ended too, so that they get what node 0 has published; release resources."""
        if not self._is_dropped:  # the others would go on without this node
            deadline = time.monotonic() + _LEAVING_S + (TEARDOWN_S if self._config.spec.teardown else 0.0)
            self._control.gather("left", give_up=lambda: time.monotonic() > deadline)
        self._context.board.close()
        self._context.directory.close()
        if self._reserved_port is not None:
            self._reserved_port.close()

    # --- one round ------------------------------------------------------------------------------------------------

    def _read_unready(self) -> ExitReport | None:
        """Why a node cannot have ranks, as it has published before all nodes met; None if all can."""
        with contextlib.suppress(CoordinatorGone):
            message = self._control.read("unready")
            return None if message is None else ExitReport.from_dict(message)
        return None

    def _take_part(self) -> NodeResult:
        """Run this node's ranks from start to end. If they cannot start, the round ends on all nodes."""
        node = self._config.node
        try:
            if node == 0:
                resume_from, self._began = self._control.call_alive(self._host.find_checkpoint)
                mlflow_run_id = self._control.call_alive(self._host.find_mlflow_run)
                if self._number != self._config.stage.round or self._reserved_port is None:
                    # Each round has a port of its own. Torch keeps the addresses of a process group in the store, and
                    # ranks must not see the addresses of an earlier round; and what still listens there is not rank 0.
                    if self._reserved_port is not None:
                        self._reserved_port.close()
                    job = f"{self._config.job_id}/{self._number}"
                    self._reserved_port = reserve_port(job, self._config.restart)
                port = int(self._reserved_port.getsockname()[1])
                self._control.publish("begin", asdict(Begin(port, resume_from, mlflow_run_id)))
            begin = self._control.wait_for("begin")
            if begin is None:
                return NodeResult(report=self._report_without_node_0())
            self._round = Round(self._context, self._number, self._members, Begin(**begin))
            return self._round.run()
        except SlurmtrainError as error:
            if node == 0 and self._control.read("begin") is None:
                # The other nodes still wait for the message that begins the round. Only this node's leaving, which
                # follows now, ends their wait.
                raise
            reason, now = str(error), time.time()
            self._control.publish_stop(StopRequest(cause="crash", why=reason, at=now, node=node))
            return NodeResult(report=ExitReport(cause="crash", reason=reason, failed_at=now))

    # --- what follows -----------------------------------------------------------------------------------------------

    def _decide_next(self, own: NodeResult | None) -> AttemptOutcome | Stage | None:
        """On node 0: learn how the round ended on all nodes, and begin another one if that is allowed."""
        assert own is not None  # node 0 always has ranks
        results, lost = self._collect(own)
        report = self._report_attempt(results, lost)
        stop = self._control.read("stop")
        leaving: Sequence[int] = ()
        if stop is not None and report.signal is not None and not self._must_stop():
            # Nodes of another job, whose end has ended the round; none if something else has.
            leaving = self._config.stage.places_of_job(self._config.stage.job_of(stop["node"]))
        lost = sorted({*lost, *leaving})
        self._lost |= set(lost)
        members, stage = None, None
        if leaving:
            members = self._go_on_without(report, own.reached, lost)
        elif report.cause == GROW:
            members, stage = self._grow(report, own.reached, lost)
            if members is None and stage is None:
                at = time.time()
                limit = ExitReport(cause="timeout", reason="the time limit was reached", failed_at=at)
                report = limit if self._flag.name is None else report_signal(self._flag.name, at=at)
                own = replace(own, report=report)
        elif report.cause in _RESTARTABLE:
            members = self._restart(report, own.reached, results, lost)
        plain = None if stage is None else stage.to_dict()
        self._control.publish("next", {"members": members, "lost": lost, "report": report.to_dict(), "stage": plain})
        self._control.drop_nodes(lost)
        if stage is not None:
            return stage
        if members is None:
            # Lost nodes write no report, and in a hang each node only knows about itself: node 0 reports for them.
            all_nodes = bool(lost) or report.cause == "hang" or NODE_0_COMPLETED in report.evidence
            return AttemptOutcome(report if all_nodes else own.report, report)
        self._begin_next(members)
        return None

    def _follow_node_0(self, own: NodeResult | None) -> AttemptOutcome | Stage | None:
        """On any other node: publish how the round ended here, and do what node 0 decides."""
        if own is not None:
            self._publish_result(own)
        decided = self._control.wait_for("next")
        if decided is None:
            # Node 0 is gone. Work that is known to be done stays done.
            completed = own is not None and own.report.cause == "completed"
            report = own.report if own is not None and completed else self._report_without_node_0()
            return AttemptOutcome(report, report)
        # Node 0 may have given up this node, for example after a long network outage: others then do its work.
        self._is_dropped = self._config.node in decided["lost"]
        if decided["stage"] is not None and not self._is_dropped:
            return Stage.from_dict(decided["stage"])
        if decided["members"] is None or self._is_dropped:
            attempt_report = ExitReport.from_dict(decided["report"])
            node_report = own.report if own is not None else report_standby(attempt_report)
            return AttemptOutcome(node_report, attempt_report)
        self._begin_next(decided["members"])
        return None

    def _begin_next(self, members: Sequence[int]) -> None:
        self._members = members
        self._number += 1

    def _publish_result(self, result: NodeResult) -> None:
        self._control.publish(f"ended/{self._config.node}", result.to_dict())

    def _publish_stop(self, signal: str) -> None:
        self._control.publish_stop(StopRequest.by_signal(signal, at=time.time(), node=self._config.node))

    def _collect(self, own: NodeResult) -> tuple[dict[int, NodeResult], list[int]]:
        """How the round ended on each node that reports, and which nodes were lost."""
        control, node = self._control, self._config.node
        results = {node: own}
        missing = set(self._members) - {node}
        published, is_completed, ended_at = False, own.report.cause == "completed", time.time()
        self._completed_before = None
        if is_completed and missing and self._config.spec.completed_by == NODE_0:
            why = "the command of node 0 completed, and so did the run (completed_by: node0)"
            control.publish_stop(StopRequest(cause="completed", why=why, at=ended_at, node=node))
            published = True
        while missing - set(control.silent_nodes()):
            control.keep_alive()
            for other in list(missing):
                message = control.read(f"ended/{other}")
                if message is not None:
                    missing.discard(other)
                    results[other] = NodeResult.from_dict(message)
            if self._flag.name is not None and not published:
                # The ranks of this node have ended, so nothing else looks at the flag any more.
                published = True
                self._publish_stop(self._flag.name)
            if self._round is not None:
                self._round.judge_hang_elsewhere()
            is_late = is_completed and not published and time.time() > ended_at + _LONG_S
            if is_late and self._completed_before is None and self._config.spec.per_node:
                names = list(map(self._name, sorted(missing)))
                self._completed_before = NodeZeroCompleted(at=ended_at, names=names)
                self._host.journal.write(CommandCompleted(at=ended_at, running=names))
            time.sleep(_POLL_S)
        return results, sorted({*missing, *control.silent_nodes()})

    def _report_attempt(self, results: Mapping[int, NodeResult], lost: Collection[int]) -> ExitReport:
        """Why the round ended."""
        hosts, states = self._config.hosts, _states_of(results)
        members = sorted(set(lost) & set(self._members))
        lost_nodes = LostNodes(
            names=list(map(self._name, members)),
            hosts=[hosts[node] for node in members if node in hosts],
            at=time.time(),
        )
        report = report_attempt(
            [result.report for result in results.values()],
            hang=find_culprits(states)[1] if states else None,
            lost=lost_nodes if members else None,
        )
        return report if self._completed_before is None else amend(report, self._completed_before)

    def _name(self, node: int) -> str:
        return self._config.hosts.get(node, f"node {node}")

    def _restart(
        self, report: ExitReport, reached: int | None, results: Mapping[int, NodeResult], lost: Sequence[int]
    ) -> list[int] | None:
        """The nodes that have ranks in the next round, whose cause is journaled; None if there is no next round."""
        requeue = self._config.spec.requeue
        if not requeue.enabled or self._restarts >= requeue.restarts_in_place or self._must_stop():
            return None
        end = PriorEnd.of_report(
            report,
            at=time.time(),
            began=self._began,
            left=self._control.call_alive(self._host.checkpoints.newest),
            reached=reached,
            in_place=True,
        )
        if not self._control.call_alive(lambda: self._host.ask_policy(end)).again:
            return None
        # The nodes whose ranks failed, or hang while ranks of other nodes wait for them.
        blamed = {node for node, result in results.items() if result.report is report or result.report.gpu_failed}
        if report.cause == "hang":
            states = _states_of(results)
            ranks = find_culprits(states)[0]
            hanging = {state.node for state in states if state.rank in ranks}
            # If all nodes have hanging ranks, none is more to blame than another.
            blamed |= hanging if len(hanging) < len(self._members) else set()
        # Before deciding whether there is a next round: its members are chosen by all failures so far.
        self._blamed += blamed
        members = self._choose_members()
        if members is None:
            return None
        self._restarts += 1
        self._note_restart(report, members, lost, reached, past=end)
        return members

    def _choose_members(self) -> list[int] | None:
        """The nodes that can have ranks in the next round; None if there are too few."""
        nodes = self._config.spec.resources.nodes
        return choose_members(self._config.nodes, nodes, lost=self._lost, blamed=self._blamed)

    def _must_stop(self) -> bool:
        """Whether a signal has come, or the time limit is near."""
        deadline = self._config.deadline
        return self._flag.raised is not None or (deadline is not None and time.monotonic() >= deadline)

    def _note_restart(
        self,
        report: ExitReport,
        members: Sequence[int],
        lost: Sequence[int],
        reached: int | None,
        *,
        past: PriorEnd | None = None,
        joined: Sequence[int] = (),
    ) -> None:
        """Journal that another round follows.

        ``past``: the end of this one, as the restart policy sees it. ``joined``: the numbers of newcomers.
        """
        roster = self._config.stage.roster
        self._host.journal.write(
            RanksRestarted(
                round=self._number + 1,
                members=[roster[place] for place in members],
                cause=report.cause,
                why=report.reason,
                failures=list(report.failures),
                lost=[roster[place] for place in lost],
                reached=reached,
                joined=list(joined) or None,
                past=None if past is None else past.to_dict(),
            )
        )

    def _report_without_node_0(self) -> ExitReport:
        """The report of a node that has lost node 0."""
        if self._flag.name is not None:
            return report_signal(self._flag.name, at=time.time())
        return ExitReport(cause="node_fail", reason="node 0 no longer answers", failed_at=time.time(), cascade=True)

    # --- more nodes, and fewer ----------------------------------------------------------------------------------------

    def _go_on_without(self, report: ExitReport, reached: int | None, lost: Sequence[int]) -> list[int] | None:
        """The nodes of the next round, after another job's nodes have left; None if there are too few."""
        config, members = self._config, self._choose_members()
        if members is None:
            return None
        job_id = next(job for place in lost if (job := config.stage.job_of(place)))
        hosts = list(map(self._name, config.stage.places_of_job(job_id)))
        self._note_restart(report, members, lost, reached)
        self._host.journal.write(NodesLeft(job_id=job_id, hosts=hosts, why=report.reason))
        if self._growth is not None:
            self._growth.nodes_left(job_id, hosts)
        return members

    def _grow(
        self, report: ExitReport, reached: int | None, lost: Sequence[int]
    ) -> tuple[list[int] | None, Stage | None]:
        """The next stage, with newcomers; or, if they have left meanwhile, the nodes of the next round.

        Both are None if the attempt has to end now.
        """
        growth, config = self._growth, self._config
        if self._must_stop() or growth is None:
            return None, None
        newcomers = growth.newcomers()
        if not newcomers:
            members = self._choose_members()
            if members is not None:
                self._note_restart(report, members, lost, reached)
            return members, None
        grown = config.stage.grown(newcomers, config.hosts, round=self._number + 1, lost=self._lost)
        stage = replace(grown, restarts=self._restarts)
        nodes = min(len(stage.roster), config.spec.resources.nodes.max)
        staying = [place for place in range(config.nodes) if place not in self._lost]
        self._note_restart(report, staying, lost, reached, joined=[each.number for each in newcomers])
        for job_id in dict.fromkeys(each.job_id for each in newcomers):
            hosts = [each.host for each in newcomers if each.job_id == job_id]
            self._host.journal.write(NodesJoined(job_id=job_id, hosts=hosts, nodes=nodes))
        self._control.call_alive(lambda: growth.admit(stage))
        return None, stage


def _states_of(results: Mapping[int, NodeResult]) -> list[RankState]:
    """What the ranks of all nodes were doing."""
    return [state for result in results.values() for state in result.states]
