"""What Slurm knows of this user's jobs: at most one squeue and one sacct call for any command."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurmtrain.errors import PathError, SlurmDown
from slurmtrain.slurm.command import run_command
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

# Beyond this many ids, all of the user's jobs since then are asked for: the list would get too long for a command line.
_MAX_IDS = 1000
# sacct compares --starttime with slurmctld's clock, which may be ahead of ours or in another zone by mistake.
_CLOCK_MARGIN_S = 3600.0
# What sacct prints where AccountingStorageType is none.
_NO_ACCOUNTING = "accounting storage is disabled"


@dataclass(frozen=True, slots=True)
class Queue:
    """squeue's answer: jobs by id, or why there is none. ``at``: when it was asked, in seconds since 1970."""

    jobs: Mapping[str, Job] = field(default_factory=dict)
    problem: str = ""
    at: float = 0.0

    @property
    def answered(self) -> bool:
        """Whether squeue has answered."""
        return not self.problem

    def job(self, job_id: str) -> Job | None:
        """What squeue says of a job. Elements of an array that ended as a whole have one row, with the array's id."""
        return self.jobs.get(job_id) or self.jobs.get(job_id.partition("_")[0])


@dataclass(frozen=True, slots=True)
class Accounting:
    """sacct's answer: all starts of each job, oldest first, or why there is none.

    ``absent``: the site has no accounting, so there never will be an answer. ``at``: when it was asked, in seconds
    since 1970.
    """

    starts: Mapping[str, list[Job]] = field(default_factory=dict)
    problem: str = ""
    absent: bool = False
    at: float = 0.0

    @property
    def answered(self) -> bool:
        """Whether all is known that this site's accounting can ever say."""
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
        asked_at, text = self._read_cache(now)
        if text is None:
            asked_at = now
            try:
                text = run_command(
                    "squeue", "--me", "--noheader", "--array", "--states=all", f"--Format={queue_format()}"
                )
            except SlurmDown as error:
                self._queue = Queue(problem=str(error), at=now)
                return self._queue
            self._write_cache(asked_at, text)
        self._queue = Queue(read_queue(text), at=asked_at)
        return self._queue

    def accounting(self, job_ids: Collection[str], by_name: bool, since: float) -> Accounting:
        """What sacct has of jobs. Never raises: an answer that failed says so.

        Asked again only for jobs that the last answer was not about.

        Args:
            job_ids: the jobs.
            by_name: all jobs of the user's are wanted, to look for some by their names.
            since: seconds since 1970, before the oldest of these jobs was submitted.
        """
        now = time.time()
        subjects = frozenset(job_ids) | ({"*"} if by_name else set())
        if self._accounting is not None:
            answered, answer = self._accounting
            if now - answer.at < self._max_age_s and (subjects <= answered or not self._looks_again):
                return answer
        command = ["sacct", "--parsable2", "--noheader", "--duplicates", f"--user={os.getuid()}"]
        command += [f"--format={','.join(ACCOUNTING_FIELDS)}", f"--starttime={_local_time(since - _CLOCK_MARGIN_S)}"]
        if not by_name and len(job_ids) <= _MAX_IDS:
            # Elements of an array that ended as a whole have one row, with the array's id.
            command.append(f"--jobs={','.join(sorted({job_id.partition('_')[0] for job_id in job_ids}))}")
        try:
            answer = Accounting(read_accounting(run_command(*command)), at=now)
        except SlurmDown as error:
            answer = Accounting(problem=str(error), absent=_NO_ACCOUNTING in str(error).lower(), at=now)
        self._accounting = (subjects, answer)
        return answer

    def partitions(self) -> dict[str, dict[str, str]]:
        """Fields of each partition by name. Raises SlurmDown."""
        if self._partitions is None:
            self._partitions = read_partitions(run_command("scontrol", "--oneliner", "show", "partition"))
        return self._partitions

    def nodes(self) -> list[NodeInfo]:
        """Every node, once for each of its partitions. Raises SlurmDown."""
        now = time.time()
        if self._nodes is None or now - self._nodes[0] >= self._max_age_s:
            self._nodes = (now, read_nodes(run_command("sinfo", "--noheader", "--Node", f"--format={NODE_FORMAT}")))
        return self._nodes[1]

    def should_retry(self, key: str) -> bool:
        """Whether it is time to retry what failed before: once in ``max_age_s`` for each ``key``, counted from now."""
        now = time.time()
        if now - self._tried_at.get(key, -math.inf) < self._max_age_s:
            return False
        self._tried_at[key] = now
        return True

    def cancel(self, job_ids: Collection[str], *, force: bool) -> None:
        """One scancel for all jobs: SIGTERM to their tasks, and SIGKILL KillWait (slurm.conf(5)) later.

        ``force`` kills at once. A job is asked for again only after ``max_age_s``. Raises SlurmDown.
        """
        now = time.time()
        due = [job_id for job_id in job_ids if now - self._cancelled_at.get(job_id, -math.inf) >= self._max_age_s]
        if not due:
            return
        # A requeue that is under way would start a cancelled job again. Not every version takes a list of ids here.
        with contextlib.suppress(SlurmDown):
            run_command("scontrol", "update", f"JobId={','.join(due)}", "Requeue=0")
        try:
            if force:
                # --full: the batch script and its children too (scancel(1)).
                run_command("scancel", "--signal=KILL", "--full", *due)
            run_command("scancel", *due)
        except SlurmDown as error:
            # A job that has ended meanwhile, and is no longer in slurmctld's memory.
            if "invalid job id" not in str(error).lower():
                raise
        self._cancelled_at.update(dict.fromkeys(due, now))
        self.forget()

    def forget(self) -> None:
        """Ask anew next time: something was changed. Cached answers from before now count no more."""
        self._queue = self._accounting = None
        self._changed_at = time.time()

    @property
    def _looks_again(self) -> bool:
        return self._cache is not None

    def _read_cache(self, now: float) -> tuple[float, str | None]:
        """When another command has asked squeue, and its answer; None where there is none that is new enough."""
        if self._cache is None:
            return 0.0, None
        try:
            entry = read_json(self._cache) or {}
        except PathError:
            return 0.0, None
        at, text = entry.get("at"), entry.get("squeue")
        # An answer from the future was written by a clock that has been set back since.
        if isinstance(at, float) and isinstance(text, str) and 0 <= now - at < self._max_age_s:
            return (at, text) if at >= self._changed_at else (0.0, None)
        return 0.0, None

    def _write_cache(self, at: float, text: str) -> None:
        if self._cache is None:
            return
        with contextlib.suppress(OSError):  # somebody who may only read these runs
            write_json(self._cache, {"at": at, "squeue": text})


def _local_time(at: float) -> str:
    """A time as sacct takes it: in this machine's zone, in which sacct reads it too (sacct(1), --starttime)."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))


def find_unclaimed_job(jobs: Mapping[str, Job], run_id: str, claimed: Collection[str]) -> str | None:
    """The id of a job whose name ends with the run's id, and that is not a submission's already.

    Args:
        jobs: the jobs to look through, by id.
        run_id: the run.
        claimed: ids of the jobs of the run's submissions.
    """
    unclaimed = (job.id for job in jobs.values() if job.name.endswith(f"-{run_id}") and job.id not in claimed)
    return next(unclaimed, None)
