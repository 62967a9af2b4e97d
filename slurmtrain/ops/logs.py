"""Reading the logs of a run, and following them as they grow."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.errors import RunNotFound
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.workspace import Workspace

_POLL_S = 0.3
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log. ``origin`` is the rank, or what else wrote it."""

    attempt: int
    origin: str
    text: str


class _Tail:
    """What has grown in one file since the last look."""

    def __init__(self, path: Path, attempt: int, origin: str) -> None:
        self.path = path
        self._attempt = attempt
        self._origin = origin
        self._offset = 0
        self._rest = b""

    def lines(self, *, last: bool) -> Iterator[Line]:
        """Whole lines; with ``last`` also one that has no end."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(self._offset)
            while chunk := file.read(_CHUNK):
                self._offset += len(chunk)
                *whole, self._rest = (self._rest + chunk).split(b"\n")
                yield from map(self._line, whole)
        if last and self._rest:
            yield self._line(self._rest)
            self._rest = b""

    def _line(self, line: bytes) -> Line:
        return Line(self._attempt, self._origin, line.decode(errors="replace").rstrip("\r"))


def read_logs(
    workspace: Workspace,
    run_id: str,
    *,
    rank: int | None = None,
    attempt: int | None = None,
    follow: bool = False,
    waits: Callable[[str], None] = lambda _: None,
) -> Iterator[Line]:
    """Lines of a run's logs, attempt by attempt, rank by rank; with ``follow`` until the run has ended.

    ``attempt`` counts from 1; the newest by default. Following goes on over later attempts unless one is named;
    ``waits`` is told once for each of them that a command is to start, and why. Raises RunNotFound for an attempt or a
    rank that there is not.
    """
    told = 0
    tails: dict[Path, _Tail] = {}
    workspace = workspace.looking_again() if follow else workspace
    while True:
        run = observe_run(workspace, run_id, ask_slurm=True)
        for one in _chosen(run, attempt, follow=follow, seen=bool(tails)):
            place = workspace.root.run(run_id).attempt(one.job_id, one.restart)
            for path, origin in _files(place, one, rank):
                tails.setdefault(path, _Tail(path, one.number, origin))
        ended = run.ended or not follow
        for tail in list(tails.values()):
            yield from tail.lines(last=ended)
        if ended:
            if rank is not None and not tails:
                raise RunNotFound(
                    f"run {run_id} has no log of rank {rank}; 'slurmtrain logs {run_id}' shows all there are"
                )
            return
        if run.newest is not None and run.newest.restarted_by == "sync" and told < len(run.attempts):
            waits(run.reason)
            told = len(run.attempts)
        time.sleep(_POLL_S)


def _chosen(run: Run, number: int | None, *, follow: bool, seen: bool) -> Sequence[Attempt]:
    if number is None:
        return run.attempts if follow and seen else run.attempts[-1:]
    chosen = [attempt for attempt in run.attempts if attempt.number == number]
    if not chosen:
        raise RunNotFound(f"run {run.id} has no attempt {number}; it has {len(run.attempts)}")
    return chosen


def _files(place: AttemptDir, attempt: Attempt, rank: int | None) -> Iterator[tuple[Path, str]]:
    """The logs of the ranks; where no rank ever started, or the attempt failed, what the node agents printed too."""
    ranks = sorted(place.logs.glob("rank-*.log"), key=lambda path: int(path.stem.split("-")[1]))
    for path in ranks:
        number = int(path.stem.split("-")[1])
        if rank is None or number == rank:
            yield path, f"rank {number}"
    if rank is None and attempt.ended and not ranks:
        submission = place.run.submission(attempt.submission)
        yield submission.controller_log, "job"
        for path in sorted(submission.submitit.glob("*_log.out")):
            yield path, f"agent {path.stem.split('_')[-2]}"
