"""Reading the logs of an attempt, within bounds, and finding known patterns in them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from pathlib import Path

from slurmtrain.model.diagnosis.log_scan import Hit, make_hit, rank_of, scan_log, time_of
from slurmtrain.model.run.run import Attempt
from slurmtrain.ops.diagnose.journals import AttemptJournals, printable
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.owned_files import open_readable

# How much of a log is read, at its beginning and end: causes are at the end, wrong settings at the beginning.
HEAD_BYTES, TAIL_BYTES = 2 << 20, 6 << 20
# The logs share the first of these equally, but each gets at least the second.
_ALL_BYTES = 64 << 20
_LEAST_BYTES = 64 << 10
# The log of a job has the lines of all its starts. Lines farther than this from an attempt belong to another start, and
# so do all lines from before it, if there was an earlier start: Slurm starts a job again only when its last process is
# gone. The clocks of a job's nodes may differ by the second margin.
_MARGIN_S = 120.0
_CLOCKS_S = 2.0
# A line without a time gets the time of an earlier line, at most this many characters back.
_LOOK_BACK = 64 << 10
_RANK_LOG = re.compile(r"rank-(\d+)(?:\.(\d+))?\.log")
# A command that starts the ranks of its node itself has one log for all of them; others are of what runs beside ranks.
_NODE_LOG = re.compile(r"(?:node|setup|setup_node|teardown|sidecar-[\w.]+)-(\d+)\.log")


@dataclass(frozen=True, slots=True)
class _Log:
    """A file to read. ``rank`` and ``host``: its writer's. ``shared``: other starts of the job write to it too."""

    path: Path
    rank: int | None
    host: str
    shared: bool = False


