"""What Slurm knows about this user's jobs: at most one squeue and one sacct call for any command."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from slurmtrain.errors import PathError, SlurmDown
from slurmtrain.slurm.jobs import join_elements
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
from slurmtrain.slurm.slurm_commands import run_command
from slurmtrain.system.files import read_json, write_json

# Beyond this many ids, all of the user's jobs since the oldest one are queried: the list would be too long.
_MAX_IDS = 1000
# sacct compares --starttime with slurmctld's clock, which may be ahead of ours or misconfigured to another time zone.
_CLOCK_MARGIN_S = 3600.0
# Seconds that sacct has in any case.
_LEAST_S = 1.0
# What sacct prints if AccountingStorageType is none.
_NO_ACCOUNTING = "accounting storage is disabled"


@dataclass(frozen=True, slots=True)
class Queue:
    """squeue's answer: jobs by id, or why there is none. ``at``: when it was queried, in seconds since 1970."""

    jobs: Mapping[str, Job] = field(default_factory=dict)
    problem: str = ""
    at: float = 0.0

    @property
    def answered(self) -> bool:
        """Whether squeue has answered."""
        return not self.problem

    def job(self, job_id: str) -> Job | None:
        """What squeue says about a job."""
        return self.jobs.get(job_id)

    def array_of(self, job_id: str) -> Job | None:
        """The row, with the array's id, of elements that ended before they began, if this job is one of an array.

        It does not name them: other elements may have run, and have left the queue (seen on 22.05 and 24.11).
        """
        array, underscore, _ = job_id.partition("_")
        return self.jobs.get(array) if underscore else None


@dataclass(frozen=True)
class Accounting:
    """sacct's answer: all starts of each job, oldest first, or why there is none.

    ``absent``: the site has no accounting, so there will never be an answer. ``at``: when it was queried, in seconds
    since 1970.
    """

    starts: Mapping[str, list[Job]] = field(default_factory=dict)
    problem: str = ""
    absent: bool = False
    at: float = 0.0

    @property
    def answered(self) -> bool:
        """Whether this site's accounting has nothing more to say."""
        return not self.problem or self.absent

    def starts_of(self, job_id: str) -> list[Job]:
        """What sacct says about a job; of an element without rows of its own, the row that it shares with others."""
        array, _, index = job_id.partition("_")
        own = self.starts.get(job_id)
        if own or not index.isdecimal():
            return own or []
        return [start for start in self.starts.get(array, ()) if start.has_element(int(index))]

    def knows_array_of(self, job_id: str) -> bool:
        """Whether this job is an element of an array, and sacct knows any element of that array."""
        array, underscore, _ = job_id.partition("_")
        return bool(underscore) and array in self._arrays

    @cached_property
    def _arrays(self) -> frozenset[str]:
        return frozenset(job_id.partition("_")[0] for job_id in self.starts)


