"""Handing an attempt over to Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.errors import LaunchError, NotAvailable, Refused, SlurmDown, Unsure
from slurmtrain.model.run.layout import SubmissionDir
from slurmtrain.model.spec.plan import Plan
from slurmtrain.runtime.job.environment import scrubbed
from slurmtrain.slurm.command import complaint, found
from slurmtrain.slurm.limits import impossible
from slurmtrain.slurm.request import make_request
from slurmtrain.slurm.scheduler import Scheduler
from slurmtrain.system.process import processes_with_argument

# What sbatch says when slurmctld may, or may not, have taken the job.
_UNSURE = ("timed out", "zero bytes were transmitted", "receive failure", "reset by peer")
# What it says when nobody was there to take it.
_DOWN = ("unable to contact slurm controller", "connection refused", "connect failure")
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
class Handover:
    """A request on its way: the lock of its run stays held, by this handle, as long as anybody may still submit it.

    ``without``: nodes to leave out. ``follows``: another job of the run came before.
    """

    plan: Plan
    submission: SubmissionDir
    lock: int
    without: Sequence[str] = ()
    follows: bool = False


def check(plans: Sequence[Plan], scheduler: Scheduler) -> None:
    """Raise, before anything is created, for what Slurm could not run, or when it does not answer.

    NotAvailable where there is no sbatch, LaunchError where slurmctld is down, Refused for what is impossible.
    """
    if not found("sbatch"):
        raise NotAvailable("--executor slurm: there is no sbatch on this machine's PATH; use --executor local here")
    try:
        partitions = scheduler.partitions()
    except SlurmDown as error:
        raise LaunchError(f"Slurm does not answer, so nothing was created; try again later ({error})") from error
    for plan in plans:
        reason = impossible(plan, partitions)
        if reason is not None:
            raise Refused(reason)


def launch(handing: Handover, environment: Mapping[str, str]) -> str:
    """Submit the job and return its id.

    ``environment``: variables that reach the job and are written nowhere. Raises Refused where sbatch says no, Unsure
    where nobody knows, LaunchError for everything else; only after Unsure there may be a job.
    """
    request = make_request(handing.plan, handing.submission, handing.without, follows=handing.follows)
    said = {"folder": str(request.folder), "parameters": dict(request.parameters),
            "submission": str(handing.submission.path)}  # fmt: skip
    done = subprocess.run(
        # The folder once more as it is, to be found by: JSON has its own spelling of some characters.
        [sys.executable, "-m", "slurmtrain.slurm.launcher", json.dumps(said), str(request.folder)],
        env={**scrubbed(os.environ), **environment},
        cwd=handing.submission.path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        start_new_session=True,
        pass_fds=(handing.lock,),
    )
    answer = _answer(done.stdout)
    if "job_id" in answer:
        return answer["job_id"]
    problem = complaint(answer.get("problem", done.stderr).splitlines()) or f"exit code {done.returncode}"
    raise _error(problem, answer.get("how", "unsure"))


def find(submission: SubmissionDir) -> bool:
    """Whether a submission that was killed has left anything on this machine that may still submit its job."""
    return any(_submits(command) for _, command in processes_with_argument(str(submission.submitit)))


def _submits(command: bytes) -> bool:
    words = command.split(b"\0")
    return Path(os.fsdecode(words[0])).name == "sbatch" or b"slurmtrain.slurm.launcher" in words


def _answer(text: str) -> dict[str, str]:
    lines = text.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _error(problem: str, how: str) -> LaunchError | Refused:
    low = problem.lower()
    if how == "unsure" or any(words in low for words in _UNSURE):
        return Unsure(
            f"Slurm may have taken the job or not ({problem}): 'slurmtrain sync' finds out, and submits it if not"
        )
    if how == "failed" or any(words in low for words in _DOWN):
        return LaunchError(f"the job could not be handed to Slurm; try again later ({problem})")
    hint = next((advice for words, advice in _HINTS.items() if words in low), None)
    return Refused(f"Slurm refused the job: {problem}" + (f"; {hint}" if hint else ""))
