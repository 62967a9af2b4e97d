"""Runs on a cluster while files are lost or deleted: a broken registry, a directory that is removed, ``delete``."""

from __future__ import annotations

import shutil
from pathlib import Path

from helpers.cluster import Cluster, ClusterSite
from helpers.site import until


def held(site: ClusterSite, name: str) -> Path:
    """A spec whose job waits for ever."""
    return site.spec(name, slurm={"hold": True}, resources={"nodes": 1, "time": "00:05:00"})


def test_cancelling_a_run_whose_directory_was_deleted_ends_its_job(site: ClusterSite, cluster: Cluster) -> None:
    """The first is known to the registry, the second only to Slurm, by the name of its job."""
    run_ids = [site.submit(held(site, name)) for name in ("first", "second")]
    for run_id in run_ids:
        shutil.rmtree(site.runs / run_id)
    cancelled = site.call("cancel", run_ids[0])
    assert "its job was ended; its directory was deleted" in cancelled.stderr
    assert run_ids[0] not in site.call("status", "--all").stdout
    assert [name.rpartition("-")[2] for name in cluster.jobs().values()] == [run_ids[1]]
    (site.runs / "registry.db").unlink()
    [run] = site.json("cancel", run_ids[1])["runs"]
    assert (run["id"], run["state"]) == (run_ids[1], "cancelled")
    assert cluster.jobs() == {}
    again = site.call("cancel", run_ids[1], code=2)
    assert f"there is no run '{run_ids[1]}' here, and it has no job or process" in again.stderr


def test_the_job_of_a_run_whose_directory_was_deleted_while_it_trains_ends_by_itself(
    site: ClusterSite, cluster: Cluster
) -> None:
    run_id = site.submit(site.steady(resources={"nodes": 2, "procs_per_node": 1, "time": "00:05:00"}))
    site.wait_for_lines(run_id, 2)
    while (site.runs / run_id).exists():
        shutil.rmtree(site.runs / run_id, ignore_errors=True)
    until(lambda: not cluster.jobs(), "the end of its job")
    assert run_id not in site.call("status", "--all").stdout


def test_a_sweep_is_cancelled_by_its_id_and_deleted_once_its_jobs_have_ended(
    site: ClusterSite, cluster: Cluster
) -> None:
    spec = site.spec(
        "held",
        slurm={"hold": True},
        resources={"nodes": 1, "time": "00:05:00"},
        params={"lr": 1},
        sweep={"params.lr": [1, 2]},
    )
    submitted = site.call("submit", str(spec), "--executor", "slurm")
    first, second = submitted.stdout.split()
    sweep = site.status(first)["sweep"]
    assert f"'slurmtrain status {sweep}' lists this sweep of 2 runs" in submitted.stderr
    assert f"'slurmtrain cancel {first}' ends it first" in site.call("delete", sweep, "-y", code=2).stderr
    site.call("cancel", sweep)
    assert cluster.jobs() == {}
    site.call("delete", sweep, "-y")
    assert not list((site.runs / first).rglob("submitit"))
    assert site.status(second)["reason"].startswith("its files were deleted")
    site.call("delete", sweep, "--forget", "-y")
    assert site.json("status")["runs"] == []
