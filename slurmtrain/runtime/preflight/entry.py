"""The preflight as the node agent runs it: it measures this machine, stops at a signal, and writes to the journal.

Agents find node 0 by variables that the batch script exported, or by a file in the run directory. Either source holds
node 0's addresses, a port, and the secret of the attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.interruption.exit_report import ExitReport, report_signal
from slurmtrain.model.preflight.election import Candidate, ExcludedAddress
from slurmtrain.model.run.events.agent_events import ClockMeasured, PreflightDone
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.runtime.environment.node import BOOTSTRAP, CoordinatorEndpoints, Node, pop_coordinator_endpoints
from slurmtrain.runtime.environment.ranks import environment_of_ranks
from slurmtrain.runtime.job.signals import StopFlag
from slurmtrain.runtime.peers.channel import Refusals
from slurmtrain.runtime.peers.peer_store import Link, MessageStore, StoreClient
from slurmtrain.runtime.preflight import ports
from slurmtrain.runtime.preflight.connections import Endpoint, PeerLost, ResponseTimeout
from slurmtrain.runtime.preflight.coordinator import coordinate
from slurmtrain.runtime.preflight.facts import measure
from slurmtrain.runtime.preflight.facts.allreduce import measure_all_reduce
from slurmtrain.runtime.preflight.facts.measure import NodeContext
from slurmtrain.runtime.preflight.participant import LOOPBACK, Participant, PreflightOutcome, participate
from slurmtrain.runtime.preflight.ports import listen, listen_on_first
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.journal import Journal

_SIGNAL_POLL_S = 0.05
# A signal to all nodes may reach another node first; this node then notices the disconnect before the signal.
_SIGNAL_SKEW_S = 0.3
# If endpoints were exported, the file is read only after they have not worked for this long,
_EXPORTED_ONLY_S = 3.0
# and then only at this interval: a shared filesystem is slow.
_FILE_POLL_S = 0.5
# Nodes import torch at their own pace, minutes apart on a busy file server.
_CONNECT_S = 300.0


class _Stopped(Exception):
    """A signal arrived before the preflight ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightHost:
    """What the agent has for its part of a preflight.

    Attributes:
        flag: Raised when a signal arrives.
        refusals: Counts connections that do not come from nodes of the attempt.
        finish: On node 0, waits for what has to be there before any node passes. May raise SlurmtrainError.
    """

    flag: StopFlag
    refusals: Refusals = field(default_factory=Refusals)
    finish: Callable[[], None] = lambda: None


def run_preflight(
    attempt: AttemptDir, node: Node, plan: Plan, journal: Journal, host: PreflightHost
) -> PreflightOutcome | ExitReport:
    """Run this node's part of the preflight with all other nodes, and journal the outcome.

    Args:
        attempt: The attempt that is about to start.
        node: This node of the attempt.
        plan: The run's plan.
        journal: This node's journal.
        host: The agent.

    Returns:
        The outcome; or how this agent should exit if the nodes never reached a verdict.

    Raises:
        LaunchError: Node 0 cannot be found.
        SlurmtrainError: ``finish`` of the host has raised it.
    """
    began, flag = time.monotonic(), host.flag
    local = _LocalNode(attempt, node, plan, host)
    try:
        outcome = asyncio.run(_unless_stopped(local.run(), flag))
    except _Stopped:
        return report_signal(flag.name or "", at=time.time(), before_start=True)
    except PeerLost as lost:
        return _peer_lost_report(lost, local.host_of(lost.node), flag)
    except ResponseTimeout:
        return ExitReport(
            cause="node_fail", reason="node 0 never reached a verdict", failed_at=time.time(), cascade=True
        )
    finally:
        local.remove_files()
    if outcome.election is not None:
        journal.write(outcome.election)
    clock = ClockMeasured.from_json({"node": node.index, **outcome.clock})
    if outcome.clock and clock is not None:
        journal.write(clock)
    findings = [finding.to_dict() for finding in outcome.findings]
    seconds, is_blamed = round(time.monotonic() - began, 3), local.participant.host in outcome.blamed
    journal.write(
        PreflightDone(node=node.index, status=outcome.status, seconds=seconds, findings=findings, blamed=is_blamed)
    )
    return outcome


