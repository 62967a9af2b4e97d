"""What executors start for each agent: ``python -m slurmtrain.runtime.task FOLDER``, which runs submitit's task there.

It is submitit's own entry point, but for what an agent does not need: before it reads a pickle, submitit imports numpy
if there is one, which takes 12 MB and a tenth of an agent's start.
"""

from __future__ import annotations

import sys

from slurmtrain.system.interpreter import collect_rarely

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
    collect_rarely()
    # Python finds no module that is None here (the reference of "import" says so); what is imported later finds it.
    sys.modules["numpy"] = None  # type: ignore[assignment]
    try:
        from submitit.core.submission import submitit_main
    finally:
        del sys.modules["numpy"]
    submitit_main()


if __name__ == "__main__":
    run_task()
