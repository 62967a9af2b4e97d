"""What Slurm knows about this user's jobs, with at most one squeue and one sacct call for any command, and what is new.

What its answers add to what is known of a run is pure, so that tests can try every order of answers.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import PathError, SlurmDown
from slurmtrain.model.run.job_state import ABSENT, GONE, base, is_final
from slurmtrain.slurm.parse import (
    ACCOUNTING_FIELDS,
    NODE_FORMAT,
    Job,
    NodeInfo,
    join_elements,
    queue_format,
    read_accounting,
    read_nodes,
    read_partitions,
    read_queue,
)
from slurmtrain.slurm.slurm_commands import run_command
from slurmtrain.system.files import read_json, write_json

if TYPE_CHECKING:
    from slurmtrain.model.run.events.command_events import JobObserved
    from slurmtrain.model.run.run import Attempt, Run

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
        self.asked_for_s = 0.0
        """How many seconds squeue and sacct took the last time."""
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
        self.problem = ""
        """Why squeue has not answered the last time; empty: it has, or was not asked."""

    def queue(self) -> Queue:
        """This user's jobs that squeue still knows. Never raises: a failed query is reported in the answer."""
        now = time.time()
        if self._queue is not None and now - self._queue.at < self._max_age_s:
            return self._queue
        asked_at, text = self._read_cache(now)
        if text is None:
            asked_at = now
            self.asked_for_s = 0.0
            try:
                form = f"--Format={queue_format()}"
                text = self._ask("squeue", "--me", "--noheader", "--array", "--states=all", form)
            except SlurmDown as error:
                self.problem = str(error)
                self._queue = Queue(problem=self.problem, at=now)
                return self._queue
            # This user may only read these runs.
            with contextlib.suppress(OSError):
                if self._cache is not None:
                    write_json(self._cache, {"at": asked_at, "squeue": text})
        self._queue = Queue(read_queue(text), at=asked_at)
        self.answered_at, self.problem = asked_at, ""
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
            # A command that looks once asks once, also if it comes to more jobs later.
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
            return run_command(*command, timeout_s=max(_LEAST_S, self._patience_s - self.asked_for_s))
        finally:
            self.asked_for_s += time.monotonic() - begin

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


# --- what answers add to what is known of a run ----------------------------------------------------------------------

# How long a job may be missing from both squeue and sacct before it is given up: sacct lags behind, and slurmdbd and
# slurmctld may be restarting.
GIVEN_UP_S = 300.0


def may_change(run: Run) -> bool:
    """Whether an answer from Slurm about any start of the run's newest job could still change anything."""
    newest = run.newest
    return newest is not None and any(
        not attempt.settled for attempt in run.attempts if attempt.job_id == newest.job_id
    )


def needs_accounting(run: Run, queue: Queue) -> bool:
    """Whether squeue's answer leaves a question open that sacct may answer."""
    newest = run.newest
    if newest is None or not newest.job_id:
        return newest is not None
    if not queue.answered:
        return False
    job = queue.job(newest.job_id)
    # squeue reports FAILED also if sacct knows more, for example that a step ran out of memory.
    if job is None or base(job.state) == "FAILED":
        return True
    earlier = [a for a in run.attempts if a.job_id == newest.job_id and a.restart < (job.restart or 0)]
    return any(not attempt.confirmed for attempt in earlier)


