"""The workers of one node: torch elastic starts and watches them, under supervision that decides when they must end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from slurmtrain.model.diagnosis.redact import redact
from slurmtrain.model.interruption.exit_report import STOPPED, Exit, StopRequest
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.runtime.agent.control_store import ControlStore
from slurmtrain.runtime.agent.rendezvous import FixedRendezvous, MeetingPoint
from slurmtrain.runtime.job.signals import StopFlag

# Seconds between asking workers to stop and killing them once another worker has failed: nobody is left to save with.
CRASH_GRACE_S = 5.0
# The same where they wait for one that does not come any more, and so cannot hear of it.
STUCK_GRACE_S = 1.0
# The same for workers of which some have left, as if they had been asked to: the others are about to.
_LEFT_GRACE_S = 30.0
_MONITOR_S = 0.1
_SIGNAL_SKEW_S = 0.3
_TAIL_LINES = 20
_TAIL_BYTES = 16_384
_SHIM = Path(__file__).with_name("rank_main.py")


class _RankLogs(LogsSpecs):
    """The shim opens the logs; torch elastic only learns where workers leave their error files."""

    def __init__(self, logs: Path) -> None:
        super().__init__(log_dir=str(logs))
        self._logs = logs

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        errors = {local: str(self._logs / f"rank-{env['RANK']}.error.json") for local, env in envs.items()}
        for local, path in errors.items():
            envs[local]["TORCHELASTIC_ERROR_FILE"] = path
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(nowhere, nowhere, nowhere, nowhere, errors)

    @property
    def root_log_dir(self) -> str:
        return str(self._logs)


class Workers(LocalElasticAgent):
    """Torch elastic's agent for one node.

    It overrides the documented extension points of SimpleElasticAgent: workers are asked before they are killed, the
    failure of one ends the others within seconds, and all nodes end together.
    """

    def __init__(
        self,
        *,
        argv: Sequence[str],
        count: int,
        attempt: AttemptDir,
        point: MeetingPoint,
        where: tuple[str, int],
        peers: ControlStore,
        node: int,
        members: Sequence[int],
        local_addr: str,
        flag: StopFlag,
        deadline: float | None,
        stop_by: signal.Signals,
        grace: Callable[[], float],
        hang: Callable[[], StopRequest | None],
        started: Callable[[Mapping[int, int]], None],
        stopping: Callable[[StopRequest], None],
    ) -> None:
        """``attempt`` names the round. ``members``: the nodes that have ranks in it, this one among them.

        ``deadline``: when to ask for a stop, by the monotonic clock. ``stop_by``: what workers are asked by. ``grace``:
        until when they may then take, by that clock; it is asked again and again. ``hang``: whether a worker hangs.
        ``where``: address and port at which the workers meet. ``started`` gets pids by global rank. ``local_addr``:
        this node's address in the elected network.
        """
        spec = WorkerSpec(
            role="worker",
            local_world_size=count,
            rdzv_handler=FixedRendezvous(
                point, where, members.index(node), len(members), f"{attempt.run.id}/{attempt.round}"
            ),
            entrypoint=sys.executable,
            # Torch elastic substitutes $-variables in arguments; a user's dollar signs are to arrive as they are.
            args=tuple(word.replace("$", "$$") for word in ("-I", "-S", str(_SHIM), *argv)),
            max_restarts=attempt.round,
            monitor_interval=_MONITOR_S,
            local_addr=local_addr,
        )
        super().__init__(spec, _RankLogs(attempt.logs), start_method="spawn")
        # Torch tells ranks apart by how often they were restarted; whether they are again is decided elsewhere.
        self._remaining_restarts = 0
        self.peers = peers
        self.request: StopRequest | None = None
        self._attempt = attempt
        self._node = node
        self._flag = flag
        self._deadline = deadline
        self._stop_by = stop_by
        self._grace = grace
        self._hang = hang
        self._started = started
        self._stopping = stopping
        self._died: dict[int, float] = {}

    # --- torch elastic's extension points ---------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ids: dict[int, Any] = super()._start_workers(worker_group)
        for pid in ids.values():
            threading.Thread(target=self._note_death, args=(pid,), daemon=True).start()
        self._started({worker.global_rank: ids[worker.local_rank] for worker in worker_group.workers})
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self._codes()
        failed = any(code not in (None, 0, STOPPED) for code in codes)
        if self.request is None:
            if -signal.SIGTERM in codes:
                # Whoever signals everything at once may reach the workers first: the agent's own signal is on its way.
                time.sleep(_SIGNAL_SKEW_S)
            self.request = self._asked()
        if self.request is not None or failed:
            self._end_workers(failed)
        elif STOPPED in codes:
            self._wait_for_all(_in(_LEFT_GRACE_S))
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _exit_barrier(self) -> None:
        """Nobody waits here: the agents tell each other how a round ended."""

    # --- supervision --------------------------------------------------------------------------------------------------

    def exits(self) -> list[Exit]:
        """How each worker of this node ended, once all have."""
        ranks = {worker.id: worker.global_rank for worker in self._worker_group.workers}
        return [
            Exit(
                rank=ranks[process.pid],
                pid=process.pid,
                code=process.returncode,
                at=self._died.get(process.pid, time.time()),
                raised=_raised(self._attempt.rank_journal(ranks[process.pid])),
                last_lines=_last_lines(self._attempt.rank_log(ranks[process.pid])) if process.returncode else (),
            )
            for process in self._processes()
            if process.returncode is not None
        ]

    def _asked(self) -> StopRequest | None:
        """Whether anything asks this node's workers to stop."""
        if self._flag.raised is not None:
            return StopRequest.by_signal(self._flag.raised.name, at=time.time(), node=self._node)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return StopRequest(cause="timeout", why="the time limit was reached", at=time.time(), node=self._node)
        return self._hang() or self.peers.stop_request()

    def _end_workers(self, failed: bool) -> None:
        """Ask, wait, kill; tell the other nodes."""
        request = self.request
        if failed and request is None:
            first = min((one for one in self.exits() if one.failed), key=lambda one: one.blame)
            self.peers.publish_stop(
                StopRequest(cause="crash", why=first.describe(), at=first.failed_at, node=self._node)
            )
        elif request is not None and self._node in (request.node, 0):
            # That another node is gone node 0 alone notices, and says for it.
            self.peers.publish_stop(request)
        if request is not None:
            self._stopping(request)
        if failed or (request is not None and request.cause == "crash"):
            until = _in(CRASH_GRACE_S)
        elif request is not None and request.cause in ("node_fail", "hang"):
            until = _in(STUCK_GRACE_S)
        else:
            until = self._grace
        for process in self._processes():
            if process.poll() is None:
                # The process alone, not its group: data-loader workers are not to act on it.
                process.send_signal(self._stop_by)
        self._wait_for_all(until)

    def _wait_for_all(self, until: Callable[[], float]) -> None:
        """Let the workers end by themselves until this time, then kill them with all that they have started."""
        while any(code is None for code in self._codes()) and time.monotonic() < until():
            self.peers.keep_alive()
            time.sleep(_MONITOR_S / 2)
        for process in self._processes():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _processes(self) -> list[Any]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handler.proc for handler in handlers.values()]

    def _codes(self) -> list[int | None]:
        """Exit codes of this node's workers; None for those that still run."""
        return [process.poll() for process in self._processes()]

    def _note_death(self, pid: int) -> None:
        """Note the moment at which a worker ends, which polling would blur: the first to fail is the one to blame."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self._died.setdefault(pid, time.time())


def _in(seconds: float) -> Callable[[], float]:
    """So many seconds from now, by the monotonic clock."""
    at = time.monotonic() + seconds
    return lambda: at


def _raised(journal: Path) -> tuple[float, str] | None:
    """The exception that the session journaled, if it did."""
    with contextlib.suppress(OSError):
        for line in journal.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event.get("kind") == "raised":
                    return float(event["t"]), redact(f"{event['type']}: {event['message']}")
    return None


def _last_lines(log: Path) -> list[str]:
    """The end of a log, secrets taken out."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return [redact(line) for line in file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]]
    except OSError:
        return []
