"""One round of ranks on a node, from their start to their end."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from slurmtrain.model.diagnosis.hang import RankState
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.interruption.exit_report import ExitReport, StopRequest, amend, report_exits
from slurmtrain.model.interruption.members import Newcomer, Stage
from slurmtrain.model.run.events.agent_events import LeftoversKilled, RanksExited, RanksStopping, WorkersStarted
from slurmtrain.model.run.events.base import Payload
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.model.run.run import GROW
from slurmtrain.runtime.agent.exits import KernelState
from slurmtrain.runtime.agent.monitor import RankMonitor
from slurmtrain.runtime.agent.script_metrics import OutputWatch, watch_output
from slurmtrain.runtime.agent.workers import RankPlacement, Workers
from slurmtrain.runtime.environment.setup_script import advise_on_python
from slurmtrain.runtime.environment.variables import environment_of_agent
from slurmtrain.runtime.job.heartbeat import Board
from slurmtrain.runtime.peers.control_store import ControlStore
from slurmtrain.runtime.peers.peer_store import CoordinatorGone
from slurmtrain.runtime.preflight.facts.cpus import bound_cpus
from slurmtrain.runtime.preflight.facts.gpus import load_nvml
from slurmtrain.system.directories import DeletionWatch
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import identify

if TYPE_CHECKING:
    from slurmtrain.runtime.agent.agent import NodeAgent

# Ranks are killed this long before the time limit at the latest, so that the agent can still report.
_LIMIT_MARGIN_S = 1.0
# Scripts that show no steps are taken to have begun after this time.
_SETTLED_S = 60.0
# A change of the time by which ranks must have ended is published if it is larger than this.
_UNTIL_CHANGE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundConfig:
    """The settings that all rounds of a stage of an attempt share.

    ``stage``: which agents take part. ``node``: the place of this one among them; ``nodes``: how many there are.
    ``job_id`` and ``restart``: this start of the job, from which ports are derived. ``hosts``: the names of nodes, if
    Slurm gives them. ``address``: node 0's, where ranks meet: rank 0 opens the store there. The agents do not use it,
    since their messages are authenticated (:mod:`slurmtrain.runtime.peers`), and a store is not. ``reserved``: on node
    0, the socket that keeps a port free for it. ``deadline``: when to ask for a stop, by the monotonic clock,
    ``lead_s`` seconds before the time limit; None: no limit.
    """

    attempt: AttemptDir
    spec: Spec
    stage: Stage
    node: int
    job_id: str
    restart: int
    hosts: Mapping[int, str]
    address: str
    reserved: socket.socket | None
    deadline: float | None
    lead_s: float

    @property
    def nodes(self) -> int:
        """How many nodes take part, with ranks or without."""
        return len(self.stage.roster)

    @property
    def number(self) -> int:
        """The number of this agent, which it has in all stages: its files are named by it."""
        return self.stage.roster[self.node]


@dataclass(frozen=True, slots=True)
class Begin:
    """What node 0 says of a round as it begins.

    ``port``: where the ranks meet. ``resume_from``: the path of the checkpoint; None: from the beginning.
    ``mlflow_run_id``: the run on its MLflow server; None: it has none, or that is unknown.
    """

    port: int
    resume_from: str | None
    mlflow_run_id: str | None = None


class MoreNodes(Protocol):
    """What gets more nodes for an attempt, on its node 0 (the plug-in of the group ``slurmtrain.growth``)."""

    def ranks_started(self, nodes: int) -> None:
        """Ranks have been started on so many ``nodes``."""

    def ranks_began(self, seconds: float) -> None:
        """Ranks have begun to train so many ``seconds`` after they were started."""

    def take_events(self) -> Sequence[Payload]:
        """What is to be journaled since the last call."""

    def newcomers(self) -> list[Newcomer]:
        """The newcomers that the ranks should stop for now; none if it is better to train on."""

    def admit(self, stage: Stage) -> None:
        """Let the agents in the roster of a ``stage`` begin. Raises PathError, OSError."""

    def nodes_left(self, job_id: str, hosts: Collection[str]) -> None:
        """Nodes called ``hosts`` of the job ``job_id`` take no part any more."""

    def note_unfit(self, journal: Journal, stage: Stage) -> None:
        """Note in node 0's ``journal`` that a ``stage`` could not begin because of its newcomers."""

    def end(self) -> None:
        """Cancel what waits in the queue, without waiting for that: the attempt ends."""

    def join(self) -> None:
        """Wait some seconds for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The objects that all rounds use; see :class:`~.rounds.Rounds`."""

    config: RoundConfig
    host: NodeAgent
    control: ControlStore
    board: Board
    directory: DeletionWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """How a round ended on a node.

    ``states``: what its ranks were doing, if the round hung. ``reached``: the last step that one of them finished; None
    if unknown.
    """

    report: ExitReport
    states: Sequence[RankState] = ()
    reached: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """This as JSON, as it is sent to node 0."""
        return {"report": self.report.to_dict(), "states": [state.to_dict() for state in self.states]}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> NodeResult:
        """Read what :meth:`to_dict` returned."""
        states = [RankState.from_dict(state) for state in plain["states"]]
        return cls(report=ExitReport.from_dict(plain["report"]), states=states)


