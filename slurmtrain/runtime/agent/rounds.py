"""The rounds of an attempt: ranks start, end, and may be restarted without giving up the allocation.

When a round has ended on all nodes, node 0 decides which nodes have ranks in the next one, or that there is none, and
publishes that. Lost nodes drop out if the spec allows fewer nodes or requests spare ones. Node 0 cannot drop out: the
agents' messages go through it, and the batch script runs there.

If nodes of another job can join (``model/interruption/growth_policy``), the rounds end with the next stage of the
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

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.diagnosis.hang import RankState, find_culprits
from slurmtrain.model.experiment.spec import NODE_0
from slurmtrain.model.interruption.exit_report import (
    NODE_0_COMPLETED,
    AttemptOutcome,
    ExitReport,
    HangEvidence,
    LostNodes,
    NodeZeroCompleted,
    StopRequest,
    amend,
    report_attempt,
    report_signal,
    report_standby,
)
from slurmtrain.model.interruption.growth_policy import Stage
from slurmtrain.model.interruption.members import choose_members
from slurmtrain.model.interruption.policy import Newest, PriorEnd
from slurmtrain.model.run.events.agent_events import CommandCompleted, NodesJoined, NodesLeft, RanksRestarted
from slurmtrain.model.run.run import GROW
from slurmtrain.runtime.agent.hang_watch import SuspensionWatch
from slurmtrain.runtime.agent.job_query import JobQuery
from slurmtrain.runtime.agent.node_round import (
    Begin,
    Context,
    NodeResult,
    Round,
    RoundConfig,
    RoundHost,
)
from slurmtrain.runtime.job.heartbeat import Board
from slurmtrain.runtime.job.signals import StopFlag
from slurmtrain.runtime.peers.control_store import ControlStore
from slurmtrain.runtime.peers.peer_store import CoordinatorGone, Link
from slurmtrain.runtime.preflight.ports import reserve_port
from slurmtrain.runtime.setup.helpers import STOPPED_S
from slurmtrain.runtime.setup.setup_script import TEARDOWN_S
from slurmtrain.system.directories import DeletionWatch
from slurmtrain.system.journal import Journal

# Causes after which ranks may be restarted in the same allocation; any other cause ends the attempt.
_RESTARTABLE = frozenset({"crash", "hang", "node_fail"})
_POLL_S = 0.02
# How long an agent waits for the others at the end: they get node 0's last message from it.
_LEAVING_S = 30.0
# How much longer than node 0's command the commands of other nodes may run before that is worth a sentence.
_LONG_S = 30.0


class Rounds:
    """Runs this node's part of all rounds of an attempt."""

    def __init__(
        self,
        config: RoundConfig,
        host: RoundHost,
        link: Link,
        query: JobQuery,
        journal: Journal,
        flag: StopFlag,
    ) -> None:
        """Nothing is started before :meth:`run`.

        ``config``: what is fixed. ``host``: the agent. ``link``: the agents' messages. ``query``: asks Slurm about the
        job when a signal arrives. ``journal``: this node's. ``flag``: set by a signal to this agent.
        """
        self._context = Context(
            config=config, host=host, query=query, journal=journal, flag=flag,
            control=ControlStore(link, config.node, config.nodes),
            board=Board(config.spec.resources.local_world_size),
            directory=DeletionWatch(config.attempt.run.path, config.attempt.run.plan.name),
        )  # fmt: skip
        self._config = config
        self._host = host
        self._control = self._context.control
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
        suspensions = SuspensionWatch(self._context.journal.write)
        if self._config.node == 0:
            suspensions.start()
        try:
            while True:
                self._control.begin_round(self._number, self._members)
                if self._number == self._config.stage.round:
                    self._set_up()
                # Agents leave the preflight, or the previous round, at different times. Ranks that started earlier
                # would wait for the ranks of a node that a signal may be stopping right now.
                self._control.gather("here", give_up=lambda: self._context.flag.raised is not None)
                if self._context.flag.raised is not None and self._number == self._config.stage.round:
                    self._publish_stopped()
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
                self._tear_down()
            suspensions.stop()
            self._leave()
            self._context.board.close()
            self._context.directory.close()
            self._release_port()

    # --- one round ------------------------------------------------------------------------------------------------

    def _publish_stopped(self) -> None:
        """Tell the other nodes that a signal came before this node had ranks: some may have started theirs already."""
        name, now, node = self._context.flag.name, time.time(), self._config.node
        assert name is not None
        self._control.publish_stop(StopRequest.by_signal(name, at=now, node=node))
        self._publish_result(NodeResult(report=report_signal(name, at=now)))

    def _set_up(self) -> None:
        """Run what the spec has this node run before its ranks; if that fails, no node starts any."""
        report = self._control.call_alive(self._host.set_up_node)
        if report is not None:
            self._control.publish_first("unready", report.to_dict())

    def _read_unready(self) -> ExitReport | None:
        """Why a node cannot have ranks, as it has published before all nodes met; None if all can."""
        with contextlib.suppress(CoordinatorGone):
            message = self._control.read("unready")
            return None if message is None else ExitReport.from_dict(message)
        return None

    def _tear_down(self) -> None:
        """Run what the spec has this node run at the end, within what a stop leaves."""
        until = time.monotonic() + TEARDOWN_S
        if self._must_stop():
            until = self._round.stop_by() if self._round is not None else time.monotonic() + STOPPED_S
        self._control.call_alive(lambda: self._host.tear_down_node(until))

    def _take_part(self) -> NodeResult:
        """Run this node's ranks from start to end. If they cannot start, the round ends on all nodes."""
        node = self._config.node
        try:
            if node == 0:
                self._begin()
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

    def _begin(self) -> None:
        """On node 0: find the checkpoint to resume from and the port where ranks meet, and let the round begin."""
        resume_from, self._began = self._control.call_alive(self._host.find_checkpoint)
        mlflow_run_id = self._control.call_alive(self._host.find_mlflow_run)
        self._control.publish("begin", asdict(Begin(self._prepare_port(), resume_from, mlflow_run_id)))

    def _prepare_port(self) -> int:
        """The port where the ranks of the next round meet, which is kept free for rank 0.

        Each round has a port of its own. Torch keeps the addresses of a process group in the store, and ranks must not
        see addresses of an earlier round; and whatever still listens at an earlier port must not be taken for rank 0.
        """
        config = self._config
        if self._number != config.stage.round or self._reserved_port is None:
            self._release_port()
            self._reserved_port = reserve_port(f"{config.job_id}/{self._number}", config.restart)
        return int(self._reserved_port.getsockname()[1])

    def _release_port(self) -> None:
        if self._reserved_port is not None:
            self._reserved_port.close()
            self._reserved_port = None

    # --- what follows -----------------------------------------------------------------------------------------------

    def _decide_next(self, own: NodeResult | None) -> AttemptOutcome | Stage | None:
        """On node 0: learn how the round ended on all nodes, and begin another one if that is allowed."""
        assert own is not None  # node 0 always has ranks
        results, lost = self._collect(own)
        attempt_report = self._report_attempt(results, lost)
        if self._completed_before is not None:
            attempt_report = amend(attempt_report, self._completed_before)
        leaving = self._leaving(attempt_report)
        lost = sorted({*lost, *leaving})
        self._lost |= set(lost)
        members, stage = None, None
        if leaving:
            members = self._go_on_without(attempt_report, own.reached, lost)
        elif attempt_report.cause == GROW:
            members, stage = self._grow(attempt_report, own.reached, lost)
        elif attempt_report.cause in _RESTARTABLE:
            members = self._restart(attempt_report, own.reached, self._nodes_to_blame(attempt_report, results), lost)
        if attempt_report.cause == GROW and members is None and stage is None:
            attempt_report = self._report_stop()
            own = replace(own, report=attempt_report)
        self._publish_next(members, lost, attempt_report, stage)
        self._control.drop_nodes(lost)
        if stage is not None:
            return stage
        if members is None:
            # Lost nodes write no report, and in a hang each node only knows about itself: node 0 reports for them.
            all_nodes = bool(lost) or attempt_report.cause == "hang" or NODE_0_COMPLETED in attempt_report.evidence
            return AttemptOutcome(attempt_report if all_nodes else own.report, attempt_report)
        self._begin_next(members)
        return None

    def _publish_next(
        self, members: Sequence[int] | None, lost: Sequence[int], report: ExitReport, stage: Stage | None
    ) -> None:
        self._control.publish(
            "next",
            {
                "members": members,
                "lost": sorted(lost),
                "report": report.to_dict(),
                "stage": None if stage is None else stage.to_dict(),
            },
        )

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
        if decided["stage"] is not None and self._config.node not in decided["lost"]:
            return Stage.from_dict(decided["stage"])
        self._is_dropped = self._config.node in decided["lost"]
        # Node 0 may have given up this node, for example after a long network outage: others then do its work.
        if decided["members"] is None or self._config.node in decided["lost"]:
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

    def _collect(self, own: NodeResult) -> tuple[dict[int, NodeResult], list[int]]:
        """How the round ended on each node that reports, and which nodes were lost."""
        control, flag = self._control, self._context.flag
        results = {self._config.node: own}
        missing = set(self._members) - {self._config.node}
        published = False
        ended_at = time.time()
        self._completed_before = None
        if own.report.cause == "completed" and missing and self._config.spec.completed_by == NODE_0:
            why = "the command of node 0 completed, and with it the run (completed_by: node0)"
            control.publish_stop(StopRequest(cause="completed", why=why, at=ended_at, node=self._config.node))
            published = True
        while missing - set(control.silent_nodes()):
            control.keep_alive()
            for node in list(missing):
                message = control.read(f"ended/{node}")
                if message is not None:
                    missing.discard(node)
                    results[node] = NodeResult.from_dict(message)
            if flag.name is not None and not published:
                # The ranks of this node have ended, so nothing else looks at the flag any more.
                published = True
                control.publish_stop(StopRequest.by_signal(flag.name, at=time.time(), node=self._config.node))
            if self._round is not None:
                self._round.judge_hang_elsewhere()
            if own.report.cause == "completed" and not published and time.time() > ended_at + _LONG_S:
                self._note_completed(ended_at, missing)
            time.sleep(_POLL_S)
        return results, sorted({*missing, *control.silent_nodes()})

    def _note_completed(self, at: float, missing: Collection[int]) -> None:
        """Journal once that the command of this node has completed, while others go on; ``at``: when it has."""
        if self._completed_before is None and self._config.spec.per_node:
            names = [self._config.hosts.get(node, f"node {node}") for node in sorted(missing)]
            self._completed_before = NodeZeroCompleted(at=at, names=names)
            self._context.journal.write(CommandCompleted(at=at, running=names))

    def _report_attempt(self, results: Mapping[int, NodeResult], lost: Collection[int]) -> ExitReport:
        """Why the round ended."""
        hosts = self._config.hosts
        states = _states_of(results)
        members = sorted(set(lost) & set(self._members))
        lost_nodes = LostNodes(
            names=[hosts.get(node, f"node {node}") for node in members],
            hosts=[hosts[node] for node in members if node in hosts],
            at=time.time(),
        )
        return report_attempt(
            [result.report for result in results.values()],
            hang=HangEvidence(find_culprits(states)[1]) if states else None,
            lost=lost_nodes if members else None,
        )

    def _nodes_to_blame(self, attempt_report: ExitReport, results: Mapping[int, NodeResult]) -> Collection[int]:
        """The nodes whose ranks failed, or hang while ranks of other nodes wait for them."""
        blamed = {
            node for node, result in results.items() if result.report is attempt_report or result.report.gpu_failed
        }
        if attempt_report.cause == "hang":
            states = _states_of(results)
            ranks = find_culprits(states)[0]
            hanging = {state.node for state in states if state.rank in ranks}
            # If all nodes have hanging ranks, none is more to blame than another.
            blamed |= hanging if len(hanging) < len(self._members) else set()
        return blamed

    def _restart(
        self, attempt_report: ExitReport, reached: int | None, blamed: Collection[int], lost: Sequence[int]
    ) -> list[int] | None:
        """The nodes that have ranks in the next round, whose cause is journaled; None if there is no next round."""
        spec = self._config.spec
        if not self._has_restarts_left():
            return None
        end = PriorEnd.of_report(
            attempt_report,
            at=time.time(),
            began=self._began,
            left=self._control.call_alive(self._host.newest_checkpoint),
            reached=reached,
            in_place=True,
        )
        if not self._control.call_alive(lambda: self._host.ask_policy(end)).again:
            return None
        # Before deciding whether there is a next round: its members are chosen by all failures so far.
        self._blamed += blamed
        members = choose_members(self._config.nodes, spec.resources.nodes, lost=self._lost, blamed=self._blamed)
        if members is None:
            return None
        self._restarts += 1
        self._note_restart(attempt_report, members, lost, reached, past=end)
        return members

    def _has_restarts_left(self) -> bool:
        """Whether the spec allows another round, and no stop is requested."""
        requeue = self._config.spec.requeue
        return requeue.enabled and self._restarts < requeue.restarts_in_place and not self._must_stop()

    def _must_stop(self) -> bool:
        """Whether a signal has come, or the time limit is near."""
        deadline = self._config.deadline
        return self._context.flag.raised is not None or (deadline is not None and time.monotonic() >= deadline)

    def _report_stop(self) -> ExitReport:
        """The report of an attempt that has to end while it would have grown."""
        if self._context.flag.name is not None:
            return report_signal(self._context.flag.name, at=time.time())
        return ExitReport(cause="timeout", reason="the time limit was reached", failed_at=time.time())

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
        self._context.journal.write(
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

    # --- more nodes, and fewer ----------------------------------------------------------------------------------------

    def _leaving(self, report: ExitReport) -> list[int]:
        """The nodes of another job whose end ended the round, by their places; empty if it was something else."""
        stop = self._control.read("stop")
        if stop is None or report.signal is None or self._must_stop():
            return []
        stage = self._config.stage
        return stage.places_of_job(stage.job_of(stop["node"]))

    def _go_on_without(self, report: ExitReport, reached: int | None, lost: Sequence[int]) -> list[int] | None:
        """The nodes of the next round, after another job's nodes have left; None if there are too few."""
        spec, config = self._config.spec, self._config
        members = choose_members(config.nodes, spec.resources.nodes, lost=self._lost, blamed=self._blamed)
        if members is None:
            return None
        job_id = next(job for place in lost if (job := config.stage.job_of(place)))
        hosts = [config.hosts.get(place, f"node {place}") for place in config.stage.places_of_job(job_id)]
        self._note_restart(report, members, lost, reached)
        self._context.journal.write(NodesLeft(job_id=job_id, hosts=hosts, why=report.reason))
        if self._growth is not None:
            self._growth.nodes_left(job_id, hosts)
        return members

    def _grow(
        self, report: ExitReport, reached: int | None, lost: Sequence[int]
    ) -> tuple[list[int] | None, Stage | None]:
        """The next stage, with newcomers; or, if they have left meanwhile, the nodes of the next round.

        Both are None if the attempt has to end now.
        """
        if self._must_stop() or self._growth is None:
            return None, None
        spec, config = self._config.spec, self._config
        newcomers = self._growth.newcomers()
        if not newcomers:
            members = choose_members(config.nodes, spec.resources.nodes, lost=self._lost, blamed=self._blamed)
            if members is not None:
                self._note_restart(report, members, lost, reached)
            return members, None
        stage = replace(
            config.stage.grown(newcomers, config.hosts, round=self._number + 1, lost=self._lost),
            restarts=self._restarts,
        )
        nodes = min(len(stage.roster), spec.resources.nodes.max)
        staying = [place for place in range(config.nodes) if place not in self._lost]
        self._note_restart(report, staying, lost, reached, joined=[each.number for each in newcomers])
        for job_id in dict.fromkeys(each.job_id for each in newcomers):
            hosts = [each.host for each in newcomers if each.job_id == job_id]
            self._context.journal.write(NodesJoined(job_id=job_id, hosts=hosts, nodes=nodes))
        growth = self._growth
        self._control.call_alive(lambda: growth.admit(stage))
        return None, stage

    def _report_without_node_0(self) -> ExitReport:
        """The report of a node that has lost node 0."""
        if self._context.flag.name is not None:
            return report_signal(self._context.flag.name, at=time.time())
        return ExitReport(cause="node_fail", reason="node 0 no longer answers", failed_at=time.time(), cascade=True)

    def _leave(self) -> None:
        """Wait until the other nodes have ended too, so that they get what node 0 has published."""
        if self._is_dropped:
            return  # the others go on without it
        deadline = time.monotonic() + _LEAVING_S + (TEARDOWN_S if self._config.spec.teardown else 0.0)
        self._control.gather("left", give_up=lambda: time.monotonic() > deadline)


def _states_of(results: Mapping[int, NodeResult]) -> list[RankState]:
    """What the ranks of all nodes were doing."""
    return [state for result in results.values() for state in result.states]
