"""Submitting an attempt to Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.errors import LaunchError, NotAvailable, RequestRefused, SlurmDown, SubmissionUncertain
from slurmtrain.model.run.layout import SubmissionDir
from slurmtrain.model.spec.plan import Plan
from slurmtrain.runtime.job.environment import scrubbed
from slurmtrain.slurm.command import extract_errors, is_installed
from slurmtrain.slurm.limits import rejection_reason
from slurmtrain.slurm.request import make_request
from slurmtrain.slurm.scheduler import Scheduler
from slurmtrain.system.process import processes_with_argument

# What sbatch prints when slurmctld may, or may not, have taken the job, and when nobody was there to take it: messages
# of Slurm's (slurm_errno.c) and of the C library.
_UNSURE = ("timed out", "zero bytes were transmitted", "receive failure", "reset by peer")
_DOWN = ("unable to contact slurm controller", "connection refused", "connect failure")
# By words of sbatch's message: what the user can do about it.
_HINTS = {
    "invalid account": "name an account that you may use with slurm.account ('sacctmgr show assoc user=$USER')",
    "invalid partition": "name a partition with slurm.partition ('sinfo' lists them)",
    "invalid qos": "name a QOS that you may use with slurm.qos",
    "gres": "ask for resources.gpus_per_node that nodes have ('sinfo -o \"%N %G\"')",
    "time limit": "ask for less with resources.time",
    "node count": "ask for fewer resources.nodes",
    "node configuration": "ask for less per node, or for another partition or constraint",
    "feature": "name a feature that nodes have with slurm.constraint ('sinfo -o \"%N %f\"')",
}


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """One submission to Slurm.

    ``lock``: the handle of the run's lock, which the process that calls sbatch inherits: the lock stays held as long as
    anybody may still submit the job. ``excluded_nodes``: what it must not get. ``singleton``: not while another job of
    the run is there.
    """

    plan: Plan
    submission: SubmissionDir
    lock: int
    excluded_nodes: Sequence[str] = ()
    singleton: bool = False


def check(plans: Sequence[Plan], scheduler: Scheduler) -> None:
    """Raise, before anything is created, for what Slurm could not run, or when it does not answer.

    NotAvailable where there is no sbatch, LaunchError where slurmctld is down, RequestRefused for what is impossible.
    """
    if not is_installed("sbatch"):
        raise NotAvailable("--executor slurm: there is no sbatch on this machine's PATH; use --executor local here")
    try:
        partitions = scheduler.partitions()
    except SlurmDown as error:
        raise LaunchError(f"Slurm does not answer, so nothing was created; try again later ({error})") from error
    for plan in plans:
        reason = rejection_reason(plan, partitions)
        if reason is not None:
            raise RequestRefused(reason)


def launch(request: LaunchRequest, environment: Mapping[str, str]) -> str:
    """Submit the job and return its id.

    ``environment``: variables that reach the job and are written nowhere. Raises RequestRefused where sbatch says no,
    SubmissionUncertain where nobody knows, LaunchError for everything else. Only after SubmissionUncertain there may be
    a job.
    """
    job = make_request(request.plan, request.submission, request.excluded_nodes, singleton=request.singleton)
    order = {"folder": str(job.folder), "parameters": dict(job.parameters), "submission": str(request.submission.path)}
    completed = subprocess.run(
        # The folder once more, as it is: is_submitting() looks for it, and JSON escapes some characters.
        [sys.executable, "-m", "slurmtrain.slurm.launcher", json.dumps(order), str(job.folder)],
        env={**scrubbed(os.environ), **environment},
        cwd=request.submission.path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        # Ctrl-C in this terminal must not reach sbatch half-way.
        start_new_session=True,
        pass_fds=(request.lock,),
    )
    reply = _parse_reply(completed.stdout)
    if "job_id" in reply:
        return reply["job_id"]
    problem = extract_errors(reply.get("problem", completed.stderr).splitlines()) or f"exit code {completed.returncode}"
    # A launcher that was killed has printed nothing: sbatch may have been through by then.
    raise _error(problem, reply.get("failure", "unsure"))


def is_submitting(submission: SubmissionDir) -> bool:
    """Whether a submission that was killed has left a process on this machine that may still submit its job."""
    return any(_submits(command) for _, command in processes_with_argument(str(submission.submitit)))


def _submits(command: bytes) -> bool:
    arguments = command.split(b"\0")
    return Path(os.fsdecode(arguments[0])).name == "sbatch" or b"slurmtrain.slurm.launcher" in arguments


def _parse_reply(text: str) -> dict[str, str]:
    """The launcher's last line; what a site's sbatch wrapper printed before it does not count."""
    lines = text.strip().splitlines()
    try:
        reply = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return reply if isinstance(reply, dict) else {}


def _error(problem: str, failure: str) -> LaunchError | RequestRefused:
    """The error for what the launcher printed. ``failure``: ``refused``, ``failed`` (no job) or ``unsure``."""
    lower = problem.lower()
    if failure == "unsure" or any(text in lower for text in _UNSURE):
        return SubmissionUncertain(
            f"Slurm may have taken the job or not ({problem}): 'slurmtrain sync' finds out, and submits it if not"
        )
    if failure == "failed" or any(text in lower for text in _DOWN):
        return LaunchError(f"the job could not be submitted to Slurm; try again later ({problem})")
    hint = next((hint for text, hint in _HINTS.items() if text in lower), None)
    return RequestRefused(f"Slurm refused the job: {problem}" + (f"; {hint}" if hint else ""))
