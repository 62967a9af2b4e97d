"""Starting attempts: of one run, or of several as the elements of a job array. A kill at any point loses nothing.

A submission creates one job, or one job array, and each start of a job is an attempt: Slurm keeps the id of a job
across a requeue. Everything happens under the locks of the runs (``.lock``, flock), which the kernel releases once this
process and any process that submits for it are dead. What is written, in this order, for all runs one step at a time,
and what the next command does after a kill right then:

1. ``.new-<id>/`` with spec, plan and ``created`` event: its lock is free, so ``sync`` deletes it. For a sweep there are
   several of them before 2. With an idempotency key, ``keys/<hash>.json`` then names the ids: the next submission with
   this key replaces runs that have no directory, and finishes the others as ``sync`` does.
2. The rename to ``<id>/``: a run in state ``created``, which ``sync`` starts. ``resume`` begins after this.
3. Of an array, ``arrays/<id>/``: litter until something names it.
4. ``submissions/<n>/plan.json`` and ``launch.json``: as in 2, since it is a submission only once an event names it. The
   ``launch.json`` of an element names the array and the element, and the array has a link to the submission. The runs
   of a pack are of the same element; ``launch.json`` and the link also name their slots.
5. The ``submitting`` event: the lock is free and there is no ``submitted``, so the job is searched for
   (``local_jobs``, ``slurm_jobs``), an array by its id, with which its name ends.
6. ``lease.json`` names the submission: as in 5.
7. The job is submitted, or the array, by one sbatch: as in 5; it is found and adopted.
8. The ``submitted`` event with the job's id, or the controller's process: nothing is left to do.

The process that calls sbatch inherits the locks of all runs. It is started before 4, as it imports submitit meanwhile,
and calls nothing before 7.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import (
    LaunchError,
    PathError,
    RequestRefused,
    RunBusy,
    RunCancelled,
    SlurmDown,
    SlurmtrainError,
    SubmissionUncertain,
)
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.sections import write_requeue
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.model.run.events.command_events import CancelRequested, JobReplaced, Submitted, Submitting, Unstarted
from slurmtrain.model.run.layout import ALPHABET, ArrayDir, RunDir, SubmissionDir
from slurmtrain.ops.shared.ledger_file import exclusions
from slurmtrain.ops.shared.next_attempts import NewAttempt, PartitionStats, outlook, run_settings
from slurmtrain.ops.shared.shared_jobs import shares_job
from slurmtrain.ops.shared.start_order import (
    earlier_elements,
    jobs_of_namesakes,
    move_dependents,
    unfinished_upstream_jobs,
)
from slurmtrain.ops.shared.trackers import mlflow_server
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.node import Launch
from slurmtrain.runtime.job import lease
from slurmtrain.slurm.outer_variables import counting_variables, placed, telling_variables
from slurmtrain.system.files import (
    describe_os_error,
    durable_together,
    json_bytes,
    link_new,
    make_directory,
    make_new_directory,
    write_new,
)
from slurmtrain.system.journal import Journal, command_journal
from slurmtrain.system.process import Process, uninterrupted

if TYPE_CHECKING:
    from subprocess import Popen

_JOB_DIGITS = 6
# The name under which commands claim the next attempt, to distinguish their claims from agents' claims.
_COMMANDS = "submission"
# A command journals its submission moments after its claim; an older claim without one is from a killed command.
_CLAIM_S = 60.0


def start(
    workspace: Workspace,
    attempts: Sequence[NewAttempt],
    *,
    command: str,
    at_once: int | None = None,
    pack: Pack | None = None,
) -> list[str]:
    """Start an attempt, or several as the elements of one job array of Slurm's; returns notes for the user.

    Of several runs, those whose next attempt another command has claimed, or that somebody has cancelled meanwhile, are
    left out, which a note says.

    Args:
        workspace: where the runs are.
        attempts: what to start; if it is more than one, all request the same from Slurm, and no job of theirs is left.
        command: the command that starts them, for the journals.
        at_once: how many of the array's jobs may run at once; None: all.
        pack: how runs share an element's job; None: each has its own. There are as many as fill all jobs.

    Raises:
        LaunchError: the job could not be submitted; the runs are as they were before.
        SubmissionUncertain: the job may exist, and the runs wait for ``sync`` to find out.
        PathError: the runs root cannot be written; there is no job.
        RequestRefused: Slurm does not accept the job; the runs are as they were before.
        RunBusy: another command has claimed the next attempt.
        RunCancelled: somebody cancelled the run meanwhile, without its lock; there is no job, or it was cancelled too.
    """
    first, on_slurm = attempts[0], attempts[0].executor == "slurm"
    # All of them request the same: what this shell adds to the plan of one, it adds to all.
    variables = counting_variables(first.plan, first.inherited) if on_slurm else {}
    plan = placed(first.plan, variables)
    excluded = exclusions(workspace, plan, first.excluded_nodes, slurm=on_slurm)
    stats = outlook(workspace, first.run.id, plan, first.executor)
    attempts = [
        replace(each, excluded_nodes=excluded.nodes, inherited={**variables, **telling_variables(each.plan)})
        for each in attempts
    ]
    # From here on there is something that a killed command would leave: a first signal waits for the end.
    with uninterrupted():
        array = _new_array(workspace) if len(attempts) > 1 else None
        group = _Group(workspace, command, plan, stats, attempts, array, None if array is None else pack)
        return [*excluded.notes, *stats.notes, *group.start(at_once)]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """An attempt that is ready to be submitted. ``journal``: this command's in the run.

    ``index``: the element of the job array that it will be; None: it has a job of its own.
    """

    attempt: NewAttempt
    submission: SubmissionDir
    journal: Journal
    index: int | None = None


@dataclass(slots=True)
class _Group:
    """The attempts of one submission.

    ``plan``: the plan of the first, as it is asked of Slurm. ``stats``: what is known about interruptions where they
    will run. ``array``: of several attempts; None: a single one has a job of its own. ``pack``: how runs share the jobs
    of the array.
    """

    workspace: Workspace
    command: str
    plan: Plan
    stats: PartitionStats
    attempts: Sequence[NewAttempt]
    array: ArrayDir | None = None
    pack: Pack | None = None
    prepared: list[_Prepared] = field(default_factory=list)

    def start(self, at_once: int | None) -> list[str]:
        """Prepare the attempts, submit them, and journal that; returns notes for the user. Raises as :func:`start`.

        ``at_once``: how many of the array's jobs may run at once.
        """
        first, on_slurm = self.attempts[0], self.attempts[0].executor == "slurm"
        # Slurm assigns the ids of its jobs; a local job's id is known before the job exists.
        local_id = None if on_slurm else "local-" + "".join(secrets.choice(ALPHABET) for _ in range(_JOB_DIGITS))
        # The process that calls sbatch inherits them, so they stay held if this command is killed.
        locks = [each.held.lock for each in self.attempts]
        with ExitStack() as stack:
            try:
                submission, launcher = _new_submission(first.run), None
                if on_slurm:
                    from slurmtrain.slurm.slurm_launch import launcher_in

                    # Before the runs are prepared, since it needs as long until it is ready for its order.
                    folder = (self.array or submission).submitit
                    launcher = stack.enter_context(launcher_in(folder, locks, first.secrets))
                with self.together():
                    left_out = self.prepare(submission)
            except BaseException:
                # No event names the array yet.
                self.remove()
                raise
            try:
                # Durable before there can be a job: 'sync' finds the job of a killed command by what is written here.
                with self.together():
                    self.announce(local_id)
                job_id, process = self.submit(launcher, locks, at_once, local_id)
            except SubmissionUncertain:
                # Everything stays as it is: the job may exist, and 'sync' searches for it by what is written.
                raise
            except (LaunchError, RequestRefused, OSError) as error:
                self.withdraw(local_id, error)
                raise _unwritable(self.place, error) if isinstance(error, OSError) else error from error
            notes, cancelled = self.record(job_id, process)
        if self.array is None and cancelled:
            raise cancelled[0]
        return [*left_out, *notes, *map(str, cancelled)]

    @property
    def place(self) -> Path:
        """The directory of the array, or of the run."""
        return self.attempts[0].run.path if self.array is None else self.array.path

    def together(self) -> AbstractContextManager[None]:
        """Makes what is written for many runs durable at once."""
        return nullcontext() if self.array is None else durable_together(self.array.path)

    def prepare(self, first: SubmissionDir) -> list[str]:
        """Claim the starts, and write what the jobs read; returns notes on runs that are left out.

        Args:
            first: the submission of the first.

        Raises:
            PathError: something cannot be written.
            RunBusy, RunCancelled: all are left out or, of runs that share jobs, one.
        """
        left_out: list[SlurmtrainError] = []
        try:
            if self.array is not None:
                make_directory(self.array.submitit)
                make_directory(self.array.elements)
            for number, attempt in enumerate(self.attempts):
                try:
                    self.prepared.append(self._prepare(attempt, _new_submission(attempt.run) if number else first))
                except (RunBusy, RunCancelled) as error:
                    if self.pack is not None:
                        raise
                    left_out.append(error)
        except BaseException as error:
            for each in self.prepared:
                _release_claim(each.attempt)
            if isinstance(error, OSError):
                raise _unwritable(self.place, error) from error
            raise
        notes = [str(error) for error in left_out]
        if not self.prepared:
            raise type(left_out[0])("; ".join(notes))
        return notes

    def _prepare(self, attempt: NewAttempt, submission: SubmissionDir) -> _Prepared:
        """Prepare an attempt. A submission exists only once an event names it: until then it is harmless litter."""
        index, slot = divmod(len(self.prepared), self.pack.runs if self.pack else 1)
        launch = Launch(
            attempt=attempt.number,
            turn=attempt.turn,
            from_start=attempt.from_start,
            since=attempt.since,
            history=self.stats.history,
            array=None if self.array is None else (self.array.id, index),
            mlflow=mlflow_server(self.workspace, attempt.plan),
            pack=self.pack,
            slot=slot,
            notify=str(self.workspace.config.notify_file or ""),
        )
        try:
            _claim(attempt, submission)
        except RunBusy:
            # The other command has a directory of its own.
            submission.path.rmdir()
            raise
        try:
            # Most runs of a sweep begin as they were created: a link costs no blocks.
            if not (attempt.is_as_created and link_new(submission.plan, attempt.run.plan)):
                write_new(submission.plan, json_bytes(attempt.plan.to_json()))
            write_new(submission.launch, json_bytes(launch.to_dict()))
            # One that shares its job is cancelled later, for the sake of the others.
            if self.pack is None and attempt.held.is_cancelled:
                raise RunCancelled(
                    f"run {attempt.run.id} was cancelled before this command submitted its job; it has no job"
                )
            if self.array is not None:
                # Slurm writes the output of the job there.
                make_directory(submission.submitit)
                self.array.element(index, slot if self.pack else None).symlink_to(submission.path)
        except (OSError, SlurmtrainError):
            _release_claim(attempt)
            raise
        journal = command_journal(attempt.run.journals, self.command)
        return _Prepared(attempt, submission, journal, None if self.array is None else index)

    def announce(self, job_id: str | None) -> None:
        """Journal that the jobs are about to be submitted, and give them the leases of their runs. Raises OSError.

        ``job_id``: the id of a local job.
        """
        for each in self.prepared:
            with each.journal as journal:
                attempt = each.attempt
                spec, nodes = attempt.plan.spec, attempt.plan.spec.resources.allocated
                event = Submitting(
                    submission=each.submission.number,
                    job_id=job_id,
                    attempt=attempt.number,
                    code=attempt.plan.code.hash if attempt.plan.code is not None else None,
                    executor=attempt.executor,
                    host=socket.gethostname(),
                    overrides=attempt.overrides,
                    from_start=attempt.from_start,
                    by=self.command,
                    requeue=write_requeue(spec.requeue),
                    nodes=(nodes.min, nodes.max),
                    follows=None if attempt.predecessor is None else attempt.predecessor.path.name,
                    without=attempt.excluded_nodes or None,
                    partition=self.stats.partition or None,
                    inherited=dict(attempt.inherited) or None,
                    pack=self.pack.to_dict() if self.pack else None,
                )
                # Only overrides change what a run trains with, and all later submissions repeat them.
                is_restated = self.command == "resume" or attempt.overrides
                journal.write(replace(event, **run_settings(attempt.plan)) if is_restated else event)
            # Before the job exists, since an agent ends at once if the lease does not name its submission.
            lease.grant(each.submission)

    def submit(
        self, launcher: Popen[str] | None, locks: Sequence[int], at_once: int | None, local_id: str | None
    ) -> tuple[str, Process | None]:
        """Submit the job or the array; returns its id, and the controller of a local job.

        Args:
            launcher: the process that calls sbatch; None: it is a local job.
            locks: the locks that it holds.
            at_once: how many elements of the array may run at once.
            local_id: the id of a local job.
        """
        attempt, submission = self.prepared[0].attempt, self.prepared[0].submission
        if launcher is None:
            from slurmtrain.local import launch_here

            assert local_id is not None
            return local_id, launch_here(attempt.plan, submission, local_id, attempt.secrets)
        from slurmtrain.slurm.request import Elements, make_request
        from slurmtrain.slurm.slurm_launch import launch

        last = self.prepared[-1].index
        elements = None if last is None else Elements(last + 1, at_once, self.pack)
        # All elements of an array start after the same runs (request_key).
        after = [*unfinished_upstream_jobs(attempt.run), *jobs_of_namesakes(self.workspace, self.plan.spec)]
        succeeds = self.array is None and attempt.predecessor is not None
        if succeeds:
            from slurmtrain.runtime.job.run_reader import read_run

            after += earlier_elements(read_run(attempt.run))
        place, excluded = self.array or submission, attempt.excluded_nodes
        request = make_request(self.plan, place, elements, excluded_nodes=excluded, after=after, singleton=succeeds)
        return launch(launcher, request, locks), None

    def withdraw(self, job_id: str | None, error: Exception) -> None:
        """Journal that nothing was started. If the disk is full, the next command notices that there is no job.

        Args:
            job_id: the id of a local job.
            error: why it was not.
        """
        for each in self.prepared:
            with contextlib.suppress(OSError), each.journal as journal:
                journal.write(Unstarted(submission=each.submission.number, job_id=job_id, reason=str(error)))
            _release_claim(each.attempt)
        self.remove()

    def remove(self) -> None:
        """Remove the directory of an array without jobs."""
        if self.array is not None:
            shutil.rmtree(self.array.path, ignore_errors=True)

    def record(self, job_id: str, process: Process | None) -> tuple[list[str], list[RunCancelled]]:
        """Journal the jobs, and cancel those whose runs were cancelled meanwhile.

        Args:
            job_id: the id of the job, or of the array.
            process: the controller of a local job.

        Returns:
            Notes on jobs that exist but cannot be journaled, which the next command finds; and what was cancelled.
        """
        notes, jobs = [], []
        controller = None if process is None else process.to_dict()
        for each in self.prepared:
            own_id = job_id if each.index is None else f"{job_id}_{each.index}"
            submitted = Submitted(submission=each.submission.number, job_id=own_id, process=controller)
            jobs.append(submitted)
            try:
                # What is lost in a power failure is found again like the job of a command that was killed.
                with Journal(each.journal.path, durable=self.array is None) as journal:
                    journal.write(submitted)
            except OSError as error:
                run, why = each.attempt.run, describe_os_error(error)
                notes.append(
                    f"run {run.id} was submitted as job {submitted.job_id}, but that could not be written to "
                    f"{run.journals} ({why}); the next command will find the job once it can be"
                )
        # Its answers so far are from before these jobs.
        self.workspace.scheduler.forget()
        if process is None:
            # Jobs behind these runs wait for their earlier jobs, if they have had any.
            notes += move_dependents(self.workspace, [each.attempt.run for each in self.prepared])
        return notes, [
            self._cancel(each.attempt, submitted)
            for each, submitted in zip(self.prepared, jobs, strict=True)
            if each.attempt.held.is_cancelled
        ]

    def _cancel(self, attempt: NewAttempt, submitted: Submitted) -> RunCancelled:
        """End a job that was submitted after its run was cancelled; returns the error that says so."""
        run = attempt.run
        message = f"run {run.id} was cancelled while its job was being submitted"
        with self.workspace.journal(run, "cancel") as journal:
            # Again: the first request may be older than the submission, and then applies to what was before it.
            journal.write(CancelRequested())
            lease.close(run, None, "cancelled")
            if shares_job(self.workspace, run.submission(submitted.submission)):
                why = "it was cancelled; its job continues with other runs"
                journal.write(JobReplaced(job_id=submitted.job_id or "", restart=0, why=why))
                return RunCancelled(message)
        if submitted.process:
            Process.from_dict(submitted.process).send(signal.SIGTERM)
        elif submitted.job_id:
            # If Slurm does not answer, 'sync' does it, because of the event.
            with contextlib.suppress(SlurmDown):
                self.workspace.scheduler.cancel([submitted.job_id], force=False)
        return RunCancelled(f"{message}; job {submitted.job_id} was too")


def _new_array(workspace: Workspace) -> ArrayDir:
    """A directory for a new job array, whose id no run has. Raises PathError."""
    make_directory(workspace.root.arrays)
    while True:
        # The names of jobs end with the id of a run or of an array: no two may be equal.
        array = workspace.root.array(workspace.new_id())
        try:
            make_new_directory(array.path)
        except FileExistsError:
            continue
        except OSError as error:
            raise _unwritable(array.path, error) from error
        return array


def _new_submission(run: RunDir) -> SubmissionDir:
    """A directory that no other submission has, even if locks fail and another command creates one right now."""
    make_directory(run.submissions)
    numbers = [int(name) for name in os.listdir(run.submissions) if name.isdigit()]
    # mkdir() is atomic even where locks do not work: the second command takes the next number.
    for number in itertools.count(max(numbers, default=0) + 1):
        submission = run.submission(number)
        try:
            make_new_directory(submission.path)
        except FileExistsError:
            continue
        except OSError as error:
            raise PathError(f"cannot create the directory {submission.path}: {describe_os_error(error)}") from error
        break
    return submission


def _claim(attempt: NewAttempt, submission: SubmissionDir) -> None:
    """Claim the start after this attempt's predecessor. Raises RunBusy if another command has claimed it.

    The run's lock keeps other commands out; the claim is for file systems without locks.
    """
    after = attempt.predecessor
    if after is None:
        return
    claim = lease.read_claim(after, by=_COMMANDS)
    if claim is not None:
        # A claim is void if its command was killed before it journaled a submission. A process on another machine
        # cannot be checked: the claim's age decides then, whichever clock is ahead.
        dead = False
        with contextlib.suppress(KeyError, TypeError, ValueError):
            dead = Process.from_dict(claim["process"]).alive() is False
        if dead or abs(time.time() - float(claim.get("t", 0.0))) >= _CLAIM_S:
            from slurmtrain.runtime.job.run_reader import read_run

            if all(attempt.submission != claim.get("submission") for attempt in read_run(submission.run).attempts):
                lease.release_claim(after, by=_COMMANDS)
    if not lease.claim_restart(after, _COMMANDS, {"submission": submission.number}):
        raise RunBusy(f"another command is starting run {submission.run.id} right now; try again in a moment")


def _release_claim(attempt: NewAttempt) -> None:
    """Let other commands claim an attempt that was not started."""
    if attempt.predecessor is not None:
        with contextlib.suppress(OSError):
            lease.release_claim(attempt.predecessor, by=_COMMANDS)


def _unwritable(place: Path, error: OSError) -> PathError:
    """The error for a directory that cannot be written to. ``place``: the directory; ``error``: why."""
    return PathError(f"cannot write to {place}: {describe_os_error(error)}")