class Round:
    """One round on this node: starts the ranks and supervises them (:class:`~.workers.Workers`)."""

    def __init__(self, context: Context, number: int, members: Sequence[int], begin: Begin) -> None:
        """``context``: shared by all rounds. ``number``: from 0 on. ``members``: the nodes that have ranks.

        ``begin``: the state that the ranks begin with.
        """
        config = context.config
        self._context = context
        self._config = config
        self._control = context.control
        self._begin = begin
        attempt = replace(config.attempt, round=number)
        self._placement = RankPlacement(config=config, attempt=attempt, members=members, port=begin.port)
        self._published_until = 0.0
        self._began_at = time.monotonic()
        self._have_begun = False
        # Whether the ranks are stopped because of a signal to nodes of another job.
        self._is_of_others = False
        self._output: OutputWatch | None = None
        self._monitor = RankMonitor(self._placement, context.board, context.control, context.host.journal)

    def run(self) -> NodeResult:
        """Start the ranks, and wait until they end. Raises SlurmtrainError."""
        config, context = self._config, self._context
        context.host.query.forget_others()
        # Before the ranks learn about the board: heartbeats of the previous round must not count in this one.
        context.board.reset()
        argv = self._control.call_alive(
            lambda: context.host.prepare_ranks(self._placement, self._begin, context.board.path)
        )
        kernel = KernelState.now()
        workers = Workers(self._placement, argv, context, self)
        if config.node == 0:
            self._output = watch_output(config.spec, self._placement.attempt, context.host.checkpoints.resumed_at)
        sampler: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if config.spec.tracking.system_metrics:
            from slurmtrain.runtime.agent.gauges import Gauges
            from slurmtrain.runtime.agent.monitor import Sampler

            path = config.attempt.system_metrics(config.number)
            sampler = Sampler(path, lambda: Gauges(environment_of_agent(), load_nvml(), path), self._monitor.last_step)
        try:
            with sampler:
                workers.run()
        finally:
            workers.end_leftovers()
            if self._output is not None:
                in_grace = workers.request is not None and workers.request.signal is not None
                self._output.end(in_grace=in_grace)
        exits = workers.exits()
        if workers.request is None and not any(each.code for each in exits):
            self._monitor.completed()
        if workers.request is not None:
            command = f"node {config.node}"
            codes = {command if each.rank is None else str(each.rank): each.code for each in exits}
            context.host.journal.write(RanksExited(codes=codes))
        zero_completes = config.spec.requeue.zero_completes
        report = report_exits(exits, workers.request, config.node, zero_completes=zero_completes)
        return NodeResult(
            report=advise_on_python(amend(report, kernel.changes())),
            states=self._monitor.states,
            reached=self._monitor.last_step(),
        )

    def started(self, pids: Mapping[int, int]) -> None:
        """Called when the ranks have started; ``pids`` are their process ids by global rank.

        If a command starts them itself, ``pids`` has the ids of the commands, by their nodes as the round counts them.
        """
        spec = self._config.spec
        if self._context.host.growth is not None:
            self._context.host.growth.ranks_started(len(self._placement.members))
        self._monitor.set_pids(pids)
        processes = {str(number): process.to_dict() for number, pid in pids.items() if (process := identify(pid))}
        self._context.host.journal.write(
            WorkersStarted(
                processes=processes,
                ranks_each=spec.resources.local_world_size if spec.per_node else 1,
                first_rank=self._placement.own_ranks.start if spec.per_node else None,
                cpus=bound_cpus(sorted(pids)),
                resume_from=self._begin.resume_from,
            )
        )

    def find_hang(self) -> StopRequest | None:
        """A request to stop because a rank hangs, if one does. Called several times a second."""
        self._context.host.helpers.look()
        if self._output is not None:
            self._output.look()
        return self._monitor.find_hang()

    def judge_hang_elsewhere(self) -> None:
        """On node 0, whose ranks have ended: decide whether ranks of other nodes hang, if one asks."""
        self._monitor.judge_hang_elsewhere()

    def find_growth(self) -> StopRequest | None:
        """A request to stop because nodes can join, on node 0 of a run that can use them. Called as often."""
        growth = self._context.host.growth
        if growth is None:
            return None
        for event in growth.take_events():
            self._context.host.journal.write(event)
        # Ranks that have not begun yet would neither save nor have anything to save.
        if not self._have_begun:
            took_s = time.monotonic() - self._began_at
            self._have_begun = self._monitor.last_step() is not None or took_s > _SETTLED_S
            if not self._have_begun:
                return None
            growth.ranks_began(took_s)
        newcomers = growth.newcomers()
        if not newcomers:
            return None
        hosts = ", ".join(each.host for each in newcomers)
        return StopRequest(cause=GROW, why=f"{hosts} can join", at=time.time(), node=self._config.node)

    def stopping(self, request: StopRequest) -> None:
        """Called before the ranks are asked to stop: ask Slurm for the cause, and examine ranks that still hang."""
        self._context.host.journal.write(RanksStopping(cause=request.cause, why=request.why, signal=request.signal))
        self._is_of_others = bool(self._config.stage.job_of(request.node))
        if request.signal is not None and self._config.node == 0 and not self._is_of_others:
            self._context.host.query.begin()
        if request.cause == "hang":
            self._control.call_alive(self._monitor.examine_hang)

    def left_behind(self, killed: Sequence[str], remaining: Sequence[str]) -> None:
        """Called when processes that the ranks had left behind were killed, or cannot be."""
        self._context.host.journal.write(LeftoversKilled(killed=list(killed), remaining=list(remaining)))

    def stop_by(self) -> float:
        """The time by which ranks must have saved and exited, by the monotonic clock. It may change meanwhile.

        Node 0 knows Slurm's answer, and publishes this time, so that the ranks of all nodes have the same.
        """
        config, host = self._config, self._context.host
        if host.flag.raised is None and config.deadline is not None and time.monotonic() >= config.deadline:
            return config.deadline + config.lead_s - _LIMIT_MARGIN_S
        query = host.query
        stop_by = query.stop_by_of_others() if self._is_of_others else query.stop_by()
        if config.node == 0:
            # By the wall clock: the nodes' monotonic clocks are unrelated, whereas the preflight has compared their
            # wall clocks.
            at = time.time() + stop_by - time.monotonic()
            if abs(at - self._published_until) > _UNTIL_CHANGE_S:
                self._published_until = at
                self._control.publish("until", {"at": at})
            return stop_by
        message = None
        with contextlib.suppress(CoordinatorGone):
            message = self._control.read("until")
        return stop_by if message is None else time.monotonic() + message["at"] - time.time()
