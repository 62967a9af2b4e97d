"""Runs that get more nodes while they train."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from helpers.cluster import NODES, Cluster, ClusterSite
from helpers.cluster_runs import events, preempt
from helpers.gpt import TOLERANCE, logged_losses
from helpers.rare import rare
from helpers.site import PROJECT, until

STEPS = 200


def expected_losses(site: ClusterSite, steps: int) -> list[float]:
    """The losses of one process, with the Python of the nodes, whose standard library is the text."""
    program = f"import json; from helpers.gpt import losses_of_one_process as f; print(json.dumps(f({steps})))"
    environment = {**os.environ, "PYTHONPATH": f"{PROJECT / 'tests'}{os.pathsep}{PROJECT}"}
    printed = subprocess.run([site.python, "-c", program], env=environment, capture_output=True, text=True, check=True)
    losses: list[float] = json.loads(printed.stdout)
    return losses


def blocked(cluster: Cluster, nodes: int) -> str:
    """A job that takes so many whole nodes; returns its id."""
    options = ("--partition=spot", "--exclusive", f"--nodes={nodes}", "--time=20", "--output=/dev/null")
    job = cluster.slurm("sbatch", "--parsable", *options, "--wrap=sleep 1000").strip()
    until(lambda: cluster.state(job) == "RUNNING", "the job that takes nodes")
    return job


def submit(site: ClusterSite, steps: int, most: int = 2) -> str:
    spec = site.person.code / "experiments" / "gpt" / "elastic.yaml"
    few = (f"params.steps={steps}", "+params.seconds_per_step=0.2", "tracking.mlflow.enabled=false")
    resources = (f"resources.nodes={{min: 1, max: {most}}}", "resources.mem=null", "resources.time=00:10:00")
    return site.submit(spec, *few, *resources, f"workdir={site.person.code}", "+slurm.partition=spot")


def jobs_of(cluster: Cluster, run_id: str) -> list[str]:
    """The ids of all jobs of a run that have not ended, also its second one."""
    rows = cluster.slurm("squeue", "--noheader", "--format=%i|%j|%T").split("\n")
    live = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
    return [row.split("|")[0] for row in rows if run_id in row and row.split("|")[2] in live]


@rare
def test_a_run_grows_as_nodes_get_free_and_is_preempted_then_with_the_losses_of_one_process(
    site: ClusterSite, cluster: Cluster
) -> None:
    blocker = blocked(cluster, NODES - 1)
    run_id = submit(site, STEPS)
    site.until_step(run_id, 4)
    job = site.job(run_id)
    until(lambda: events(site, run_id, "nodes_requested"), "the request for more nodes")
    [request] = events(site, run_id, "nodes_requested")
    assert (request["nodes"], cluster.state(request["job_id"])) == (1, "PENDING")
    cluster.slurm("scancel", blocker)
    # Rank 0 writes it whenever it begins to train.
    until(lambda: len(events(site, run_id, "total")) == 2, "ranks on two nodes")
    [joined] = events(site, run_id, "nodes_joined")
    assert (joined["job_id"], joined["nodes"]) == (request["job_id"], 2)
    attempt = site.show(run_id)["attempts"][0]
    assert (len(set(attempt["nodes"])), attempt["lost_steps"] or 0, attempt["state"]) == (2, 0, "running")
    grown_at = events(site, run_id, "restored")[-1]["step"]
    site.until_step(run_id, grown_at + 4)
    preempt(cluster, lambda: cluster.restarts(job) == 1)
    site.until_state(run_id, "completed")
    run = site.show(run_id)
    assert (run["step"], run["lost_steps"]) == (STEPS, 0)
    steps, losses = zip(*logged_losses(site.runs / run_id), strict=True)
    assert list(steps) == list(range(1, STEPS + 1))
    assert list(losses) == pytest.approx(expected_losses(site, STEPS), rel=TOLERANCE)
    until(lambda: not jobs_of(cluster, run_id), "the end of the second job")
