"""Events that node agents write, into ``attempts/*/node-<i>.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar

from slurmtrain.model.run.events.base import OMIT_NONE, Payload, payload
from slurmtrain.model.run.events.records import FailureRecord, FindingRecord, ProcessRecord, RankRecord, RoundRecord


@payload
class AgentStarted(Payload):
    """The agent of a node is there."""

    KIND: ClassVar[str] = "agent"

    node: int = 0
    """The node's number, from 0 on."""
    nodes: int = 1
    """How many nodes the attempt has."""
    host: str
    """The node's name."""
    process: ProcessRecord | None = None
    """The agent's process: ``host``, ``boot``, ``pid``, ``start``."""
    executor: str = "local"
    """``slurm`` or ``local``."""
    submission: int | None = field(default=None, metadata=OMIT_NONE)
    """Which submission started it."""
    attempt: int = 0
    """The number of the attempt."""


@payload
class WaitingForRun(Payload):
    """The runs of a local sweep train one after the other: this one waits for its turn."""

    KIND: ClassVar[str] = "waiting"

    run: str
    """The id of the run before it."""


@payload
class NetworkElected(Payload):
    """Node 0: the networks that it could train over, and which one it is."""

    KIND: ClassVar[str] = "election"

    networks: Sequence[Mapping[str, Any]] = ()
    """Each with its name, interfaces, rate and problems."""
    excluded: Sequence[Mapping[str, Any]] = ()
    """Interfaces that were left out, and why."""
    elected: int | None = None
    """The index of the elected one among ``networks``; None: there is none."""
    tests: int = 0
    """How many connections were tried."""


@payload
class ClockMeasured(Payload):
    """This node's clock beside node 0's."""

    KIND: ClassVar[str] = "clock"

    node: int | None = field(default=None, metadata=OMIT_NONE)
    """The node's number."""
    offset_ms: float | None = None
    """How far it is ahead, in milliseconds; None: not measured."""
    bound_ms: float | None = None
    """By how much that may be wrong, in milliseconds."""
    samples: int = 0
    """How many usable exchanges that comes from."""
    disciplined: bool | None = None
    """Whether a time service keeps it; None: not known."""
    source: str | None = None
    """What keeps it, such as ``chrony``."""


@payload
class PreflightDone(Payload):
    """What the checks say of this node."""

    KIND: ClassVar[str] = "preflight"

    node: int | None = field(default=None, metadata=OMIT_NONE)
    """The node's number."""
    status: str = ""
    """The worst of its findings: ``pass``, ``warn``, ``fail``."""
    seconds: float = 0.0
    """How long the preflight took."""
    findings: Sequence[FindingRecord] = ()
    """Each with ``check``, ``status``, ``summary`` and, where there is any, ``evidence``."""
    blamed: bool = False
    """Whether the attempt cannot start because of this node."""


@payload
class RendezvousReady(Payload):
    """Where the ranks meet, and the interface that this node trains over."""

    KIND: ClassVar[str] = "rendezvous"

    node: int = 0
    """The node's number."""
    master_addr: str | None = None
    """The address of node 0."""
    master_port: int | None = None
    """The port there."""
    interface: str | None = None
    """This node's interface."""


@payload
class WorkersStarted(Payload):
    """The ranks of this node were started."""

    KIND: ClassVar[str] = "workers"

    processes: Mapping[str, ProcessRecord] = field(default_factory=dict)
    """By rank: ``host``, ``boot``, ``pid``, ``start``."""
    resume_from: str | None = None
    """The checkpoint that a script of the user's own is to resume from."""


@payload
class SurplusStart(Payload):
    """The agent was started though the run is over: it does nothing."""

    KIND: ClassVar[str] = "surplus"

    why: str = ""
    """Why the run is over."""


@payload
class RanksStopping(Payload):
    """The ranks of this node are asked to stop, or ended."""

    KIND: ClassVar[str] = "stopping"

    cause: str = ""
    """The cause of an end, such as ``preempted`` or ``hang``."""
    why: str = ""
    """What asks for it."""
    signal: str | None = None
    """The signal that asks for it, such as ``SIGTERM``."""


