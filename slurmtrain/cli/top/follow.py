"""Following one run for the page: its attempts, and what is new in its logs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmtrain.cli.shared.printable import printable_log
from slurmtrain.cli.top.look import describe
from slurmtrain.errors import RunNotFound
from slurmtrain.ops.logs import Choice, Line, LogReader
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.run_details import attempt_json
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.config import Config
    from slurmtrain.model.run.run import Run

# Of a line longer than this, the rest is left out: a terminal shows a few hundred characters.
_LONGEST = 4_000


@dataclass(frozen=True, slots=True)
class FollowedRun:
    """The run to follow, how many ``lines`` of its logs to begin with, and whether to follow the logs of all ranks."""

    run_id: str
    lines: int
    all_ranks: bool = False


@dataclass(frozen=True, slots=True)
class News:
    """What is new about a run.

    ``attempts``: its ATTEMPTs, None if they were not read again. ``lines``: new lines of its logs, printable.
    ``first``: whether these are the first. ``problem``: why the run cannot be read, in a sentence.
    """

    subject: FollowedRun
    attempts: Sequence[Mapping[str, Any]] | None
    lines: Sequence[str]
    first: bool
    problem: str = ""


class Follower:
    """Reads the run that ``subject`` names, which may be set from another thread, and reports what is new."""

    def __init__(self, config: Config, report: Callable[[News], None], interval_s: float) -> None:
        """Follow nothing so far.

        Args:
            config: The runs root.
            report: Called with what is new.
            interval_s: How often the run's journals are read, in seconds; its logs are read at each call.
        """
        self.subject: FollowedRun | None = None
        self._config = config
        self._report = report
        self._interval_s = interval_s
        self._workspace: Workspace | None = None
        self._current: FollowedRun | None = None
        self._run: Run | None = None
        self._read_at = 0.0
        # The logs of rank 0 and the logs of all ranks, until one of them has lines.
        self._readers: dict[bool, LogReader] = {}
        self._problem = ""

    def look(self) -> None:
        """Report what is new about the subject, if anything is. Never raises."""
        subject = self.subject
        if subject is None:
            return
        first = subject != self._current
        if first:
            self._begin(subject)
        try:
            attempts = self._read_run(subject)
            lines, problem = self._new_lines(subject), ""
        except Exception as error:  # noqa: BLE001 (a page that shows a bug is of more use than none)
            attempts, lines, problem = None, [], describe(error)
        if first or attempts is not None or lines or problem != self._problem:
            self._problem = problem
            self._report(News(subject, attempts, lines, first, problem))

    def _begin(self, subject: FollowedRun) -> None:
        self._current, self._run, self._readers, self._problem = subject, None, {}, ""

    def _read_run(self, subject: FollowedRun) -> list[dict[str, Any]] | None:
        """The attempts of the run; None if it is too early to read them again."""
        now = time.monotonic()
        if self._run is not None and now - self._read_at < self._interval_s:
            return None
        self._read_at = now
        self._workspace = self._workspace or Workspace(self._config)
        observe(self._workspace, [subject.run_id], ask_slurm=False)
        run = self._workspace.store.load(subject.run_id)
        if run is None:
            raise RunNotFound(f"there is no run {subject.run_id} any more: its directory was deleted")
        is_same, self._run = run == self._run, run
        return None if is_same else [attempt_json(attempt) for attempt in run.attempts]

    def _new_lines(self, subject: FollowedRun) -> list[str]:
        if self._run is None or self._workspace is None:
            return []
        if not self._readers:
            choices = {True: Choice(newest=subject.lines)}
            if not subject.all_ranks:
                # One rank's log is what most people want; if it has none, whatever there is.
                choices = {False: Choice(rank=0, newest=subject.lines), **choices}
            self._readers = {is_all: LogReader(self._workspace, choice) for is_all, choice in choices.items()}
        for is_all, reader in self._readers.items():
            lines = deque(reader.read(self._run, last=self._run.ended), maxlen=subject.lines)
            if reader.has_logs:
                self._readers = {is_all: reader}
                return list(shown(lines, with_origin=is_all))
        return []


def shown(lines: Iterable[Line], *, with_origin: bool) -> Iterable[str]:
    """Lines of logs as the page shows them; ``with_origin``: after the attempt and the process that wrote them."""
    for line in lines:
        origin = f"[{line.attempt}/{line.origin}] " if with_origin else ""
        yield origin + printable_log(line.text[:_LONGEST])
