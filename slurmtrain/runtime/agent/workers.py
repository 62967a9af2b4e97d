"""The ranks of one node: this module starts and watches them, and decides when they must end.

They are checked ten times a second: a rank that failed, a signal to this agent, the time limit, a hang, or another node
may cause a stop (a :class:`StopRequest`). The first request counts. It is published to all nodes, and every agent asks
its ranks, waits, and kills.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import LaunchError, SlurmtrainError
from slurmtrain.model.experiment.launcher import RANKS, NodeRanks
from slurmtrain.model.interruption.exit_report import STOPPED, Exit, StopRequest
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.model.run.run import GROW
from slurmtrain.runtime.agent.exits import CommandExits, RankExits
from slurmtrain.runtime.agent.helpers import HELPERS
from slurmtrain.runtime.agent.nsys import is_nsys
from slurmtrain.runtime.checkpoint.writer_process import PUBLISHING
from slurmtrain.runtime.environment import variables
from slurmtrain.runtime.environment.ranks import Tasks, variables_of_rank, write_changes
from slurmtrain.runtime.environment.variables import HELPER
from slurmtrain.system.process import (
    Entry,
    descend,
    has_variable,
    identity_of,
    name_of,
    pipe_of,
    program_of,
    read_table,
)

if TYPE_CHECKING:
    from slurmtrain.runtime.agent.node_round import Context, Round, RoundConfig

# Seconds between asking ranks to stop and killing them once another rank has failed: a save needs all ranks.
CRASH_GRACE_S = 5.0
# The same if they wait in a collective for a rank that is gone or hangs, and so would never notice the request.
STUCK_GRACE_S = 1.0
# The same if nodes have joined. Nothing presses: the new ones wait, and to go on from an earlier step would lose work.
GROW_GRACE_S = 600.0
# The same if the run is completed, and what remains only serves it.
COMPLETED_GRACE_S = 30.0
# How long the other ranks have once one has exited as if asked to stop: a signal may have reached only that one.
_LEFT_GRACE_S = 30.0
# What ranks leave behind is killed after this time: helpers of multiprocessing end, and clean up, once their rank has.
_LEFTOVER_S = 0.5
# How long to wait for a checkpoint that is just being published, and how long if the job is about to be ended.
_PUBLISH_S = 10.0
_PUBLISH_IN_GRACE_S = 2.0
# How often to look for processes that have not been asked to stop yet: looking at all processes costs milliseconds.
_ASK_S = 0.2
# How long a killed rank may take to be reaped.
_REAP_S = 1.0
_MONITOR_S = 0.1
# A signal to all processes of a job reaches ranks and agent in any order, but at most this far apart.
_SIGNAL_SKEW_S = 0.3
_RANK_MAIN = Path(__file__).with_name("rank_main.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """Which ranks of a round are on this node, and where all ranks meet.

    ``config``: what all rounds share. ``attempt`` names the round. ``members``: the nodes that have ranks in the round,
    this one among them. ``port``: of rank 0's store.
    """

    config: RoundConfig
    attempt: AttemptDir
    members: Sequence[int]
    port: int

    @property
    def place(self) -> int:
        """This node's place among the members."""
        return self.members.index(self.config.node)

    @property
    def ranks(self) -> NodeRanks:
        """How many ranks each member has."""
        return self.config.spec.resources.ranks_on(self.members)

    @property
    def own_ranks(self) -> range:
        """The global ranks of this node."""
        return self.ranks.ranks_of(self.place)

    @property
    def tasks(self) -> Tasks:
        """The ranks as tasks of Slurm."""
        hosts = [self.config.hosts[node] for node in self.members if node in self.config.hosts]
        return Tasks(
            launcher=self.config.spec.launcher or RANKS,
            place=self.place,
            ranks=self.ranks,
            hosts=hosts if len(hosts) == len(self.members) else (),
            cpus_per_task=self.config.spec.resources.of_node(self.config.number).cpus_per_proc,
            own=self.config.spec.env.keys(),
        )

    def log_of(self, rank: int) -> Path:
        """The log of a ``rank`` of this node; if a command starts the ranks, all of them share one."""
        return self.attempt.node_log(self.config.node) if self.config.spec.per_node else self.attempt.rank_log(rank)


