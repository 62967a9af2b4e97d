"""How the processes that an agent has started have ended, by their exit codes, journals and logs."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.model.diagnosis.rank_groups import RankEnd, find_rank_end, without_report
from slurmtrain.model.diagnosis.tracebacks import Raised, find_fatal, find_raised
from slurmtrain.model.experiment.launcher import NodeRanks
from slurmtrain.model.interruption.exit_report import Exit, KernelEvidence, is_cascade
from slurmtrain.model.run.events.base import AnyEvent, select
from slurmtrain.model.run.events.rank_events import ExceptionRaised, TrainingCompleted
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.model.urls import redact
from slurmtrain.runtime.environment.process_limits import exceeded_limit
from slurmtrain.runtime.job.run_reader import read_events
from slurmtrain.runtime.preflight.facts.cpus import own_cgroups
from slurmtrain.runtime.preflight.facts.gpus import KERNEL_LOG, find_xids, read_kernel_log
from slurmtrain.system.owned_files import open_readable

_TAIL_LINES = 20
# A launcher's report on its ranks, with a traceback of its own, comes after their lines.
_REPORT_LINES = 120
_TAIL_BYTES = 16_384
# What nanobind prints when an interpreter that has imported Triton ends with an exception, as with torch 2.15: dozens
# of lines behind the traceback.
_LEAK_REPORT = re.compile(r"nanobind: | - (?:leaked |\.\.\. skipped )|See https://nanobind\.")


class RankExits:
    """The exits of processes that are a rank each."""

    def __init__(self, attempt: AttemptDir) -> None:
        """``attempt``: names the round."""
        self._attempt = attempt

    def code(self, process: Any) -> int | None:
        """The exit code of a process, negative for a signal; None if it still runs."""
        code: int | None = process.poll()
        return code

    def read(self, number: int, process: Any, at: float) -> Exit:
        """How a ``process`` ended, which has ended.

        ``number``: its number among the processes that agents have started on all nodes: the rank. ``at``: when it
        ended, in seconds since 1970.
        """
        events = read_events(self._attempt.rank_journal(number))
        raised = _find_exception(events)
        finished, log = bool(select(events, TrainingCompleted)), self._attempt.rank_log(number)
        return _exit_of(process, at, process.returncode, raised, log, rank=number, finished=finished)


class CommandExits(RankExits):
    """The exits of a command that starts the ranks of its node itself.

    Launchers exit with 1 where a rank has exited with 75, or was killed by a signal to all processes of the job, but
    they print how it ended.
    """

    def __init__(self, attempt: AttemptDir, node: int, ranks: NodeRanks) -> None:
        """``attempt``: names the round. ``node``: this node. ``ranks``: how many its command starts, on each node."""
        super().__init__(attempt)
        self._node = node
        self._ranks = ranks
        self._ends: dict[int, RankEnd | None] = {}

    def code(self, process: Any) -> int | None:
        """As :meth:`RankExits.code` for this ``process``, but of the rank that made it end, if any."""
        code = super().code(process)
        end = self._end(process) if code else None
        return code if end is None else end.code

    def read(self, number: int, process: Any, at: float) -> Exit:
        """As :meth:`RankExits.read`, with its ``process`` and ``at``; ``number``: the node's among training nodes."""
        ranks = self._ranks.ranks_of(number)
        events = {rank: read_events(self._attempt.rank_journal(rank)) for rank in ranks}
        raised = {rank: error for rank in ranks if (error := _find_exception(events[rank]))}
        end = self._end(process) if process.returncode else None
        local = end.local_rank if end is not None else None
        reported = ranks[local] if local is not None and local < len(ranks) else None
        rank = _blamed(raised, reported)
        code = process.returncode if end is None else end.code
        if reported is not None and rank != reported:
            code = 1  # what Python exits with after an exception; the launcher's report is on another rank
        error = raised.get(rank) if rank is not None else None
        finished = all(select(events[rank], TrainingCompleted) for rank in ranks)
        log = self._attempt.node_log(self._node)
        return _exit_of(process, at, code, error, log, rank=rank, node=self._node, finished=finished)

    def _end(self, process: Any) -> RankEnd | None:
        if process.pid not in self._ends:
            self._ends[process.pid] = find_rank_end(_last_lines(self._attempt.node_log(self._node), _REPORT_LINES))
        return self._ends[process.pid]


def _blamed(raised: Mapping[int, tuple[float, str]], reported: int | None) -> int | None:
    """The rank to blame for the end of a command; None if none is known.

    If several ranks have ended by the time that a launcher looks, it may report one that failed because of another.

    ``raised``: time and text of the exceptions that ranks have journaled. ``reported``: the rank that the launcher
    reports.
    """
    if reported is not None and (reported not in raised or not is_cascade(raised[reported][1])):
        return reported
    return min(raised, key=lambda rank: (is_cascade(raised[rank][1]), raised[rank][0]), default=None)


def _find_exception(events: Sequence[AnyEvent]) -> tuple[float, str] | None:
    """Time and text of the exception that the session journaled, if any. ``events``: the rank's journal."""
    for event in select(events, ExceptionRaised):
        return event.time, redact(f"{event.payload.type}: {event.payload.message}")
    return None


