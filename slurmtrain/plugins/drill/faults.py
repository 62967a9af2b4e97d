"""Injecting faults into a run, with only its owner's permissions.

The target processes are read from the run's journals. On this machine they are signalled after a check of their
identity. On Slurm's nodes the signals are sent by a step inside the job's allocation (``srun --overlap``), or by
``scancel --signal``, which reaches the steps of a job and which Slurm treats neither as a preemption nor as a cancel.
``scancel --signal=KILL`` does count as a cancel (observed on 22.05), so there processes are killed node by node.
"""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from slurmtrain.errors import RunBusy, SlurmDown, UserError
from slurmtrain.model.run.events.agent_events import AgentStarted, WorkersStarted
from slurmtrain.model.run.events.base import Event, P
from slurmtrain.model.run.layout import attempt_of, staged_step
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.drill.facts import InjectedFault
from slurmtrain.runtime.checkpoint.external import OTHER, ExternalCheckpoint, Search, find_checkpoints
from slurmtrain.system.process import Process, descendants

# The signals that ask the agents to stop.
_ANNOUNCED = {"preempt": signal.SIGTERM, "timeout": signal.SIGUSR2}
_TO_RANK = {"rank": signal.SIGKILL, "hang": signal.SIGSTOP}
# A shell script: its arguments are a signal and NODE:PID,PID,... for each node; it signals the processes on its own
# node.
_ON_A_NODE = 'n=$1; shift; IFS=,; for w; do case $w in "$SLURMD_NODENAME":*) kill -s "$n" -- ${w#*:};; esac; done'
# A step inside an allocation starts within seconds, or not at all.
_STEP_S = 60.0
# How often to look for a save, in seconds: it may be over in a few milliseconds.
_SAVE_POLL_S = 0.005
# How long processes may take to end after SIGKILL, in seconds.
_DEATH_S = 5.0


@dataclass(frozen=True, slots=True)
class FaultTarget:
    """The processes of a run's newest attempt.

    ``nodes``: how many nodes it has; spare nodes have no ranks. ``hosts`` and ``agents``: by node number. ``ranks``: by
    node number, then by global rank.
    """

    attempt: Attempt
    nodes: int
    hosts: Mapping[int, str]
    agents: Mapping[int, Process]
    ranks: Mapping[int, Mapping[int, Process]]

    @property
    def complete(self) -> bool:
        """Whether all agents have journaled their start, and no rank is missing below the highest known one."""
        ranks = sorted(rank for ranks in self.ranks.values() for rank in ranks)
        return len(self.agents) == self.nodes and bool(ranks) and ranks == list(range(len(ranks)))

    def all_ranks(self) -> list[Process]:
        """The processes of all ranks."""
        return [process for ranks in self.ranks.values() for process in ranks.values()]

    def pids(self, node: int) -> list[int]:
        """The process numbers of the ranks on a ``node``."""
        return [process.pid for process in self.ranks.get(node, {}).values()]

    def last_rank(self) -> tuple[int, int, Process]:
        """The highest rank, its node and its process: a rank without a special role, unlike rank 0."""
        rank, node = max((rank, node) for node, ranks in self.ranks.items() for rank in ranks)
        return rank, node, self.ranks[node][rank]


def find_target(workspace: Workspace, run: Run) -> FaultTarget | None:
    """The processes of a run, from its journals; None if no agent has journaled its start yet."""
    newest = run.newest
    if newest is None:
        return None
    nodes = 0
    hosts: dict[int, str] = {}
    agents: dict[int, Process] = {}
    ranks: dict[int, Mapping[int, Process]] = {}
    for event in _events_of_attempt(workspace, run, newest, AgentStarted):
        agent = event.payload
        if agent.process is not None:
            nodes = max(nodes, agent.nodes)
            hosts[agent.node], agents[agent.node] = agent.host, Process.from_dict(agent.process)
    # Only the newest attempt's: an earlier one of the same job has its own journals.
    by_source = {f"attempts/{newest.key}/node-{node}.jsonl": node for node in agents}
    for started in _events_of_attempt(workspace, run, newest, WorkersStarted):
        if started.source in by_source:
            ranks[by_source[started.source]] = {
                int(rank): Process.from_dict(process) for rank, process in started.payload.processes.items()
            }
    return FaultTarget(newest, nodes, hosts, agents, ranks) if agents else None