class Workers:
    """The ranks of one node in one round, or the command that starts them.

    Ranks are asked before they are killed, the failure of one ends the others within seconds, and all nodes end
    together.
    """

    def __init__(self, placement: RankPlacement, argv: Sequence[str], context: Context, supervisor: Round) -> None:
        """:meth:`run` starts the ranks.

        ``placement``: which ranks. ``argv``: the command of each. ``context``: shared by all rounds. ``supervisor``:
        the round.
        """
        self.request: StopRequest | None = None
        """Why the ranks were asked to stop, if they were."""
        self._placement = placement
        self._argv = argv
        self._directory = context.directory
        self._control = context.control
        self._flag = context.host.flag
        self._supervisor = supervisor
        attempt, spec = placement.attempt, placement.config.spec
        self._exits = (
            CommandExits(attempt, placement.config.node, placement.ranks) if spec.per_node else RankExits(attempt)
        )
        self._ranks = RankProcesses(besides=bool(spec.setup or spec.setup_node or spec.sidecars))
        # By rank; with a command that starts the ranks itself, by the node's place among the training nodes.
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._died_at: dict[int, float] = {}
        self._stop_signal = signal.Signals[spec.requeue.signal]

    def run(self) -> None:
        """Start the ranks, and watch them until all have ended. Raises SlurmtrainError if one cannot be started."""
        self._start()
        while None in self._exit_codes():
            time.sleep(_MONITOR_S)
            self._check()

    def _start(self) -> None:
        placement, place, tasks = self._placement, self._placement.place, self._placement.tasks
        placed = NodeRanks((1,) * len(placement.members)) if placement.config.spec.per_node else placement.ranks
        master = (placement.config.address, placement.port)
        argv = [sys.executable, "-I", "-S", str(_RANK_MAIN), *self._argv]

        def note_death(pid: int) -> None:
            # More precisely than polling could: the first rank to fail is the one to blame. WNOWAIT leaves the exit
            # code to be collected by who polls the process, and ECHILD means that it has been.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            self._died_at.setdefault(pid, time.time())

        for local, rank in enumerate(placed.ranks_of(place)):
            environ = {
                **variables.environment_of_agent(),
                **variables_of_rank(placement.attempt, placed, place, local, master),
            }
            changes = write_changes(tasks.changes(environ, local))
            try:
                process = subprocess.Popen(argv, env={**environ, variables.CHANGES: changes}, start_new_session=True)
            except OSError as error:
                # The kernel refuses it: too many processes, or too much text for them.
                raise LaunchError(f"rank {rank} cannot be started on this node: {error.strerror}") from error
            self._processes[rank] = process
            threading.Thread(target=note_death, args=(process.pid,), daemon=True).start()
        pids = {rank: process.pid for rank, process in self._processes.items()}
        self._ranks.started(pids.values())
        self._supervisor.started(pids)

    def _check(self) -> None:
        """Look at the ranks once, and end them if it is time to."""
        self._ranks.reap()
        codes = self._exit_codes()
        failed = any(code not in (None, 0, STOPPED) for code in codes)
        if self.request is None:
            if self._may_follow_a_signal(codes):
                # This agent may be about to receive the signal too. Without waiting for it, the end would count as a
                # crash, or as completion.
                time.sleep(_SIGNAL_SKEW_S)
            self.request = self._find_request()
        if self.request is not None or failed:
            self._end_workers(failed)
        elif STOPPED in codes:
            self._wait_or_kill(_seconds_from_now(_LEFT_GRACE_S), ask=False)

    # --- supervision --------------------------------------------------------------------------------------------------

    def exits(self) -> list[Exit]:
        """How each rank of this node, or the command that starts them, ended, once all have."""
        return [
            self._exits.read(number, process, self._died_at.get(process.pid, time.time()))
            for number, process in self._processes.items()
            if process.returncode is not None
        ]

    def _may_follow_a_signal(self, codes: Sequence[int | None]) -> bool:
        """Whether ranks may have ended because of a signal, so far unknown to this agent, to all processes of the job.

        ``codes``: the ranks' exit codes; None for a rank that still runs.
        """
        if -signal.SIGTERM in codes or STOPPED in codes:
            return True
        if None in codes or any(codes) or self._placement.config.spec.requeue.zero_completes:
            return False
        return not all(each.finished for each in self.exits())

    def _find_request(self) -> StopRequest | None:
        """Why this node's ranks are to stop, if they are; this node's own reasons come first."""
        node, deadline = self._placement.config.node, self._placement.config.deadline
        if self._flag.name is not None:
            return StopRequest.by_signal(self._flag.name, at=time.time(), node=node)
        if deadline is not None and time.monotonic() >= deadline:
            return StopRequest(cause="timeout", why="the time limit was reached", at=time.time(), node=node)
        if self._directory.deleted:
            why = f"the run directory {self._placement.attempt.run.path} was deleted"
            # The journals were deleted too: if anything is left of this attempt, it is its output.
            print(f"slurmtrain: {why}: the ranks can no longer save, so they are stopped", file=sys.stderr, flush=True)
            return StopRequest(cause="cancelled", why=why, at=time.time(), node=node)
        return self._supervisor.find_hang() or self._control.stop_request() or self._supervisor.find_growth()

    def _end_workers(self, failed: bool) -> None:
        """Tell the other nodes, ask the ranks to stop, wait, and kill the ones that remain."""
        request, node = self.request, self._placement.config.node
        if failed and request is None:
            first = min((exited for exited in self.exits() if exited.failed), key=lambda exited: exited.blame)
            self._control.publish_stop(StopRequest(cause="crash", why=first.describe(), at=first.failed_at, node=node))
        elif request is not None and node in (request.node, 0):
            # Only node 0 notices that another node is gone, so it publishes that in the other node's name.
            self._control.publish_stop(request)
        if request is not None:
            self._supervisor.stopping(request)
        if self._directory.deleted:
            # Not asked: a save would make the directory again, with nothing in it that identifies it.
            self._wait_or_kill(_seconds_from_now(0.0), ask=False)
        else:
            by_signal = request is not None and request.signal is not None
            # A shell dies at once of a signal to all processes of the job, and the script that it has started does not:
            # it may save now.
            crashed = failed and not (by_signal and self._ranks.have_orphans())
            self._wait_or_kill(self._grace(request, crashed), ask=True)

    def _grace(self, request: StopRequest | None, failed: bool) -> Callable[[], float]:
        """Until when ranks may take to exit by themselves, by the monotonic clock; this may change meanwhile."""
        if request is None or failed or request.cause == "crash":
            return _seconds_from_now(CRASH_GRACE_S)
        if request.cause in ("node_fail", "hang"):
            return _seconds_from_now(STUCK_GRACE_S)
        if request.cause == "completed":
            return _seconds_from_now(COMPLETED_GRACE_S)
        if request.cause == GROW:
            return _seconds_from_now(GROW_GRACE_S)
        return self._supervisor.stop_by

    def _wait_or_kill(self, stop_by: Callable[[], float], *, ask: bool) -> None:
        """Let the ranks exit by themselves until this time, then kill what remains.

        ``ask``: send the stop signal, and wait for all processes that get it. A rank that does not handle the signal
        may leave behind the processes that train, and that save now.
        """
        codes: Sequence[int | None] = ()
        asked_run, asked_at = False, -math.inf
        deadline = stop_by
        while True:
            before, codes = codes, self._exit_codes()
            if ask and (codes != before or time.monotonic() - asked_at > _ASK_S):
                asked_run, asked_at = self._ranks.ask(self._stop_signal), time.monotonic()
            # What a shell, or a rank that died of a signal, has left behind may be what trains.
            may_train = self._ranks.has_shell or any(code is not None and code < 0 for code in codes)
            if None not in codes and deadline is stop_by and not may_train:
                deadline = _seconds_from_now(min(CRASH_GRACE_S, stop_by() - time.monotonic()))
            if (None not in codes and not asked_run) or time.monotonic() >= deadline():
                break
            self._control.keep_alive()
            time.sleep(_MONITOR_S / 2)
        if None in codes:
            self._control.call_alive(self._kill)

    def _kill(self) -> None:
        """Kill the ranks and all that they have started. Raises SlurmtrainError if a rank cannot be killed."""
        _, remaining = self._ranks.kill(spare=is_publishing)
        if remaining:
            self._supervisor.left_behind((), remaining)
        for process in self._processes.values():
            try:
                process.wait(_REAP_S)
            except subprocess.TimeoutExpired:
                raise SlurmtrainError(
                    f"{', '.join(remaining)} cannot be killed: it waits for the kernel, perhaps for a file server"
                ) from None

    def end_leftovers(self) -> None:
        """End what the ranks have left behind, after they have ended: nothing of a round may run on into the next."""
        if not self._ranks.wait(timeout_s=0.0):
            self._control.call_alive(self._end_leftovers)

    def _end_leftovers(self) -> None:
        if self._ranks.wait(timeout_s=_LEFTOVER_S):
            return
        if self.request is None and not any(each.failed for each in self.exits()):
            self._ranks.ask(signal.SIGTERM)
            self._ranks.wait(timeout_s=CRASH_GRACE_S)
        in_hurry = self.request is not None and self.request.signal is not None
        self._ranks.wait(timeout_s=_PUBLISH_IN_GRACE_S if in_hurry else _PUBLISH_S, only=is_publishing)
        killed, remaining = self._ranks.kill()
        if killed:
            self._supervisor.left_behind(killed, remaining)

    def _exit_codes(self) -> list[int | None]:
        """Exit codes of this node's ranks, or of the command that starts them; None for a process that still runs."""
        return [self._exits.code(process) for process in self._processes.values()]


