"""A short process between ``slurmtrain submit`` and sbatch.

``python -m slurmtrain.slurm.sbatch_process FOLDER`` submits through submitit what standard input describes in JSON, and
prints the job's id. It runs in the job's environment and outlives the command that started it: it holds the
lock of the run until sbatch has answered. FOLDER is where submitit keeps its files: by it, other commands recognize
this process.

People wait for it, so this imports submitit and little else.

It prints one line of JSON: ``{"job_id": ...}``, or ``{"failure": ..., "problem": ...}`` with a failure of ``refused``
(sbatch rejected the job), ``failed`` (sbatch was never called) or ``unsure`` (there may be a job).
"""

from __future__ import annotations

import errno
import json
import logging
import subprocess
import sys
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError

from slurmtrain.runtime.environment.process_limits import restore_limit
from slurmtrain.slurm import task


class _Executor(submitit.SlurmExecutor):  # type: ignore[misc]
    """Submits a job with a batch script that is given, instead of submitit's own (``slurm/request``)."""

    def __init__(self, folder: Path, script: str) -> None:
        """``folder``: the job's, or the array's; ``script``: its text."""
        super().__init__(folder=folder)
        self._script = script
        self.has_called = False
        """Whether sbatch may have been started."""

    def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002 (submitit's)
        return self._script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # The last that happens before sbatch is started: the batch script is written.
        self.has_called = True
        return list(super()._make_submission_command(submission_file_path))


def call_sbatch() -> None:
    """Submit the job that standard input describes, and print the outcome."""
    # submitit warns about its own defaults; sbatch's messages are in its exceptions.
    logging.getLogger("submitit").setLevel(logging.ERROR)
    executor: _Executor | None = None
    try:
        request = json.load(sys.stdin)
        restore_limit(request["open_files"], request["locks"])
        executor = _Executor(Path(sys.argv[1]), request["script"])
        job = executor.submit(getattr(task, request["task"]), request["argument"])
    except Exception as error:  # noqa: BLE001 (whatever it is, the command must know whether there may be a job)
        # There is no sbatch, or the system has no room for it or its arguments.
        is_of_exec = isinstance(error, OSError) and (
            error.filename == "sbatch" or error.errno in (errno.EAGAIN, errno.ENOMEM)
        )
        # sbatch may have accepted the job before any error but its own, and if it was killed (negative code).
        cause = error.__cause__ if isinstance(error, FailedJobError) else None
        failure = "unsure"
        if executor is None or not executor.has_called or is_of_exec:
            failure = "failed"
        elif isinstance(cause, subprocess.CalledProcessError) and cause.returncode > 0:
            failure = "refused"
        print(json.dumps({"failure": failure, "problem": str(error) or repr(error)}), flush=True)
        sys.exit(1)
    print(json.dumps({"job_id": job.job_id}), flush=True)


if __name__ == "__main__":
    call_sbatch()
