"""A short process between ``slurmtrain submit`` and sbatch.

``python -m slurmtrain.slurm.launcher FOLDER`` submits through submitit what standard input describes in JSON, and
prints the job's id. It runs in the job's environment and outlives the command that started it: it holds the
lock of the run until sbatch has answered. FOLDER is where submitit keeps its files: by it, other commands recognize
this process.

For a job array, FOLDER is that of the array, and standard input names the directory of links to its runs.

It prints one line of JSON: ``{"job_id": ...}``, or ``{"failure": ..., "problem": ...}`` with a failure of ``refused``
(sbatch rejected the job), ``failed`` (sbatch was never called) or ``unsure`` (there may be a job).
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from slurmtrain.runtime.job.file_limit import restore_limit
from slurmtrain.slurm.request import element_command
from slurmtrain.slurm.task import run_element, run_node


class _ArrayExecutor(submitit.SlurmExecutor):  # type: ignore[misc]
    """Submits a job array with a single pickle, whose elements work in the folders of their own runs."""

    @property
    def _submitit_command_str(self) -> str:
        return element_command(sys.executable)


def main() -> None:
    """Submit the job that standard input describes, and print the outcome."""
    request = json.load(sys.stdin)
    # submitit warns about its own defaults; sbatch's messages are in its exceptions.
    logging.getLogger("submitit").setLevel(logging.ERROR)
    restore_limit(request["open_files"], request["locks"])
    elements = request.get("elements")
    try:
        executor = (_ArrayExecutor if elements else submitit.SlurmExecutor)(folder=Path(sys.argv[1]))
    except RuntimeError as error:  # submitit requires srun
        _fail("failed", error)
    executor.update_parameters(**request["parameters"])
    try:
        job = executor.submit(run_element, elements) if elements else executor.submit(run_node, request["submission"])
    except FailedJobError as error:
        _fail("refused" if _has_answered(error) else "unsure", error)
    except (FailedSubmissionError, OSError) as error:  # sbatch may have accepted the job before this error
        _fail("unsure", error)
    print(json.dumps({"job_id": job.job_id}), flush=True)


def _has_answered(error: FailedJobError) -> bool:
    """Whether sbatch exited normally: if it was killed (negative code), it may have submitted the job already."""
    return isinstance(error.__cause__, subprocess.CalledProcessError) and error.__cause__.returncode > 0


def _fail(failure: str, error: Exception) -> NoReturn:
    print(json.dumps({"failure": failure, "problem": str(error)}), flush=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
