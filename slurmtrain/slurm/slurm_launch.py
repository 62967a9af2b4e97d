"""Submitting an attempt to Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slurmtrain.errors import LaunchError, NotAvailable, RequestRefused, SlurmDown, SubmissionUncertain
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.model.run.layout import ArrayDir, SubmissionDir
from slurmtrain.runtime.environment.process_limits import soft_limit_of_ranks
from slurmtrain.slurm.outer_variables import counting_variables, environment_of_job, of_sbatch, placed
from slurmtrain.slurm.request import Request
from slurmtrain.slurm.scheduler import Scheduler
from slurmtrain.slurm.site import excess_of_pack, rejection_reason
from slurmtrain.slurm.slurm_commands import extract_errors, is_installed
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.inherited import users_umask
from slurmtrain.system.interpreter import own_python
from slurmtrain.system.process import processes_with_argument

# What sbatch prints if slurmctld may or may not have accepted the job, and if slurmctld could not be reached: messages
# of Slurm (slurm_errno.c) and of the C library.
_UNSURE = ("timed out", "zero bytes were transmitted", "receive failure", "reset by peer")
_DOWN = ("unable to contact slurm controller", "connection refused", "connect failure")
# Hints for the user, by a phrase in sbatch's message: the first that is in it counts, as the message on any limit of an
# account or a QOS speaks of time limits, too.
_HINTS = {
    "submitjob": "each run of a sweep is a job, and you may have only so many ('sacctmgr show assoc user=$USER' and "
    "'sacctmgr show qos' list the limits): submit fewer, or try again when others have ended; with "
    "--idempotency-key the same command submits only the missing ones",
    "wallduration": "ask for less with resources.time",
    "accounting/qos policy": "'sacctmgr show assoc user=$USER' and 'sacctmgr show qos' list your limits",
    "invalid account": "name an account that you may use with slurm.account ('sacctmgr show assoc user=$USER')",
    "invalid partition": "name a partition with slurm.partition ('sinfo' lists them)",
    "invalid qos": "name a QOS that you may use with slurm.qos",
    "gres": "ask for resources.gpus_per_node that nodes have ('sinfo -o \"%N %G\"')",
    "time limit": "ask for less with resources.time",
    "node count": "ask for fewer resources.nodes",
    "node configuration": "ask for less per node, or for another partition or constraint",
    "feature": "name a feature that nodes have with slurm.constraint ('sinfo -o \"%N %f\"')",
}


def check(plans: Sequence[Plan], scheduler: Scheduler, pack: Pack | None = None) -> None:
    """Raise, before anything is created, if Slurm could not run the plan or does not answer.

    Args:
        plans: what is to run.
        scheduler: the scheduler to ask.
        pack: how several of them share a job; None: each has its own.

    Raises:
        NotAvailable: there is no sbatch.
        LaunchError: slurmctld is down.
        RequestRefused: the request is impossible.
    """
    if not is_installed("sbatch"):
        raise NotAvailable("--executor slurm: there is no sbatch on this machine's PATH; use --executor local here")
    try:
        partitions = scheduler.partitions()
    except SlurmDown as error:
        raise LaunchError(f"Slurm does not answer, so nothing was created; try again later ({error})") from error
    environ = of_sbatch()
    plans = [placed(plan, counting_variables(plan, environ=environ)) for plan in plans]
    if pack is not None:
        if not scheduler.max_array_size():
            raise RequestRefused("sweep.pack needs job arrays, and this cluster does not allow them (MaxArraySize=0)")
        # If Slurm does not answer, it refuses a job that is too large itself.
        with contextlib.suppress(SlurmDown):
            nodes = scheduler.nodes()
            for plan in {repr((plan.spec.resources, plan.spec.slurm)): plan for plan in plans}.values():
                if (reason := excess_of_pack(plan, pack, partitions, nodes)) is not None:
                    raise RequestRefused(reason)
    for plan in plans:
        reason = rejection_reason(plan, partitions)
        if reason is not None:
            raise RequestRefused(reason)
    if any(plan.spec.resources.components for plan in plans) and (reason := scheduler.component_problem()):
        raise RequestRefused(f"resources.components: {reason}")


@contextlib.contextmanager
def launcher_in(folder: Path, locks: Sequence[int], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The process that calls sbatch. It is started before its order is made, as it imports submitit meanwhile.

    Without an order, which may also be because this process is killed, it ends and has called nothing: it may be
    started before anything says that there will be a job.

    Args:
        folder: where submitit keeps its files: is_submitting() looks for it.
        locks: the handles of the locks that it inherits.
        environment: variables for the job, in addition to this process's.

    Raises:
        LaunchError: it cannot be started.
    """
    try:
        launcher = subprocess.Popen(
            own_python("-m", "slurmtrain.slurm.sbatch_process", str(folder)),
            env={**environment_of_job(os.environ), **users_umask(), **environment},
            cwd=folder.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            # Ctrl-C in this terminal must not interrupt sbatch.
            start_new_session=True,
            pass_fds=tuple(locks),
        )
    except OSError as error:
        raise LaunchError(f"the process that calls sbatch cannot be started: {describe_os_error(error)}") from error
    with launcher:
        try:
            yield launcher
        finally:
            launcher.kill()  # nothing, if it has replied


