"""A short process between ``slurmtrain submit`` and submitit's controller.

``python -m slurmtrain.local.controller_process JSON`` starts a controller and prints its identity. A controller
inherits the session, terminal and output of its parent: started from here, it has a session of its own and writes to a
file, so it outlives the terminal and keeps no pipe open.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import submitit

from slurmtrain.runtime.task import run_local_node, task_command
from slurmtrain.system.files import FILE_MODE
from slurmtrain.system.interpreter import own_python
from slurmtrain.system.process import identify

# The node agents enforce the time limit themselves; submitit's own must never come first.
_FOREVER_MIN = 60 * 24 * 365


class _Executor(submitit.LocalExecutor):  # type: ignore[misc]
    """Submits tasks that start as agents do."""

    @property
    def _submitit_command_str(self) -> str:
        return task_command(self.python, shlex.quote(str(self.folder)))


def main() -> None:
    """Start the controller that the first argument describes, and print its identity (``Process``) as JSON."""
    request = json.loads(sys.argv[1])
    # The submitter reads standard output until it is closed, so the controller gets a file instead.
    answer = os.dup(1)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE_MODE)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1)):
        os.dup2(source, target)
    executor = _Executor(folder=Path(request["folder"]), python=shlex.join(own_python()))
    executor.update_parameters(
        tasks_per_node=request["nodes"],
        timeout_min=_FOREVER_MIN,
        stderr_to_stdout=True,
    )
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
    main()
