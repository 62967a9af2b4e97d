"""A link of the user's own to the log of each attempt: the key ``log``."""

from __future__ import annotations

import contextlib
import getpass
import os
from collections.abc import Mapping
from pathlib import Path

from slurmtrain.errors import PathError
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.slurm_options import fill_log
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.system.files import describe_os_error, write_atomically
from slurmtrain.system.inherited import expand_home
from slurmtrain.system.owned_files import read_readable


def log_facts(name: str, job_id: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The values of a pattern's letters.

    Args:
        name: The spec's name: the job's name ends with the run's id.
        job_id: The job's, of an element of an array ``<array>_<index>``.
        environ: The variables that Slurm gives the job.
    """
    array, _, index = job_id.partition("_")
    user = ""
    with contextlib.suppress(KeyError, OSError):
        user = getpass.getuser()
    return {
        "x": name,
        # Of an element, Slurm has another number for it alone.
        "j": environ.get("SLURM_JOB_ID", job_id) if index else job_id,
        "A": array,
        "a": index or "0",
        "u": user,
        "N": os.uname().nodename.partition(".")[0],
        "n": "0",
        "t": "0",
    }


def link_log(plan: Plan, attempt: AttemptDir, job_id: str, log: Path) -> str:
    """Let the link that the ``plan`` asks for lead to a ``log``; returns why it does not, or nothing.

    A file, and the link of another run, are left as they are.

    Args:
        plan: The run's.
        attempt: The attempt, which notes where the link is: it goes with the run.
        job_id: The id of its job.
        log: The log.
    """
    if plan.spec.log is None:
        return ""
    try:
        path = Path(plan.workdir, expand_home(fill_log(plan.spec.log, log_facts(plan.spec.name, job_id, os.environ))))
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.readlink() if path.is_symlink() else None
        if target is None and path.exists():
            return f"log: {path} is there already, and stays as it is; the log is {log}"
        if target is not None and not target.is_relative_to(attempt.run.path):
            return f"log: {path} leads to {target}, which is not this run's; the log is {log}"
        write_atomically(attempt.log_link, os.fsencode(path), private=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.unlink(missing_ok=True)
        beside.symlink_to(log)
        beside.replace(path)
    except (OSError, PathError) as error:
        why = describe_os_error(error) if isinstance(error, OSError) else str(error)
        return f"log: {plan.spec.log}: {why}; the log is {log}"
    return ""


def unlink_logs(run: RunDir) -> None:
    """Remove the links that lead to logs of a run, which is deleted.

    Args:
        run: Its directory.
    """
    for note in run.attempts.glob("*/log-link"):
        with contextlib.suppress(OSError, PathError):
            path = Path(os.fsdecode(read_readable(note)))
            # The runs root may have been renamed meanwhile.
            if path.is_symlink() and run.id in path.readlink().parts:
                path.unlink()
