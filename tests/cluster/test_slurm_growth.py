"""Runs that get more nodes while they train."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from helpers.cluster import NODES, Cluster, ClusterSite
from helpers.cluster_runs import events, preempt, watching
from helpers.gpt import TOLERANCE, logged_losses, losses_with
from helpers.rare import rare
from helpers.site import PATIENCE_S, seldom, until

STEPS = 200
# How often the processes of a node are killed while a run grows.
KILLS = int(os.environ.get("TEST_GROWTH_KILLS", "2"))


def blocked(cluster: Cluster, nodes: int) -> str:
    """A job that takes so many whole nodes; returns its id."""
    options = ("--partition=spot", "--exclusive", f"--nodes={nodes}", "--time=20", "--output=/dev/null")
    job = cluster.slurm("sbatch", "--parsable", *options, "--wrap=sleep 1000").strip()
    until(lambda: cluster.state(job) == "RUNNING", "the job that takes nodes")
    return job


def submit(site: ClusterSite, steps: int, *more: str) -> str:
    spec = site.person.code / "experiments" / "gpt" / "elastic.yaml"
    few = (f"params.steps={steps}", "+params.seconds_per_step=0.2", "tracking.mlflow.enabled=false")
    resources = ("resources.nodes={min: 1, max: 2}", "resources.mem=null", "resources.time=00:10:00")
    return site.submit(spec, *few, *resources, f"workdir={site.person.code}", "+slurm.partition=spot", *more)


def submit_on_one_node(site: ClusterSite, cluster: Cluster, steps: int) -> str:
    """A run that has begun on one of two nodes, of which the other is free now; returns its id."""
    blocker = blocked(cluster, NODES - 1)
    run_id = submit(site, steps)
    site.until_step(run_id, 4)
    cluster.slurm("scancel", blocker)
    return run_id


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
    assert list(losses) == pytest.approx(losses_with(site.python, STEPS), rel=TOLERANCE)
    until(lambda: not jobs_of(cluster, run_id), "the end of the second job")


@rare
def test_a_run_goes_on_without_a_step_lost_when_its_second_job_is_cancelled_and_ends_with_it(
    site: ClusterSite, cluster: Cluster
) -> None:
    run_id = submit_on_one_node(site, cluster, STEPS)
    until(lambda: events(site, run_id, "nodes_joined"), "a second node")
    second = events(site, run_id, "nodes_joined")[0]["job_id"]
    until(lambda: len(events(site, run_id, "total")) == 2, "ranks on two nodes")
    cluster.slurm("scancel", second)
    site.until_state(run_id, "completed")
    [left] = events(site, run_id, "nodes_left")
    assert left["job_id"] == second
    run = site.show(run_id)
    assert (run["step"], run["lost_steps"], len(run["attempts"])) == (STEPS, 0, 1)
    steps, losses = zip(*logged_losses(site.runs / run_id), strict=True)
    assert list(steps) == list(range(1, STEPS + 1))
    assert list(losses) == pytest.approx(losses_with(site.python, STEPS), rel=TOLERANCE)
    until(lambda: not jobs_of(cluster, run_id), "the end of all jobs")


@rare
def test_no_job_is_left_of_a_run_that_is_cancelled_or_loses_its_node_0_while_it_waits_for_more_nodes(
    site: ClusterSite, cluster: Cluster
) -> None:
    blocker = blocked(cluster, NODES - 1)
    run_id = submit(site, STEPS)
    until(lambda: events(site, run_id, "nodes_requested"), "the second job")
    first = events(site, run_id, "nodes_requested")[0]["job_id"]
    [agent] = events(site, run_id, "agent")
    # Slurm takes the end of its task for that of the job, which 'sync' starts again.
    os.kill(agent["process"]["pid"], signal.SIGKILL)
    until(lambda: site.call("sync") is not None and first not in jobs_of(cluster, run_id), "the end of the second job")
    until(lambda: len(events(site, run_id, "nodes_requested")) == 2, "the request of the next attempt")
    until(lambda: len(jobs_of(cluster, run_id)) == 2, "the second job again")
    site.call("cancel", run_id)
    until(lambda: not jobs_of(cluster, run_id), "the end of all jobs")
    cluster.slurm("scancel", blocker)


@rare
def test_a_run_goes_on_alone_if_the_node_that_could_join_is_unfit(site: ClusterSite, cluster: Cluster) -> None:
    blocker = blocked(cluster, NODES - 2)
    names = cluster.slurm("squeue", "--noheader", f"--jobs={blocker}", "--format=%N").strip()
    blocked_hosts = cluster.slurm("scontrol", "show", "hostnames", names).split()
    last = max(node for node in range(NODES) if f"node{node}" not in blocked_hosts)
    options = ("--partition=spot", "--exclusive", f"--nodelist=node{last}", "--time=20", "--output=/dev/null")
    second = cluster.slurm("sbatch", "--parsable", *options, "--wrap=sleep 1000").strip()
    until(lambda: cluster.state(second) == "RUNNING", "the job that takes a node")
    with cluster.wrong_clock(last, 5):
        run_id = submit(site, 100)
        site.until_step(run_id, 4)
        cluster.slurm("scancel", second)
        site.until_state(run_id, "completed")
    [left] = events(site, run_id, "nodes_left")
    assert (left["hosts"], left["why"]) == ([f"node{last}"], "the preflight with the new nodes failed")
    run = site.show(run_id)
    assert (run["step"], run["lost_steps"], len(run["attempts"])) == (100, 0, 1)
    until(lambda: not jobs_of(cluster, run_id), "the end of all jobs")
    cluster.slurm("scancel", blocker)


# Slurm starts a requeued job after two minutes.
@rare
@pytest.mark.timeout(600 * (KILLS + 1))
def test_a_run_that_grows_completes_though_all_processes_of_a_node_are_killed_at_any_moment(
    site: ClusterSite, cluster: Cluster
) -> None:
    steps, chance = STEPS * (KILLS + 1), random.Random(int(os.environ.get("TEST_CHAOS_SEED", "1")))
    others, alone = blocked(cluster, NODES - 2), blocked(cluster, 1)
    patient = "requeue={max_failures: 50, max_node_failures: 50, restarts_in_place: 5, backoff_s: 0}"
    requests, moments = 0, []
    with watching(site):
        run_id = submit(site, steps, patient, "checkpoint.every={steps: 20}")
        over = seldom(lambda: site.status(run_id)["state"] in ("completed", "failed", "cancelled", "lost"))
        for _ in range(KILLS):
            until(
                lambda requests=requests: len(events(site, run_id, "nodes_requested")) > requests or over(),
                f"a request after {moments}",
                patience_s=4 * PATIENCE_S,
            )
            cluster.slurm("scancel", alone)
            time.sleep(moment := chance.uniform(0, 12))
            node = chance.choice(sorted(nodes_of(site, run_id)))
            requests, saved = len(events(site, run_id, "nodes_requested")), len(events(site, run_id, "saved"))
            cluster.kill_all_of(site.person.uid, node)
            moments.append((round(moment, 1), node))
            # So that the run has a single node again, and waits for another one.
            alone = blocked(cluster, 1)
            until(
                lambda saved=saved: len(events(site, run_id, "saved")) > saved or over(),
                f"a checkpoint after {moments}",
                patience_s=4 * PATIENCE_S,
            )
        cluster.slurm("scancel", alone, others)
        until(over, f"the end of the run after {moments}", patience_s=4 * PATIENCE_S)
    run = site.show(run_id)
    assert (run["state"], run["step"]) == ("completed", steps), moments
    expected = losses_with(site.python, steps)
    for step, loss in logged_losses(site.runs / run_id):
        assert loss == pytest.approx(expected[step - 1], rel=TOLERANCE), step
    until(lambda: not jobs_of(cluster, run_id), "the end of all jobs")


def nodes_of(site: ClusterSite, run_id: str) -> set[int]:
    """The nodes that agents of the newest attempt are on."""
    agents = events(site, run_id, "agent")
    return {int(event["host"].removeprefix("node")) for event in agents if event["attempt"] == agents[-1]["attempt"]}
