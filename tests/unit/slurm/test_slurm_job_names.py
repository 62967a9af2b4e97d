"""Whose job a job is, by its name: a person's other jobs may have the id of a run in theirs."""

from __future__ import annotations

import pytest

from slurmtrain.slurm.jobs import find_unclaimed_job, is_named_after, job_arrays, job_name
from slurmtrain.slurm.parse import Job


def jobs(**names: str) -> dict[str, Job]:
    return {job_id[1:]: Job(id=job_id[1:], name=name, state="RUNNING") for job_id, name in names.items()}


def test_a_run_finds_its_job_by_its_name_and_id() -> None:
    listed = jobs(j1="digits-other", j2="x-r1", j3="r1-x", j4="x-r1")
    assert find_unclaimed_job(listed, "r1", "x", {"2"}) == "4"
    assert find_unclaimed_job(listed, "r1", "x", {"2", "4"}) is None
    assert find_unclaimed_job({}, "r1", "x", set()) is None


@pytest.mark.parametrize(
    "name", ["eval-x-r1", "eval-r1", "-r1", "r1", "x-r1 ", "x-r1\n", "x|x-r1", "X-r1", "x-r1-more"]
)
def test_another_job_with_the_id_in_its_name_is_not_the_runs(name: str) -> None:
    assert find_unclaimed_job(jobs(j7=name), "r1", "x", set()) is None


def test_without_the_name_of_a_run_the_id_at_the_end_counts() -> None:
    [job] = jobs(j7=job_name("x", "r1")).values()
    assert is_named_after(job, "r1", "")
    assert not is_named_after(job, "r2", "")


@pytest.mark.parametrize("order", [1, -1])
def test_an_array_is_the_first_job_that_has_its_id_in_its_name(order: int) -> None:
    listed = [Job(id=job_id, name=name, state="RUNNING") for job_id, name in (
        ("9_0", "x-a1"), ("9_1", "x-a1"), ("10", "eval-a1"), ("11_0", "again-a1"), ("8_0", "y-a2")
    )]  # fmt: skip
    assert job_arrays({job.id: job for job in listed[::order]}) == {"a1": "9", "a2": "8"}
