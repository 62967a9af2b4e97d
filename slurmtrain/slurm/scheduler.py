"""What Slurm knows of this user's jobs: one squeue and one sacct call at most for any command."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurmtrain.errors import PlaceError, SlurmDown
from slurmtrain.slurm.command import ask
from slurmtrain.slurm.parse import (
    ACCOUNTING_FIELDS,
    NODE_FORMAT,
    Job,
    NodeInfo,
    queue_format,
    read_accounting,
    read_nodes,
    read_partitions,
    read_queue,
)
from slurmtrain.system.files import read_json, write_json

# Beyond this many ids a list of them is longer than a look at everything of the user's since then.
_MAX_IDS = 1000
# sacct's window is cut by the clock of the scheduler, ours may be another.
_CLOCK_MARGIN_S = 3600.0
_NO_ACCOUNTING = "accounting storage is disabled"


@dataclass(frozen=True, slots=True)
class Queue:
    """squeue's answer: jobs by id, or why there is none. ``at``: when it was asked, in seconds since 1970."""

    jobs: Mapping[str, Job] = field(default_factory=dict)
    problem: str = ""
    at: float = 0.0

    @property
    def answered(self) -> bool:
        return not self.problem

    def job(self, job_id: str) -> Job | None:
        """What squeue says of a job. An element of an array that ended as a whole is known by the array's id alone."""
        return self.jobs.get(job_id) or self.jobs.get(job_id.partition("_")[0])


@dataclass(frozen=True, slots=True)
class Accounting:
    """sacct's answer: all starts of each job, oldest first, or why there is none. ``absent``: the site keeps none.

    ``at``: when it was asked, in seconds since 1970.
    """

    starts: Mapping[str, list[Job]] = field(default_factory=dict)
    problem: str = ""
    absent: bool = False
    at: float = 0.0

    @property
    def answered(self) -> bool:
        return not self.problem or self.absent

    def starts_of(self, job_id: str) -> list[Job]:
        """What sacct says of a job, or of the array that it was an element of."""
        return self.starts.get(job_id) or self.starts.get(job_id.partition("_")[0], [])


