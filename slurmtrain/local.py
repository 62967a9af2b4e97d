"""The local executor: runs on this machine, through submitit's LocalExecutor, that outlive the terminal they are from.

``python -m slurmtrain.local JSON`` is a short process between a submission and submitit's controller: it starts one and
prints its identity. A controller inherits the session, terminal and output of its parent: started from here, it has a
session of its own and writes to a file, so it outlives the terminal and keeps no pipe open.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import LaunchError, NotAvailable
from slurmtrain.runtime.environment.variables import local_job, scrubbed
from slurmtrain.system.files import FILE_MODE
from slurmtrain.system.inherited import users_umask
from slurmtrain.system.interpreter import own_python
from slurmtrain.system.process import Process, identify, processes_with_argument

if TYPE_CHECKING:
    from slurmtrain.model.experiment.plan import Plan
    from slurmtrain.model.run.layout import SubmissionDir

# The node agents enforce the time limit themselves; submitit's own must never come first.
_FOREVER_MIN = 60 * 24 * 365


def check_here(plan: Plan) -> None:
    """Raise NotAvailable if a plan requests something that this machine does not have."""
    if plan.spec.setup and shutil.which("bash") is None:
        raise NotAvailable("'setup' needs bash, which is not on PATH; install it, or leave 'setup' out")
    resources, pinned = plan.spec.resources, plan.spec.network.interface
    needed, present = resources.most_gpus, len(gpus())
    if needed > present:
        nodes = resources.allocated.max
        each = "their" if resources.components else f"x {resources.gpus_per_node}"
        raise NotAvailable(
            f"not available with this executor: {nodes} nodes {each} GPUs are {needed} "
            f"GPUs, this machine shows {present}; ask for fewer, or use --executor slurm"
        )
    if pinned not in ("auto", "lo"):
        raise NotAvailable(
            f"not available with this executor: network.interface {pinned!r}; all nodes are on this machine and "
            "talk over the loopback interface, so leave it at 'auto'"
        )


def gpus() -> list[str]:
    """The GPUs that a run started from here may use, as CUDA_VISIBLE_DEVICES names them; empty if there are none.

    Without that variable they are numbered like their device files: querying a library would take a second.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu.strip()]
    numbers = sorted(
        int(entry.name[6:]) for entry in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", entry.name)
    )
    return [str(number) for number in numbers]


def launch_here(plan: Plan, submission: SubmissionDir, job_id: str, secrets: Mapping[str, str]) -> Process:
    """Start submitit's controller of one submission, which starts the run's agents, and return it.

    Args:
        plan: what to run; each of its nodes is an agent on this machine.
        submission: the directory for the submission's files.
        job_id: the job's id, chosen by the caller.
        secrets: variables that are passed to the job and never written to disk.

    Raises:
        LaunchError: it could not be started.
    """
    request = {
        "submission": str(submission.path),
        "folder": str(submission.submitit),
        "log": str(submission.controller_log),
        "nodes": plan.spec.resources.allocated.max,
    }
    environ = {**scrubbed(os.environ), **users_umask(), **local_job(job_id, gpus()), **secrets}
    completed = subprocess.run(
        own_python("-m", "slurmtrain.local", json.dumps(request)),
        env=environ,
        cwd=submission.path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        # Detached from this terminal: neither Ctrl-C nor a hangup may end the run.
        start_new_session=True,
    )
    if completed.returncode == 0:
        return Process.from_dict(json.loads(completed.stdout))
    # It may have been killed after it had started the controller.
    controller, _ = find_controller(submission)
    if controller is None:
        why = next(reversed(completed.stderr.strip().splitlines()), f"exit code {completed.returncode}")
        raise LaunchError(f"the local job could not be started: {why}")
    return controller


def find_controller(submission: SubmissionDir) -> tuple[Process | None, bool]:
    """What is still running of a submission that was killed before it journaled its job, found by command line.

    Returns its controller, if there is one, and whether there is a controller or a process about to start one.
    """
    starting = False
    # The submission's folder is an argument of both the launcher and the controller that it starts.
    for process, command in processes_with_argument(str(submission.submitit)):
        if b"submitit.local._local" in command:
            return process, True
        starting = True
    return None, starting


def start_controller() -> None:
    """Start the controller that the first argument describes, and print its identity (``Process``) as JSON."""
    import submitit

    from slurmtrain.runtime.task import run_local_node, task_command

    class Executor(submitit.LocalExecutor):  # type: ignore[misc]
        """Submits tasks that start as agents do."""

        @property
        def _submitit_command_str(self) -> str:
            return task_command(self.python, shlex.quote(str(self.folder)))

    request = json.loads(sys.argv[1])
    # The submitter reads standard output until it is closed, so the controller gets a file instead.
    answer = os.dup(1)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE_MODE)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1)):
        os.dup2(source, target)
    executor = Executor(folder=Path(request["folder"]), python=shlex.join(own_python()))
    executor.update_parameters(tasks_per_node=request["nodes"], timeout_min=_FOREVER_MIN, stderr_to_stdout=True)
    # Errors up to here go to the submitter, which reads both pipes to EOF: the controller must not hold one open.
    errors = os.dup(2)
    os.dup2(log, 2)
    try:
        job = executor.submit(run_local_node, request["submission"])
    except Exception as error:  # noqa: BLE001 (the submitter prints whatever submitit raises)
        os.write(errors, f"{type(error).__name__}: {error}\n".encode())
        sys.exit(1)
    # It may have ended already: its parent, this process, can still identify the zombie.
    process = identify(int(job.job_id), ended=True)
    assert process is not None
    os.write(answer, json.dumps(process.to_dict()).encode())


if __name__ == "__main__":
    start_controller()