def inject(workspace: Workspace, run: Run, name: str) -> InjectedFault:
    """Inject a fault into a training run.

    Args:
        workspace: Where the run is.
        run: Its state, just read.
        name: The fault, a key of :data:`slurmtrain.plugins.drill.facts.FAULTS`.

    Raises:
        RunBusy: The run does not train, or its processes ended before the signal was sent.
        UserError: Its processes run on another machine, without a Slurm that can reach them.
        SlurmDown: ``scancel`` or ``srun`` failed.
    """
    from slurmtrain.slurm.slurm_commands import run_command

    target, is_local = _target_of(workspace, run), run.executor == "local"
    attempt, hit, node = target.attempt, "all of its processes", max(target.ranks)
    # Taken before the signal, so that no effect of it precedes the fault.
    at = time.time()
    if name in _ANNOUNCED:
        number, count = _ANNOUNCED[name], len(target.agents)
        hit = "the agent" if count == 1 else f"all {count} agents"
        if is_local:
            _signal_all([*target.agents.values()], number, hit)
        else:
            run_command("scancel", f"--signal={number.name.removeprefix('SIG')}", attempt.job_id)
    elif name == "all":
        # Ranks first, agents last: a rank that outlived its agent would go on training.
        others = [Process.from_dict(process) for process in attempt.processes] if is_local else []
        struck = [*target.all_ranks(), *others, *target.agents.values()]
        if is_local:
            struck = [process for root in struck for process in (root, *descendants(root))]
            _signal_all(list(dict.fromkeys(struck)), signal.SIGKILL, hit)
        else:
            pids = {target.hosts[each]: [*target.pids(each), agent.pid] for each, agent in target.agents.items()}
            # The step that sends the signals is part of the job and may die with it, which srun reports as a failure.
            with contextlib.suppress(SlurmDown):
                _signal_on(attempt.job_id, pids, signal.SIGKILL)
    else:
        number, process, hit = signal.SIGKILL, target.agents[node], f"the agent of node {node}"
        if name in _TO_RANK:
            rank, node, process = target.last_rank()
            number, hit = _TO_RANK[name], f"rank {rank}"
        if is_local:
            # A launcher or a shell that is stopped alone stops no training.
            _signal_all([process, *(descendants(process) if name == "hang" else ())], number, hit)
        else:
            hit = f"{hit} on {target.hosts[node]}"
            _signal_on(attempt.job_id, {target.hosts[node]: [-process.pid if name == "hang" else process.pid]}, number)
    return InjectedFault(
        fault=name, at=at, attempt=attempt.key, restarts=len(attempt.restarts), step=run.step, target=hit
    )


def inject_in_save(workspace: Workspace, run: Run, watch: SaveWatch, timeout_s: float) -> InjectedFault | None:
    """Kill all ranks as soon as a save is under way; None if none is within ``timeout_s`` seconds.

    ``half_written`` of the result is empty if the save was finished after all before the signal arrived. ``workspace``
    has the ``run``, whose saves ``watch`` looks for. Raises what :func:`inject` raises.
    """
    target = _target_of(workspace, run)
    local = run.executor == "local"
    roots = target.all_ranks()
    processes = [process for root in roots for process in (root, *descendants(root))] if local else []
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if begun := watch.half_written([process.pid for process in processes]):
            at = time.time()
            count = len(target.all_ranks())
            hit = "the rank" if count == 1 else f"all {count} ranks"
            if local:
                _signal_all(processes, signal.SIGKILL, hit)
            else:
                groups = {target.hosts[node]: [-pid for pid in target.pids(node)] for node in target.ranks}
                _signal_on(target.attempt.job_id, groups, signal.SIGKILL)
            killed_at = time.monotonic()
            while any(process.alive() for process in processes) and time.monotonic() < killed_at + _DEATH_S:
                time.sleep(_SAVE_POLL_S)
            attempt = target.attempt
            return InjectedFault(
                fault="save", at=at, attempt=attempt.key, restarts=len(attempt.restarts), step=run.step, target=hit,
                half_written=watch.still_half_written(begun),
            )  # fmt: skip
        time.sleep(_SAVE_POLL_S)
    return None


def _target_of(workspace: Workspace, run: Run) -> FaultTarget:
    target = find_target(workspace, run)
    if target is None or not target.complete:
        raise RunBusy(f"run {run.id} is not training, so there is nothing to hit")
    return target


def _events_of_attempt(workspace: Workspace, run: Run, attempt: Attempt, cls: type[P]) -> list[Event[P]]:
    """An attempt's events of one kind, in order."""
    events = (event for event in workspace.store.events(run.id, cls) if attempt_of(event.source) == attempt.key)
    return sorted(events, key=lambda event: event.order)


def _signal_all(processes: Sequence[Process], number: signal.Signals, target: str) -> None:
    """Signal these processes on this machine, which ``target`` names.

    Raises RunBusy if all of them had ended, UserError if they are on another machine.
    """
    # Unknown means another machine, whose process numbers may coincide with ours.
    if any(process.alive() is None for process in processes):
        raise UserError(f"the processes of the run on {processes[0].host} cannot be reached from here: drill there")
    sent = [process.send(number) for process in processes]
    if not any(sent):
        raise RunBusy(f"{target} had ended before {number.name} was sent")


def _signal_on(job_id: str, pids: Mapping[str, Sequence[int]], number: signal.Signals) -> None:
    """Signal processes from a step inside the job's allocation. Raises SlurmDown.

    ``pids``: by host; the negative of one is its process group, as for kill(1).
    """
    from slurmtrain.slurm.slurm_commands import run_command

    count = len(pids)
    arguments = [f"{host}:{','.join(map(str, ids))}" for host, ids in pids.items()]
    run_command(
        "srun",
        f"--jobid={job_id}",
        # The job's own step holds all of its CPUs; without this the new step would wait for them.
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
        *arguments,
        timeout_s=_STEP_S,
    )


