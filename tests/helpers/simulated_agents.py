"""Agents of an attempt in threads over one board, with scripted ranks instead of processes."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.site import until
from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.diagnosis.hang import Phase
from slurmtrain.model.experiment.spec import Spec, read_spec
from slurmtrain.model.interruption.exit_report import STOPPED, Exit, StopRequest
from slurmtrain.model.interruption.members import Stage
from slurmtrain.model.interruption.policy import Decision, Newest, PriorEnd, decide
from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.agent.exits import RankExits
from slurmtrain.runtime.agent.job_query import JobQuery
from slurmtrain.runtime.agent.node_round import Begin, Context, RoundConfig
from slurmtrain.runtime.agent.rounds import Rounds
from slurmtrain.runtime.agent.workers import RankPlacement, Workers
from slurmtrain.runtime.job.heartbeat import Pulse
from slurmtrain.runtime.job.signals import StopFlag
from slurmtrain.runtime.peers.control_store import ControlStore
from slurmtrain.runtime.peers.peer_store import MessageStore
from slurmtrain.runtime.preflight.ports import reserve
from slurmtrain.system.journal import Journal

# What ranks of a node do in a round: end on their own, fail, wait for a request to stop, the same but then exit with 0,
# hang, hang in a system call that cannot be interrupted, hang with the others in the loop, or die with their agent.
COMPLETE, CRASH, WAIT, OBEY, HANG, STUCK, LOST = "complete", "crash", "wait", "obey", "hang", "stuck", "lost"
POLL_S = 0.002


class Gone(BaseException):
    """The agent has died; nothing catches this."""


class Process:
    """The part of a rank's process that the agent uses."""

    def __init__(self, pid: int, behaviour: str) -> None:
        self.pid = pid
        self.is_stuck = behaviour == STUCK
        self.stop_code = 0 if behaviour == OBEY else STOPPED
        self.returncode: int | None = {COMPLETE: 0, CRASH: 1}.get(behaviour)
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        if self.returncode is None:
            raise subprocess.TimeoutExpired("rank", timeout_s)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)
        if self.returncode is None and not self.is_stuck:
            self.returncode = self.stop_code


class SimulatedProcesses:
    """All processes of a node's ranks: only the ranks themselves."""

    def __init__(self, ranks: Sequence[Process]) -> None:
        self.ranks = ranks
        self.has_shell = False

    def ask(self, number: signal.Signals) -> bool:
        for rank in self.ranks:
            if rank.returncode is None and not rank.signals:
                rank.send_signal(number)
        return any(rank.returncode is None for rank in self.ranks)

    def kill(self, **_: Any) -> tuple[list[str], list[str]]:
        for rank in self.ranks:
            if rank.returncode is None and not rank.is_stuck:
                rank.returncode = -signal.SIGKILL
        return [], ["python (pid 1)" for rank in self.ranks if rank.returncode is None]

    def wait(self, **_: Any) -> bool:
        return True

    def have_orphans(self) -> bool:
        return False


class Ranks(Workers):
    """The real supervision of workers, over fake processes."""

    world: World

    def __init__(
        self,
        placement: RankPlacement,
        _argv: Sequence[str],
        context: Context,
        supervisor: Any,
    ) -> None:
        self.request: StopRequest | None = None
        self.placement = self._placement = placement
        self._stop_signal = signal.SIGTERM
        self._control = context.control
        self._flag = context.host.flag
        self._supervisor = supervisor
        self._exits = RankExits(placement.attempt)
        self._directory = context.directory
        self._first = placement.place
        number, node = placement.attempt.round, placement.config.node
        self.behaviour = self.world.script.get((number, node), COMPLETE)
        process: Any = Process(1000 + 100 * number + node, self.behaviour)
        self._processes = {self._first: process}
        self._ranks = SimulatedProcesses([process])  # type: ignore[assignment]
        self.world.ranks[number, node] = self

    def run(self) -> None:
        if self.behaviour == LOST:
            self.world.lose(self._placement.config.node, self._control)
        self._supervisor.started({number: process.pid for number, process in self._processes.items()})
        pulse = Pulse.open(self.world.boards[self._placement.config.node], 0)
        step = 0
        while self.request is None and None in self._exit_codes():
            step += 0 if self.behaviour == HANG else 1
            pulse.beat(step if self.behaviour == HANG else 5, Phase.TRAINING, step_s=0.01)
            self.request = self._find_request()
            time.sleep(POLL_S)
        if pulse.phase is Phase.NONE:
            pulse.beat(5, Phase.LEFT)
        if self.request is not None or self.behaviour == CRASH:
            self._end_workers(self.behaviour == CRASH)

    @property
    def process(self) -> Any:
        """The rank's."""
        return self._processes[self._first]

    def exits(self) -> list[Exit]:
        if self._placement.config.node == 0:
            self.world.when_ended()
        codes = [process.returncode for process in self._processes.values() if process.returncode is not None]
        lines = [self.world.last_line] if self.behaviour == CRASH else []
        return [Exit(rank=self._first, pid=1, code=code, at=time.time(), last_lines=lines) for code in codes]