def _seconds_from_now(seconds: float) -> Callable[[], float]:
    """A function that returns a fixed time, by the monotonic clock: this many seconds from now."""
    at = time.monotonic() + seconds
    return lambda: at


# --- all processes that ranks have started ----------------------------------------------------------------------------
# Programs that wait for their children, and do not pass signals on.
SHELLS = frozenset(("ash", "bash", "busybox", "csh", "dash", "fish", "ksh", "mksh", "sh", "tcsh", "zsh"))
_POLL_S = 0.02
# How often to look for orphans to reap, at most: looking at all processes costs milliseconds.
_REAP_EVERY_S = 1.0
# How long to go on killing. A process that has been killed ends at once, unless it is in a system call that cannot be
# interrupted, such as one to a file server that does not answer.
_KILL_S = 10.0


class RankProcesses:
    """The processes of this node's ranks, from the agent's point of view."""

    def __init__(self, *, besides: bool = False) -> None:
        """The agent must be a subreaper (:func:`~slurmtrain.system.process.become_subreaper`).

        ``besides``: the node runs other processes beside its ranks, which have the variable ``HELPER``.
        """
        self._besides = besides
        self._agent = os.getpid()
        self._session = os.getsid(0)
        self._ranks: frozenset[int] = frozenset()
        self._asked_already: set[tuple[int, int]] = set()
        self._reap_at = 0.0
        self.has_shell = False
        """Whether one of the ranks that were asked to stop is a shell."""

    def started(self, ranks: Iterable[int]) -> None:
        """Take note of the process ids of the ranks, whose exit codes are collected elsewhere."""
        self._ranks = frozenset(ranks)

    def running(self) -> list[Entry]:
        """The processes that have not ended, parents before their children."""
        return [entry for entry in self._entries() if not entry.ended]

    def have_orphans(self) -> bool:
        """Whether ranks that have ended have left processes behind."""
        return any(entry.parent == self._agent and entry.pid not in self._ranks for entry in self.running())

    def ask(self, number: signal.Signals) -> bool:
        """Send a stop signal to the processes that are to hear it and have not yet. Call it repeatedly until they end.

        Returns whether any process that was asked is still running.
        """
        running = self.running()
        asked_run = any(_key(entry) in self._asked_already for entry in running)

        def is_shell(pid: int) -> bool:
            is_one = program_of(pid) in SHELLS
            self.has_shell = self.has_shell or (is_one and pid in self._ranks)
            return is_one

        hearing = listeners(running, self._agent, is_shell, lambda pid: is_nsys(program_of(pid)))
        new = [entry for entry in hearing if _key(entry) not in self._asked_already]
        first = []
        for entry in new:
            pipe = pipe_of(entry.pid, 0)
            others = [other.pid for other in running if other.pid != entry.pid]
            if pipe is None or not any(pipe in (pipe_of(pid, 1), pipe_of(pid, 2)) for pid in others):
                first.append(entry)
        # If each waits for another, as with a coprocess, none is first.
        for entry in first or ([] if asked_run else new):
            self._asked_already.add(_key(entry))
            asked_run = identity_of(entry).send(number) or asked_run
        return asked_run

    def wait(self, *, timeout_s: float, only: Callable[[Entry], bool] = lambda _entry: True) -> bool:
        """Wait until none of these is running any more; returns whether that is so.

        ``timeout_s``: how many seconds to wait at most. ``only``: which processes count.
        """
        deadline = time.monotonic() + timeout_s
        while any(map(only, self.running())):
            if time.monotonic() >= deadline:
                return False
            self._reap_orphans()
            time.sleep(_POLL_S)
        self._reap_orphans()
        return True

    def kill(self, *, spare: Callable[[Entry], bool] = lambda _entry: False) -> tuple[list[str], list[str]]:
        """Kill all of them, in passes until a pass finds none: any of them may start others meanwhile.

        ``spare``: the processes that are not killed. Returns descriptions of the killed processes, and of processes
        that still run: these are in a system call that cannot be interrupted, and end as soon as it returns.
        """
        killed: dict[tuple[int, int], str] = {}
        deadline = time.monotonic() + _KILL_S
        while running := [entry for entry in self.running() if not spare(entry)]:
            if time.monotonic() >= deadline:
                return list(killed.values()), [describe_process(entry) for entry in running]
            for entry in running:
                killed.setdefault(_key(entry), describe_process(entry))
                identity_of(entry).send(signal.SIGKILL)
            self._reap_orphans()
            time.sleep(_POLL_S)
        self._reap_orphans()
        return list(killed.values()), []

    def reap(self) -> None:
        """Reap orphans that have ended. It costs one system call if nothing has; call it as often as you like."""
        try:
            has_ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return
        if not has_ended or time.monotonic() < self._reap_at:
            return
        # What has ended may also be a rank or a helper of the agent, which somebody else reaps, perhaps never.
        self._reap_at = time.monotonic() + _REAP_EVERY_S
        self._reap_orphans()

    def _reap_orphans(self) -> None:
        for entry in self._entries():
            if entry.ended and entry.parent == self._agent and entry.pid not in self._ranks:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(entry.pid, os.WNOHANG)

    def _entries(self) -> list[Entry]:
        entries = [entry for entry in descend(read_table(), self._agent) if entry.session != self._session]
        if not self._besides:
            return entries
        # One that has ended shows no variables.
        return [each for each in entries if each.pid not in HELPERS and not has_variable(each.pid, HELPER)]


def listeners(
    running: Iterable[Entry],
    agent: int,
    is_shell: Callable[[int], bool],
    is_profiler: Callable[[int], bool] = lambda _pid: False,
) -> list[Entry]:
    """The processes for which a stop signal is.

    ``running``: the processes of ranks, parents before their children. ``agent``: the process id of the agent, which is
    the parent of ranks and of orphans. ``is_shell``: whether the process with this id is a shell. ``is_profiler``:
    whether it is a profiler, which is to hear nothing, but the command that it has started.
    """
    parents = {agent}
    hearing = []
    for entry in running:
        if entry.parent in parents and is_profiler(entry.pid):
            parents.add(entry.pid)
        elif entry.parent in parents:
            hearing.append(entry)
            if is_shell(entry.pid):
                parents.add(entry.pid)
    return hearing


def is_publishing(entry: Entry) -> bool:
    """Whether this process is just publishing a checkpoint, which takes a moment."""
    return name_of(entry.pid) == PUBLISHING


def describe_process(entry: Entry) -> str:
    """A process in a few words."""
    return f"{name_of(entry.pid) or 'a process'} (pid {entry.pid})"


def _key(entry: Entry) -> tuple[int, int]:
    return (entry.pid, entry.start)