class Scheduler:
    """Answers of squeue and sacct, each asked for at most once in ``max_age_s``.

    ``cache``: a file in which commands that look again and again share squeue's answer; None for those that look once.
    """

    def __init__(self, max_age_s: float, cache: Path | None) -> None:
        self._max_age_s = max_age_s
        self._cache = cache
        self._queue: Queue | None = None
        self._accounting: tuple[frozenset[str], Accounting] | None = None
        self._partitions: dict[str, dict[str, str]] | None = None
        self._nodes: tuple[float, list[NodeInfo]] | None = None
        self._tried_at: dict[str, float] = {}
        self._changed_at = 0.0
        self._cancelled_at: dict[str, float] = {}

    def queue(self) -> Queue:
        """This user's jobs that squeue still knows. Never raises: an answer that failed says so."""
        now = time.time()
        if self._queue is not None and now - self._queue.at < self._max_age_s:
            return self._queue
        asked_at, text = self._shared(now)
        if text is None:
            asked_at = now
            try:
                text = ask("squeue", "--me", "--noheader", "--array", "--states=all", f"--Format={queue_format()}")
            except SlurmDown as error:
                self._queue = Queue(problem=str(error), at=now)
                return self._queue
            self._share(asked_at, text)
        self._queue = Queue(read_queue(text), at=asked_at)
        return self._queue

    def accounting(self, job_ids: Collection[str], names_wanted: bool, since: float) -> Accounting:
        """What sacct has of these jobs; with ``names_wanted`` of all jobs since then, to be looked for by name.

        Asked again only for jobs that the last answer was not asked for. Never raises.
        """
        now = time.time()
        wanted = frozenset(job_ids) | ({"*"} if names_wanted else set())
        if self._accounting is not None:
            asked, answer = self._accounting
            if now - answer.at < self._max_age_s and (wanted <= asked or not self._looks_again):
                return answer
        command = ["sacct", "--parsable2", "--noheader", "--duplicates", f"--user={os.getuid()}"]
        command += [f"--format={','.join(ACCOUNTING_FIELDS)}", f"--starttime={_day(since - _CLOCK_MARGIN_S)}"]
        if not names_wanted and len(job_ids) <= _MAX_IDS:
            # An element of an array that ended as a whole is known by the array's id alone.
            command.append(f"--jobs={','.join(sorted({job_id.partition('_')[0] for job_id in job_ids}))}")
        try:
            answer = Accounting(read_accounting(ask(*command)), at=now)
        except SlurmDown as error:
            answer = Accounting(problem=str(error), absent=_NO_ACCOUNTING in str(error).lower(), at=now)
        self._accounting = (wanted, answer)
        return answer

    def partitions(self) -> dict[str, dict[str, str]]:
        """Fields of each partition by name. Raises SlurmDown."""
        if self._partitions is None:
            self._partitions = read_partitions(ask("scontrol", "--oneliner", "show", "partition"))
        return self._partitions

    def nodes(self) -> list[NodeInfo]:
        """Every node, once for each of its partitions. Raises SlurmDown."""
        now = time.time()
        if self._nodes is None or now - self._nodes[0] >= self._max_age_s:
            self._nodes = (now, read_nodes(ask("sinfo", "--noheader", "--Node", f"--format={NODE_FORMAT}")))
        return self._nodes[1]

    def try_again(self, what: str) -> bool:
        """Whether it is time to try something that failed before: once in ``max_age_s``."""
        now = time.time()
        if now - self._tried_at.get(what, -math.inf) < self._max_age_s:
            return False
        self._tried_at[what] = now
        return True

    def cancel(self, job_ids: Collection[str], *, force: bool) -> None:
        """One scancel for all jobs: SIGTERM to their tasks, SIGKILL to those that are still there after KillWait.

        ``force`` kills at once. A job is asked for again only after ``max_age_s``. Raises SlurmDown.
        """
        now = time.time()
        wanted = [job_id for job_id in job_ids if now - self._cancelled_at.get(job_id, -math.inf) >= self._max_age_s]
        if not wanted:
            return
        # A requeue that is under way would bring a cancelled job to life again; not every version takes a list.
        with contextlib.suppress(SlurmDown):
            ask("scontrol", "update", f"JobId={','.join(wanted)}", "Requeue=0")
        try:
            if force:
                ask("scancel", "--signal=KILL", "--full", *wanted)
            ask("scancel", *wanted)
        except SlurmDown as error:
            # One that has ended in the meantime is none to worry about.
            if "invalid job id" not in str(error).lower():
                raise
        self._cancelled_at.update(dict.fromkeys(wanted, now))
        self.forget()

    def forget(self) -> None:
        """Ask anew next time: something was changed."""
        self._queue = self._accounting = None
        self._changed_at = time.time()

    @property
    def _looks_again(self) -> bool:
        return self._cache is not None

    def _shared(self, now: float) -> tuple[float, str | None]:
        if self._cache is None:
            return 0.0, None
        try:
            said = read_json(self._cache) or {}
        except PlaceError:
            return 0.0, None
        at, text = said.get("at"), said.get("squeue")
        # An answer from the future was written by a clock that has been set back since.
        if isinstance(at, float) and isinstance(text, str) and 0 <= now - at < self._max_age_s:
            return (at, text) if at >= self._changed_at else (0.0, None)
        return 0.0, None

    def _share(self, at: float, text: str) -> None:
        if self._cache is None:
            return
        with contextlib.suppress(OSError):  # who may only read the runs shares nothing
            write_json(self._cache, {"at": at, "squeue": text})


def _day(at: float) -> str:
    """A time as sacct takes it, in this machine's zone, which is the zone sacct reads it in."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))


def job_of_run(jobs: Mapping[str, Job], run_id: str, known: Collection[str]) -> str | None:
    """The id of a job whose name carries the run's id and that no submission of the run has claimed yet."""
    found = [job.id for job in jobs.values() if job.name.endswith(f"-{run_id}") and job.id not in known]
    return found[0] if found else None
