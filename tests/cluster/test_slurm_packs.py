"""Packs on a real cluster: several runs of a sweep share a job, and each is a run of its own."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import SPOT, STEPS, digests, events, pid_of, preempt, until_trains
from helpers.expected_weights import expected_digests
from helpers.site import until
from test_slurm_kills import Killing, _launchers

from slurmtrain.model.run.layout import is_run_id

# How many runs share a job, of twice as many.
PACK = 4 if int(os.environ.get("TEST_PREEMPTIONS", "1")) > 1 else 2
# What does not change the weights.
SWEEP = ("--sweep", f"params.step_ms=range(50,{50 + 2 * PACK})", f"--pack={PACK}")
# How many seconds runs may take to complete after the loss of a node, or with several starts.
TO_THE_END_S = 400.0
# Submissions of packs and of other arrays have the process that calls sbatch in common.
WITHIN = ("slurmtrain", "slurmtrain.slurm.sbatch_process") if os.environ.get("TEST_KILLS") == "all" else ("slurmtrain",)


def submit_packs(site: ClusterSite, spec: Path, *arguments: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = site.json("submit", str(spec), *arguments, "--executor", "slurm")["runs"]
    return runs


def job_ids(runs: list[dict[str, Any]]) -> list[str]:
    return [run["job_id"] for run in runs]


def test_runs_of_a_preempted_pack_all_complete_with_the_weights_of_undisturbed_runs(
    site: ClusterSite, cluster: Cluster
) -> None:
    [undisturbed] = expected_digests(STEPS)
    spec = site.light(params={"steps": STEPS, "step_ms": 50}, slurm=SPOT, checkpoint={"every": {"steps": 10}})
    runs = submit_packs(site, spec, *SWEEP)
    [array] = {job.partition("_")[0] for job in job_ids(runs)}
    assert job_ids(runs) == [f"{array}_0"] * PACK + [f"{array}_1"] * PACK
    for run in runs:
        until_trains(site, run["id"], starts=1)
    preempt(cluster, lambda: all(events(site, run["id"], "end") for run in runs))
    site.call("wait", *(run["id"] for run in runs), code=None)
    shown = [site.show(run["id"]) for run in runs]
    assert [(run["state"], run["step"]) for run in shown] == [("completed", STEPS)] * 2 * PACK, [
        r["reason"] for r in shown
    ]
    for run in shown:
        assert [attempt["restart"] for attempt in run["attempts"]] == [0, 1]
        assert run["attempts"][0]["cause"] == "preempted"
        assert run["attempts"][0]["lost_steps"] == 0
        assert digests(site, run["id"]) == {undisturbed}


def test_a_crash_and_a_cancel_concern_one_run_of_a_pack(site: ClusterSite, cluster: Cluster) -> None:
    spec = site.light(
        params={"steps": 100000, "step_ms": 50}, checkpoint={"every": {"steps": 10}}, requeue={"restarts_in_place": 1}
    )
    runs = submit_packs(site, spec, "--sweep", "params.step_ms=50,51,52", "--pack=3")
    [job] = set(job_ids(runs))
    for run in runs:
        until_trains(site, run["id"], starts=1)
    first, second, third = runs
    os.kill(pid_of(site, first["id"], 0), signal.SIGKILL)
    until_trains(site, first["id"], starts=2)
    site.call("cancel", second["id"])
    assert site.status(second["id"])["state"] == "cancelled"
    assert cluster.state(job) == "RUNNING"
    # A crash that is not restarted in place waits for the next start of the job.
    os.kill(pid_of(site, first["id"], 0), signal.SIGKILL)
    site.until_state(first["id"], "requeued")
    assert site.status(third["id"])["state"] == "running"
    site.call("cancel", third["id"])
    until(lambda: cluster.restarts(job) == 1, "the requeue of the job")
    until_trains(site, first["id"], starts=3)
    site.call("cancel", first["id"])
    until(lambda: not cluster.jobs(), "the end of the job")
    assert {run["state"] for run in site.json("status")["runs"]} == {"cancelled"}


RARE = pytest.mark.skipif(PACK == 2, reason="takes minutes of waiting for Slurm: scripts/test --thorough runs it")


@RARE
def test_runs_of_a_pack_whose_node_dies_all_complete_without_the_blame(site: ClusterSite, cluster: Cluster) -> None:
    spec = site.light(params={"steps": STEPS, "step_ms": 50}, checkpoint={"every": {"steps": 10}})
    runs = submit_packs(site, spec, "--sweep", "params.step_ms=50,51", "--pack=2")
    for run in runs:
        until_trains(site, run["id"], starts=1)
        until(lambda run=run: events(site, run["id"], "saved"), "a checkpoint of each")
    [host] = {event["host"] for run in runs for event in events(site, run["id"], "agent")}
    cluster.script("kill-node", host.removeprefix("node"))
    try:
        site.call("wait", *(run["id"] for run in runs), code=None, patience_s=TO_THE_END_S)
    finally:
        cluster.script("start-node", host.removeprefix("node"))
    for run in (site.show(run["id"]) for run in runs):
        assert (run["state"], run["step"]) == ("completed", STEPS), run["reason"]
        first, second = run["attempts"]
        assert (first["cause"], first["job_id"], first["nodes"]) == ("node_fail", second["job_id"], [host])
        assert second["nodes"] != [host]


@pytest.mark.usefixtures("cluster")
def test_runs_of_a_pack_have_gpus_and_cores_of_their_own(site: ClusterSite) -> None:
    # All cores of this machine together: a job that has all that its processes may use divides them.
    cores = len(os.sched_getaffinity(0)) // 2
    variables = "os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS']"
    spec = site.commanding(
        f'python -c "import json, os; print(json.dumps([{variables}, sorted(os.sched_getaffinity(0))]))"',
        launcher="node",
        resources={"nodes": 1, "gpus_per_node": 1, "cpus_per_proc": cores, "time": "00:05:00"},
        params={"a": 1},
    )
    site.call("submit", str(spec), "--sweep", "params.a=1,2", "--pack=2", "--executor", "slurm", "--wait")
    runs = site.json("status")["runs"]
    assert len({run["job_id"] for run in runs}) == 1
    (gpu, threads, own), (other_gpu, _, others) = (json.loads(site.printed(run["id"])[-1]) for run in runs)
    assert {gpu, other_gpu} == {"0", "1"}
    assert threads == str(cores)
    assert len(own) == len(others) == cores
    assert not set(own) & set(others)


def test_a_run_that_is_cancelled_before_its_pack_starts_never_trains(site: ClusterSite, cluster: Cluster) -> None:
    spec = site.light(params={"steps": 20, "step_ms": 10}, slurm={"hold": True})
    runs = submit_packs(site, spec, "--sweep", "params.step_ms=10,11", "--pack=2")
    site.call("cancel", runs[0]["id"])
    assert site.status(runs[0]["id"])["state"] == "cancelled"
    cluster.slurm("scontrol", "release", runs[0]["job_id"])
    site.call("wait", runs[1]["id"])
    assert not events(site, runs[0]["id"], "agent")
    assert [run["state"] for run in site.json("status")["runs"]].count("cancelled") == 1


@pytest.mark.parametrize("within", WITHIN)
def test_a_killed_submit_leaves_one_place_in_a_pack_for_each_run(
    site: ClusterSite, cluster: Cluster, within: str
) -> None:
    killing = Killing(site)
    killing.spec.write_text(killing.spec.read_text() + "params: {a: 1}\nsweep: {params.a: [1, 2, 3, 4], pack: 2}\n")
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
    assert sorted(jobs) == sorted({run["job_id"] for run in listed})
    assert max(Counter(run["job_id"] for run in listed).values()) == 2
