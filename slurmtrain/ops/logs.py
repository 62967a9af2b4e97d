"""Reading the logs of a run, and following them as they grow."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from slurmtrain.errors import PathError, RunNotFound
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.owned_files import open_readable

# How often files are checked while following, in seconds.
_POLL_S = 0.3
_CHUNK_BYTES = 1 << 20
# In the order of display.
_WRITERS = ("setup", "setup_node", "sidecar", "node", "rank", "teardown")
_LOG = re.compile(rf"({'|'.join(_WRITERS)})(?:-([\w.]+))?-(\d+)\.log")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log.

    ``origin``: the rank or other process that wrote it. ``text``: its text, decoded with ``surrogateescape``.
    """

    attempt: int
    origin: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which lines to read.

    ``rank``: only lines of this rank. ``attempt``: only lines of this attempt, counted from 1; by default the newest
    and, when following, later ones too. ``newest``: only this many at the end of each log that exists already.
    ``pattern``: only lines that match it. ``since``: only lines written since then, in seconds since 1970, as far as
    agents have noted how long logs were at what time, and of all attempts that had not ended by then.
    """

    rank: int | None = None
    attempt: int | None = None
    newest: int | None = None
    pattern: re.Pattern[str] | None = None
    since: float | None = None

    def has(self, line: Line) -> bool:
        """Whether the line has what is looked for."""
        return self.pattern is None or self.pattern.search(line.text) is not None


class _Tail:
    """What was added to one file since it was last read."""

    def __init__(self, path: Path, attempt: int, origin: str) -> None:
        self.path = path
        self._attempt = attempt
        self._origin = origin
        self._offset = 0
        self._rest = b""

    def skip_until(self, since: float) -> None:
        """Begin with the first line that may have been written at this time, in seconds since 1970, or later."""
        with contextlib.suppress(OSError), open_readable(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            if os.fstat(file.fileno()).st_mtime < since:
                self._offset = size
                return
            place = 0
            for path in self.path.parent.glob("sizes-*.jsonl"):
                with contextlib.suppress(OSError, PathError), open_readable(path) as notes:
                    for line in notes:
                        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                            note = json.loads(line)
                            noted = int(note["sizes"][self.path.name])
                            place = max(place, noted if float(note["t"]) <= since else 0)
            # In the middle of a line, if that was being written.
            place = min(place, size)
            while place:
                start = max(0, place - _CHUNK_BYTES)
                file.seek(start)
                before, line_break, _ = file.read(place - start).rpartition(b"\n")
                place = start + len(before) + len(line_break) if line_break else start
                if line_break:
                    break
            self._offset = place

    def skip_to(self, newest: int) -> None:
        """Begin with the last ``newest`` lines of the file, which are read from its end: logs grow to gigabytes."""
        with contextlib.suppress(OSError), open_readable(self.path) as file:
            size = place = file.seek(0, os.SEEK_END)
            content = b""
            while place and content.count(b"\n") <= newest:
                place = file.seek(max(0, place - _CHUNK_BYTES))
                content = file.read(size - place - len(content)) + content
            lines = content.split(b"\n")
            # After a final line break there is one more, empty part.
            count = newest + (not lines[-1])
            self._offset = size - len(b"\n".join(lines[max(0, len(lines) - count) :]))

    def read(self, choice: Choice, *, is_new: bool, last: bool) -> Iterator[Line]:
        """What is new in the log; ``is_new``: of the whole log, only the newest lines that were asked for."""
        if is_new and choice.since is not None:
            self.skip_until(choice.since)
        if not is_new or choice.newest is None:
            return filter(choice.has, self.lines(last=last))
        if choice.pattern is None and choice.since is None:
            self.skip_to(choice.newest)
            return self.lines(last=last)
        # How far back the newest matching lines go cannot be known without reading all.
        return iter(deque(filter(choice.has, self.lines(last=last)), maxlen=choice.newest))

    def lines(self, *, last: bool) -> Iterator[Line]:
        """Complete lines; with ``last`` also a final one without a line break."""
        with contextlib.suppress(OSError), open_readable(self.path) as file:
            file.seek(self._offset)
            while chunk := file.read(_CHUNK_BYTES):
                self._offset += len(chunk)
                *whole, self._rest = (self._rest + chunk).split(b"\n")
                yield from map(self._line, whole)
        if last and self._rest:
            yield self._line(self._rest)
            self._rest = b""

    def _line(self, line: bytes) -> Line:
        return Line(self._attempt, self._origin, line.decode(errors="surrogateescape"))


class LogReader:
    """The lines added to the logs of a run since they were last read, for callers that decide when to look."""

    def __init__(self, workspace: Workspace, choice: Choice, *, follows: bool = True) -> None:
        """Nothing has been read so far.

        Args:
            workspace: where the run is.
            choice: which lines.
            follows: read later attempts too, once there are logs.
        """
        self._workspace = workspace
        self._choice = choice
        self._follows = follows
        self._tails: dict[Path, _Tail] = {}
        self._has_read = False

    @property
    def has_logs(self) -> bool:
        """Whether there have been any."""
        return bool(self._tails)

    def read(self, run: Run, *, last: bool) -> Iterator[Line]:
        """The new lines, attempt by attempt, rank by rank.

        Args:
            run: the run, as just observed.
            last: also a final line without a line break.
        """
        chosen = _tails(self._workspace, run, self._choice, follow=self._follows, started=self.has_logs)
        new = {tail.path: tail for tail in chosen if tail.path not in self._tails}
        self._tails |= new
        is_first, self._has_read = not self._has_read, True
        for path, tail in list(self._tails.items()):
            yield from tail.read(self._choice, is_new=path in new and is_first, last=last)


def read_logs(
    workspace: Workspace,
    run_id: str,
    choice: Choice,
    *,
    follow: bool = False,
    waits: Callable[[str], None] = lambda _: None,
) -> Iterator[Line]:
    """Lines of a run's logs, attempt by attempt, rank by rank.

    Args:
        workspace: where the run is.
        run_id: the run.
        choice: which lines.
        follow: wait for more lines until the run has ended.
        waits: called with the reason if there are no logs yet; and once for each later attempt that does not start by
            itself: a command such as ``sync`` must start it.

    Raises:
        RunNotFound: there is no such attempt or rank, or the files of the run were deleted.
    """
    # How many attempts there were when ``waits`` was last called; -1: it was not called.
    announced = -1
    workspace = workspace.looking_again() if follow else workspace
    reader = LogReader(workspace, choice, follows=follow)
    while True:
        run = observe_run(workspace, run_id, ask_slurm=True)
        if run.deleted_at is not None:
            raise RunNotFound(f"the logs of run {run_id} were deleted with its other files")
        # The run's state is read before its files: if it has ended, this reads everything that it has written.
        ended = run.ended or not follow
        yield from reader.read(run, last=ended)
        has_logs = reader.has_logs
        of_any_rank = replace(choice, rank=None)
        if (
            not has_logs
            and ended
            and choice.rank is not None
            and (run.ended or any(_tails(workspace, run, of_any_rank, follow=False, started=False)))
        ):
            raise RunNotFound(
                f"run {run_id} has no log of rank {choice.rank} alone; 'slurmtrain logs {run_id}' shows all there are"
            )
        if announced < 0 and not has_logs and not run.ended:
            reason = f" ({run.reason})" if run.reason else ""
            waits(f"it is {run.state}{reason}; logs will be in {workspace.root.run(run_id).attempts}")
        elif run.newest is not None and run.newest.restarted_by == "sync" and announced < len(run.attempts):
            waits(run.reason)
        if ended:
            return
        announced = max(announced, len(run.attempts))
        time.sleep(_POLL_S)


def log_paths(workspace: Workspace, run_id: str, choice: Choice) -> list[Path]:
    """The files that :func:`read_logs` would read, with the same ``workspace``, ``run_id`` and ``choice``.

    Raises RunNotFound if there is no such attempt.
    """
    run = observe_run(workspace, run_id, ask_slurm=False)
    return [tail.path for tail in _tails(workspace, run, choice, follow=False, started=False)]


def _tails(workspace: Workspace, run: Run, choice: Choice, *, follow: bool, started: bool) -> Iterator[_Tail]:
    """The logs of ranks, or of the commands that start them."""
    # Once following has started with the newest attempt, all later ones are included.
    attempts = run.attempts if follow and started else run.attempts[-1:]
    if choice.attempt is not None:
        attempts = [each for each in run.attempts if each.number == choice.attempt]
        if not attempts:
            raise RunNotFound(f"run {run.id} has no attempt {choice.attempt}; it has {len(run.attempts)}")
    elif choice.since is not None:
        attempts = [each for each in run.attempts if each.ended_at is None or each.ended_at >= choice.since]
    for each in attempts:
        directory = workspace.root.run(run.id).attempt(each.job_id, each.restart)
        named = [(path, match) for path in directory.logs.glob("*.log") if (match := _LOG.fullmatch(path.name))]
        # The kind of what has written a log, and its number: a rank's, or the node's.
        logs = [(path, " ".join(filter(None, match.group(1, 2))), int(match[3])) for path, match in named]
        logs.sort(key=lambda log: (_WRITERS.index(log[1].split()[0]), *log[1:]))
        for path, writer, number in logs:
            if choice.rank is None or (writer, number) == ("rank", choice.rank):
                yield _Tail(path, each.number, f"{writer} {number}")
        # If nothing was started, the agents' logs; while the attempt starts, they are of no interest yet.
        if choice.rank is None and each.ended and not any(writer in ("node", "rank") for _, writer, _ in logs):
            submission = directory.run.submission(each.submission)
            yield _Tail(submission.controller_log, each.number, "job")
            for path in sorted(submission.submitit.glob("*_log.out")):
                # submitit names it JOB_TASK_log.out.
                yield _Tail(path, each.number, f"agent {path.stem.split('_')[-2]}")
