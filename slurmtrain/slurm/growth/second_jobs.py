"""The names of second jobs, which wait for more nodes of a run (:mod:`.more_nodes`): they carry the run's id.

They do not end with it, unlike the names of the run's own jobs, so that none is ever taken for the job of a run.
"""

from __future__ import annotations

from collections.abc import Collection

from slurmtrain.slurm.parse import Job

_SUFFIX = "-more"


def job_name(name: str, run_id: str) -> str:
    """The name of the second jobs of a run with this ``name`` and id."""
    return f"{name}-{run_id}{_SUFFIX}"


def second_jobs(jobs: Collection[Job], name: str = "") -> dict[str, list[Job]]:
    """The second jobs among ``jobs``, by the ids of the runs that they are for.

    Args:
        jobs: a person's jobs.
        name: the run's name, if there is only one; empty: any run's.
    """
    result: dict[str, list[Job]] = {}
    for job in jobs:
        first, _, run_id = job.name.removesuffix(_SUFFIX).rpartition("-")
        if job.name.endswith(_SUFFIX) and name in ("", first):
            result.setdefault(run_id, []).append(job)
    return result
