"""Heterogeneous jobs: runs whose nodes differ, as components of one job of Slurm."""

from __future__ import annotations

import pytest
from helpers.cluster import NODES, Cluster, ClusterSite
from helpers.cluster_runs import events, preempt
from helpers.gpt import TOLERANCE, logged_losses, losses_with
from helpers.site import until

STEPS = 24
# The node of component 0 comes last by its name.
FIRST, SECOND = f"node{NODES - 1}", "node0"
COMPONENTS = (
    f"[{{nodes: 1, procs_per_node: 1, slurm: {{nodelist: {FIRST}}}}}, "
    f"{{nodes: 1, procs_per_node: 2, gpus_per_node: 2, slurm: {{nodelist: {SECOND}}}}}]"
)


def submit(site: ClusterSite, steps: int, *more: str) -> str:
    """Submit the experiment, with one rank on a node without GPUs and two on another one; returns the run's id."""
    spec = site.person.code / "experiments" / "gpt" / "components.yaml"
    few = (f"params.steps={steps}", "+params.seconds_per_step=0.2", "tracking.mlflow.enabled=false")
    resources = ("resources.mem=null", "resources.time=00:10:00", f"resources.components={COMPONENTS}")
    return site.submit(spec, *few, *resources, f"workdir={site.person.code}", "+slurm.partition=spot", *more)


def components_of(cluster: Cluster, run_id: str) -> set[str]:
    """The components of a run's jobs that have not ended, as squeue names them."""
    return {job for job, name in cluster.jobs().items() if name.endswith(f"-{run_id}")}


def test_a_run_over_two_components_is_preempted_and_goes_on_with_the_losses_of_one_process(
    site: ClusterSite, cluster: Cluster
) -> None:
    run_id = submit(site, STEPS)
    site.until_step(run_id, 4)
    job = site.job(run_id)
    assert job.isdecimal()
    assert components_of(cluster, run_id) == {f"{job}+0", f"{job}+1"}
    running = site.status(run_id)
    assert (running["state"], running["nodes"]) == ("running", [FIRST, SECOND])
    preempt(cluster, lambda: cluster.restarts(job) >= 1)
    site.until_state(run_id, "completed")
    run = site.show(run_id)
    assert (run["step"], run["lost_steps"]) == (STEPS, 0)
    assert [each["cause"] for each in run["attempts"]] == ["preempted", "completed"]
    assert [each["nodes"] for each in run["attempts"]] == [[FIRST, SECOND]] * 2
    # Each node knows its own component's partition, which decides what it costs.
    assert {event["partition"] for event in events(site, run_id, "agent")} == {"spot"}
    started = {tuple(sorted(event["processes"])) for event in events(site, run_id, "workers")}
    assert started == {("0",), ("1", "2")}
    steps, losses = zip(*logged_losses(site.runs / run_id), strict=True)
    assert list(steps) == list(range(1, STEPS + 1))
    assert list(losses) == pytest.approx(losses_with(site.python, STEPS), rel=TOLERANCE)
    assert not components_of(cluster, run_id)


def test_a_run_over_components_that_waits_is_cancelled_whole(site: ClusterSite, cluster: Cluster) -> None:
    run_id = submit(site, STEPS, "+slurm.begin=now+1hour")
    assert site.status(run_id)["state"] == "pending"
    job = site.job(run_id)
    assert components_of(cluster, run_id) == {f"{job}+0", f"{job}+1"}
    site.call("cancel", run_id)
    site.until_state(run_id, "cancelled")
    assert not components_of(cluster, run_id)


def test_a_site_without_steps_over_components_refuses_the_run(site: ClusterSite, cluster: Cluster) -> None:
    spec = site.light(resources={"components": [{"nodes": 1}, {"nodes": 1}]})
    with cluster.configured("SchedulerParameters=bf_interval=1,disable_hetjob_steps"):
        refused = site.call("submit", str(spec), "--executor", "slurm", code=2)
    assert "this site allows no job step over several components" in refused.stderr
    assert cluster.jobs() == {}


def test_a_run_over_components_is_cancelled_and_resumed_with_other_ones(site: ClusterSite, cluster: Cluster) -> None:
    run_id = submit(site, STEPS)
    site.until_step(run_id, 4)
    site.call("cancel", run_id)
    site.until_state(run_id, "cancelled")
    until(lambda: not components_of(cluster, run_id), "the end of both components")
    other = "[{nodes: 1, procs_per_node: 2}, {nodes: 2, procs_per_node: 1}]"
    site.call("resume", run_id, f"resources.components={other}")
    site.until_state(run_id, "completed")
    run = site.show(run_id)
    assert (run["step"], run["lost_steps"], len(set(run["attempts"][-1]["nodes"]))) == (STEPS, 0, 3)
    steps, losses = zip(*logged_losses(site.runs / run_id), strict=True)
    assert list(losses) == pytest.approx(losses_with(site.python, len(steps)), rel=TOLERANCE)