def report_unfit(outcome: PreflightOutcome, spec: Spec, *, is_node_0: bool) -> ExitReport:
    """The report of a node after a preflight that found the nodes unfit to train.

    Node 0 has the reason; the other nodes' reports follow from it.

    Args:
        outcome: The preflight's outcome.
        spec: The run's.
        is_node_0: Whether this is node 0.
    """
    return ExitReport(
        cause="preflight",
        reason=outcome.problem or "the preflight found no address where the ranks can meet",
        failed_at=time.time(),
        cascade=not is_node_0,
        without=tuple(outcome.blamed) if is_node_0 and spec.preflight.exclude else (),
    )


class _LocalNode:
    """This machine as a :class:`Participant`."""

    def __init__(self, attempt: AttemptDir, node: Node, plan: Plan, host: PreflightHost) -> None:
        self._attempt = attempt
        self._node = node
        self._plan = plan
        self._exported = pop_coordinator_endpoints()
        # Set once the checks have begun, so that their files can be removed.
        self._context: NodeContext | None = None
        interface = plan.spec.network.interface
        self.participant = Participant(
            node=node.index,
            nodes=node.count,
            host=node.name(node.count),
            spec=plan.spec,
            candidates=lambda: _find_candidates(node.index, None if interface == "auto" else interface),
            measure=self._measure,
            discipline=measure.read_discipline,
            reserve=lambda: ports.reserve_port(f"{node.job_id}/{attempt.round}", node.restart),
            listen=lambda address: ports.listen_on_job_port(address, node.job_id, node.restart),
            bandwidth=self._measure_bandwidth,
            single_machine=node.executor == "local",
            expected_hosts=node.hosts if node.executor == "slurm" else {},
            stopped=lambda: host.flag.name,
            refusals=host.refusals,
            finish=host.finish,
        )

    def run(self) -> Coroutine[Any, Any, PreflightOutcome]:
        """This node's part: the coordinator's on node 0, a participant's on all others."""
        if self._node.index != 0:
            return participate(self.participant, watch_endpoints(self._attempt, self._exported))
        if self.participant.nodes == 1:
            # No other node connects: there is no secret to share, unless one was exported.
            return coordinate(self.participant, self._exported.secret if self._exported else b"", None)
        candidates = [LOOPBACK] if self.participant.single_machine else _find_candidates(0)[0]
        addresses = [candidate.address for candidate in candidates]
        listener, secret = listen_for_participants(
            self._attempt, self._node.job_id, self._node.restart, self._exported, addresses
        )
        return coordinate(self.participant, secret, listener)

    def host_of(self, node: int) -> str:
        """The name of another node, or its number if the name is unknown."""
        return self.participant.expected_hosts.get(node, f"node {node}")

    def remove_files(self) -> None:
        """Remove the files that the checks wrote."""
        if self._context is not None:
            with contextlib.suppress(OSError):
                measure.remove_shared_file(self._context)

    def _measure(self, addresses: Sequence[str], token: str) -> Mapping[str, Mapping[str, Any]]:
        self._context = NodeContext(
            node=self._node.index,
            nodes=self.participant.nodes,
            host=self.participant.host,
            executor=self._node.executor,
            attempt=self._attempt,
            plan=self._plan,
            addresses=addresses,
            token=token,
            environ=environment_of_ranks(self._plan, self._node),
        )
        return measure.measure_all(self._context)

    def _measure_bandwidth(self, address: str, port: int, interface: str) -> Mapping[str, Any]:
        return measure_all_reduce(self._plan.spec, self._node.index, self._node.count, address, port, interface)


def _find_candidates(node: int, pinned: str | None = None) -> tuple[Sequence[Candidate], Sequence[ExcludedAddress]]:
    """As :func:`~.facts.interfaces.find_candidates`, which needs psutil: only where there are other nodes."""
    from slurmtrain.runtime.preflight.facts.interfaces import find_candidates

    return find_candidates(node, pinned)


async def _unless_stopped(part: Coroutine[Any, Any, PreflightOutcome], flag: StopFlag) -> PreflightOutcome:
    """Run this node's part to its end, or until a signal arrives. Raises _Stopped."""
    task = asyncio.create_task(part)
    while not task.done():
        # Polled: the flag is raised by a signal handler that knows nothing about this loop.
        await asyncio.wait({task}, timeout=_SIGNAL_POLL_S)
        if flag.raised is not None and not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise _Stopped
    return task.result()


