"""Faults that are inflicted on a run on purpose, with no more rights than its owner's.

Whom they hit is read from the run's journals. On this machine that is done by signals to processes whose identity is
checked; on Slurm's nodes by a step inside the job's allocation (``srun --overlap``), or by ``scancel --signal``, which
reaches the steps of a job and is neither a preemption nor a cancel to Slurm. ``scancel --signal=KILL`` is a cancel
(seen on 22.05), so what is to die there is killed node by node.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from slurmtrain.errors import RunBusy, SlurmDown, UserError
from slurmtrain.model.diagnosis.drill import Injected
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.layout import attempt_of
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.process import Process, descendants

# What asks the agents to stop.
_ANNOUNCED = {"preempt": signal.SIGTERM, "timeout": signal.SIGUSR2}
_TO_RANK = {"rank": signal.SIGKILL, "hang": signal.SIGSTOP}
# Reads NODE:PID,PID,... for each node, and signals those of the node that it runs on.
_ON_A_NODE = 'n=$1; shift; IFS=,; for w; do case $w in "$SLURMD_NODENAME":*) kill -s "$n" ${w#*:};; esac; done'
# A step inside an allocation starts within seconds, or not at all.
_STEP_S = 60.0


@dataclass(frozen=True, slots=True)
class FaultTarget:
    """Where the newest attempt runs: the host, agent and ranks of each node, by number. Ranks go by global number.

    ``nodes``: how many there are. Spare ones have no ranks.
    """

    attempt: Attempt
    nodes: int
    hosts: Mapping[int, str]
    agents: Mapping[int, Process]
    ranks: Mapping[int, Mapping[int, Process]]

    @property
    def complete(self) -> bool:
        """Whether all agents have spoken, and no rank is missing before the last one that is known."""
        known = sorted(rank for ranks in self.ranks.values() for rank in ranks)
        return len(self.agents) == self.nodes and bool(known) and known == list(range(len(known)))

    def last_rank(self) -> tuple[int, int, Process]:
        """The rank with the highest number, which no other one waits for in particular, and its node."""
        rank, node = max((rank, node) for node, ranks in self.ranks.items() for rank in ranks)
        return rank, node, self.ranks[node][rank]


def place_of(workspace: Workspace, run: Run) -> FaultTarget | None:
    """Where a run is, by its journals; None where its agents have not spoken yet."""
    newest = run.newest
    if newest is None:
        return None
    nodes = 0
    hosts: dict[int, str] = {}
    agents: dict[int, Process] = {}
    ranks: dict[int, Mapping[int, Process]] = {}
    for event in _told(workspace, run, newest, "agent"):
        node, nodes = int(event.data["node"]), max(nodes, int(event.data["nodes"]))
        hosts[node], agents[node] = str(event.data["host"]), Process.from_dict(event.data["process"])
    by_source = {f"attempts/{newest.key}/node-{node}.jsonl": node for node in agents}
    for event in _told(workspace, run, newest, "workers"):
        if event.source in by_source:
            told = event.data.get("processes", {})
            ranks[by_source[event.source]] = {int(rank): Process.from_dict(one) for rank, one in told.items()}
    return FaultTarget(newest, nodes, hosts, agents, ranks) if agents else None


def inject(workspace: Workspace, run: Run, name: str) -> Injected:
    """Inflict a fault on a run that trains; returns what was hit, and when.

    Raises RunBusy where there is nothing to hit, UserError where its processes cannot be reached from here, SlurmDown.
    """
    place = place_of(workspace, run)
    if place is None or not place.complete:
        raise RunBusy(f"run {run.id} does not train, so there is nothing to hit")
    at = time.time()
    on = _here(place, name) if run.executor == "local" else _in_slurm(place, name)
    return Injected(
        fault=name, at=at, attempt=place.attempt.key, restarts=len(place.attempt.restarts), step=run.step, on=on
    )


def _told(workspace: Workspace, run: Run, attempt: Attempt, kind: str) -> Iterator[AnyEvent]:
    told = (event for event in workspace.store.events(run.id, kind) if attempt_of(event.source) == attempt.key)
    return iter(sorted(told, key=lambda event: event.order))


# --- on this machine --------------------------------------------------------------------------------------------------


def _here(place: FaultTarget, name: str) -> str:
    if name in _ANNOUNCED:
        return _send([*place.agents.values()], _ANNOUNCED[name], _agents_in_words(place))
    if name in _TO_RANK:
        rank, _, process = place.last_rank()
        return _send([process], _TO_RANK[name], f"rank {rank}")
    if name == "agent":
        node = max(place.ranks)
        return _send([place.agents[node]], signal.SIGKILL, f"the agent of node {node}")
    # The ranks first: who is left must have nobody to restart.
    ranks = [process for ranks in place.ranks.values() for process in ranks.values()]
    others = [Process.from_dict(process) for process in place.attempt.processes]
    every = [each for one in (*ranks, *others, *place.agents.values()) for each in (one, *descendants(one))]
    return _send(list(dict.fromkeys(every)), signal.SIGKILL, "all of its processes")


def _send(processes: Sequence[Process], number: signal.Signals, on: str) -> str:
    """Signal them, and say whom. Raises RunBusy where none was there, UserError where they are on another machine."""
    if any(process.alive() is None for process in processes):
        raise UserError(f"the run is on {processes[0].host}, whose processes cannot be reached from here: drill there")
    sent = [process.send(number) for process in processes]
    if not any(sent):
        raise RunBusy(f"{on} had ended before {number.name} was sent")
    return on


# --- on Slurm's nodes -------------------------------------------------------------------------------------------------


def _in_slurm(place: FaultTarget, name: str) -> str:
    from slurmtrain.slurm.command import ask

    job_id = place.attempt.job_id
    if name in _ANNOUNCED:
        ask("scancel", f"--signal={_ANNOUNCED[name].name.removeprefix('SIG')}", job_id)
        return _agents_in_words(place)
    if name in _TO_RANK:
        rank, node, process = place.last_rank()
        _signal_on(job_id, {place.hosts[node]: [process.pid]}, _TO_RANK[name])
        return f"rank {rank} on {place.hosts[node]}"
    if name == "agent":
        node = max(place.ranks)
        _signal_on(job_id, {place.hosts[node]: [place.agents[node].pid]}, signal.SIGKILL)
        return f"the agent on {place.hosts[node]}"
    pids = {
        place.hosts[node]: [*(rank.pid for rank in place.ranks.get(node, {}).values()), agent.pid]
        for node, agent in place.agents.items()
    }
    # The step that kills may end with the job.
    with contextlib.suppress(SlurmDown):
        _signal_on(job_id, pids, signal.SIGKILL)
    return "all of its processes"


def _signal_on(job_id: str, pids: Mapping[str, Sequence[int]], number: signal.Signals) -> None:
    """Signal processes on nodes of a job, from a step inside its allocation. Raises SlurmDown."""
    from slurmtrain.slurm.command import ask

    count = len(pids)
    words = [f"{host}:{','.join(map(str, ids))}" for host, ids in pids.items()]
    ask(
        "srun",
        f"--jobid={job_id}",
        "--overlap",
        f"--nodelist={','.join(pids)}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "sh",
        "-c",
        _ON_A_NODE,
        "sh",
        number.name.removeprefix("SIG"),
        *words,
        timeout_s=_STEP_S,
    )


def _agents_in_words(place: FaultTarget) -> str:
    return "the agent" if len(place.agents) == 1 else f"all {len(place.agents)} agents"
