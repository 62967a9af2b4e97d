"""Ranks under Nsight Systems: ``nsys profile`` starts the command, and writes a report when it has ended.

Stop signals go past it, to the command: nsys itself would end its recording, and then the command, without waiting for
a save (:class:`~.workers.RankProcesses`). It ends with the command's exit code.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from slurmtrain.errors import LaunchError
from slurmtrain.model.experiment.sections import NSYS
from slurmtrain.model.run.layout import NSYS_REPORTS, AttemptDir
from slurmtrain.runtime.environment import variables
from slurmtrain.system.files import make_directory


def under_nsys(words: Sequence[str], attempt: AttemptDir, *, per_node: bool) -> list[str]:
    """A command under nsys, unless the run has a report already: an attempt after an interruption needs no second one.

    Args:
        words: The command.
        attempt: Where the reports go.
        per_node: Whether the command is started once per node; otherwise it is for each rank.

    Raises:
        LaunchError: There is no nsys on this node.
        PathError: There can be no folder for reports.
    """
    # Of an earlier attempt: one of this attempt may be of a node that is ahead.
    reports = attempt.run.attempts.glob(f"*/{attempt.profiles.name}/{NSYS_REPORTS}")
    if any(report.parent.parent.name != attempt.path.name for report in reports):
        return list(words)
    if shutil.which(NSYS) is None:
        raise LaunchError(
            f"'profile: nsys' needs {NSYS} (NVIDIA Nsight Systems), which is not on PATH on this node; load it in "
            "'setup', such as `module load nsight-systems`, or remove 'profile'"
        )
    make_directory(attempt.profiles, private=True)
    # nsys itself puts in the value of the variable.
    name = f"node-%q{{{variables.NODE}}}" if per_node else "rank-%q{RANK}"
    options = ("-o", str(attempt.profiles / name), "--force-overwrite=true", "--kill=none", "--wait=primary")
    return [NSYS, "profile", *options, *words]


def is_nsys(program: str) -> bool:
    """Whether a program, by its file name, is nsys or a part of it that starts what is profiled."""
    return program == NSYS or program.startswith(f"{NSYS}-")
