"""Events that node agents write, into ``attempts/*/node-<i>.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from slurmtrain.model.run.events.base import (
    OMIT_NONE,
    AddressRecord,
    EvidenceRecord,
    FailureRecord,
    FindingRecord,
    NetworkRecord,
    Payload,
    ProcessRecord,
    RankRecord,
    RoundRecord,
    payload,
)


@payload("agent")
class AgentStarted(Payload):
    """The agent of a node started."""

    node: int = 0
    """The node's number, counted from 0."""
    # outcome.with_outcome() waits for the ends of so many nodes; the largest number counts, since more may join.
    nodes: int = 1
    """How many nodes the attempt has."""
    host: str
    """The node's name."""
    process: ProcessRecord | None = None
    """The agent's process: ``host``, ``boot``, ``pid``, ``start``."""
    executor: str = "local"
    """``slurm`` or ``local``."""
    # Ties a job to its submission where the command was killed before it could journal the id of the job.
    submission: int | None = field(default=None, metadata=OMIT_NONE)
    """Which submission started it."""
    attempt: int = 0
    """The number of the attempt."""
    # A job may be submitted to several partitions, whose prices differ.
    partition: str | None = field(default=None, metadata=OMIT_NONE)
    """The partition that the node's job is in."""


@payload("waiting")
class WaitingForRun(Payload):
    """A local run waits for another one to end, after which it starts."""

    run: str
    """The id of that run."""


@payload("waiting_for_slot")
class WaitingForSlot(Payload):
    """A run on this machine waits for its turn: enough runs of its sweep run, or too few GPUs are free."""

    count: int = 1
    """How many runs of its sweep may run at once; 0: it belongs to no sweep."""
    gpus: int = 0
    """How many GPUs it needs for itself."""


@payload("code")
class CodePrepared(Payload):
    """Node 0 has made the run's own copy of its code."""

    snapshot: str
    """The hash of the snapshot."""
    files: int = 0
    """How many files it holds."""


@payload("environment")
class EnvironmentNoted(Payload):
    """The environment of the attempt on this node: software, machine, variables."""

    node: int = 0
    """The node's number."""
    # Only the hash: the list is long, and the nodes of an attempt mostly have the same packages.
    software: str = ""
    """The hash of its Python and packages, which ``environments/<hash>.txt`` in the run directory lists."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of ``python``, ``torch``, ``cuda``, ``cudnn``, the GPUs' ``driver``, and on node 0 of ``slurm``."""
    machine: Mapping[str, str] = field(default_factory=dict)
    """What kind of machine it is: ``cpu``, ``cores``, ``memory``, ``gpus``, ``kernel``, ``os``."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The ranks' environment variables for training libraries, such as ``NCCL_*``, without secrets."""
    interpreter: str = ""
    """The interpreter that ``python`` in the command means, if the lines of setup changed it."""


@payload("election")
class NetworkElected(Payload):
    """Node 0: the networks that the ranks could train over, and the one that was elected."""

    networks: Sequence[NetworkRecord] = ()
    """Each network with its name, interfaces, rate and problems."""
    excluded: Sequence[AddressRecord] = ()
    """Interfaces that were left out, and why."""
    elected: int | None = None
    """The index in ``networks`` of the elected one; None: there is none."""
    tests: int = 0
    """How many connections were tested."""


@payload("clock")
class ClockMeasured(Payload):
    """This node's clock compared with node 0's."""

    node: int | None = field(default=None, metadata=OMIT_NONE)
    """The node's number."""
    offset_ms: float | None = None
    """How far it is ahead, in milliseconds; None: not measured."""
    bound_ms: float | None = None
    """The maximum error of ``offset_ms``, in milliseconds."""
    samples: int = 0
    """The number of usable exchanges that it was measured from."""
    disciplined: bool | None = None
    """Whether a time service synchronizes the clock; None: unknown."""
    source: str | None = None
    """What synchronizes it, such as ``chrony``."""


