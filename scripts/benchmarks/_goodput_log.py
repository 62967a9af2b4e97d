"""The log of finished steps that every system writes, and its evaluation. Standard library only."""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

# What can happen to a job, in the order of the full trace.
PREEMPT, KILL_RANK, KILL_NODE = "preempt", "kill_rank", "kill_node"
FULL = (PREEMPT, KILL_RANK, KILL_NODE, PREEMPT)
QUICK = (PREEMPT, KILL_RANK)


class Line(NamedTuple):
    """A step that rank 0 has finished: when, in which process, and its number, from 1."""

    t: float
    pid: int
    step: int


class Place(NamedTuple):
    """Where a rank runs."""

    host: str
    pid: int


class Fault(NamedTuple):
    """What happens, and how many seconds after the first step since the previous fault."""

    kind: str
    after_s: float


class StepLog:
    """What each rank writes to ``out``: where it runs and, on rank 0, a line for each finished step."""

    def __init__(self, out: Path, rank: int) -> None:
        self._out, self._rank = out, rank
        place = out / f"rank-{rank}.json"
        unfinished = place.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(Place(socket.gethostname(), os.getpid())))
        unfinished.replace(place)
        self._file = (out / "steps.log").open("a", buffering=1) if rank == 0 else None

    def finished(self, step: int) -> None:
        """Record a finished step."""
        if self._file is not None:
            self._file.write(f"{time.time():.3f} {os.getpid()} {step}\n")

    def finish(self) -> None:
        """Record that all steps are finished."""
        if self._rank == 0:
            (self._out / "done").touch()


def read(out: Path) -> list[Line]:
    """The steps finished so far."""
    try:
        return parse((out / "steps.log").read_text())
    except FileNotFoundError:
        return []


def parse(text: str) -> list[Line]:
    """The lines of a log, without an incomplete last one."""
    fields = (line.split() for line in text.splitlines(keepends=True) if line.endswith("\n"))
    return [Line(float(t), int(pid), int(step)) for t, pid, step in fields]


def victim(out: Path) -> Place:
    """The rank on the job's last node, never the one where the batch script runs."""
    return max(Place(*json.loads(path.read_text())) for path in out.glob("rank-*.json"))


def lost_steps(lines: Sequence[Line]) -> int:
    """Steps that were done again."""
    return len(lines) - len({line.step for line in lines})


def missing_steps(lines: Sequence[Line], steps: int) -> list[int]:
    """Steps that were never done, although the result should hold them."""
    return sorted(set(range(1, steps + 1)) - {line.step for line in lines})


def first_after(lines: Sequence[Line], fault_t: float) -> Line | None:
    """The first step that was finished by a process other than the one hit by the fault at ``fault_t``."""
    before = [line.pid for line in lines if line.t <= fault_t]
    hit = before[-1] if before else None
    return next((line for line in lines if line.t > fault_t and line.pid != hit), None)


def step_seconds(lines: Sequence[Line]) -> float:
    """The median time from the end of one step to the end of the next, within a process."""
    return statistics.median(
        after.t - before.t for before, after in pairwise(lines) if before.pid == after.pid and after.step > before.step
    )


def trace(kinds: Sequence[str], seed: int, least_s: float, most_s: float) -> list[Fault]:
    """The same faults for every system: a draw for each pause, to tenths of a second."""
    numbers = random.Random(seed)
    return [Fault(kind, round(numbers.uniform(least_s, most_s), 1)) for kind in kinds]


def due(fault: Fault, lines: Sequence[Line], last_fault_t: float | None) -> float | None:
    """When a fault is due (seconds since 1970); None until the job has recovered from the previous one.

    A fault that hits no job does not count, so the trace pauses while a system does not train.
    """
    since = first_after(lines, last_fault_t) if last_fault_t is not None else next(iter(lines), None)
    return None if since is None else since.t + fault.after_s


class Start(NamedTuple):
    """One start of a job: times in whole seconds since 1970, how many nodes it had, and how it ended."""

    begin: int
    end: int
    nodes: int
    state: str


def starts(sacct: str, prefix: str) -> list[Start]:
    """All starts of the jobs whose names have this prefix, from accounting.

    ``sacct``: lines of JobName|State|Start|End|NNodes, with times in seconds since 1970, and no time or a word where
    there was no start. Raises ValueError while one of the jobs has not ended.
    """
    parsed = []
    for line in sacct.splitlines():
        name, state, begin, end, nodes = line.rsplit("|", 4)
        if not name.startswith(prefix) or not begin.isdecimal():
            continue
        if not end.isdecimal():
            raise ValueError(f"a start of job {name} has not ended: it is {state}")
        parsed.append(Start(int(begin), int(end), int(nodes), state.split()[0]))
    return parsed


def complete(accounted: Sequence[Start], observed: Sequence[Start]) -> list[Start]:
    """The starts that ``accounted`` has from accounting, and those that only squeue showed (``observed``), in order.

    Slurm 22.05 keeps no account of a start after which a job continues without some nodes.
    """
    lacking = [one for one in observed if not any(abs(one.begin - other.begin) <= 2 for other in accounted)]
    return sorted([*accounted, *lacking])


def node_seconds(all_starts: Sequence[Start]) -> float:
    """Seconds on nodes, times nodes."""
    return float(sum((one.end - one.begin) * one.nodes for one in all_starts))


@dataclass
class Hand:
    """Simulates a user who checks on a job occasionally and resubmits it if it does not restart automatically."""

    gone_after_s: float
    stuck_after_s: float
    _gone_since: float | None = None
    _calm_since: float = 0.0

    def needed(self, now: float, *, in_queue: bool, last_step_t: float) -> str | None:
        """Why help is needed at this time ("gone", "stuck"), if it is; all times are in seconds since 1970."""
        if in_queue:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
        if self._gone_since is not None and now - self._gone_since >= self.gone_after_s:
            return "gone"
        return "stuck" if in_queue and now - max(last_step_t, self._calm_since) >= self.stuck_after_s else None

    def lent(self, now: float) -> None:
        """The job has just been submitted."""
        self._gone_since, self._calm_since = None, now


def counted(ends: Iterable[str]) -> str:
    """How often jobs ended how, in words."""
    return ", ".join(f"{count} {end}" for end, count in Counter(ends).items())