def launch(launcher: subprocess.Popen[str], request: Request, locks: Sequence[int]) -> str:
    """Submit a job or a job array with one call of sbatch, and return its id; an element's id is ``<id>_<index>``.

    Args:
        launcher: the process that calls it, from :func:`launcher_in` the request's folder.
        request: what is requested.
        locks: the handles of the locks that the launcher holds.

    Raises:
        RequestRefused: sbatch rejects the job.
        SubmissionUncertain: the outcome is unknown; only then there may be a job.
        LaunchError: anything else.
    """
    order = {
        "script": request.script,
        "task": request.task,
        "argument": request.argument,
        # Slurm hands the launcher's limits on to the job.
        "open_files": soft_limit_of_ranks(),
        "locks": list(locks),
    }
    # Not as an argument, which every user of this machine can read (proc(5), /proc/pid/cmdline).
    printed_out, printed_err = launcher.communicate(json.dumps(order))
    reply: dict[str, str] = {}
    with contextlib.suppress(ValueError, IndexError, TypeError):
        # Its last line: a site's wrapper of sbatch may print more before.
        reply = dict(json.loads(printed_out.strip().splitlines()[-1]))
    if "job_id" in reply:
        return reply["job_id"]
    if "problem" in reply:
        lines = reply["problem"].splitlines()
    else:
        # The line of a Python process's last words that says why it ended.
        lines = [line for line in printed_err.splitlines() if line.strip()]
        lines = [line for line in lines if "Error" in line][-1:] or lines[-1:]
    printed = extract_errors(lines)
    # A launcher that was killed has printed nothing, but sbatch may have finished by then; any other replies, unless
    # Python itself did not start.
    failure = reply.get("failure", "failed" if launcher.returncode > 0 else "unsure")
    problem = printed or f"exit code {launcher.returncode}"
    lower = problem.lower()
    if failure == "unsure" or (failure == "refused" and any(text in lower for text in _UNSURE)):
        raise SubmissionUncertain(
            f"it is unknown whether Slurm accepted the job ({problem}): 'slurmtrain sync' finds out, and submits it "
            "if not"
        )
    if failure == "failed":
        raise LaunchError(f"the job could not be submitted: sbatch was not called ({problem})")
    if any(text in lower for text in _DOWN):
        raise LaunchError(f"the job could not be submitted to Slurm; try again later ({problem})")
    hint = next((hint for text, hint in _HINTS.items() if text in lower), None)
    raise RequestRefused(f"Slurm refused the job: {problem}" + (f"; {hint}" if hint else ""))


def is_submitting(submission: SubmissionDir | ArrayDir) -> bool:
    """Whether a killed submission has left a process on this machine that may still submit its job."""
    commands = [command.split(b"\0") for _, command in processes_with_argument(str(submission.submitit))]
    return any(
        Path(os.fsdecode(words[0])).name == "sbatch" or b"slurmtrain.slurm.sbatch_process" in words
        for words in commands
    )
