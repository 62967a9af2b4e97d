"""The names of second jobs, which wait for more nodes of a run (:mod:`.more_nodes`): they carry the run's id.

They do not end with it, as those of the run's own jobs do, so that none is ever taken for the job of a run.
"""

from __future__ import annotations

from collections.abc import Collection

from slurmtrain.slurm.parse import Job

_SUFFIX = "-more"


def job_name(name: str, run_id: str) -> str:
    """The name of the second jobs of a run with this ``name`` and id."""
    return f"{name}-{run_id}{_SUFFIX}"


def second_jobs(jobs: Collection[Job]) -> dict[str, list[Job]]:
    """The second jobs among these ``jobs``, by the ids of the runs that they are for."""
    result: dict[str, list[Job]] = {}
    for job in jobs:
        if job.name.endswith(_SUFFIX):
            result.setdefault(job.name.removesuffix(_SUFFIX).rpartition("-")[2], []).append(job)
    return result
