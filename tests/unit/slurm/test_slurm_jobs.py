"""The names of jobs: whose each is, and second jobs, which ask for more nodes of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fakeslurm import SlurmCommands, job

from slurmtrain.errors import SlurmDown
from slurmtrain.plugins.growth import Extension, SlurmNodes
from slurmtrain.runtime.environment.process_limits import soft_limit_of_ranks
from slurmtrain.slurm.parse import (
    Job,
    find_unclaimed_job,
    is_named_after,
    job_arrays,
    second_job_name,
    second_jobs,
)

RUN_ID = "0123456789"
RECORD = """JobId=7 JobName=digits-0123456789
   JobState=RUNNING Partition=spot Account=team QOS=normal
   NodeList=n[1-2] ExcNodeList=n[7-8] NumNodes=2
"""
NODES = SlurmNodes("digits", RUN_ID)


def jobs(**names: str) -> dict[str, Job]:
    return {job_id[1:]: Job(id=job_id[1:], name=name, state="RUNNING") for job_id, name in names.items()}


def test_a_run_finds_its_job_by_its_name_and_id() -> None:
    listed = jobs(j1="digits-other", j2="x-r1", j3="r1-x", j4="x-r1")
    assert find_unclaimed_job(listed, "r1", "x", {"2"}) == "4"
    assert find_unclaimed_job(listed, "r1", "x", {"2", "4"}) is None
    # Without the name of the run, the id at the end counts.
    assert [is_named_after(listed[each], "r1", "") for each in ("1", "2")] == [False, True]


@pytest.mark.parametrize(
    "name", ["eval-x-r1", "eval-r1", "-r1", "r1", "x-r1 ", "x-r1\n", "x|x-r1", "X-r1", "x-r1-more"]
)
def test_another_job_with_the_id_in_its_name_is_not_the_runs(name: str) -> None:
    assert find_unclaimed_job(jobs(j7=name), "r1", "x", set()) is None


@pytest.mark.parametrize("order", [1, -1])
def test_an_array_is_the_first_job_that_has_its_id_in_its_name(order: int) -> None:
    listed = [Job(id=job_id, name=name, state="RUNNING") for job_id, name in (
        ("9_0", "x-a1"), ("9_1", "x-a1"), ("10", "eval-a1"), ("11_0", "again-a1"), ("8_0", "y-a2")
    )]  # fmt: skip
    assert job_arrays({job.id: job for job in listed[::order]}) == {"a1": "9", "a2": "8"}


# --- second jobs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    commands = SlurmCommands(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{commands.on_path()}:/usr/bin:/bin")
    commands.replies("scontrol", RECORD)
    commands.replies("sbatch", "8;cluster\n")
    commands.replies("scancel")
    return commands


def test_a_second_job_is_like_the_first_but_gets_none_of_its_nodes(
    slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert NODES.request("7", Extension("7.0", 2), 3, 601.0, ["n3"]) == "8"
    [call] = slurm.calls("sbatch")
    assert call.args == [
        "--parsable", "--partition=spot", "--account=team", "--qos=normal", f"--job-name=digits-{RUN_ID}-more",
        "--nodes=1-3", "--exclude=n[1-3,7-8]", "--no-requeue", "--dependency=after:7",
        "--export=ALL,SLURMTRAIN_EXTENDS=7.0:2", "--time=11",
    ]  # fmt: skip
    # Slurm would hand them on to the second job.
    assert not {"SLURM_JOB_ID", "SLURM_NTASKS"} & call.env.keys()
    assert [call.args for call in slurm.calls("scontrol")] == [
        ["write", "batch_script", "7", "-"],
        ["show", "job", "7"],
    ]


def test_a_second_job_has_the_locale_of_its_agent_and_no_formats_of_answers(
    slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    NODES.request("7", Extension("7.0", 2), 1, None, [])
    [call] = slurm.calls("sbatch")
    assert (call.env["LC_ALL"], call.env["LANG"]) == ("de_DE.UTF-8", "de_DE.UTF-8")
    assert not {"SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN"} & call.env.keys()
    monkeypatch.delenv("LC_ALL")
    NODES.request("7", Extension("7.0", 2), 1, None, [])
    assert "LC_ALL" not in slurm.calls("sbatch")[-1].env


def test_the_second_job_of_an_element_of_an_array_is_one_with_the_same_index(slurm: SlurmCommands) -> None:
    assert NODES.request("12_3", Extension("12_3.0", 2), 1, None, []) == "8_3"
    [call] = slurm.calls("sbatch")
    assert not [option for option in call.args if option.startswith("--time")]
    assert {"--nodes=1", "--array=3", "--dependency=after:12_3", "--export=ALL,SLURMTRAIN_EXTENDS=12_3.0:2"} <= set(
        call.args
    )


def test_a_second_job_may_open_as_many_files_as_the_first(slurm: SlurmCommands, tmp_path: Path) -> None:
    sbatch = slurm.path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\nulimit -Sn > {tmp_path}/limit\necho 8\n")
    NODES.request("7", Extension("7.0", 2), 1, None, [])
    assert (tmp_path / "limit").read_text().split() == [str(soft_limit_of_ranks())]


def test_a_refusal_says_why(slurm: SlurmCommands) -> None:
    slurm.fails("sbatch", "sbatch: error: Batch job submission failed: Invalid account\n")
    with pytest.raises(SlurmDown, match="Batch job submission failed: Invalid account"):
        NODES.request("7", Extension("7.0", 2), 1, None, [])


def test_all_second_jobs_of_a_run_are_cancelled_by_their_name(slurm: SlurmCommands) -> None:
    NODES.cancel_all()
    assert [call.args for call in slurm.calls("scancel")] == [["--me", f"--name=digits-{RUN_ID}-more"]]


def test_a_second_job_is_known_by_its_name_and_never_taken_for_the_job_of_a_run() -> None:
    name = second_job_name("my-net", RUN_ID)
    assert not name.endswith(f"-{RUN_ID}")
    own, second, other = job("RUNNING"), job("PENDING", "8"), job("PENDING", "9")
    named = {own.id: own.name, second.id: name, other.id: "buy-more"}
    jobs = [job("PENDING", job_id, name=named[job_id]) for job_id in named]
    assert {run_id: [each.id for each in of_run] for run_id, of_run in second_jobs(jobs).items()} == {
        RUN_ID: ["8"], "buy": ["9"],
    }  # fmt: skip
