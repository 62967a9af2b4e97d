"""The logs of an attempt, read within bounds: their known patterns, and how the processes that failed ended."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, tzinfo
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

from slurmtrain.model.diagnosis.last_words import EXCEPTION, IMPORT, Ending, Facts, at_place, explain_end, raised_by
from slurmtrain.model.diagnosis.patterns import CASCADE, NOTE, OF_EXCEPTIONS, ROOT
from slurmtrain.model.diagnosis.rank_groups import without_report
from slurmtrain.model.diagnosis.root_cause import Hit, make_hit, rank_of, scan_log, time_of
from slurmtrain.model.diagnosis.tracebacks import find_fatal, find_raised
from slurmtrain.model.run.run import Attempt
from slurmtrain.model.urls import redact
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.owned_files import open_readable

# How many characters of a line are shown.
_SHOWN_LINE = 500
# How many of the last lines of a log are searched for the exception that ended its process.
_LAST_LINES = 300

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
_NODE = re.compile(r"node-(\d+)\.log")
_NODE_LOG = re.compile(r"(?:node|setup|setup_node|teardown|sidecar-[\w.]+)-(\d+)\.log")


@dataclass(frozen=True, slots=True)
class _Log:
    """A file to read.

    ``rank`` and ``host``: its writer's. ``shared``: other starts of the job write to it too. ``is_last``: no later
    round has a log of the rank.
    """

    path: Path
    rank: int | None
    host: str
    shared: bool = False
    is_last: bool = True


class AttemptLogs:
    """The logs of an attempt, read within bounds. The public attributes are filled by :meth:`hits`."""

    def __init__(
        self, attempt: Attempt, attempts: Sequence[Attempt], hosts: Mapping[int, str],
        failures: Mapping[int | None, Mapping[str, Any]], facts: Facts,
    ) -> None:  # fmt: skip
        """The logs of ``attempt``.

        ``attempts``: all of its run. ``hosts``: the host of each rank. ``failures``: the first failure of each rank, as
        journaled. ``facts``: what can be looked up about them.
        """
        self._attempt = attempt
        self._hosts = hosts
        self._failures = failures
        self._facts = facts
        # The times between which lines of shared logs may belong to the attempt, in seconds since 1970.
        self._since, self._until = -math.inf, math.inf
        if (began := attempt.started_at or attempt.submitted_at) is not None:
            starts = [each.started_at for each in attempts if each.job_id == attempt.job_id and each.started_at]
            self._since = began - (_CLOCKS_S if any(start < began for start in starts) else _MARGIN_S)
            until = math.inf if attempt.ended_at is None else attempt.ended_at + _MARGIN_S
            self._until = min([until, *(start - _CLOCKS_S for start in starts if start > began)])
        # Programs log local time without naming the zone; nodes and this machine are assumed to share it.
        self._zone: tzinfo = datetime.now().astimezone().tzinfo or UTC
        self.ranks: set[int] = set()
        self.read = 0
        self.partly: list[str] = []
        self.problems: list[str] = []

    def hits(self, workspace: Workspace, run_id: str) -> Iterator[Hit]:
        """What the logs of ranks, of agents and of the batch script say of how the attempt ended.

        ``workspace`` and ``run_id`` say where these logs are.
        """
        logs = list(self._files(workspace, run_id, self._attempt))
        # Without bounds, a thousand ranks would mean gigabytes.
        share = max(_LEAST_BYTES, _ALL_BYTES // max(1, len(logs)))
        unexplained = dict(self._failures)
        for log in logs:
            # One unreadable log must not hide what the others say.
            try:
                parts, whole = _read_ends(log.path, share)
            except OSError as error:
                self.problems.append(f"{log.path}: {describe_os_error(error)}")
                continue
            self.read += 1
            if not whole:
                self.partly.append(str(log.path))
            hits = [hit for offset, text in parts for hit in self._hits_in(text, log, offset)]
            failure = self._failure_in(log)
            if failure is not None:
                unexplained.pop(failure["rank"], None)
                hits = _judged(hits, failure, log, parts[-1], self._facts)
            yield from hits
        for rank, failure in unexplained.items():
            # The log is gone, but the agent has journaled its last lines.
            lines = "\n".join([*map(str, failure.get("last_lines") or ()), str(failure.get("error") or "")])
            writer = f"rank {rank}" if rank is not None else "node"
            log = _Log(Path(f"journal of {writer}"), rank, self._hosts.get(rank if rank is not None else -1, ""))
            yield from _judged(list(self._hits_in(lines, log, 0)), failure, log, (0, lines), self._facts)

    def _failure_in(self, log: _Log) -> Mapping[str, Any] | None:
        """The failure whose process has written this log."""
        of_node = _NODE.fullmatch(log.path.name)
        if of_node is None:
            failure = self._failures.get(log.rank) if log.rank is not None and log.is_last else None
            return failure if failure is not None and failure.get("node") is None else None
        return next((each for each in self._failures.values() if str(each.get("node")) == of_node[1]), None)

    def _files(self, workspace: Workspace, run_id: str, attempt: Attempt) -> Iterator[_Log]:
        directory = workspace.root.run(run_id)
        logs = directory.attempt(attempt.job_id, attempt.restart).logs
        matches = [(path, _RANK_LOG.fullmatch(path.name)) for path in _paths_in(logs)]
        rank_logs = [(path, int(match[1]), int(match[2] or 0)) for path, match in matches if match]
        # By rank and round, so that hits without a time are in the order of writing.
        newest = {rank: path for path, rank, _ in sorted(rank_logs, key=lambda log: log[1:])}
        for path, rank, _ in sorted(rank_logs, key=lambda log: log[1:]):
            self.ranks.add(rank)
            yield _Log(path, rank, self._hosts.get(rank, ""), is_last=newest[rank] == path)
        for path in _paths_in(logs):
            if match := _NODE_LOG.fullmatch(path.name):
                yield _Log(path, None, attempt.hosts.get(match[1], ""))
        submission = directory.submission(attempt.submission)
        for path in _paths_in(submission.submitit):
            if path.name.startswith(f"{attempt.job_id}_") and path.name.endswith("_log.out"):
                yield _Log(path, None, attempt.hosts.get(path.name.split("_")[-2], ""), shared=True)
        # A directory that cannot be entered is an error for Path.exists().
        if os.path.exists(submission.controller_log):  # noqa: PTH110
            yield _Log(submission.controller_log, None, "", shared=True)

    def _hits_in(self, text: str, log: _Log, offset: int) -> Iterator[Hit]:
        """The hits in a part of a log that begins at this offset."""
        attempt = self._attempt
        # torch's log lines have no year: it is derived from the end of the attempt.
        near = attempt.ended_at or attempt.started_at or attempt.submitted_at or 0.0
        for place, pattern, match, line in scan_log(text):
            at = time_of(line, near, self._zone)
            if log.shared:
                # The job's log has the lines of all its starts; a line without any time may belong to this one.
                line_at = at if at is not None else self._before(text, place, near)
                # What follows the last line with a time of the start before is from this one, if its agents wrote
                # nothing.
                is_silent = at is None and not attempt.hosts
                if line_at is not None and not (line_at <= self._until and (line_at >= self._since or is_silent)):
                    continue
            # In the job's log, only torch's own lines name their rank.
            rank = log.rank if log.rank is not None else rank_of(line)
            exact = at is not None
            hit = make_hit(
                pattern,
                match,
                text=printable_line(line),
                origin=str(log.path),
                rank=rank,
                host=log.host or self._hosts.get(rank if rank is not None else -1, ""),
                at=at if exact else self._failures.get(rank, {}).get("at"),
                exact=exact,
                line=offset + place,
            )
            if pattern.name == IMPORT and (raised := raised_by(match[0])):
                explained = explain_end(Ending(None, raised), self._facts)
                hit = replace(hit, cause=explained.cause, fix=explained.fix)
            yield hit

    def _before(self, text: str, place: int, near: float) -> float | None:
        """The time of the nearest earlier line that has one, in seconds since 1970."""
        for line in reversed(text[max(0, place - _LOOK_BACK) : place].split("\n")):
            at = time_of(line, near, self._zone)
            if at is not None:
                return at
        return None


def _judged(
    hits: Sequence[Hit], failure: Mapping[str, Any], log: _Log, part: tuple[int, str], facts: Facts
) -> list[Hit]:
    """The hits in the log of a process that failed, and what its end means.

    What exceptions say counts where it is in the exception that ended the process, and is then placed in the user's
    code; the process has survived the others.

    ``failure``: how it ended. ``part``: the last one of the log. ``facts``: what can be looked up about it.
    """
    offset, text = part
    lines = text.splitlines(keepends=True)
    first = max(0, len(lines) - _LAST_LINES)
    ending, begin = _ending_of([line.rstrip("\r\n") for line in lines[first:]], failure)
    begins_at = offset + sum(map(len, lines[: first + begin]))
    judged, explained = [], False
    for hit in hits:
        if hit.name == IMPORT and hit.line >= begins_at:
            continue  # explained below, with the user's line
        if hit.name in OF_EXCEPTIONS and ending.raised is not None and hit.line < begins_at:
            hit = replace(hit, role=NOTE)
        elif ending.raised is not None and hit.role in (ROOT, CASCADE) and hit.line >= begins_at:
            hit = replace(hit, cause=f"{hit.cause}{at_place(ending.raised)}")
            explained = True
        judged.append(hit)
    meaning = explain_end(ending, facts)
    if explained and meaning.name == EXCEPTION:
        return judged
    end = Hit(
        name=meaning.name,
        role=CASCADE if meaning.follows else ROOT,
        cause=printable_line(meaning.cause),
        fix=meaning.fix,
        text=printable_line(ending.raised.text if ending.raised is not None else ending.message or ending.last_line),
        origin=str(log.path),
        rank=failure["rank"],
        host=log.host,
        at=failure.get("at"),
        line=begins_at,
    )
    return [*judged, end]


def _ending_of(lines: Sequence[str], failure: Mapping[str, Any]) -> tuple[Ending, int]:
    """How a process ended, by its ``failure`` and the last ``lines`` of its log, and where its traceback begins."""
    name, code = failure.get("signal"), failure.get("exit_code")
    if name and name in Signals.__members__:
        code = -Signals[name]
    error = str(failure.get("error") or "")
    own = [line for line in without_report(lines) if line.strip()]
    last_line = " ".join(own[-1].split()) if own else ""
    raised = None
    # Python ends itself by SIGINT after a KeyboardInterrupt.
    if not name or name == Signals.SIGINT.name:
        begin = max(0, len(lines) - 1)
        raised = find_raised(lines, error, failure["rank"])
        raised = raised or next(
            (replace(each, begin=begin) for each in map(raised_by, (error, last_line)) if each), None
        )
    message, stack = find_fatal(lines) if raised is None else ("", None)
    ending = Ending(code, raised, message, stack, last_line)
    return ending, raised.begin if raised is not None else len(lines)


def printable_line(line: str) -> str:
    """A line for printing: without secrets and control characters, and not too long."""
    # Logs may contain escape sequences, which could overwrite other text on the terminal.
    clean = "".join(character if character.isprintable() else " " for character in redact(line.strip()))
    return clean if len(clean) <= _SHOWN_LINE else f"{clean[:_SHOWN_LINE]}..."


def _paths_in(folder: Path) -> list[Path]:
    try:
        return sorted(folder / name for name in os.listdir(folder))
    except OSError:
        return []


def _read_ends(path: Path, share: int) -> tuple[list[tuple[int, str]], bool]:
    """(offset, text) of a log's beginning and end, or of all of it, and whether that is all of it. Raises OSError.

    ``share``: bytes that may be read of it.
    """
    tail = min(TAIL_BYTES, share * 3 // 4)
    head = min(HEAD_BYTES, share // 4)
    decode = partial(str, encoding="utf-8", errors="replace")
    with open_readable(path) as file:
        # The size of the open file: a rank that still runs may write meanwhile.
        size = os.fstat(file.fileno()).st_size
        if size <= head + tail:
            return [(0, decode(file.read(head + tail)))], True
        first = file.read(head)
        file.seek(size - tail)
        return [(0, decode(first)), (size - tail, decode(file.read(tail)))], False