def _peer_lost_report(lost: PeerLost, host: str, flag: StopFlag) -> ExitReport:
    """How to exit when another node is lost: it was stopped, as this one may be in a moment, or it is dead."""
    deadline = time.monotonic() + _SIGNAL_SKEW_S
    while flag.raised is None and time.monotonic() < deadline:
        time.sleep(_SIGNAL_POLL_S)
    signal = lost.signal or flag.name
    if signal is not None:
        # If only this node got the signal, it may come from srun, which ends all tasks when one node is lost: Slurm's
        # record of the job decides which it was.
        return report_signal(signal, at=None, before_start=True, missing=() if lost.signal else [host])
    return ExitReport(cause="node_fail", reason=f"{host} is gone: {lost}", failed_at=time.time(), cascade=True)


def listen_for_participants(
    attempt: AttemptDir, job_id: str, restart: int, exported: CoordinatorEndpoints | None, addresses: Sequence[str]
) -> tuple[socket.socket, bytes]:
    """Listen, as node 0, on the exported port or else on another one, and write a file with the endpoints.

    Args:
        attempt: Where the file is written.
        job_id: The job's id, from which other ports are derived.
        restart: How often the job was restarted, which affects the choice too.
        exported: What the batch script exported; None if it exported nothing.
        addresses: This node's.

    Returns:
        The listening socket, and the secret.

    Raises:
        LaunchError: No port is free.
    """
    secret = exported.secret if exported is not None else secrets.token_bytes(32)
    candidates = ports.job_ports(job_id, restart, salt=BOOTSTRAP)
    if list(addresses) == ["127.0.0.1"]:  # all nodes are on this machine: no other machine connects
        listener = listen("127.0.0.1", 0)
    else:
        listener = listen_on_first(itertools.chain([exported.port] if exported is not None else [], candidates))
    # Always written: a task may not have received the variables, and the port may differ from the exported one.
    endpoints = CoordinatorEndpoints(tuple(addresses), int(listener.getsockname()[1]), secret)
    write_json(attempt.rendezvous, endpoints.to_dict(), private=True)
    return listener, secret


def watch_endpoints(attempt: AttemptDir, exported: CoordinatorEndpoints | None) -> Callable[[], Sequence[Endpoint]]:
    """A function that returns the endpoints of node 0 that are known when it is called.

    These are the ``exported`` ones and, after a while, the endpoints in the file.
    """
    from_environment = _endpoints(exported)
    next_look = time.monotonic() + (_EXPORTED_ONLY_S if from_environment else 0.0)
    from_file: list[Endpoint] = []

    def known_endpoints() -> list[Endpoint]:
        nonlocal next_look
        if not from_file and time.monotonic() >= next_look:
            content = read_json(attempt.rendezvous)
            from_file.extend(_endpoints(CoordinatorEndpoints.from_dict(content) if content is not None else None))
            # Without exported endpoints the file is the only source, so each call reads it.
            next_look = time.monotonic() + (_FILE_POLL_S if from_environment else 0.0)
        return from_environment + [endpoint for endpoint in from_file if endpoint not in from_environment]

    return known_endpoints


def _endpoints(coordinator: CoordinatorEndpoints | None) -> list[Endpoint]:
    if coordinator is None:
        return []
    return [Endpoint(address, coordinator.port, coordinator.secret) for address in coordinator.addresses]


def open_link(
    preflight: PreflightOutcome, address: str, node: Node, refusals: Refusals, give_up: Callable[[], bool]
) -> Link:
    """Open the link to the messages at node 0, which has this ``address``.

    Args:
        preflight: The result of the preflight.
        address: Address of node 0.
        node: This node.
        refusals: Counts connections that do not come from nodes of the attempt.
        give_up: Called repeatedly while node 0 does not answer; True ends the wait.

    Raises:
        LaunchError: Nothing answers.
    """
    if preflight.control_port is None or preflight.control_listener is not None:
        store = MessageStore()
        if preflight.control_listener is not None:
            store.serve(preflight.control_listener, preflight.secret, node.count, refusals)
        return store
    client = StoreClient((address, preflight.control_port), preflight.secret, node.index, node.count)
    client.wait_until_connected(_CONNECT_S, give_up=give_up)
    return client
