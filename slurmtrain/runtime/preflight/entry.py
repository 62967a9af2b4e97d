"""The agent in the preflight: what it brings from its machine, until a signal comes, and what it journals of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from slurmtrain.model.interruption.exit_report import ExitReport, report_signal
from slurmtrain.model.run.events.agent import ClockMeasured, PreflightDone
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.model.spec.plan import Plan
from slurmtrain.runtime.job.environment import Node, environment_of_ranks, expected_hosts, pop_coordinator_endpoints
from slurmtrain.runtime.job.signals import StopFlag
from slurmtrain.runtime.preflight import ports
from slurmtrain.runtime.preflight.connections import PeerLost, ResponseTimeout
from slurmtrain.runtime.preflight.coordinator import coordinate
from slurmtrain.runtime.preflight.discovery import listen_for_participants, watch_endpoints
from slurmtrain.runtime.preflight.facts import clock, measure
from slurmtrain.runtime.preflight.facts.allreduce import measure_all_reduce
from slurmtrain.runtime.preflight.facts.interfaces import find_candidates
from slurmtrain.runtime.preflight.facts.measure import NodeContext
from slurmtrain.runtime.preflight.participant import LOOPBACK, Participant, PreflightOutcome, participate
from slurmtrain.system.interpreter import importing
from slurmtrain.system.journal import Journal

_POLL_S = 0.05
# A signal to all nodes may reach another one first.
_SIGNAL_SKEW_S = 0.3


class _Stopped(Exception):
    """A signal came before the nodes were done."""


def run_preflight(
    attempt: AttemptDir, node: Node, plan: Plan, journal: Journal, flag: StopFlag
) -> PreflightOutcome | ExitReport:
    """Meet the other nodes, check this one, and hear whether to train.

    Returns an ExitReport where the nodes never came to a verdict. Raises LaunchError where node 0 cannot be found.
    """
    began = time.monotonic()
    here = _LocalNode(attempt, node, plan, flag)
    try:
        outcome = asyncio.run(_unless_stopped(here.take_part(), flag))
    except _Stopped:
        return report_signal(flag.name or "", at=time.time(), before_start=True)
    except PeerLost as left:
        return _left(left, here.name_of(left.node), flag)
    except ResponseTimeout:
        return ExitReport(
            cause="node_fail", reason="node 0 never came to a verdict", failed_at=time.time(), cascade=True
        )
    finally:
        here.tidy_up()
    _journal_outcome(journal, node, outcome, here.party.host, time.monotonic() - began)
    return outcome


class _LocalNode:
    """This machine, as the preflight needs it."""

    def __init__(self, attempt: AttemptDir, node: Node, plan: Plan, flag: StopFlag) -> None:
        self._attempt = attempt
        self._node = node
        self._plan = plan
        self._invited = pop_coordinator_endpoints()
        self._here: NodeContext | None = None
        nodes = node.count
        pinned = plan.spec.network.interface
        self.party = Participant(
            node=node.index,
            nodes=nodes,
            host=node.name(nodes),
            spec=plan.spec,
            candidates=lambda: find_candidates(node.index, None if pinned == "auto" else pinned),
            measure=self._measure,
            discipline=clock.read_discipline,
            warm_up=_import_torch,
            listen=lambda address: ports.listen_on_job_port(address, node.job_id, node.restart),
            bandwidth=self._bandwidth,
            together=node.executor == "local",
            expected_hosts=expected_hosts(nodes) if node.executor == "slurm" else {},
            stopped=lambda: flag.name,
        )

    def take_part(self) -> Coroutine[Any, Any, PreflightOutcome]:
        """The conversation with the other nodes."""
        if self._node.index != 0:
            return participate(self.party, watch_endpoints(self._attempt, self._invited))
        if self.party.nodes == 1:
            return coordinate(self.party, self._invited.secret if self._invited else b"", None)
        found = [LOOPBACK] if self.party.together else find_candidates(0)[0]
        addresses = [one.address for one in found]
        listener, secret = listen_for_participants(
            self._attempt, self._node.job_id, self._node.restart, self._invited, addresses
        )
        return coordinate(self.party, secret, listener)

    def name_of(self, node: int) -> str:
        """What another node is called here."""
        return self.party.expected_hosts.get(node, f"node {node}")

    def tidy_up(self) -> None:
        """Remove what was written for the checks."""
        if self._here is not None:
            with contextlib.suppress(OSError):
                measure.remove_shared_file(self._here)

    def _measure(self, addresses: Sequence[str], token: str) -> Mapping[str, Mapping[str, Any]]:
        self._here = NodeContext(
            node=self._node.index,
            nodes=self.party.nodes,
            host=self.party.host,
            executor=self._node.executor,
            attempt=self._attempt,
            plan=self._plan,
            addresses=addresses,
            token=token,
            environ=environment_of_ranks(self._plan, self._node),
        )
        return measure.measure_all(self._here)

    def _bandwidth(self, address: str, port: int, interface: str) -> Mapping[str, Any]:
        return measure_all_reduce(self._plan.spec, self._node.index, self._node.count, address, port, interface)


async def _unless_stopped(part: Coroutine[Any, Any, PreflightOutcome], flag: StopFlag) -> PreflightOutcome:
    """Run a conversation to its end, or until a signal comes. Raises _Stopped."""
    task = asyncio.create_task(part)
    while not task.done():
        await asyncio.wait({task}, timeout=_POLL_S)
        if flag.raised is not None and not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise _Stopped
    return task.result()


def _left(left: PeerLost, name: str, flag: StopFlag) -> ExitReport:
    """Another node is gone: stopped, as this one may be in a moment, or dead."""
    deadline = time.monotonic() + _SIGNAL_SKEW_S
    while flag.raised is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    signal = left.signal or flag.name
    if signal is not None:
        # Slurm says whether that is why the other one is gone, or whether srun ends this one because it is.
        return report_signal(signal, at=None, before_start=True, missing=() if left.signal else [name])
    return ExitReport(cause="node_fail", reason=f"{name} is gone: {left}", failed_at=time.time(), cascade=True)


def _journal_outcome(journal: Journal, node: Node, outcome: PreflightOutcome, name: str, seconds: float) -> None:
    if outcome.election is not None:
        journal.write(outcome.election)
    clock = ClockMeasured.from_json({"node": node.index, **outcome.clock})
    if outcome.clock and clock is not None:
        journal.write(clock)
    journal.write(
        PreflightDone(
            node=node.index,
            status=outcome.status,
            seconds=round(seconds, 3),
            findings=[finding.to_dict() for finding in outcome.findings],
            blamed=name in outcome.blamed,
        )
    )


def _import_torch() -> None:
    """It takes seconds, and has to be done anyway."""
    with importing():
        import torch.distributed.elastic.agent.server.local_elastic_agent  # noqa: F401
