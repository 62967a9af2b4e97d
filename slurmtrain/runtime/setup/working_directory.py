"""Where the command of a run is to run: ``python -m slurmtrain.runtime.setup.working_directory SUBMISSION`` prints it.

The shell of ``setup`` asks this before there are agents. The run's own copy of its code is made by then.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.run.layout import SubmissionDir
from slurmtrain.model.spec.code import CodeSnapshot
from slurmtrain.runtime.job import lease
from slurmtrain.runtime.job.plan_file import read_plan


def main() -> None:
    """Print the directory for the submission that the first argument names, or say why there is none."""
    submission = SubmissionDir(Path(sys.argv[1]))
    try:
        plan = read_plan(submission.plan)
        if plan is None:
            raise SlurmtrainError(f"there is no plan at {submission.plan}; is the run directory visible on this node?")
        place = plan.working_directory(submission.run.code)
        if plan.code is not None:
            place = _make_copy(submission, plan.code, place)
    except SlurmtrainError as error:
        sys.exit(f"slurmtrain: {error}")
    # As it is on disk, whatever PYTHONIOENCODING says.
    sys.stdout.buffer.write(os.fsencode(place) + b"\n")


def _make_copy(submission: SubmissionDir, code: CodeSnapshot, place: Path) -> Path:
    """Make the run's copy of its code, and return where to run; a job whose run goes on elsewhere must not change it.

    The agents of such a job end at once.
    """
    run, number = submission.run, submission.number
    if lease.granted_to(run) == number and lease.final_state(run, number) is None:
        from slurmtrain.runtime.code.tree import make_tree

        make_tree(run, code)
    return place if place.is_dir() else run.path


if __name__ == "__main__":
    main()
