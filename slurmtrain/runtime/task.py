"""What executors, and the shell of ``setup``, start of slurmtrain: ``python -m slurmtrain.runtime.task ...``.

* ``FOLDER`` runs submitit's task there: an agent. It is submitit's own entry point, but for what agents do not need:
  before it reads a pickle, submitit imports numpy if there is one, which takes 12 MB and a tenth of an agent's start.
* ``directory SUBMISSION`` prints where the command of a run is to run. The shell asks this before there are agents; the
  run's own copy of its code is made by then.
* ``report HANDLE`` runs in the place of that shell, and writes the variables and limits that the shell has by then to
  the descriptor ``HANDLE``.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

ENTRY = "slurmtrain.runtime.task"


def task_command(python: str, folder: str) -> str:
    """What starts a task, as a line of shell.

    Args:
        python: Words that start Python, quoted for the shell.
        folder: The folder of submitit with the task, quoted for the shell.
    """
    return f"{python} -u -m {ENTRY} {folder}"


def run_local_node(submission: str) -> None:
    """Run an agent on this machine, as a task of submitit. ``submission``: the submission's directory."""
    # Imported here, as what submits the task needs this function but no agent.
    from slurmtrain.runtime.agent.agent import run_node

    run_node(submission)


def run_task() -> None:
    """Run the task in the folder that is the first argument."""
    from slurmtrain.system.interpreter import collect_rarely

    collect_rarely()
    # Python finds no module that is None here (the reference of "import" says so); what is imported later finds it.
    sys.modules["numpy"] = None  # type: ignore[assignment]
    try:
        from submitit.core.submission import submitit_main
    finally:
        del sys.modules["numpy"]
    submitit_main()


def print_directory(path: str) -> None:
    """Print the directory for the submission at this ``path``, or say why there is none."""
    # Only here: a report needs nothing of this.
    from slurmtrain.errors import SlurmtrainError
    from slurmtrain.model.run.layout import SubmissionDir
    from slurmtrain.runtime.environment.node import read_plan
    from slurmtrain.runtime.job import lease

    submission = SubmissionDir(Path(path))
    run, number = submission.run, submission.number
    try:
        plan = read_plan(submission.plan)
        if plan is None:
            raise SlurmtrainError(f"there is no plan at {submission.plan}; is the run directory visible on this node?")
        place = plan.working_directory(run.code)
        if plan.code is not None:
            # A job whose run goes on elsewhere must not change the copy; its agents end at once.
            if lease.granted_to(run) == number and lease.ended_as(run, number) is None:
                from slurmtrain.runtime.code.code_copy import make_tree

                make_tree(run, plan.code)
            place = place if place.is_dir() else run.path
    except SlurmtrainError as error:
        sys.exit(f"slurmtrain: {error}")
    # As it is on disk, whatever PYTHONIOENCODING says.
    sys.stdout.buffer.write(os.fsencode(place) + b"\n")


def report(handle: int) -> None:
    """Write the environment and the limits of this process as JSON. ``handle``: the descriptor."""
    numbers = {value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}
    limits = {str(number): resource.getrlimit(number) for number in sorted(numbers)}
    text = json.dumps({"environ": dict(os.environ), "limits": limits})
    with os.fdopen(handle, "wb", closefd=False) as file:
        file.write(text.encode())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["report", handle]:
            report(int(handle))
        case ["directory", path]:
            print_directory(path)
        case _:
            run_task()
