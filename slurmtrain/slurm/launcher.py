"""A short process between ``slurmtrain submit`` and sbatch.

``python -m slurmtrain.slurm.launcher FOLDER`` submits through submitit what standard input describes in JSON, and
prints the job's id. It runs in the job's environment and outlives the command that started it: it holds the
lock of the run until sbatch has answered. FOLDER is where submitit keeps its files: by it, other commands recognize
this process.

For a job array, FOLDER is that of the array, and standard input names the array's directory.

It prints one line of JSON: ``{"job_id": ...}``, or ``{"failure": ..., "problem": ...}`` with a failure of ``refused``
(sbatch rejected the job), ``failed`` (sbatch was never called) or ``unsure`` (there may be a job).
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from slurmtrain.model.run.root import ArrayDir
from slurmtrain.runtime.environment.file_limit import restore_limit
from slurmtrain.slurm.components import join_parts
from slurmtrain.slurm.request import agent_command, element_command, pack_command
from slurmtrain.slurm.task import run_element, run_node, run_packed


class _Executor(submitit.SlurmExecutor):  # type: ignore[misc]
    """Submits a job, or a job array with a single pickle, whose elements work in the folders of their own runs."""

    def __init__(self, folder: Path, command: str) -> None:
        """``folder``: the job's, or the array's; ``command``: what each task runs, with what follows it in the srun."""
        super().__init__(folder=folder)
        self._command = command

    @property
    def _submitit_command_str(self) -> str:
        return self._command


def main() -> None:
    """Submit the job that standard input describes, and print the outcome."""
    request = json.load(sys.stdin)
    # submitit warns about its own defaults; sbatch's messages are in its exceptions.
    logging.getLogger("submitit").setLevel(logging.ERROR)
    restore_limit(request["open_files"], request["locks"])
    try:
        executor, task = _prepare(request, Path(sys.argv[1]))
    except RuntimeError as error:  # submitit requires srun
        _fail("failed", error)
    executor.update_parameters(**request["parameters"])
    try:
        job = executor.submit(*task)
    except FailedJobError as error:
        _fail("refused" if _has_answered(error) else "unsure", error)
    except (FailedSubmissionError, OSError) as error:  # sbatch may have accepted the job before this error
        _fail("unsure", error)
    print(json.dumps({"job_id": job.job_id}), flush=True)


def _prepare(request: Mapping[str, Any], folder: Path) -> tuple[submitit.SlurmExecutor, tuple[Any, ...]]:
    """What submits the job, and the function that its tasks call, with its argument. Raises RuntimeError."""
    if "array" not in request:
        command = join_parts(agent_command(sys.executable, folder), request.get("parts", ()))
        return _Executor(folder, command), (run_node, request["submission"])
    array = ArrayDir(Path(request["array"]))
    elements, packed = str(array.elements), bool(request.get("packed"))
    command = pack_command(sys.executable, array) if packed else element_command(sys.executable)
    return _Executor(folder, command), (run_packed if packed else run_element, elements)


def _has_answered(error: FailedJobError) -> bool:
    """Whether sbatch exited normally: if it was killed (negative code), it may have submitted the job already."""
    return isinstance(error.__cause__, subprocess.CalledProcessError) and error.__cause__.returncode > 0


def _fail(failure: str, error: Exception) -> NoReturn:
    print(json.dumps({"failure": failure, "problem": str(error)}), flush=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