class AttemptLogs:
    """The logs of an attempt, read within bounds. The public attributes are filled by :meth:`hits`."""

    def __init__(self, journals: AttemptJournals, attempts: Sequence[Attempt]) -> None:
        """``journals``: the attempt's. ``attempts``: all of its run."""
        self._journals = journals
        self._since, self._until = _span(journals.attempt, attempts)
        # Programs log local time without naming the zone; nodes and this machine are assumed to share it.
        self._zone: tzinfo = datetime.now().astimezone().tzinfo or UTC
        self.ranks: set[int] = set()
        self.read = 0
        self.partly: list[str] = []
        self.problems: list[str] = []

    def hits(self, workspace: Workspace, run_id: str, attempt: Attempt) -> Iterator[Hit]:
        """The known patterns in the logs of ranks, of agents and of the batch script of an ``attempt``.

        ``workspace`` and ``run_id`` say where these logs are.
        """
        logs = list(self._files(workspace, run_id, attempt))
        # Without bounds, a thousand ranks would mean gigabytes.
        share = max(_LEAST_BYTES, _ALL_BYTES // max(1, len(logs)))
        legible = set()
        for log in logs:
            # One unreadable log must not hide what the others say.
            try:
                parts, whole = _parts(log.path, share)
            except OSError as error:
                self.problems.append(f"{log.path}: {describe_os_error(error)}")
                continue
            self.read += 1
            legible.add(log.rank)
            if not whole:
                self.partly.append(str(log.path))
            for offset, text in parts:
                yield from self._hits_in(text, log, offset)
        for rank, failure in self._journals.failures.items():
            # The log is gone, but the agent has journaled its last lines. A node's log has the lines of all of its
            # ranks.
            if rank not in legible and failure.get("node") is None:
                lines = "\n".join([*map(str, failure.get("last_lines") or ()), str(failure.get("error") or "")])
                yield from self._hits_in(lines, _Log(Path(f"journal of rank {rank}"), rank, ""), 0)

    def _files(self, workspace: Workspace, run_id: str, attempt: Attempt) -> Iterator[_Log]:
        directory = workspace.root.run(run_id)
        logs = directory.attempt(attempt.job_id, attempt.restart).logs
        matches = [(path, _RANK_LOG.fullmatch(path.name)) for path in _listed(logs)]
        rank_logs = [(path, int(match[1]), int(match[2] or 0)) for path, match in matches if match]
        # By rank and round, so that hits without a time are in the order of writing.
        for path, rank, _ in sorted(rank_logs, key=lambda log: log[1:]):
            self.ranks.add(rank)
            yield _Log(path, rank, self._journals.hosts.get(rank, ""))
        for path in _listed(logs):
            if match := _NODE_LOG.fullmatch(path.name):
                yield _Log(path, None, attempt.hosts.get(match[1], ""))
        submission = directory.submission(attempt.submission)
        for path in _listed(submission.submitit):
            if path.name.startswith(f"{attempt.job_id}_") and path.name.endswith("_log.out"):
                yield _Log(path, None, attempt.hosts.get(path.name.split("_")[-2], ""), shared=True)
        # A directory that cannot be entered is an error for Path.exists().
        if os.path.exists(submission.controller_log):  # noqa: PTH110
            yield _Log(submission.controller_log, None, "", shared=True)

    def _hits_in(self, text: str, log: _Log, offset: int) -> Iterator[Hit]:
        """The hits in a part of a log that begins at this offset."""
        attempt = self._journals.attempt
        # torch's log lines have no year: it is derived from the end of the attempt.
        near = attempt.ended_at or attempt.started_at or attempt.submitted_at or 0.0
        for place, pattern, match, line in scan_log(text):
            at = time_of(line, near, self._zone)
            if log.shared and not self._is_ours(at, at if at is not None else self._before(text, place, near)):
                continue
            # In the job's log, only torch's own lines name their rank.
            rank = log.rank if log.rank is not None else rank_of(line)
            exact = at is not None
            yield make_hit(
                pattern,
                match,
                text=printable(line),
                origin=str(log.path),
                rank=rank,
                host=log.host or self._journals.hosts.get(rank if rank is not None else -1, ""),
                at=at if exact else self._journals.exit_at(rank),
                exact=exact,
                line=offset + place,
            )

    def _before(self, text: str, place: int, near: float) -> float | None:
        """The time of the nearest earlier line that has one, in seconds since 1970."""
        for line in reversed(text[max(0, place - _LOOK_BACK) : place].split("\n")):
            at = time_of(line, near, self._zone)
            if at is not None:
                return at
        return None

    def _is_ours(self, own: float | None, near: float | None) -> bool:
        """Whether a line of a shared log may belong to this attempt; a line without any time may.

        ``own``: the time in the line. ``near``: the same, or the time of the nearest earlier line that has one.
        """
        if near is None:
            return True
        # What follows the last line with a time of the start before is from this one, if its agents wrote nothing.
        is_silent = own is None and not self._journals.attempt.hosts
        return (near >= self._since or is_silent) and near <= self._until


def _span(attempt: Attempt, attempts: Sequence[Attempt]) -> tuple[float, float]:
    """The times between which lines of shared logs may belong to an attempt, in seconds since 1970.

    ``attempts``: all of its run.
    """
    starts = [other.started_at for other in attempts if other.job_id == attempt.job_id and other.started_at is not None]
    began = attempt.started_at or attempt.submitted_at
    if began is None:
        return -math.inf, math.inf
    since = began - (_CLOCKS_S if any(start < began for start in starts) else _MARGIN_S)
    until = math.inf if attempt.ended_at is None else attempt.ended_at + _MARGIN_S
    return since, min([until, *(start - _CLOCKS_S for start in starts if start > began)])


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder / name for name in os.listdir(folder))
    except OSError:
        return []


def _parts(path: Path, share: int) -> tuple[list[tuple[int, str]], bool]:
    """(offset, text) of a log's beginning and end, or of all of it, and whether that is all of it. Raises OSError.

    ``share``: bytes that may be read of it.
    """
    tail = min(TAIL_BYTES, share * 3 // 4)
    head = min(HEAD_BYTES, share // 4)
    with open_readable(path) as file:
        # The size of the open file: a rank that still runs may write meanwhile.
        size = os.fstat(file.fileno()).st_size
        if size <= head + tail:
            return [(0, _text(file.read(head + tail)))], True
        first = file.read(head)
        file.seek(size - tail)
        return [(0, _text(first)), (size - tail, _text(file.read(tail)))], False


def _text(content: bytes) -> str:
    return content.decode(errors="replace")