@payload("preflight")
class PreflightDone(Payload):
    """The results of this node's preflight checks."""

    node: int | None = field(default=None, metadata=OMIT_NONE)
    """The node's number."""
    status: str = ""
    """The worst of its findings: ``pass``, ``warn``, ``fail``."""
    # Only the end of the preflight is journaled: accounting.py counts back from it.
    seconds: float = 0.0
    """How long the preflight took."""
    findings: Sequence[FindingRecord] = ()
    """Each with ``check``, ``status``, ``summary`` and, if there is any, ``evidence``."""
    # The node ledger goes by this and not by the findings: a failure that all nodes share is the fault of none.
    blamed: bool = False
    """Whether the attempt cannot start because of this node."""


@payload("rendezvous")
class RendezvousReady(Payload):
    """The rendezvous address of the ranks, and the interface that this node trains over."""

    node: int = 0
    """The node's number."""
    master_addr: str | None = None
    """The address of node 0."""
    master_port: int | None = None
    """The port on node 0."""
    interface: str | None = None
    """This node's interface."""


@payload("workers")
class WorkersStarted(Payload):
    """This node's ranks were started."""

    processes: Mapping[str, ProcessRecord] = field(default_factory=dict)
    """By rank: ``host``, ``boot``, ``pid``, ``start``. If the run's command starts the ranks itself: by the number of
    the node among the training nodes."""
    ranks_each: int = 1
    """The number of ranks that each process stands for: all ranks of its node if the run's command starts the ranks
    itself."""
    first_rank: int | None = None
    """The first of the ranks that the process stands for, if the run's command starts them itself."""
    cpus: Mapping[str, str] = field(default_factory=dict)
    """The CPUs that each rank is bound to, such as ``0-3``, by rank; empty: to none."""
    resume_from: str | None = None
    """The checkpoint to resume from, for a user script that saves its own checkpoints."""


# Slurm may start a job again after its final end (runtime/agent/finish.py): such a start is no attempt.
@payload("surplus")
class SurplusStart(Payload):
    """The agent started although the run has ended, so it does nothing."""

    why: str = ""
    """Why the run is over."""


# Agents that obey a stop exit with 0: after this event, COMPLETED in Slurm does not mean that the run is completed.
@payload("stopping")
class RanksStopping(Payload):
    """The ranks of this node are asked to stop, or are killed."""

    cause: str = ""
    """The cause, such as ``preempted`` or ``hang``."""
    why: str = ""
    """The reason for the stop, in words."""
    signal: str | None = None
    """The signal that requested the stop, such as ``SIGTERM``."""


@payload("exits")
class RanksExited(Payload):
    """The ranks of this node have ended, after they were asked to stop."""

    codes: Mapping[str, int] = field(default_factory=dict)
    """Exit codes by rank, or by ``node <n>`` for a command that starts the ranks itself; negative: its signal."""


@payload("leftovers")
class LeftoversKilled(Payload):
    """Processes that ranks had left running were killed: ranks of this round, or of an earlier attempt."""

    killed: Sequence[str] = ()
    """Their names and process ids."""
    remaining: Sequence[str] = ()
    """Processes that could not be killed, because they are waiting in the kernel."""


@payload("helper")
class HelperFailed(Payload):
    """A command that a node runs beside its ranks failed, or a sidecar ended by itself; the run continues."""

    node: int = 0
    """The node's number."""
    name: str = ""
    """``setup_node``, ``teardown``, or ``sidecar`` and its number."""
    why: str = ""
    """Why, with the line and the end of its output."""


@payload("hang")
class HangDetected(Payload):
    """No step was finished for too long: what the ranks of this node were doing."""

    node: int = 0
    """The node's number."""
    ranks: Sequence[RankRecord] = ()
    """Each rank's ``rank``, ``node``, ``step``, ``phase``, ``idle_s`` (seconds), ``state`` and ``stack``."""