# --- the checkpoints that a run's script saves itself, as seen from outside while it trains ---------------------------


# How much of a directory of checkpoints is looked at, in search of a save that has begun.
_DEPTH = 3
_ENTRIES = 5000
# Names that scripts give to unfinished files begin or end like this.
_TEMPORARY_START = (".", "tmp", "_tmp")
_TEMPORARY_END = (".tmp", ".temp", ".part", ".partial", ".incomplete", "~")

# Sizes in bytes and times of change in ns, by path.
_Listing = dict[str, tuple[int, int]]


class OwnCheckpoints:
    """All complete checkpoints that have been there at any look: a script may delete its older ones."""

    def __init__(self, search: Search | None) -> None:
        """``search``: where they are; None: there are no checkpoints of its own."""
        self._search = search
        self._saves: dict[tuple[Path, float], ExternalCheckpoint] = {}

    @property
    def saves(self) -> list[ExternalCheckpoint]:
        """The checkpoints seen so far, the oldest first; a path that was saved to repeatedly is there repeatedly."""
        # Times of files are as coarse as the kernel's ticks: of two saves within a tick the higher step is newer.
        return sorted(self._saves.values(), key=lambda save: (save.saved_at, -1 if save.step is None else save.step))

    def look(self) -> None:
        """Take note of what is there now."""
        if self._search is None:
            return
        for checkpoint in filter(attrgetter("complete"), find_checkpoints(self._search)):
            self._saves[checkpoint.path, checkpoint.saved_at] = checkpoint

    def incomplete(self) -> list[str]:
        """What is there now and is not complete, each with the reason, as phrases."""
        if self._search is None:
            return []
        return [
            f"{each.path.name} is not complete: {each.problem}"
            for each in find_checkpoints(self._search)
            if each.problem
        ]


class SaveWatch:
    """Notices that a save is under way, in the directory of a run's checkpoints."""

    def __init__(self, search: Search | None, checkpoints: Path) -> None:
        """``search``: where the script's own checkpoints are, if any; ``checkpoints``: the directory of the run's."""
        self._search = search
        self._base = checkpoints
        if search is not None:
            # The directory that everything which matches the absolute pattern is below.
            parts = Path(search.pattern).parts
            magic = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
            self._base = Path(*parts[:magic])
        self._before = self._list()

    def half_written(self, pids: Iterable[int] = ()) -> list[str]:
        """Checkpoints, and what has a temporary name, that have changed since the last call and are not complete.

        A checkpoint is not complete while one of the processes ``pids``, on this machine, has a file of it open for
        writing.
        """
        now = self._list()
        changed = [path for path, entry in now.items() if self._before.get(path) != entry]
        self._before = now
        if not changed:
            return []
        # Imported here, since it takes 15 ms and most commands do not need it.
        import psutil

        written = set()
        for pid in pids:
            with contextlib.suppress(psutil.Error, OSError):
                written |= {file.path for file in psutil.Process(pid).open_files() if file.mode != "r"}
        unfinished = {*filter(_is_temporary, now), *self._unfinished(written)}
        return sorted(path for path in unfinished if any(_is_within(each, path) for each in changed))

    def still_half_written(self, paths: Sequence[str]) -> list[str]:
        """The ``paths``, half-written when their writers were killed, that had not been finished before."""
        # Nothing in a file of an unknown format says that there was more to come.
        unfinished = self._unfinished(paths, only_unknown=True)
        return [path for path in paths if Path(path).exists() and (_is_temporary(path) or path in unfinished)]

    def _unfinished(self, written: Collection[str], *, only_unknown: bool = False) -> list[str]:
        """The script's checkpoints that are not complete, or with a file that is in ``written``.

        ``only_unknown``: the latter only if their format is unknown.
        """
        return [
            str(each.path)
            for each in (find_checkpoints(self._search) if self._search is not None else ())
            if not each.complete
            or (
                (each.format == OTHER.NAME or not only_unknown)
                and any(_is_within(path, str(each.path)) for path in written)
            )
        ]

    def _list(self) -> _Listing:
        return dict(_walk(str(self._base), _DEPTH, [_ENTRIES]))


def _walk(directory: str, depth: int, left: list[int]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Files and directories below ``directory``; ``left``: how many more entries to look at."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            left[0] -= 1
            if left[0] < 0:
                return
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                yield entry.path, (status.st_size, status.st_mtime_ns)
                if depth > 1 and entry.is_dir(follow_symlinks=False):
                    yield from _walk(entry.path, depth - 1, left)


def _is_temporary(path: str) -> bool:
    name = path.rpartition("/")[2]
    return staged_step(name) is not None or name.startswith(_TEMPORARY_START) or name.endswith(_TEMPORARY_END)


def _is_within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory}/")
