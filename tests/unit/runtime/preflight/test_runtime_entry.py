"""The agent in the preflight: what it brings from this machine, what a signal does, and what it journals."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.spec import Spec, read_spec
from slurmtrain.model.interruption.exit_report import ExitReport
from slurmtrain.model.preflight.checks import Finding
from slurmtrain.model.run.events.agent_events import NetworkElected
from slurmtrain.model.run.layout import AttemptDir, RunsRoot
from slurmtrain.runtime.environment.node import Launch, Node
from slurmtrain.runtime.job.signals import StopFlag
from slurmtrain.runtime.preflight import entry
from slurmtrain.runtime.preflight.connections import PeerLost, ResponseTimeout
from slurmtrain.runtime.preflight.entry import PreflightHost, run_preflight
from slurmtrain.runtime.preflight.participant import PreflightOutcome
from slurmtrain.system.journal import Journal

LONG_S = 60.0
_OFF = ("shared", "versions", "gpu", "hardware", "disk", "tmp", "shm", "limits", "dns", "straggler", "environment")


def spec(nodes: int = 1, **preflight: Any) -> Spec:
    """Nothing is measured but what a test switches on."""
    sections = {"timeout_s": LONG_S, **dict.fromkeys(_OFF, "off"), **preflight}
    plain = {"command": "true", "resources": {"nodes": nodes}, "preflight": sections}
    return read_spec(plain, lambda at, message: pytest.fail(f"{at}: {message}"))


def node(index: int = 0, executor: str = "local", count: int = 1) -> Node:
    return Node(
        index=index,
        count=count,
        host="alpha",
        job_id="7",
        restart=0,
        executor=executor,
        submission=1,
        launch=Launch(attempt=1),
    )


class Agent:
    """One node's agent, up to the verdict."""

    def __init__(self, attempt: AttemptDir, node_: Node, spec: Spec) -> None:
        self._attempt = attempt
        self._node = node_
        self._plan = Plan(spec=spec, workdir="/", python=sys.executable, template={})
        self.flag = StopFlag()
        self.host = PreflightHost(flag=self.flag)

    def run(self) -> PreflightOutcome | ExitReport:
        with Journal(self._attempt.node_journal(self._node.index), durable=False) as journal:
            result = run_preflight(self._attempt, self._node, self._plan, journal, self.host)
        if isinstance(result, PreflightOutcome) and result.reserved is not None:
            result.reserved.close()
        return result

    @property
    def events(self) -> list[dict[str, Any]]:
        journal = self._attempt.node_journal(self._node.index)
        return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


Agents = Callable[..., Agent]


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agents:
    """An agent of an attempt in a directory of this test."""
    attempt = RunsRoot(tmp_path).run("r-1").attempt("7", 0)
    attempt.path.mkdir(parents=True)
    monkeypatch.setattr(
        entry.measure, "read_discipline", lambda: {"disciplined": True, "source": "chrony", "description": "ok"}
    )
    return lambda node_=None, spec_=None: Agent(attempt, node_ or node(), spec_ or spec())


@pytest.fixture
def hanging() -> Iterator[Callable[..., Any]]:
    """A function that hangs until the test is over; ``begun`` is set when it is called."""
    over = threading.Event()

    def hang(*_: Any) -> Any:
        hang.begun.set()  # type: ignore[attr-defined]
        over.wait(LONG_S)

    hang.begun = threading.Event()  # type: ignore[attr-defined]
    yield hang
    over.set()


# --- a verdict --------------------------------------------------------------------------------------------------


def test_a_single_node_is_checked_and_binds_a_port(agent: Agents) -> None:
    single = agent(spec_=spec(disk="fail"))
    result = single.run()
    assert isinstance(result, PreflightOutcome)
    assert result.problem is None
    assert result.master is not None
    assert (result.master[0], result.interface) == ("127.0.0.1", "lo")
    clock, preflight = single.events
    assert (clock["kind"], clock["node"], clock["source"]) == ("clock", 0, "chrony")
    assert (preflight["kind"], preflight["node"]) == ("preflight", 0)
    assert (preflight["status"], preflight["blamed"]) == ("pass", False)
    assert [outcome["check"] for outcome in preflight["findings"]] == ["clock", "network", "disk", "port"]
    assert preflight["findings"][2]["summary"].endswith(" free")
    assert preflight["seconds"] >= 0