@payload("hang_limit")
class HangLimitRaised(Payload):
    """Node 0: no step was finished for too long, but the ranks that all others wait for compute: they get more time."""

    node: int = 0
    """The number of the node where the limit was exceeded."""
    limit_s: float | None = None
    """The limit so far, in seconds."""
    raised_s: float | None = None
    """The limit from now on, in seconds."""
    ranks: Sequence[int] = ()
    """The ranks that compute."""
    why: str = ""
    """The same in words, with the place in the script."""


@payload("paused")
class RanksPaused(Payload):
    """Node 0: the script has paused for longer than a few seconds."""

    ranks: Sequence[int] = ()
    """The ranks of this node that have paused."""
    step: int | None = None
    """Finished steps."""
    activity: str = ""
    """What the script says it is doing."""


@payload("resumed")
class RanksResumed(Payload):
    """Node 0: the script continues after a pause."""

    seconds: float | None = None
    """How long the pause was."""


@payload("straggler")
class StragglerDetected(Payload):
    """Node 0: a rank that slows the others down."""

    rank: int | None = None
    """The rank."""
    host: str = ""
    """Its node's name."""
    ratio: float | None = None
    """The duration of its steps divided by the median rank's."""
    own_s: float | None = None
    """Its seconds per step, without waiting for other ranks."""
    median_s: float | None = None
    """The same for the median rank."""
    step: int | None = None
    """The last step finished by then."""


@payload("ranks_apart")
class RanksApart(Payload):
    """Node 0 or rank 0: ranks train without a connection or without exchanging gradients, or some ranks are missing."""

    why: str = ""
    """Which ranks, and what to do about it; empty: they train together now."""


@payload("restart")
class RanksRestarted(Payload):
    """Node 0: the ranks are restarted inside the allocation."""

    round: int = 0
    """The number of restarts so far, including this one."""
    members: Sequence[int] = ()
    """The nodes that have ranks in this round."""
    cause: str | None = None
    """Why the previous round ended: a cause as in ``end``."""
    why: str = ""
    """The same in words."""
    failures: Sequence[FailureRecord] = ()
    """The ranks that failed."""
    # with_outcome() does not wait for their ends, which may never come, and ignores the ends that do.
    lost: Sequence[int] = ()
    """Nodes that are gone for good."""
    joined: Sequence[int] | None = field(default=None, metadata=OMIT_NONE)
    """Nodes of another job that have joined; None: none."""
    reached: int | None = None
    """The last step that the previous round finished."""
    # None where nodes have joined or left: that is no end that counts against the run.
    past: RoundRecord | None = field(default=None, metadata=OMIT_NONE)
    """The end of that round, as input of the restart policy."""


@payload("nodes_requested")
class NodesRequested(Payload):
    """Node 0: a second job was submitted, for nodes that the run could use in addition to its present ones."""

    job_id: str | None = None
    """The id of the job; None: Slurm refused it."""
    nodes: int = 0
    """How many nodes it is for, at most."""
    problem: str | None = field(default=None, metadata=OMIT_NONE)
    """Why there is no such job, as a phrase."""


@payload("nodes_joined")
class NodesJoined(Payload):
    """Node 0: nodes of another job have joined the attempt, whose ranks start again on all of its nodes."""

    job_id: str = ""
    """Their job."""
    hosts: Sequence[str] = ()
    """Their names."""
    nodes: int = 0
    """How many nodes have ranks from now on."""


@payload("nodes_left")
class NodesLeft(Payload):
    """Node 0: nodes of another job have left the attempt, and the ranks start again on the others."""

    job_id: str = ""
    """Their job."""
    hosts: Sequence[str] = ()
    """Their names."""
    why: str = ""
    """Why, as a phrase."""


@payload("command_completed")
class CommandCompleted(Payload):
    """Node 0: its command, which starts the ranks itself, has ended with code 0; commands of other nodes still run."""

    at: float = 0.0
    """When it ended, in seconds since 1970."""
    running: Sequence[str] = ()
    """The nodes whose commands still run."""