@dataclass
class World:
    """The nodes of an attempt, each an agent in a thread; ``script``: what ranks do, by round and node."""

    path: Path
    resources: Mapping[str, Any]
    script: Mapping[tuple[int, int], str]
    requeue: Mapping[str, Any] = field(default_factory=dict)
    before: Sequence[PriorEnd] = ()
    last_line: str = "ValueError: 1"
    committed: int = 3
    dead: set[int] = field(default_factory=set)
    ranks: dict[tuple[int, int], Ranks] = field(default_factory=dict)
    boards: dict[int, str] = field(default_factory=dict)
    outcomes: dict[int, Any] = field(default_factory=dict)
    prepared: list[tuple[int, int, str | None]] = field(default_factory=list)
    deadline: float | None = None
    over: threading.Event = field(default_factory=threading.Event)
    waits_for_begin: set[int] = field(default_factory=set)
    unfit: int | None = None
    growth: Any = None
    stage: Stage | None = None
    when_ended: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.spec = self._spec()
        self.nodes = self.spec.resources.allocated.max
        self.flags = {node: StopFlag() for node in range(self.nodes)}
        self.attempt = RunDir(self.path / "RUN").attempt("7", 0)
        self.attempt.logs.mkdir(parents=True)
        self.attempt.run.plan.touch()
        self.board = MessageStore()
        self.threads: dict[int, threading.Thread] = {}

    def _spec(self) -> Spec:
        data = {"name": "x", "command": "true", "resources": {"procs_per_node": 1, **self.resources}}
        data["requeue"] = dict(self.requeue)
        return read_spec(data, lambda at, message: pytest.fail(f"{at}: {message}"))

    # --- what happens -------------------------------------------------------------------------------------------------

    def begin(self, *absent: int) -> World:
        """Start the agents, except these, which never join."""
        for node in range(self.nodes):
            if node not in absent:
                self.threads[node] = threading.Thread(target=self._agent, args=(node,), daemon=True)
                self.threads[node].start()
        return self

    def end(self) -> World:
        """Wait until all living agents have ended."""
        for node, thread in self.threads.items():
            until(
                lambda node=node, thread=thread: node in self.dead or not thread.is_alive(), f"the end of node {node}"
            )
        return self

    def signal(self, *nodes: int, number: signal.Signals = signal.SIGTERM) -> None:
        # Node 0 last: as soon as it has left, any node not yet signalled ends for lack of it.
        for node in nodes or reversed(range(self.nodes)):
            self.flags[node].raised, self.flags[node].raised_at = number, time.time()

    def lose(self, node: int, control: ControlStore) -> None:
        """End the agent of a node without a report."""
        self.dead.add(node)
        control.gather = lambda *_, **__: None  # type: ignore[method-assign]
        raise Gone

    def until_running(self, number: int, *nodes: int) -> None:
        until(lambda: all((number, node) in self.ranks for node in nodes), f"round {number}")

    # --- what came of it ----------------------------------------------------------------------------------------------

    def events(self, kind: str, node: int = 0) -> list[dict[str, Any]]:
        path = self.attempt.node_journal(node)
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [event for event in events if event["kind"] == kind]

    def causes(self) -> dict[int, str]:
        return {
            node: outcome.node_report.cause for node, outcome in sorted(self.outcomes.items()) if outcome is not None
        }

    @property
    def root(self) -> tuple[str, str]:
        outcome = self.outcomes[0]
        assert outcome is not None
        return outcome.attempt_report.cause, outcome.attempt_report.reason

    def rounds_of(self, node: int) -> list[int]:
        return sorted(number for number, member in self.ranks if member == node)

    # --- the agents ---------------------------------------------------------------------------------------------------

    def _agent(self, node: int) -> None:
        config = RoundConfig(
            attempt=self.attempt,
            spec=self.spec,
            stage=self.stage or Stage.first(self.nodes),
            node=node,
            job_id="7",
            restart=0,
            hosts={number: f"n{number}" for number in range(self.nodes)},
            address="127.0.0.1",
            reserved=reserve(0) if node == 0 else None,
            deadline=self.deadline,
            lead_s=30.0,
        )
        with Journal(self.attempt.node_journal(node), durable=False) as journal:
            rounds_here = Rounds(config, Host(self, node, journal), self.board)  # type: ignore[arg-type]
            try:
                self.outcomes[node] = rounds_here.run()
            except Gone:
                self.over.wait()


@dataclass(frozen=True)
class Host:
    """The agent of a node, reduced to what rounds need."""

    world: World
    node: int
    journal: Journal
    query: JobQuery = field(default_factory=lambda: JobQuery(None, None))

    @property
    def flag(self) -> StopFlag:
        return self.world.flags[self.node]

    @property
    def growth(self) -> Any:
        return self.world.growth if self.node == 0 else None

    def find_checkpoint(self) -> tuple[str, Newest]:
        return f"step-{self.world.committed}", Newest(self.world.committed)

    def set_up_node(self) -> None:
        return None

    def tear_down_node(self, until: float) -> None:
        return None

    @property
    def helpers(self) -> Any:
        return SimpleNamespace(look=lambda: None)

    @property
    def checkpoints(self) -> Any:
        return SimpleNamespace(newest=lambda: Newest(self.world.committed), resumed_at=None)

    def find_mlflow_run(self) -> None:
        return None

    def prepare_ranks(self, placement: RankPlacement, begin: Begin, board: str) -> list[str]:
        self.world.boards[self.node] = board
        if self.node == self.world.unfit:
            raise SlurmtrainError("cannot enter the working directory /w")
        self.world.prepared.append((placement.attempt.round, self.node, begin.resume_from))
        return ["true"]

    def ask_policy(self, latest: PriorEnd) -> Decision:
        events = self.world.events("restart")
        restarts = [PriorEnd.from_restart(event["past"], event["t"]) for event in events]
        return decide([*self.world.before, *restarts, latest], self.world.spec.requeue)
