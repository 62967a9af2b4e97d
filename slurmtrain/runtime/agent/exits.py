"""How the processes that an agent has started have ended, by their exit codes, journals and logs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.model.diagnosis.launcher_report import RankEnd, find_rank_end, without_report
from slurmtrain.model.diagnosis.redact import redact
from slurmtrain.model.interruption.exit_report import Exit, is_cascade
from slurmtrain.model.run.events.base import AnyEvent, select
from slurmtrain.model.run.events.rank import ExceptionRaised, TrainingCompleted
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.model.spec.launcher import NodeRanks
from slurmtrain.runtime.environment.exceeded_limit import exceeded_limit
from slurmtrain.runtime.job.run_reader import read_events
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
        events = read_events(self._attempt.rank_journal(number), "")
        raised = _find_exception(events)
        last_lines = _of_rank(self._attempt.rank_log(number)) if process.returncode else []
        return Exit(
            rank=number,
            pid=process.pid,
            code=process.returncode,
            at=at,
            raised=raised,
            last_lines=last_lines,
            limit=exceeded_limit(process.returncode, [raised[1]] if raised else last_lines),
            finished=bool(select(events, TrainingCompleted)),
        )


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
        events = {rank: read_events(self._attempt.rank_journal(rank), "") for rank in ranks}
        raised = {rank: error for rank in ranks if (error := _find_exception(events[rank]))}
        end = self._end(process) if process.returncode else None
        local = end.local_rank if end is not None else None
        reported = ranks[local] if local is not None and local < len(ranks) else None
        rank = _blamed(raised, reported)
        code = process.returncode if end is None else end.code
        if reported is not None and rank != reported:
            code = 1  # what Python exits with after an exception; the launcher's report is on another rank
        last_lines = _of_rank(self._attempt.node_log(self._node)) if process.returncode else []
        error = raised.get(rank) if rank is not None else None
        return Exit(
            rank=rank,
            node=self._node,
            pid=process.pid,
            code=code,
            at=at,
            raised=error,
            last_lines=last_lines,
            limit=exceeded_limit(code, [error[1]] if error else last_lines),
            finished=all(select(events[rank], TrainingCompleted) for rank in ranks),
        )

    def _end(self, process: Any) -> RankEnd | None:
        if process.pid not in self._ends:
            self._ends[process.pid] = find_rank_end(self._report())
        return self._ends[process.pid]

    def _report(self) -> list[str]:
        return _last_lines(self._attempt.node_log(self._node), _REPORT_LINES)


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


def _of_rank(log: Path) -> Sequence[str]:
    """The last lines of a log before what a launcher, which the rank may be, reports on it."""
    return without_report(_last_lines(log, _REPORT_LINES))[-_TAIL_LINES:]


def _last_lines(log: Path, count: int) -> list[str]:
    """The last ``count`` lines of a log that are about the rank, with secrets redacted."""
    try:
        with open_readable(log) as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [redact(line) for line in lines if not _LEAK_REPORT.match(line)][-count:]
