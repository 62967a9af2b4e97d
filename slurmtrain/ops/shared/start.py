"""Starting an attempt of a run. If it is killed at any point, nothing is started twice or lost.

A submission creates one job, and each start of the job is an attempt: Slurm keeps the id of a job across a requeue.
Everything happens under the run's lock (``.lock``, flock), which the kernel releases once this process and any process
that submits for it are dead. What is written, in this order, and what the next command does after a kill right then:

1. ``.new-<id>/`` with spec, plan and ``created`` event: its lock is free, so ``sync`` deletes it. For a sweep there are
   several of them before 2. With an idempotency key, ``keys/<hash>.json`` then names the ids: the next submission with
   this key replaces runs that have no directory, and finishes the others as ``sync`` does.
2. The rename to ``<id>/``: a run in state ``created``, which ``sync`` starts. ``resume`` begins after this.
3. ``submissions/<n>/plan.json`` and ``launch.json``: as in 2, since it is a submission only once an event names it.
4. The ``submitting`` event: the lock is free and there is no ``submitted``, so the job is searched for
   (``local_jobs``, ``slurm_jobs``).
5. ``lease.json`` names the submission: as in 4.
6. The job is submitted: as in 4; it is found and adopted.
7. The ``submitted`` event with the job's id, or the controller's process: nothing is left to do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slurmtrain.errors import (
    LaunchError,
    PathError,
    RequestRefused,
    RunBusy,
    RunCancelled,
    SlurmDown,
    SubmissionUncertain,
    UserError,
)
from slurmtrain.model.run.events.command import CancelRequested, JobReplaced, Submitted, Submitting, Unstarted
from slurmtrain.model.run.ids import ALPHABET
from slurmtrain.model.run.layout import AttemptDir, RunDir, SubmissionDir
from slurmtrain.model.run.root import unusable_in_root
from slurmtrain.model.spec.plan import REDACTED, Plan
from slurmtrain.model.spec.spec import write_requeue
from slurmtrain.model.spec.sweep import Pack
from slurmtrain.ops.shared.chain.alone import jobs_of_namesakes
from slurmtrain.ops.shared.chain.jobs import earlier_elements, move_dependents, unfinished_upstream_jobs
from slurmtrain.ops.shared.current_plan import run_settings
from slurmtrain.ops.shared.interrupt import uninterrupted
from slurmtrain.ops.shared.interruption_stats import PartitionStats, outlook
from slurmtrain.ops.shared.mirroring.targets import mlflow_server
from slurmtrain.ops.shared.node_ledger import exclusions
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.launch import Launch, Turn
from slurmtrain.runtime.environment.surroundings import counting, placed, telling
from slurmtrain.runtime.job import lease
from slurmtrain.system.files import (
    describe_os_error,
    json_bytes,
    link_new,
    make_directory,
    make_new_directory,
    write_new,
)
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import Process

_JOB_DIGITS = 6
# The name under which commands claim the next attempt, to distinguish their claims from agents' claims.
_COMMANDS = "submission"
# A command journals its submission moments after its claim; an older claim without one is from a killed command.
_CLAIM_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAttempt:
    """An attempt to start.

    ``number``: counts from 1. ``secrets``: environment variables that reach the job but are never written.
    ``is_as_created``: the plan equals the run's ``plan.json``. ``turn``: the turn that a run of a local sweep waits
    for. ``since``: the script's own checkpoints count only if they are newer than this, in seconds since 1970.
    ``excluded_nodes``: nodes that it must not get. ``predecessor``: the attempt before it. ``cancels``: the
    :func:`cancels` known to the command when it took the run's lock. ``inherited``: the variables of the submitting
    shell that count beside the plan; before it is submitted, the variables of the attempt before it, if it follows
    without a person.
    """

    plan: Plan
    executor: str
    number: int
    secrets: Mapping[str, str]
    is_as_created: bool = False
    overrides: Sequence[str] = ()
    turn: Turn | None = None
    from_start: bool = False
    since: float | None = None
    excluded_nodes: Sequence[str] = ()
    predecessor: AttemptDir | None = None
    cancels: frozenset[str] = frozenset()
    inherited: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """An element of a job array. ``array``: the array's id, which is no job's id. ``index``: the element's.

    ``pack``: how several runs share the element's job; None: it has one run. ``slot``: the run's number, from 0.
    """

    array: str
    index: int
    pack: Pack | None = None
    slot: int = 0


def check_executor(workspace: Workspace, executor: str, plans: Sequence[Plan], pack: Pack | None = None) -> None:
    """Check, before anything is created, that the plans can be started.

    Args:
        workspace: provides the scheduler to ask.
        executor: ``slurm`` or ``local``.
        plans: what will be started.
        pack: how they share jobs of Slurm; None: each has its own.

    Raises:
        NotAvailable: the executor, or something that a plan needs, is missing.
        RequestRefused: no partition could ever run one of the plans.
        LaunchError: Slurm does not answer.
        PathError: the runs root has a name that a job's files cannot have.
    """
    problem = unusable_in_root(workspace.root.path, executor)
    if problem is not None:
        raise PathError(problem)
    if executor == "slurm":
        from slurmtrain.slurm.launch import check

        check(plans, workspace.scheduler, pack)
        return
    from slurmtrain.local.launch import check as check_local

    for plan in plans:
        check_local(plan)


def start(workspace: Workspace, run: RunDir, lock: int, attempt: NewAttempt, *, command: str) -> list[str]:
    """Start an attempt of a run; returns notes for the user.

    Args:
        workspace: where the run is.
        run: its directory.
        lock: the file descriptor of the run's lock, which the caller holds.
        attempt: what to start.
        command: the command that starts it, for the journal.

    Raises:
        LaunchError: the job could not be submitted; the run is as it was before.
        SubmissionUncertain: the job may exist, and the run waits for ``sync`` to find out.
        PathError: the run directory cannot be written; there is no job.
        RequestRefused: Slurm does not accept the job; the run is as it was before.
        RunBusy: another command has claimed the next attempt.
        RunCancelled: somebody cancelled the run meanwhile, without its lock; there is no job, or it was cancelled too.
    """
    placed = placed_attempt(attempt)
    excluded = exclusions(workspace, placed.plan, attempt.excluded_nodes, slurm=attempt.executor == "slurm")
    stats = outlook(workspace, run.id, placed.plan, attempt.executor)
    # Slurm assigns the ids of its jobs; a local job's id is known before the job exists.
    job_id = _new_job_id() if attempt.executor == "local" else None
    placed = replace(placed, excluded_nodes=excluded.nodes)
    with uninterrupted(), workspace.journal(run, command) as journal:
        submission = prepare(run, attempt, stats, mlflow_server(workspace, attempt.plan))
        _check_not_cancelled(run, attempt)
        try:
            journal.write(submitting_event(placed, submission, job_id, stats.partition, command))
            # Before the job exists, since an agent ends at once if the lease does not name its submission.
            lease.grant(submission)
            others = jobs_of_namesakes(workspace, placed.plan.spec) if attempt.executor == "slurm" else []
            submitted = _submit(placed, submission, job_id, lock, attempt.secrets, others)
        except SubmissionUncertain:
            raise
        except (LaunchError, RequestRefused, OSError) as error:
            withdraw(journal, attempt, submission, job_id, error)
            raise unwritable(run, error) if isinstance(error, OSError) else error from error
        notes = record_job(journal, run, submitted)
    # Its answers so far are from before this job.
    workspace.scheduler.forget()
    if attempt.executor == "slurm":
        notes += move_dependents(workspace, [run])
    if cancels(run) - attempt.cancels:
        cancel_job(workspace, run, attempt.executor, submitted)
    return [*excluded.notes, *stats.notes, *notes]


def placed_attempt(attempt: NewAttempt, environ: Mapping[str, str] | None = None) -> NewAttempt:
    """An attempt with what the environment of this command adds to its plan, which is recorded of it.

    Args:
        attempt: what is about to be submitted.
        environ: as for :func:`counting`.
    """
    settings = telling(attempt.plan)
    if attempt.executor != "slurm":
        return replace(attempt, inherited=settings)
    variables = counting(attempt.plan, attempt.inherited, environ)
    return replace(attempt, plan=placed(attempt.plan, variables), inherited={**variables, **settings})


def cancels(run: RunDir) -> frozenset[str]:
    """The journals that request the end of a run so far: a command writes each request to a journal of its own.

    ``cancel`` does not wait for ever for a command that holds the run's lock. That command carries out the request,
    which it recognizes by a journal that was not there when it took the lock, whatever the clocks say.
    """
    return frozenset(path.name for path in run.journals.glob("cancel-*.jsonl"))


def _check_not_cancelled(run: RunDir, attempt: NewAttempt) -> None:
    if cancels(run) - attempt.cancels:
        release_claim(attempt)
        raise RunCancelled(f"run {run.id} was cancelled before this command had submitted its job; there is none")


def cancel_job(workspace: Workspace, run: RunDir, executor: str, submitted: Submitted) -> None:
    """End a job that was submitted after the run was cancelled. Raises RunCancelled.

    Args:
        workspace: where the run is.
        run: its directory.
        executor: ``slurm`` or ``local``.
        submitted: its job.
    """
    from slurmtrain.ops.shared.arrays.packs import shares_job

    with workspace.journal(run, "cancel") as journal:
        # Again: the first request may be older than the submission, and then applies to what was before it.
        journal.write(CancelRequested())
        lease.close(run, None, "cancelled")
        if shares_job(workspace, run.submission(submitted.submission)):
            why = "it was cancelled, and its job goes on with other runs"
            journal.write(JobReplaced(job_id=submitted.job_id or "", restart=0, why=why))
            raise RunCancelled(f"run {run.id} was cancelled while its job was being submitted")
    if executor == "slurm" and submitted.job_id:
        # If Slurm does not answer, 'sync' does it, because of the event.
        with contextlib.suppress(SlurmDown):
            workspace.scheduler.cancel([submitted.job_id], force=False)
    elif submitted.process:
        Process.from_dict(submitted.process).send(signal.SIGTERM)
    raise RunCancelled(f"run {run.id} was cancelled while its job was being submitted; job {submitted.job_id} was too")


def withdraw(
    journal: Journal, attempt: NewAttempt, submission: SubmissionDir, job_id: str | None, error: Exception
) -> None:
    """Journal that nothing was started. If the disk is full, the next command notices that there is no job.

    Args:
        journal: the command's, in the run.
        attempt: what was to be started.
        submission: its submission.
        job_id: the id of a local job.
        error: why it was not.
    """
    with contextlib.suppress(OSError):
        journal.write(Unstarted(submission=submission.number, job_id=job_id, reason=str(error)))
    release_claim(attempt)


def release_claim(attempt: NewAttempt) -> None:
    """Let other commands claim an attempt that was not started."""
    if attempt.predecessor is not None:
        with contextlib.suppress(OSError):
            lease.release_claim(attempt.predecessor, by=_COMMANDS)


def record_job(journal: Journal, run: RunDir, submitted: Submitted) -> list[str]:
    """Journal the job; a note if that fails, since the job exists all the same, and the next command finds it.

    Args:
        journal: the command's, in the run.
        run: the run's directory.
        submitted: the job.
    """
    try:
        journal.write(submitted)
    except OSError as error:
        why = describe_os_error(error)
        return [
            f"run {run.id} was submitted as job {submitted.job_id}, but that cannot be written to {run.journals} "
            f"({why}); the next command finds the job once it can"
        ]
    return []


def unwritable(run: RunDir, error: OSError) -> PathError:
    """The error for a run directory that cannot be written to. ``run``: the directory; ``error``: why."""
    return PathError(f"cannot write to {run.path}: {describe_os_error(error)}")


def prepare(
    run: RunDir, attempt: NewAttempt, stats: PartitionStats, mlflow: str, place: ArrayPlace | None = None
) -> SubmissionDir:
    """Claim the start, and write what the job reads.

    A submission exists only once an event names it: until then its directory is harmless litter.

    Args:
        run: the run's directory.
        attempt: what to start.
        stats: what is known about interruptions where the job will run.
        mlflow: the URI of the MLflow server that shows the run; empty: it has none.
        place: which element of a job array it will be; None: a job of its own.

    Raises:
        PathError: the run directory cannot be written.
        RunBusy: another command has claimed the start.
    """
    launch = Launch(
        attempt=attempt.number,
        turn=attempt.turn,
        from_start=attempt.from_start,
        since=attempt.since,
        history=stats.history,
        array=None if place is None else (place.array, place.index),
        mlflow=mlflow,
        pack=None if place is None else place.pack,
        slot=0 if place is None else place.slot,
    )
    submission = _new_submission(run)
    try:
        _claim(attempt, submission)
    except RunBusy:
        submission.path.rmdir()
        raise
    except OSError as error:
        raise unwritable(run, error) from error
    try:
        if not (attempt.is_as_created and link_new(submission.plan, run.plan)):
            write_new(submission.plan, json_bytes(attempt.plan.to_json()))
        write_new(submission.launch, json_bytes(launch.to_dict()))
    except OSError as error:
        release_claim(attempt)
        raise unwritable(run, error) from error
    return submission


def submitting_event(
    attempt: NewAttempt, submission: SubmissionDir, job_id: str | None, partition: str, command: str
) -> Submitting:
    """The event that an attempt is about to be submitted.

    Args:
        attempt: the attempt.
        submission: its submission.
        job_id: the id of a local job.
        partition: where a job of Slurm's goes.
        command: the command that submits it.
    """
    spec = attempt.plan.spec
    nodes = spec.resources.allocated
    submitting = Submitting(
        submission=submission.number,
        job_id=job_id,
        attempt=attempt.number,
        code=attempt.plan.code.hash if attempt.plan.code is not None else None,
        executor=attempt.executor,
        host=socket.gethostname(),
        overrides=attempt.overrides,
        from_start=attempt.from_start,
        by=command,
        requeue=write_requeue(spec.requeue),
        nodes=(nodes.min, nodes.max),
        follows=None if attempt.predecessor is None else attempt.predecessor.path.name,
        without=attempt.excluded_nodes or None,
        partition=partition or None,
        inherited=dict(attempt.inherited) or None,
    )
    # Only overrides change what a run trains with, and all later submissions repeat them.
    is_restated = command == "resume" or attempt.overrides
    return replace(submitting, **run_settings(attempt.plan)) if is_restated else submitting


def _submit(
    attempt: NewAttempt,
    submission: SubmissionDir,
    job_id: str | None,
    lock: int,
    variables: Mapping[str, str],
    others: Sequence[str],
) -> Submitted:
    """Submit the job; returns the event to journal.

    ``job_id``: the id of a local job. ``others``: jobs that must end first, beside the jobs of the run's upstreams.
    """
    if attempt.executor == "slurm":
        from slurmtrain.slurm.launch import LaunchRequest
        from slurmtrain.slurm.launch import launch as launch_slurm

        succeeds = attempt.predecessor is not None
        after = [*unfinished_upstream_jobs(submission.run), *others]
        if succeeds:
            from slurmtrain.runtime.job.run_reader import read_run

            after += earlier_elements(read_run(submission.run))
        request = LaunchRequest(attempt.plan, submission, lock, attempt.excluded_nodes, singleton=succeeds, after=after)
        return Submitted(submission=submission.number, job_id=launch_slurm(request, variables))
    from slurmtrain.local.launch import launch as launch_local

    assert job_id is not None
    process = launch_local(attempt.plan, submission, job_id, variables)
    return Submitted(submission=submission.number, job_id=job_id, process=process.to_dict())


def _claim(attempt: NewAttempt, submission: SubmissionDir) -> None:
    """Claim the start after this attempt's predecessor. Raises RunBusy if another command has claimed it.

    The run's lock keeps other commands out; the claim is for file systems without locks.
    """
    after = attempt.predecessor
    if after is None:
        return
    claim = lease.read_claim(after, by=_COMMANDS)
    if claim is not None and _is_void(submission, claim):
        lease.release_claim(after, by=_COMMANDS)
    if not lease.claim_restart(after, _COMMANDS, {"submission": submission.number}):
        raise RunBusy(f"another command is just starting run {submission.run.id} again; try again in a moment")


def _is_void(submission: SubmissionDir, claim: Mapping[str, Any]) -> bool:
    """Whether a claim is void: its command was killed before it journaled a submission."""
    from slurmtrain.runtime.job.run_reader import read_run

    process = claim.get("process")
    # A process on another machine cannot be checked: the claim's age decides then, whichever clock is ahead.
    dead = False
    with contextlib.suppress(KeyError, TypeError, ValueError):
        dead = process is not None and Process.from_dict(process).alive() is False
    if not dead and abs(time.time() - float(claim.get("t", 0.0))) < _CLAIM_S:
        return False
    number = claim.get("submission")
    return all(attempt.submission != number for attempt in read_run(submission.run).attempts)


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


def secret_values(plan: Plan, overrides: Mapping[str, str]) -> dict[str, str]:
    """Values of the variables that the plan names but does not record: from ``overrides``, else this environment.

    Raises a UserError that names all missing ones.
    """
    names = [name for name, value in plan.spec.env.items() if value == REDACTED]
    values = {name: overrides.get(name, os.environ.get(name)) for name in names}
    missing = sorted(name for name, value in values.items() if value is None)
    if missing:
        raise UserError(
            f"the values of {', '.join(missing)} are secret, so they were not recorded; set them in the "
            "environment and try again"
        )
    return {name: value for name, value in values.items() if value is not None}


def _new_job_id() -> str:
    return "local-" + "".join(secrets.choice(ALPHABET) for _ in range(_JOB_DIGITS))