# Journaled afterwards, since nothing of the job runs meanwhile; accounting.py counts the time as queueing.
@payload("suspended")
class JobSuspended(Payload):
    """Node 0: all processes of the job were stopped for a while, as by ``scontrol suspend``, and now continue."""

    since: float = 0.0
    """When they were stopped, in seconds since 1970, to about a second."""


@payload("kept")
class NodesKept(Payload):
    """Node 0: the attempt has failed, and its job keeps its nodes for a while, so that a person can inspect them."""

    until: float = 0.0
    """When it lets them go, in seconds since 1970."""
    cause: str = ""
    """Why the attempt failed: a cause as in ``end``."""
    why: str = ""
    """The same in words, and how to get to the nodes."""


@payload("refused")
class ConnectionsRefused(Payload):
    """Connections to this node's agent from outside the attempt's nodes, such as connections of a port scan."""

    node: int = 0
    """The node's number."""
    count: int = 0
    """How many there were."""
    # As many as runtime/peers/channel.py remembers: a stranger with many addresses must not fill the journal.
    addresses: Sequence[str] = ()
    """Where they came from, the most frequent address first; at most 16."""


@payload("requeue")
class JobRequeue(Payload):
    """Node 0: it is about to requeue the job. From a command: it requeued the job because the agent could not.

    An agent can be killed between writing this and requeueing. The journal's directory says which start of the job it
    is about; a command names the start.
    """

    job_id: str | None = field(default=None, metadata=OMIT_NONE)
    """The job, if a command writes this."""
    restart: int | None = field(default=None, metadata=OMIT_NONE)
    """Which start of it, if a command writes this."""
    cause: str | None = field(default=None, metadata=OMIT_NONE)
    """Why this start ends: a cause as in ``end``; None: ``preflight``."""
    # For good: attempts.number_attempts() adds up the nodes that all earlier starts of the job have excluded.
    exclude: Sequence[str] = ()
    """Nodes to exclude from the next start."""
    why: str = ""
    """The reason, in words."""
    delay_s: float | None = field(default=None, metadata=OMIT_NONE)
    """How long to wait before the next start, in seconds."""


@payload("requeue_failed")
class RequeueFailed(Payload):
    """From an agent: it could not requeue the job. From a command: the run will not be started again."""

    job_id: str | None = field(default=None, metadata=OMIT_NONE)
    """The job, if a command writes this."""
    restart: int | None = field(default=None, metadata=OMIT_NONE)
    """Which start of it, if a command writes this."""
    reason: str = ""
    """Why."""


@payload("end")
class NodeEnded(Payload):
    """How the attempt ended on this node."""

    cause: str = ""
    """``completed``, ``preempted``, ``timeout``, ``node_fail``, ``oom``, ``crash``, ``hang``, ..."""
    reason: str = ""
    """The same in words."""
    failed_at: float | None = None
    """When, in seconds since 1970; None unless the cause is on this node."""
    cascade: bool = False
    """Whether it failed because another node had failed."""
    signal: str | None = None
    """The signal that requested the stop, such as ``SIGTERM``."""
    sure: bool = False
    """Whether the scheduler confirmed what the signal stands for."""
    failures: Sequence[FailureRecord] = ()
    """The ranks that failed: ``rank``, ``pid``, ``exit_code``, ``signal``, ``at``, ``error``, ``last_lines``."""
    evidence: EvidenceRecord = field(default_factory=dict)
    """Further observations of the agent: memory, GPUs, Slurm's answer when the signal came."""
    # If the agent was killed before it closed the lease, the next start of the job learns from this that it is surplus.
    over: str | None = field(default=None, metadata=OMIT_NONE)
    """Node 0: the final state of the run: ``completed``, ``failed`` or ``cancelled``."""