def new_observations(run: Run, queue: Queue, accounting: Accounting | None, now: float) -> list[JobObserved]:
    """What these answers add, as events; none for facts that are known already.

    Args:
        run: the run as known so far; only its newest job is considered.
        queue: squeue's answer.
        accounting: sacct's answer; None if it was not queried.
        now: seconds since 1970, to determine how long the job has been unknown to Slurm.
    """
    newest = run.newest
    if newest is None or not newest.job_id:
        return []
    attempts = {attempt.restart: attempt for attempt in run.attempts if attempt.job_id == newest.job_id}
    starts = accounting.starts_of(newest.job_id) if accounting is not None else []
    # A row for several elements has not begun.
    never_began = not newest.hosts and not newest.restart and all(start.elements for start in starts)
    job = queue.job(newest.job_id) if queue.answered else None
    if job is None and queue.answered and never_began and accounting is not None and accounting.answered:
        # The row of the elements that ended before they began.
        job = queue.array_of(newest.job_id)
    observations = _observe_ended(newest.job_id, attempts, starts, job)
    reported = {observation.restart for observation in observations}
    if job is not None:
        observations += _observe_queued(attempts, job, newest, reported)
    elif newest.restart in reported or newest.settled or not newest.handed_over:
        pass
    elif queue.answered and accounting is not None and accounting.answered:
        # Both have answered, and neither knows it or its end. Answers from before its submission say nothing.
        if min(queue.at, accounting.at) <= (newest.submitted_at or 0.0):
            return observations
        # An element of an array that was cancelled before it began: nothing is left of it if other elements have not
        # begun either, as Slurm takes it out of their common row, in accounting some time later (seen on 22.05, 24.11).
        is_cancelled = never_began and accounting.knows_array_of(newest.job_id)
        # Imported here: creating the event classes takes longer than a query that finds nothing new.
        from slurmtrain.model.run.events.command_events import JobObserved

        absent = JobObserved(job_id=newest.job_id, restart=newest.restart, source="squeue, sacct", state=ABSENT)
        if newest.absent_since is None:
            observations.append(absent)
        elif now - newest.absent_since >= GIVEN_UP_S:
            reason = None if is_cancelled else "Slurm no longer knows its job, and the job did not record its end"
            observations.append(replace(absent, state="CANCELLED" if is_cancelled else GONE, reason=reason))
    return observations


def _observe_ended(
    job_id: str, attempts: Mapping[int, Attempt], starts: Sequence[Job], job: Job | None
) -> list[JobObserved]:
    """What sacct says about finished starts: it has a row for each start, the first one first."""
    # A job that has lost a node and continues without it has a row for each of its sizes (sacct(1), RESIZING).
    starts = [start for start in starts if base(start.state) != "RESIZING"]
    live = job.restart if job is not None and not is_final(job.state) else None
    return [
        _observed(start, job_id, restart, "sacct")
        for restart, start in enumerate(starts)
        if is_final(start.state) and restart != live and _adds_anything(start.state, attempts.get(restart))
    ]


def _adds_anything(state: str, attempt: Attempt | None) -> bool:
    """Whether a final state of a start adds anything to what is known about it."""
    if attempt is None or not attempt.confirmed:
        return True
    # The requeue itself follows from the job's next start, which Slurm reports too.
    return not attempt.settled and base(state) != "REQUEUED"


def _observe_queued(
    attempts: Mapping[int, Attempt], job: Job, newest: Attempt, reported: set[int]
) -> list[JobObserved]:
    """What squeue says about the job's newest start, unless sacct has ``reported`` its end."""
    restart = newest.restart if job.restart is None else job.restart
    attempt = attempts.get(restart)
    if is_final(job.state):
        if restart in reported or not _adds_anything(job.state, attempt):
            return []
        return [_observed(job, newest.job_id, restart, "squeue")]
    # While a job is pending or running, only its existence is journaled, once: the rest is queried anew each time.
    reappeared = attempt is not None and attempt.absent_since is not None and not attempt.settled
    if attempt is None or reappeared or not attempt.handed_over:
        return [_observed(job, newest.job_id, restart, "squeue")]
    return []


def _observed(job: Job, job_id: str, restart: int, source: str) -> JobObserved:
    from slurmtrain.model.run.events.command_events import JobObserved

    ended = is_final(job.state)
    return JobObserved(
        job_id=job_id,
        restart=restart,
        source=source,
        state=job.state,
        nodes=job.nodes,
        started_at=job.starts_at if ended else None,
        ended_at=job.ends_at if ended else None,
        time_limit_s=job.time_limit_s,
        exit_code=job.exit_code,
        signal=job.signal,
    )
