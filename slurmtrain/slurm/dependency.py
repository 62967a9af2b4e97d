"""What jobs wait for, as sbatch's ``--dependency`` has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

# More elements of one array than this are named by the array itself: an option has its limits.
_MOST_ELEMENTS = 32


def describe_after(job_ids: Sequence[str]) -> str:
    """The dependency on the end of all of these jobs, however they end; empty without any.

    Not ``afterok``: it is never satisfied once a job has failed, also if its run goes on in another job, and it is
    satisfied by any job that Slurm has forgotten (seen on 22.05). A requeue, also of one element of an array, ends no
    job (seen on 22.05).
    """
    counts = Counter(job_id.partition("_")[0] for job_id in job_ids)
    named = [array if counts[array := job_id.partition("_")[0]] > _MOST_ELEMENTS else job_id for job_id in job_ids]
    return ":".join(["afterany", *dict.fromkeys(named)]) if named else ""


def join_dependencies(*dependencies: str) -> str:
    """The dependency on all of these; empty ones are ignored."""
    return ",".join(filter(None, dependencies))