def test_nodes_on_one_machine_find_each_other_and_each_journals_its_own_findings(
    agent: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that stood still for a while is no reason to give a node up.
    for patience in ("connections.HEARTBEAT_TIMEOUT_S", "participant._CLOCK_ANSWER_S", "coordinator._DISCONNECT_S"):
        monkeypatch.setattr(f"slurmtrain.runtime.preflight.{patience}", LONG_S)
    spec_ = spec(3, disk="fail")
    agents = [agent(node(index, count=3), spec_) for index in range(3)]
    result: dict[int, PreflightOutcome | ExitReport] = {}
    threads = [
        threading.Thread(target=lambda index=index: result.update({index: agents[index].run()})) for index in range(3)
    ]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    outcomes = [outcome for outcome in result.values() if isinstance(outcome, PreflightOutcome)]
    assert len(outcomes) == 3
    assert {outcome.problem for outcome in outcomes} == {None}
    assert len({outcome.master for outcome in outcomes}) == 1
    for index in range(3):
        clock, preflight = agents[index].events
        assert clock["node"] == preflight["node"] == index
        assert clock["samples"] == (0 if index == 0 else 32)


def test_no_node_passes_before_node_0_has_finished(agent: Agents) -> None:
    first, second = (agent(node(index, count=2), spec(2)) for index in range(2))
    proceed, passed = threading.Event(), threading.Event()

    def finish() -> None:
        begun.set()
        assert proceed.wait(LONG_S)

    def run_second() -> None:
        assert isinstance(second.run(), PreflightOutcome)
        passed.set()

    begun = threading.Event()
    first.host = PreflightHost(flag=first.flag, finish=finish)
    threads = [threading.Thread(target=run) for run in (first.run, run_second)]
    for thread in threads:
        thread.start()
    assert begun.wait(LONG_S)
    assert not passed.wait(0.2)
    proceed.set()
    assert passed.wait(LONG_S)
    for thread in threads:
        thread.join(LONG_S)


def returning(**changes: Any) -> Callable[..., Coroutine[Any, Any, PreflightOutcome]]:
    """A conversation that comes to this."""

    async def return_outcome(*_: Any) -> PreflightOutcome:
        return PreflightOutcome(**{"findings": [Finding("disk", "warn", "little")], **changes})

    return return_outcome


@pytest.mark.parametrize(("blamed", "expected"), [(["alpha"], True), (["beta"], False)])
def test_a_node_journals_whether_it_is_the_one_to_blame(
    agent: Agents, monkeypatch: pytest.MonkeyPatch, blamed: list[str], expected: bool
) -> None:
    record = NetworkElected(tests=4)
    monkeypatch.setattr(entry, "coordinate", returning(blamed=blamed, problem="it is full", election=record))
    single = agent()
    result = single.run()
    assert isinstance(result, PreflightOutcome)
    assert result.problem == "it is full"
    elected, preflight = single.events
    assert (elected["kind"], elected["tests"]) == ("election", 4)
    assert (preflight["blamed"], preflight["status"]) == (expected, "warn")
    assert preflight["findings"] == [{"check": "disk", "status": "warn", "summary": "little"}]


# --- no verdict -------------------------------------------------------------------------------------------------


def failing(error: Exception) -> Callable[..., Coroutine[Any, Any, PreflightOutcome]]:
    async def fail(*_: Any) -> PreflightOutcome:
        raise error

    return fail


def run_with_error(agent: Agents, monkeypatch: pytest.MonkeyPatch, error: Exception, **options: Any) -> ExitReport:
    monkeypatch.setattr(entry, "_SIGNAL_SKEW_S", 0.05)
    monkeypatch.setattr(entry, "participate", failing(error))
    second = agent(node(1, options.get("executor", "local"), 3), spec(3))
    second.flag.raised = options.get("raised")
    result = second.run()
    assert isinstance(result, ExitReport)
    assert second.events == []
    return result


def test_a_lost_node_is_called_by_the_host_name_that_slurm_gave_it(
    agent: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NODELIST", "rack1-node[7-9]")
    result = run_with_error(agent, monkeypatch, PeerLost(2, "it has not sent a heartbeat for 15 s"), executor="slurm")
    assert result.reason == "rack1-node9 is gone: it has not sent a heartbeat for 15 s"


def test_nodes_of_components_are_called_by_their_names_in_the_order_of_the_components(
    agent: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "rack1-node[7-9]")
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_0", "rack1-node9")
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_1", "rack1-node[7-8]")
    result = run_with_error(agent, monkeypatch, PeerLost(2, "it has not sent a heartbeat for 15 s"), executor="slurm")
    assert result.reason == "rack1-node8 is gone: it has not sent a heartbeat for 15 s"


def test_a_node_that_was_stopped_stops_this_one_with_the_same_signal(
    agent: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_with_error(agent, monkeypatch, PeerLost(0, "it was stopped", "SIGUSR2"))
    assert (result.cause, result.signal, result.failed_at) == ("preempted", "SIGUSR2", None)
    assert result.reason == "stopped by SIGUSR2 before it began"


def test_a_signal_a_moment_later_explains_why_another_node_is_lost(
    agent: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "_SIGNAL_SKEW_S", LONG_S)
    second = agent(node(1, count=2), spec(2))

    async def leave(*_: Any) -> PreflightOutcome:
        threading.Timer(0.1, setattr, (second.flag, "raised", signal.SIGTERM)).start()
        raise PeerLost(0, "it closed the connection")

    monkeypatch.setattr(entry, "participate", leave)
    result = second.run()
    assert isinstance(result, ExitReport)
    assert (result.cause, result.signal) == ("preempted", "SIGTERM")


def test_a_node_0_without_a_verdict_is_a_node_failure(agent: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_with_error(agent, monkeypatch, ResponseTimeout([0]))
    assert (result.cause, result.reason, result.cascade) == ("node_fail", "node 0 never reached a verdict", True)


# --- signals ----------------------------------------------------------------------------------------------------


def stopped_while(agent: Agent, hanging: Any, name: signal.Signals) -> ExitReport:
    """How an agent ends that gets a signal while something hangs."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(agent.run()), daemon=True)
    thread.start()
    assert hanging.begun.wait(LONG_S)
    agent.flag.raised = name
    thread.join(LONG_S / 2)
    assert not thread.is_alive()
    assert isinstance(result[0], ExitReport)
    return result[0]


@pytest.mark.parametrize("function", ["measure", "discipline"])
def test_a_signal_is_obeyed_whatever_hangs(
    agent: Agents, monkeypatch: pytest.MonkeyPatch, hanging: Any, function: str
) -> None:
    if function == "measure":
        monkeypatch.setattr(entry.measure, "measure_all", hanging)
    else:
        monkeypatch.setattr(entry.measure, "read_discipline", hanging)
    single = agent()
    result = stopped_while(single, hanging, signal.SIGTERM)
    assert (result.cause, result.signal) == ("preempted", "SIGTERM")
    assert result.reason == "stopped by SIGTERM before it began"
    assert result.failed_at is not None
    assert single.events == []


@pytest.mark.parametrize("index", [0, 1], ids=["others are waited for", "node 0 is searched for"])
def test_a_signal_is_obeyed_while_nodes_meet(agent: Agents, hanging: Any, index: int) -> None:
    threading.Timer(0.2, hanging.begun.set).start()
    assert stopped_while(agent(node(index, count=2), spec(2)), hanging, signal.SIGUSR2).signal == "SIGUSR2"
