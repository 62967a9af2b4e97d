"""Checkpoints without a session: those of one attempt on one rank, and pairs of processes that act as two ranks."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from slurmtrain.model.experiment.checkpoint import KeepSpec
from slurmtrain.model.interruption.interval import Vote
from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.checkpoint.checkpointer import Restored, Restorer
from slurmtrain.runtime.checkpoint.saver import PublishPolicy, Save, Saver
from slurmtrain.runtime.checkpoint.state_dicts import Objects
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.system.files import make_directory, write_json
from slurmtrain.system.journal import Journal

JOB = "1"
CPU = torch.device("cpu")
# What the processes of a pair need, and take seconds to import: they are forked from one that has done so. In Python
# 3.11 that one does not know the folders that pytest adds to the path.
_IMPORTED_ONCE = [
    "hypothesis",
    "pytest",
    "slurmtrain.runtime.checkpoint.checkpointer",
    "slurmtrain.runtime.training.strategy_interface",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining.schedules",
    "torch.distributed.tensor.parallel",
]
# How long a function may take in a pair; after that its ranks are assumed to wait for each other forever.
_TIMEOUT_S = 500.0


def alone() -> RankGroup:
    """The only rank of a world of size one, which needs no process group."""
    return RankGroup(0, 1, CPU)


class Attempt:
    """One attempt's checkpoints on one rank; the attempt holds the run's lease unless ``lease`` is off."""

    def __init__(
        self,
        root: Path,
        ranks: RankGroup,
        objects: Mapping[str, Any],
        *,
        restart: int = 0,
        keep: KeepSpec | None = None,
        quota: int | None = None,
        hashes: bool = True,
        params: Mapping[str, Any] | None = None,
        lease: bool = True,
        additions: Collection[str] = (),
    ) -> None:
        self.run = RunDir(root)
        self.attempt = self.run.attempt(JOB, restart)
        self.ranks = ranks
        make_directory(self.attempt.path)
        if lease and ranks.rank == 0:
            self.take_lease()
        self.journal = Journal(self.attempt.rank_journal(0), durable=False) if ranks.rank == 0 else None
        self.objects = Objects(objects, additions)
        policy = PublishPolicy(keep=keep or KeepSpec(last=3), quota=quota, plan_hash="plan", params=params or {})
        self.saver = Saver(self.attempt, self.objects, policy, ranks, self.journal)
        self.restorer = Restorer(self.attempt, self.objects, ranks, self.journal, hashes=hashes, plan_hash="plan")

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.saver.close(failed=kind is not None)
        if self.journal is not None:
            self.journal.close()

    def take_lease(self) -> None:
        write_json(self.run.lease, {"submission": 1, "attempt": self.attempt.path.name})

    def begin(self, step: int, **metrics: float) -> str | None:
        return self.saver.begin(Save(step=step, why="steps", metrics=metrics))

    def save(self, step: int, **metrics: float) -> str:
        """Save and wait; return why the save failed, or nothing."""
        problem = self.begin(step, **metrics)
        if problem:
            return problem
        outcome = self.saver.finish()
        assert isinstance(outcome, Save)
        assert outcome.step == step
        return outcome.problem

    def advance(self) -> Save | None:
        """Agree once, as sessions do between steps; return how the save ended, once it has."""
        writing, publication = self.saver.progress()
        return self.saver.advance(self.ranks.agree(Vote(writing=writing, publication=publication)))

    def restore(self) -> Restored | None:
        return self.restorer.restore()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind that rank 0 has journaled."""
        return [event for event in events_of(self.run, self.attempt.path.name) if event["kind"] == kind]


def events_of(run: RunDir, attempt: str) -> list[dict[str, Any]]:
    """All events of rank 0 in an attempt."""
    path = run.attempts / attempt / "rank-0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def listed(root: Path) -> list[str]:
    """Names of the checkpoints and of everything next to them."""
    checkpoints = RunDir(root).checkpoints
    return sorted(entry.name for entry in checkpoints.iterdir()) if checkpoints.exists() else []


def preloaded_context() -> ForkServerContext:
    """What starts processes that have imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


class Pair:
    """Long-lived processes that are the ranks of one world and run functions of test modules."""

    def __init__(self, size: int = 2) -> None:
        self._size = size
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._meeting = ""

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run ``function(ranks, *arguments)`` on all ranks; return the results. Raises AssertionError if one raised."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, arguments))
        results = []
        for rank, connection in enumerate(self._connections):
            answer = self._answer(connection)
            if answer is None or answer[0] != "result":
                others = [self._answer(other, 1.0) for other in self._connections[rank + 1 :]]
                self.close()
                problems = [
                    f"rank {rank + i}: {one[1] if one else 'no answer'}" for i, one in enumerate([answer, *others])
                ]
                raise AssertionError("\n".join(problems))
            results.append(answer[1])
        return results

    def _answer(self, connection: Connection, timeout_s: float = _TIMEOUT_S) -> tuple[str, Any] | None:
        with suppress(EOFError, ConnectionError):
            if connection.poll(timeout_s):
                answer: tuple[str, Any] = connection.recv()
                return answer
        return None

    def _start(self) -> None:
        context = preloaded_context()
        meeting = self._meeting = tempfile.mktemp(prefix="slurmtrain-pair-")
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self._size, meeting), daemon=False)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        """End the processes; the next :meth:`run` starts new ones."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
        if self._meeting:
            Path(self._meeting).unlink(missing_ok=True)
        self._connections, self._processes = [], []


def _serve(connection: Connection, rank: int, size: int, meeting: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    ranks = RankGroup(rank, size, CPU)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            break
        try:
            answer = ("result", function(ranks, *arguments))
        except BaseException:  # noqa: BLE001 (whatever a test raises is reported)
            answer = ("error", traceback.format_exc())
        with suppress(OSError):
            connection.send(answer)
        if answer[0] == "error":
            # The other rank may wait for this one: neither process can be used any more.
            os._exit(1)
    ranks.close()
    dist.destroy_process_group()
