"""The names and the ids of jobs, and what jobs wait for.

Names carry the id of their run, by which the job of a killed submission is found. A person's other jobs may carry it
too, as ``eval-digits-<id>`` does: what is known of the name counts whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurmtrain.slurm.parse import Job

# More elements of one array than this are named by the array itself: an option has its limits.
_MOST_ELEMENTS = 32
# The end of the names of second jobs, which wait for more nodes of a run (plugins/growth). They do not end with its id,
# unlike the names of its own jobs, so that none is ever taken for the job of a run.
_SECOND = "-more"


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
        arrays[word] = min(arrays.get(word, array), array, key=lambda job_id: (len(job_id), job_id))
    return arrays


def second_job_name(name: str, run_id: str) -> str:
    """The name of the second jobs of a run with this ``name`` and id."""
    return f"{job_name(name, run_id)}{_SECOND}"


def second_jobs(jobs: Collection[Job], name: str = "") -> dict[str, list[Job]]:
    """The second jobs among ``jobs``, by the ids of the runs that they are for.

    Args:
        jobs: a person's jobs.
        name: the run's name, if there is only one; empty: any run's.
    """
    result: dict[str, list[Job]] = {}
    for job in jobs:
        first, _, run_id = job.name.removesuffix(_SECOND).rpartition("-")
        if job.name.endswith(_SECOND) and name in ("", first):
            result.setdefault(run_id, []).append(job)
    return result


def describe_after(job_ids: Sequence[str]) -> str:
    """The dependency on the end of all of these jobs, however they end; empty without any.

    Not ``afterok``: it is never satisfied once a job has failed, also if its run goes on in another job, and it is
    satisfied by any job that Slurm has forgotten (seen on 22.05). A requeue, also of one element of an array, ends no
    job (seen on 22.05).
    """
    counts = Counter(job_id.partition("_")[0] for job_id in job_ids)
    named = [array if counts[array := job_id.partition("_")[0]] > _MOST_ELEMENTS else job_id for job_id in job_ids]
    return ":".join(["afterany", *dict.fromkeys(named)]) if named else ""


def join_elements(job_ids: Iterable[str]) -> list[str]:
    """The same jobs as arguments of Slurm's commands: several elements of an array are one, ``7_[0-3,5]``."""
    arrays: dict[str, list[int]] = {}
    for job_id in job_ids:
        array, _, index = job_id.partition("_")
        arrays.setdefault(array, []).extend([int(index)] if index.isdecimal() else [])
    return [
        array if not indices else f"{array}_{indices[0]}" if len(indices) == 1 else f"{array}_[{_ranges(indices)}]"
        for array, indices in arrays.items()
    ]


def _ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as ``0-3,5``."""
    present = set(numbers)
    starts = sorted(number for number in present if number - 1 not in present)
    ends = sorted(number for number in present if number + 1 not in present)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
