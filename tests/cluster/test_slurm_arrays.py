"""Sweeps on a real cluster: one job array, whose elements are runs of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import SPOT, STEPS, digests, events, preempt, until_trains
from helpers.site import ONE_PROCESS, until
from test_slurm_kills import Killing, _launchers

from slurmtrain.model.run.layout import is_run_id

# What does not change the weights.
SWEEP = ("--sweep", "params.step_ms=50,51,52,53")
OVER = ("completed", "failed", "lost", "cancelled")


def submit_sweep(site: ClusterSite, spec: Path, *arguments: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = site.json("submit", str(spec), *(arguments or SWEEP), "--executor", "slurm")["runs"]
    return runs


def restarts(cluster: Cluster, runs: list[dict[str, Any]]) -> list[int]:
    return [cluster.restarts(run["job_id"]) for run in runs]


def test_elements_that_are_preempted_complete_with_the_weights_of_an_undisturbed_run(
    site: ClusterSite, cluster: Cluster, undisturbed: str
) -> None:
    spec = site.light(
        params={"steps": STEPS, "step_ms": 50},
        resources={**ONE_PROCESS, "nodes": 2},
        slurm=SPOT,
        checkpoint={"every": {"steps": 10}},
    )
    runs = submit_sweep(site, spec)
    [array] = {run["job_id"].partition("_")[0] for run in runs}
    assert [run["job_id"] for run in runs] == [f"{array}_{index}" for index in range(4)]
    for run in runs:
        until_trains(site, run["id"], starts=1)
    preempt(cluster, lambda: all(events(site, run["id"], "end") for run in runs))
    site.call("wait", *(run["id"] for run in runs), code=None)
    shown = [site.show(run["id"]) for run in runs]
    assert [(run["state"], run["step"]) for run in shown] == [("completed", STEPS)] * 4, [r["reason"] for r in shown]
    for run in shown:
        assert [attempt["job_id"] for attempt in run["attempts"]] == [run["job_id"]] * 2
        assert [attempt["restart"] for attempt in run["attempts"]] == [0, 1]
        assert run["attempts"][0]["cause"] == "preempted"
        assert digests(site, run["id"]) == {undisturbed}
        assert f"{run['job_id']}_0_log.out" in os.listdir(site.runs / run["id"] / "submissions" / "1" / "submitit")


def test_a_requeue_and_a_cancel_concern_one_element(site: ClusterSite, cluster: Cluster) -> None:
    spec = site.light(params={"steps": 100000, "step_ms": 50}, checkpoint={"every": {"steps": 10}})
    runs = submit_sweep(site, spec)
    first, second, *others = runs
    for run in runs:
        until_trains(site, run["id"], starts=1)
    cluster.slurm("scontrol", "requeue", first["job_id"])
    until(lambda: cluster.restarts(first["job_id"]) == 1, "the requeue")
    site.call("cancel", second["id"])
    assert site.status(second["id"])["state"] == "cancelled"
    assert restarts(cluster, others) == [0, 0]
    until_trains(site, first["id"], starts=2)
    states = {run["id"]: run["state"] for run in site.json("status")["runs"]}
    assert [states[run["id"]] for run in runs] == ["running", "cancelled", "running", "running"]
    site.call("cancel", runs[0]["sweep"])
    until(lambda: not cluster.jobs(), "the end of all elements")
    assert {run["state"] for run in site.json("status")["runs"]} == {"cancelled"}


@pytest.mark.parametrize("within", ["slurmtrain", "slurmtrain.slurm.launcher"])
def test_a_killed_submit_leaves_one_element_a_run(site: ClusterSite, cluster: Cluster, within: str) -> None:
    killing = Killing(site)
    killing.spec.write_text(killing.spec.read_text() + "params: {a: 1}\nsweep: {params.a: [1, 2, 3]}\n")
    killing.submit_dying(within=within)
    assert killing.submit_dying(within=within) == 0
    effects = killing.effects()
    for point in killing.points(effects):
        code = killing.submit_dying(within=within, at=point)
        assert code == (-9 if within == "slurmtrain" else 1), (point, effects[point - 1])
    until(lambda: not _launchers(site.runs), "the end of all launchers")
    killing.settle()
    listed = killing.site.json("status")["runs"]
    assert sorted(run["id"] for run in listed) == sorted(filter(is_run_id, os.listdir(site.runs)))
    assert {run["state"] for run in listed} == {"pending"}
    jobs = cluster.slurm("squeue", "--noheader", "--array", "--format=%i").split()
    assert sorted(jobs) == sorted(run["job_id"] for run in listed)
