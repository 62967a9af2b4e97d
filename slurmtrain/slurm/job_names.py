"""The names of jobs: they carry the id of their run, by which the job of a killed submission is found.

A person's other jobs may carry it too, as ``eval-digits-<id>`` does: what is known of the name counts whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from slurmtrain.slurm.parse import Job


def job_name(name: str, identifier: str) -> str:
    """The name of the jobs of a run, or of a job array.

    Args:
        name: the spec's name.
        identifier: the id of the run, or of the array.
    """
    return f"{name}-{identifier}"


def is_named_after(job: Job, run_id: str, name: str) -> bool:
    """Whether a job has the name of a run's jobs.

    Args:
        job: the job.
        run_id: the run.
        name: the run's; empty: it is unknown, and the job's name ends with the id.
    """
    return job.name == job_name(name, run_id) if name else job.name.endswith(f"-{run_id}")


def find_unclaimed_job(jobs: Mapping[str, Job], run_id: str, name: str, claimed: Collection[str]) -> str | None:
    """The id of a job that has the name of a run's jobs, and belongs to no known submission.

    Args:
        jobs: the jobs to search, by id.
        run_id: the run.
        name: its name.
        claimed: ids of jobs that belong to the run's submissions.
    """
    unclaimed = (job.id for job in jobs.values() if is_named_after(job, run_id, name) and job.id not in claimed)
    return next(unclaimed, None)


def job_arrays(jobs: Mapping[str, Job]) -> dict[str, str]:
    """The ids of job arrays by the last word of their names, which in slurmtrain's arrays is an id of its own.

    Args:
        jobs: jobs, by id; elements that ended before they began share one, with the array's id.
    """
    arrays: dict[str, str] = {}
    for job in jobs.values():
        word, array = job.name.rpartition("-")[2], job.id.partition("_")[0]
        # Whatever else has this id in its name was submitted later: nobody knew it before.
        arrays[word] = min(arrays.get(word, array), array, key=_in_order)
    return arrays


def _in_order(job_id: str) -> tuple[int, str]:
    return len(job_id), job_id
