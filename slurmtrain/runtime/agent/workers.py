"""The ranks of one node: torch elastic starts and watches them; this module decides when they must end.

Torch elastic calls ranks workers. They are checked ten times a second: a rank that failed, a signal to this agent, the
time limit, a hang, or another node may cause a stop (a :class:`StopRequest`). The first request counts. It is published
to all nodes, and every agent asks its ranks, waits, and kills.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.interruption.exit_report import STOPPED, Exit, StopRequest
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.model.run.run import GROW
from slurmtrain.model.spec.resources.node_ranks import NodeRanks
from slurmtrain.runtime.agent.exits import CommandExits, RankExits
from slurmtrain.runtime.agent.rank_processes import RankProcesses, is_publishing
from slurmtrain.runtime.agent.rendezvous import FixedRendezvous
from slurmtrain.runtime.job.signals import StopFlag
from slurmtrain.runtime.job.torch_private import keep_signal_handlers, never_restart, worker_processes
from slurmtrain.runtime.peers.control_store import ControlStore
from slurmtrain.system.directories.deletion_watch import DeletionWatch

# Seconds between asking ranks to stop and killing them once another rank has failed: a save needs all ranks.
CRASH_GRACE_S = 5.0
# The same if they wait in a collective for a rank that is gone or hangs, and so would never notice the request.
STUCK_GRACE_S = 1.0
# The same if nodes have joined. Nothing presses: the new ones wait, and to go on from an earlier step would lose work.
GROW_GRACE_S = 600.0
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


class _RankLogs(LogsSpecs):
    """Each rank opens its own log (rank_main.py); torch elastic only learns where ranks write their error files."""

    def __init__(self, logs: Path) -> None:
        super().__init__(log_dir=str(logs))
        self._logs = logs

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """No output files, and one error file for each rank; ``envs`` are their environments by local rank."""
        errors = {local: str(self._logs / f"rank-{env['RANK']}.error.json") for local, env in envs.items()}
        for local, path in errors.items():
            envs[local]["TORCHELASTIC_ERROR_FILE"] = path
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(nowhere, nowhere, nowhere, nowhere, errors)

    @property
    def root_log_dir(self) -> str:
        """The directory of all logs."""
        return str(self._logs)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersConfig:
    """How to start the ranks of one node.

    ``argv``: the command of each rank. ``ranks``: how many of these each of the ``members`` has. ``per_node``: the
    command is started only once, and starts the ranks itself. ``attempt`` names the round. ``node``: this node;
    ``members``: the nodes that have ranks in the round, this one among them. ``local_addr``: this node's address in the
    elected network. ``master``: address and port at which the ranks meet. ``own_store``: nothing serves a store there
    yet, rank 0 is to do so. ``stop_signal``: what asks them to stop. ``zero_completes``: code 0 means that the work is
    done, also after a stop request. ``deadline``: when to ask for a stop because of the time limit, by the monotonic
    clock; None: never. ``directory``: whether that of the run is still there.
    """

    argv: Sequence[str]
    ranks: NodeRanks
    per_node: bool
    own_store: bool
    attempt: AttemptDir
    node: int
    members: Sequence[int]
    local_addr: str
    master: tuple[str, int]
    stop_signal: signal.Signals
    zero_completes: bool
    deadline: float | None
    directory: DeletionWatch


class Supervisor(Protocol):
    """What running ranks need from the round that they belong to."""

    def started(self, pids: Mapping[int, int]) -> None:
        """Called when the ranks have started; ``pids`` are their process ids by global rank.

        With a command that starts the ranks itself, ``pids`` are those of the commands by node, as the nodes are
        counted in the round.
        """

    def find_hang(self) -> StopRequest | None:
        """A request to stop because a rank hangs, if one does. Called several times a second."""

    def find_growth(self) -> StopRequest | None:
        """A request to stop because nodes can join, if they can. Called several times a second."""

    def stopping(self, request: StopRequest) -> None:
        """Called once, before the first of the ranks is asked to stop."""

    def stop_by(self) -> float:
        """When the remaining ranks are killed, by the monotonic clock. Called repeatedly: the time may change."""

    def left_behind(self, killed: Sequence[str], remaining: Sequence[str]) -> None:
        """Called when processes that the ranks had left behind were killed, or still run: they cannot be killed."""


class Workers(LocalElasticAgent):
    """Torch elastic's agent for one node.

    It overrides the documented extension points of SimpleElasticAgent: ranks are asked before they are killed, the
    failure of one ends the others within seconds, and all nodes end together.
    """

    def __init__(
        self,
        config: WorkersConfig,
        control: ControlStore,
        flag: StopFlag,
        supervisor: Supervisor,
    ) -> None:
        """``run()`` starts the ranks.

        ``config``: what to start. ``control``: the channel for stop requests between agents. ``flag``: set by a signal
        to this agent. ``supervisor``: the round.
        """
        attempt, members = config.attempt, config.members
        own = config.ranks.ranks_of(members.index(config.node))
        self._placed = NodeRanks((1,) * len(members)) if config.per_node else config.ranks
        spec = WorkerSpec(
            role="worker",
            local_world_size=1 if config.per_node else len(own),
            rdzv_handler=FixedRendezvous(
                config.master,
                members.index(config.node),
                len(members),
                f"{attempt.run.id}/{attempt.round}",
                own_store=config.own_store,
            ),
            entrypoint=sys.executable,
            # Torch elastic substitutes $-variables in arguments; a user's dollar signs must arrive unchanged.
            args=tuple(word.replace("$", "$$") for word in ("-I", "-S", str(_RANK_MAIN), *config.argv)),
            max_restarts=attempt.round,
            monitor_interval=_MONITOR_S,
            local_addr=config.local_addr,
        )
        super().__init__(spec, _RankLogs(attempt.logs), start_method="spawn")
        # Torch tells ranks apart by how often they were restarted (max_restarts - remaining), so the number of the
        # round is passed as max_restarts. With none remaining, torch does not restart ranks by itself.
        never_restart(self)
        self.request: StopRequest | None = None
        """Why the ranks were asked to stop, if they were."""
        self._config = config
        self._control = control
        self._flag = flag
        self._supervisor = supervisor
        self._exits = CommandExits(attempt, config.node, config.ranks) if config.per_node else RankExits(attempt)
        self._ranks = RankProcesses()
        self._died_at: dict[int, float] = {}

    # --- torch elastic's extension points ---------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks. Returns their process ids by local rank."""
        keep_signal_handlers()
        ids: dict[int, Any] = super()._start_workers(worker_group)
        self._ranks.started(ids.values())
        for pid in ids.values():
            threading.Thread(target=self._note_death, args=(pid,), daemon=True).start()
        self._supervisor.started({worker.global_rank: ids[worker.local_rank] for worker in worker_group.workers})
        return ids

    def _assign_worker_ranks(
        self,
        store: object,  # noqa: ARG002 (the signature is torch's)
        group_rank: int,
        group_world_size: int,  # noqa: ARG002
        spec: WorkerSpec,  # noqa: ARG002
    ) -> list[Worker]:
        """The ranks of this node, which torch elastic would work out from what nodes write into a store."""
        world_size = self._placed.world_size
        return [
            Worker(local, global_rank=rank, role_rank=rank, world_size=world_size, role_world_size=world_size)
            for local, rank in enumerate(self._placed.ranks_of(group_rank))
        ]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the ranks once, and end them if it is time to. Torch elastic calls this repeatedly."""
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
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _exit_barrier(self) -> None:
        """Do not wait: the agents tell each other how a round ended."""

    # --- supervision --------------------------------------------------------------------------------------------------

    def exits(self) -> list[Exit]:
        """How each rank of this node, or the command that starts them, ended, once all have."""
        numbers = {worker.id: worker.global_rank for worker in self.get_worker_group().workers}
        return [
            self._exits.read(numbers[process.pid], process, self._died_at.get(process.pid, time.time()))
            for process in self._processes()
            if process.returncode is not None
        ]

    def _may_follow_a_signal(self, codes: Sequence[int | None]) -> bool:
        """Whether ranks may have ended because of a signal, so far unknown to this agent, to all processes of the job.

        ``codes``: the ranks' exit codes; None for those still running.
        """
        if -signal.SIGTERM in codes or STOPPED in codes:
            return True
        if None in codes or any(codes) or self._config.zero_completes:
            return False
        return not all(each.finished for each in self.exits())

    def _find_request(self) -> StopRequest | None:
        """Why this node's ranks are to stop, if they are; this node's own reasons come first."""
        node, deadline = self._config.node, self._config.deadline
        if self._flag.name is not None:
            return StopRequest.by_signal(self._flag.name, at=time.time(), node=node)
        if deadline is not None and time.monotonic() >= deadline:
            return StopRequest(cause="timeout", why="the time limit was reached", at=time.time(), node=node)
        if self._config.directory.deleted:
            why = f"the run directory {self._config.attempt.run.path} was deleted"
            # The journals were deleted too: if anything is left of this attempt, it is its output.
            print(f"slurmtrain: {why}: the ranks cannot save any more, and are ended", file=sys.stderr, flush=True)
            return StopRequest(cause="cancelled", why=why, at=time.time(), node=node)
        return self._supervisor.find_hang() or self._control.stop_request() or self._supervisor.find_growth()

    def _end_workers(self, failed: bool) -> None:
        """Tell the other nodes, ask the ranks to stop, wait, and kill those that remain."""
        request, node = self.request, self._config.node
        if failed and request is None:
            first = min((exited for exited in self.exits() if exited.failed), key=lambda exited: exited.blame)
            self._control.publish_stop(StopRequest(cause="crash", why=first.describe(), at=first.failed_at, node=node))
        elif request is not None and node in (request.node, 0):
            # Only node 0 notices that another node is gone, so it publishes that in the other node's name.
            self._control.publish_stop(request)
        if request is not None:
            self._supervisor.stopping(request)
        if self._config.directory.deleted:
            # Not asked: a save would make the directory again, with nothing in it that says what it is.
            self._wait_or_kill(_seconds_from_now(0.0), ask=False)
        else:
            self._wait_or_kill(self._grace(request, failed and not self._may_be_saving(request)), ask=True)

    def _may_be_saving(self, request: StopRequest | None) -> bool:
        """Whether ranks that have ended have left behind processes that may save now, because of this ``request``.

        A shell dies at once of a signal to all processes of the job, and the script that it has started does not.
        """
        return request is not None and request.signal is not None and self._ranks.have_orphans()

    def _grace(self, request: StopRequest | None, failed: bool) -> Callable[[], float]:
        """Until when ranks may take to exit by themselves, by the monotonic clock; this may change meanwhile."""
        if request is None or failed or request.cause == "crash":
            return _seconds_from_now(CRASH_GRACE_S)
        if request.cause in ("node_fail", "hang"):
            return _seconds_from_now(STUCK_GRACE_S)
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
                asked_run, asked_at = self._ranks.ask(self._config.stop_signal), time.monotonic()
            if None not in codes and deadline is stop_by and not self._may_save_without_rank(codes):
                deadline = _seconds_from_now(min(CRASH_GRACE_S, stop_by() - time.monotonic()))
            if (None not in codes and not asked_run) or time.monotonic() >= deadline():
                break
            self._control.keep_alive()
            time.sleep(_MONITOR_S / 2)
        if None in codes:
            self._control.call_alive(self._kill)

    def _may_save_without_rank(self, codes: Sequence[int | None]) -> bool:
        """Whether processes that ranks have left behind may be the ones that train.

        That may be so if a rank is a shell, or died of a signal. ``codes``: the ranks' exit codes.
        """
        return self._ranks.has_shell or any(code is not None and code < 0 for code in codes)

    def _kill(self) -> None:
        """Kill the ranks and all that they have started. Raises SlurmtrainError if a rank cannot be killed."""
        _, remaining = self._ranks.kill(spare=is_publishing)
        if remaining:
            self._supervisor.left_behind((), remaining)
        for process in self._processes():
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

    def _processes(self) -> list[Any]:
        return worker_processes(self)

    def _exit_codes(self) -> list[int | None]:
        """Exit codes of this node's ranks, or of the command that starts them; None for those still running."""
        return [self._exits.code(process) for process in self._processes()]

    def _note_death(self, pid: int) -> None:
        """Note when exactly a rank ends, more precisely than polling could: the first rank to fail is the one to blame.

        WNOWAIT leaves the exit code for torch elastic to collect; if torch was faster, waitid fails with ECHILD.
        """
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self._died_at.setdefault(pid, time.time())


def _seconds_from_now(seconds: float) -> Callable[[], float]:
    """A function that returns a fixed time, by the monotonic clock: this many seconds from now."""
    at = time.monotonic() + seconds
    return lambda: at