class Scheduler:
    """Answers of squeue and sacct, each queried at most once per ``max_age_s``.

    ``cache``: a file where polling commands share squeue's answer; None for commands that query once. ``patience_s``:
    how long squeue and sacct may take together, for commands that only look; None: as long as needed.
    """

    def __init__(self, max_age_s: float, cache: Path | None, patience_s: float | None = None) -> None:
        self._max_age_s = max_age_s
        self._cache = cache
        self._patience_s = patience_s
        self._asked_for_s = 0.0
        self._queue: Queue | None = None
        self._accounting: tuple[frozenset[str], Accounting] | None = None
        self._partitions: dict[str, dict[str, str]] | None = None
        self._nodes: tuple[float, list[NodeInfo]] | None = None
        self._config: dict[str, str] | None = None
        self._tried_at: dict[str, float] = {}
        self._changed_at = 0.0
        self._cancelled_at: dict[str, float] = {}
        self.answered_at: float | None = None
        """When squeue was asked for its last answer, in seconds since 1970; None: it has not answered."""

    def queue(self) -> Queue:
        """This user's jobs that squeue still knows. Never raises: a failed query is reported in the answer."""
        now = time.time()
        if self._queue is not None and now - self._queue.at < self._max_age_s:
            return self._queue
        asked_at, text = self._read_cache(now)
        if text is None:
            asked_at = now
            self._asked_for_s = 0.0
            try:
                form = f"--Format={queue_format()}"
                text = self._ask("squeue", "--me", "--noheader", "--array", "--states=all", form)
            except SlurmDown as error:
                self._queue = Queue(problem=str(error), at=now)
                return self._queue
            self._write_cache(asked_at, text)
        self._queue = Queue(read_queue(text), at=asked_at)
        self.answered_at = asked_at
        return self._queue

    def accounting(self, job_ids: Collection[str], by_name: bool, since: float) -> Accounting:
        """What sacct knows about jobs. Never raises: a failed query is reported in the answer.

        Queried again only for jobs that the last answer did not cover.

        Args:
            job_ids: the jobs.
            by_name: whether to query all of the user's jobs, to find some by name.
            since: a time, in seconds since 1970, before the oldest of these jobs was submitted.
        """
        now = time.time()
        subjects = frozenset(job_ids) | ({"*"} if by_name else set())
        if self._accounting is not None:
            answered, answer = self._accounting
            if now - answer.at < self._max_age_s and (subjects <= answered or self._cache is None):
                return answer
        # In this machine's time zone, which sacct assumes too (sacct(1), --starttime).
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - _CLOCK_MARGIN_S))
        command = ["sacct", "--parsable2", "--noheader", "--duplicates", f"--user={os.getuid()}"]
        command += [f"--format={','.join(ACCOUNTING_FIELDS)}", f"--starttime={start}"]
        if not by_name and len(job_ids) <= _MAX_IDS:
            # Elements of an array that have not begun share a row, with the array's id.
            command.append(f"--jobs={','.join(sorted({job_id.partition('_')[0] for job_id in job_ids}))}")
        try:
            answer = Accounting(read_accounting(self._ask(*command)), at=now)
        except SlurmDown as error:
            answer = Accounting(problem=str(error), absent=_NO_ACCOUNTING in str(error).lower(), at=now)
        self._accounting = (subjects, answer)
        return answer

    def partitions(self) -> dict[str, dict[str, str]]:
        """Fields of each partition by name. Raises SlurmDown."""
        if self._partitions is None:
            self._partitions = read_partitions(run_command("scontrol", "--oneliner", "show", "partition"))
        return self._partitions

    def config(self) -> dict[str, str]:
        """slurm.conf as scontrol prints it, by name. Raises SlurmDown."""
        if self._config is None:
            from slurmtrain.slurm.site import read_config

            self._config = read_config(run_command("scontrol", "show", "config"))
        return self._config

    def max_array_size(self) -> int:
        """How many elements a job array may have; 0: there are no job arrays here."""
        from slurmtrain.slurm.site import MAX_ARRAY_SIZE, max_array_size

        try:
            return max_array_size(self.config())
        except SlurmDown:
            return MAX_ARRAY_SIZE  # sbatch says so if it is less

    def component_problem(self) -> str:
        """Why this site runs no step over all components of a heterogeneous job; empty if it does, or does not say."""
        from slurmtrain.slurm.site import component_problem

        try:
            return component_problem(self.config())
        except SlurmDown:
            return ""

    def nodes(self) -> list[NodeInfo]:
        """Every node, once for each of its partitions. Raises SlurmDown."""
        now = time.time()
        if self._nodes is None or now - self._nodes[0] >= self._max_age_s:
            self._nodes = (now, read_nodes(run_command("sinfo", "--noheader", "--Node", f"--format={NODE_FORMAT}")))
        return self._nodes[1]

    def should_retry(self, key: str) -> bool:
        """Whether to retry what failed before: once per ``max_age_s`` for each ``key``, counted from now."""
        now = time.time()
        if now - self._tried_at.get(key, -math.inf) < self._max_age_s:
            return False
        self._tried_at[key] = now
        return True

    def cancel(self, job_ids: Collection[str], *, force: bool) -> None:
        """Cancel all jobs with one scancel: SIGTERM to their tasks, and SIGKILL after KillWait (slurm.conf(5)).

        ``force`` kills at once. The same job is cancelled again only after ``max_age_s``. Raises SlurmDown.
        """
        now = time.time()
        due = [job_id for job_id in job_ids if now - self._cancelled_at.get(job_id, -math.inf) >= self._max_age_s]
        if not due:
            return
        jobs = join_elements(due)
        # A requeue in progress would start a cancelled job again. Not every version accepts a list of ids here.
        with contextlib.suppress(SlurmDown):
            run_command("scontrol", "update", f"JobId={','.join(jobs)}", "Requeue=0")
        try:
            if force:
                # --full: the batch script and its children too (scancel(1)).
                run_command("scancel", "--signal=KILL", "--full", *jobs)
            run_command("scancel", *jobs)
        except SlurmDown as error:
            # A job that has ended in the meantime and is no longer in slurmctld's memory.
            if "invalid job id" not in str(error).lower():
                raise
        self._cancelled_at.update(dict.fromkeys(due, now))
        self.forget()

    def cancel_named(self, names: Collection[str]) -> None:
        """Cancel all of this user's jobs with these ``names`` that have not ended. Raises SlurmDown."""
        run_command("scancel", "--me", f"--name={','.join(names)}")
        self.forget()

    def forget(self) -> None:
        """Query anew next time, since something was changed. Cached answers from before now are ignored."""
        self._queue = self._accounting = None
        self._changed_at = time.time()

    def _ask(self, *command: str) -> str:
        """The answer of squeue or sacct. Raises SlurmDown."""
        if self._patience_s is None:
            return run_command(*command)
        begin = time.monotonic()
        try:
            # Of a slow squeue, something is left for sacct.
            return run_command(*command, timeout_s=max(_LEAST_S, self._patience_s - self._asked_for_s))
        finally:
            self._asked_for_s += time.monotonic() - begin

    def _read_cache(self, now: float) -> tuple[float, str | None]:
        """When another command last queried squeue, and the answer; None if there is no recent one."""
        if self._cache is None:
            return 0.0, None
        try:
            entry = read_json(self._cache) or {}
        except PathError:
            return 0.0, None
        at, text = entry.get("at"), entry.get("squeue")
        # An answer from the future was written before the clock was set back.
        if isinstance(at, float) and isinstance(text, str) and 0 <= now - at < self._max_age_s:
            return (at, text) if at >= self._changed_at else (0.0, None)
        return 0.0, None

    def _write_cache(self, at: float, text: str) -> None:
        if self._cache is None:
            return
        with contextlib.suppress(OSError):  # this user may only read these runs
            write_json(self._cache, {"at": at, "squeue": text})
