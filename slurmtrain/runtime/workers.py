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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from slurmtrain.model.layout import AttemptDir
from slurmtrain.runtime.context import STOPPED
from slurmtrain.runtime.ending import Exit, StopRequest, redact
from slurmtrain.runtime.rendezvous import FixedRendezvous, MeetingPoint
from slurmtrain.runtime.signals import StopFlag

# Seconds between asking workers to stop and killing them: enough to finish a step and save.
GRACE_S = 30.0
# The same once another worker has failed: there is nobody left to save with.
CRASH_GRACE_S = 5.0
# Seconds without a sign of life after which another node's agent counts as dead.
NODE_SILENCE_S = 15.0
_BEAT_S = 1.0
_MONITOR_S = 0.1
_SIGNAL_SKEW_S = 0.3
_TAIL_LINES = 20
_TAIL_BYTES = 16_384
_SHIM = Path(__file__).with_name("shim.py")


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


class Peers:
    """What the agents of an attempt tell each other through the store: that they live, and that all must stop."""

    def __init__(self, store: Store, node: int, nodes: int) -> None:
        self._store = PrefixStore("agents", store)
        self._node = node
        self._others = [other for other in range(nodes) if other != node] if node == 0 else [0]
        self._others = self._others if nodes > 1 else []
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._next_beat = 0.0
        self._beat = 0

    def publish_stop(self, request: StopRequest) -> None:
        """Tell all nodes to stop; the first request stands."""
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("stop", "", json.dumps(asdict(request)))

    def stop_request(self) -> StopRequest | None:
        """What another node asked for, or that one has died. Never raises."""
        if not self._others:
            return None
        try:
            self._exchange_beats()
            if self._store.check(["stop"]):
                return StopRequest(**json.loads(self._store.get("stop")))
        except RuntimeError:
            return StopRequest(cause="node_fail", why="node 0 no longer answers", at=time.time(), node=0)
        for other in self._silent():
            why = f"node {other} has not been heard of for {NODE_SILENCE_S:.0f} s"
            return StopRequest(cause="node_fail", why=why, at=time.time(), node=other)
        return None

    def keep_alive(self) -> None:
        """Tell the others that this agent lives, while it waits for something else. Never raises."""
        with contextlib.suppress(RuntimeError):
            self._exchange_beats()

    def gather(self, place: str, *, given_up: Callable[[], bool]) -> None:
        """Wait until every node has come to this place, has fallen silent, or until ``given_up()``. Never raises."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{place}/{self._node}", "1")
            waiting = set(self._others)
            while waiting and not given_up():
                self._exchange_beats()
                waiting = {other for other in waiting if not self._store.check([f"{place}/{other}"])}
                waiting -= set(self._silent())
                time.sleep(_MONITOR_S / 5)

    def _silent(self) -> list[int]:
        now = time.monotonic()
        return [other for other, (_, heard) in self._beats.items() if now - heard > NODE_SILENCE_S]

    def _exchange_beats(self) -> None:
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + _BEAT_S
        self._beat += 1
        self._store.set(f"beat/{self._node}", str(self._beat))
        for other in self._others:
            key = f"beat/{other}"
            said = self._store.get(key) if self._store.check([key]) else b""
            known = self._beats.get(other)
            if known is None or known[0] != said:
                self._beats[other] = (said, now)


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
        node: int,
        nodes: int,
        local_addr: str,
        flag: StopFlag,
        deadline: float | None,
        started: Callable[[Mapping[int, int]], None],
        stopping: Callable[[StopRequest], None],
    ) -> None:
        """``deadline``: when to ask for a stop, by the monotonic clock. ``started`` gets pids by global rank.

        ``local_addr``: this node's address in the elected network.
        """
        spec = WorkerSpec(
            role="worker",
            local_world_size=count,
            rdzv_handler=FixedRendezvous(point, node, nodes, attempt.run.id),
            entrypoint=sys.executable,
            # Torch elastic substitutes $-variables in arguments; a user's dollar signs are to arrive as they are.
            args=tuple(word.replace("$", "$$") for word in ("-I", "-S", str(_SHIM), *argv)),
            max_restarts=0,
            monitor_interval=_MONITOR_S,
            local_addr=local_addr,
        )
        super().__init__(spec, _RankLogs(attempt.logs), start_method="spawn")
        self.peers = Peers(point.store, node, nodes)
        self.request: StopRequest | None = None
        self._attempt = attempt
        self._node = node
        self._flag = flag
        self._deadline = deadline
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
            self._wait_for_all(GRACE_S)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _exit_barrier(self) -> None:
        self.peers.gather("done", given_up=lambda: self.peers.stop_request() is not None)

    def leave(self) -> None:
        """Stay until the other nodes have ended too, so that the store outlives whoever uses it."""
        deadline = time.monotonic() + GRACE_S
        self.peers.gather("left", given_up=lambda: time.monotonic() > deadline)

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
            return self._signalled(self._flag.raised)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return StopRequest(cause="timeout", why="the time limit was reached", at=time.time(), node=self._node)
        return self.peers.stop_request()

    def _signalled(self, number: signal.Signals) -> StopRequest:
        """SIGUSR2 is what batch scripts ask for before the time limit; SIGTERM may be a person's or a preemption's."""
        limit = number == signal.SIGUSR2
        why = "the time limit is near (SIGUSR2)" if limit else f"stopped by {number.name}"
        cause = "timeout" if limit else "cancelled"
        return StopRequest(cause=cause, why=why, at=time.time(), node=self._node, signal=number.name)

    def _end_workers(self, failed: bool) -> None:
        """Ask, wait, kill; tell the other nodes."""
        request = self.request
        if failed and request is None:
            first = min((one for one in self.exits() if one.failed), key=lambda one: one.blame)
            self.peers.publish_stop(
                StopRequest(cause="crash", why=first.describe(), at=first.failed_at, node=self._node)
            )
        elif request is not None and request.node == self._node:
            self.peers.publish_stop(request)
        if request is not None:
            self._stopping(request)
        hurry = failed or (request is not None and request.cause in ("crash", "node_fail"))
        for process in self._processes():
            if process.poll() is None:
                # The process alone, not its group: data-loader workers are not to act on it.
                process.send_signal(signal.SIGTERM)
        self._wait_for_all(CRASH_GRACE_S if hurry else GRACE_S)

    def _wait_for_all(self, seconds: float) -> None:
        """Give the workers this long to end by themselves, then kill them with all that they have started."""
        deadline = time.monotonic() + seconds
        while any(code is None for code in self._codes()) and time.monotonic() < deadline:
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