@payload
class HangDetected(Payload):
    """What the ranks of this node were doing when no step had been finished for too long."""

    KIND: ClassVar[str] = "hang"

    node: int = 0
    """The node's number."""
    ranks: Sequence[RankRecord] = ()
    """Each rank's ``rank``, ``node``, ``step``, ``phase``, ``idle_s`` (seconds), ``state`` and ``stack``."""


@payload
class StragglerDetected(Payload):
    """Node 0: a rank that holds the others up."""

    KIND: ClassVar[str] = "straggler"

    rank: int | None = None
    """The rank."""
    host: str = ""
    """Its node's name."""
    ratio: float | None = None
    """How many times as long as the median rank it takes for a step."""
    own_s: float | None = None
    """Seconds a step, without waiting for others."""
    median_s: float | None = None
    """The same of the median rank."""
    step: int | None = None
    """The last step that was finished then."""


@payload
class RanksRestarted(Payload):
    """Node 0: the ranks are started again inside the allocation."""

    KIND: ClassVar[str] = "restart"

    round: int = 0
    """How often they were by now."""
    members: Sequence[int] = ()
    """The nodes that have ranks in this round."""
    cause: str | None = None
    """Why the last round ended, as the cause of an end."""
    why: str = ""
    """The same in words."""
    failures: Sequence[FailureRecord] = ()
    """The ranks that failed."""
    lost: Sequence[int] = ()
    """Nodes that are gone for good."""
    reached: int | None = None
    """The last step that the round before finished."""
    past: RoundRecord | None = field(default=None, metadata=OMIT_NONE)
    """The end of that round, as the policy weighs it."""


@payload
class JobRequeue(Payload):
    """Node 0: about to put the job back into the queue; or a command: it was done for an agent that could not.

    An agent can be killed between writing this and doing it. The journal's place says which start it is about; a
    command names it.
    """

    KIND: ClassVar[str] = "requeue"

    job_id: str | None = field(default=None, metadata=OMIT_NONE)
    """The job, where a command writes this."""
    restart: int | None = field(default=None, metadata=OMIT_NONE)
    """Which start of it, where a command writes this."""
    cause: str | None = field(default=None, metadata=OMIT_NONE)
    """Why this start ends, as the cause of an end; None: ``preflight``."""
    exclude: Sequence[str] = ()
    """Nodes that the next start goes without."""
    why: str = ""
    """Why, in words."""
    delay_s: float | None = field(default=None, metadata=OMIT_NONE)
    """How long it is to wait before it starts again, in seconds."""


@payload
class RequeueFailed(Payload):
    """An agent: the job could not be put back into the queue; or a command: nobody will start the run again."""

    KIND: ClassVar[str] = "requeue_failed"

    job_id: str | None = field(default=None, metadata=OMIT_NONE)
    """The job, where a command writes this."""
    restart: int | None = field(default=None, metadata=OMIT_NONE)
    """Which start of it, where a command writes this."""
    reason: str = ""
    """Why."""


@payload
class NodeEnded(Payload):
    """How the attempt ended on this node."""

    KIND: ClassVar[str] = "end"

    cause: str = ""
    """Why: ``completed``, ``preempted``, ``timeout``, ``node_fail``, ``oom``, ``crash``, ``hang``, ..."""
    reason: str = ""
    """The same in words."""
    failed_at: float | None = None
    """When, in seconds since 1970; None unless the reason lies with this node."""
    cascade: bool = False
    """Whether it failed because another node had."""
    signal: str | None = None
    """The signal that asked it to stop, such as ``SIGTERM``."""
    sure: bool = False
    """Whether the scheduler was asked what the signal stands for."""
    failures: Sequence[FailureRecord] = ()
    """The ranks that failed: ``rank``, ``pid``, ``exit_code``, ``signal``, ``at``, ``error``, ``last_lines``."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """What the agent saw beside it: memory, GPUs, what Slurm said when the signal came."""


AGENT_EVENTS: Sequence[type[Payload]] = (
    AgentStarted, WaitingForRun, NetworkElected, ClockMeasured, PreflightDone, RendezvousReady, WorkersStarted,
    SurplusStart, RanksStopping, HangDetected, StragglerDetected, RanksRestarted, JobRequeue, RequeueFailed, NodeEnded,
)  # fmt: skip