def _exit_of(process: Any, at: float, code: int, raised: tuple[float, str] | None, log: Path, **more: Any) -> Exit:
    """The exit of a ``process``, with the last lines of its ``log`` if it failed."""
    # What a launcher reports on a rank, which the rank may be itself, comes after the rank's own lines.
    own_lines = without_report(_last_lines(log, _REPORT_LINES)) if process.returncode else []
    lines = own_lines[-_TAIL_LINES:]
    limit = exceeded_limit(code, [raised[1]] if raised else lines)
    # Python ends itself by SIGINT after a KeyboardInterrupt.
    may_raise = code > 0 or code == -signal.SIGINT
    exception = find_raised(own_lines, raised[1] if raised else "", more.get("rank")) if may_raise else None
    stack = exception or (find_fatal(own_lines)[1] if code < 0 else Raised(""))
    error = exception.text if exception is not None else ""
    return Exit(
        pid=process.pid, code=code, at=at, raised=raised, last_lines=lines, limit=limit,
        error=error, place=stack.place(), **more,
    )  # fmt: skip


def _last_lines(log: Path, count: int) -> list[str]:
    """The last ``count`` lines of a log that are about the rank, with secrets redacted."""
    try:
        with open_readable(log) as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [redact(line) for line in lines if not _LEAK_REPORT.match(line)][-count:]


# --- what the kernel knows about it -----------------------------------------------------------------------------------
# The state is read before the ranks start and again after they have ended: the difference is what counts.


_ROOT = Path("/")
# By version: Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst in the kernel's sources.
_MEMORY_FILES = (("memory.oom_control", "memory.limit_in_bytes"), ("memory.events", "memory.max"))
# "No limit" of version 1 is the largest number of whole pages (PAGE_COUNTER_MAX); no machine has as much as this.
_NO_LIMIT = 1 << 60
# The most digits that a 64-bit number has.
_DIGITS = 20
_RECORD = re.compile(r"\d+,(\d{1,20}),\d+,[^;\n]*;")


@dataclass(frozen=True, slots=True)
class KernelState:
    """What the kernel has recorded so far: its out-of-memory counts, and the number of the newest record in its log."""

    memory: MemoryEvents
    record: int | None

    @classmethod
    def now(cls) -> KernelState:
        """The current state."""
        return cls(memory_events(), last_record())

    def changes(self) -> KernelEvidence:
        """What the kernel has recorded since this state was read."""
        memory = memory_events().since(self.memory)
        return KernelEvidence(oom_kills=memory.kills or 0, memory_limit=memory.limit_bytes, xids=xids(self.record))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvents:
    """Processes killed for lack of memory, and the memory limit in bytes (None: no known limit).

    ``kills`` counts kills in this process's own cgroup, and so in its job. If the kernel does not count these, it is
    the count of the whole machine (``own`` is False), and None if there is neither.
    """

    kills: int | None = None
    limit_bytes: int | None = None
    own: bool = True

    def since(self, before: MemoryEvents) -> MemoryEvents:
        """The kills since ``before``: ``kills`` is 0 if that cannot be known."""
        comparable = self.own == before.own and self.kills is not None and before.kills is not None
        kills = max(0, (self.kills or 0) - (before.kills or 0)) if comparable else 0
        return MemoryEvents(kills=kills, limit_bytes=self.limit_bytes, own=self.own)


def memory_events(root: Path = _ROOT) -> MemoryEvents:
    """What the kernel counts now for the cgroup of this process. ``root`` replaces ``/`` in tests."""
    folders = own_cgroups("memory", root)
    for events, limit in _MEMORY_FILES:
        counts = (_count(folder / events, "oom_kill") for folder in folders)
        kills = next((count for count in counts if count is not None), None)
        if kills is not None:
            # The limits of all of them apply: Slurm creates one each for a job, a step and a task.
            limits = [unsigned_number(_read_text(folder / limit).strip()) for folder in folders]
            least = min((each for each in limits if each is not None), default=_NO_LIMIT)
            return MemoryEvents(kills=kills, limit_bytes=least if least < _NO_LIMIT else None)
    return MemoryEvents(kills=_count(root / "proc/vmstat", "oom_kill"), own=False)


def last_record(log: Path = KERNEL_LOG) -> int | None:
    """The number of the newest record in the kernel ``log``, which :func:`xids` takes; None if it is not readable."""
    numbers = [number for number, _ in _records(log)]
    return max(numbers, default=None)


def xids(after: int | None, log: Path = KERNEL_LOG) -> list[dict[str, Any]]:
    """The GPU errors that the driver logged after this record, as :func:`~..preflight.facts.gpus.find_xids` has them.

    These include the errors of all GPUs of the node: ``bus`` tells which are the job's. Empty if ``after`` is None.
    """
    if after is None:
        return []
    return find_xids("\n".join(text for number, text in _records(log) if number > after), set())


def _records(log: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each record: ``priority,number,microseconds,flags;text`` (ABI/testing/dev-kmsg).

    Records are compared by number, since the log's clock drifts from all others.
    """
    text = ""
    with suppress(OSError):
        text = read_kernel_log(log)
    for line in text.split("\n"):
        head = _RECORD.match(line)
        if head is not None:
            yield int(head[1]), line[head.end() :]


def _read_text(path: Path) -> str:
    with suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _count(path: Path, name: str) -> int | None:
    """The number of this name in a file of names and numbers."""
    for line in _read_text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return unsigned_number(value)
    return None


def unsigned_number(text: str) -> int | None:
    """The text as a number of at most 64 bits, as the kernel and Slurm write them; None if it is not one."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None
