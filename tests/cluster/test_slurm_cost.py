"""What a run costs whose nodes Slurm has taken away, by the partition that each attempt was in."""

from __future__ import annotations

import os

import pytest
from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import PARAMS, SPOT, TWO, events, preempt, until_trains

# How often a run is preempted: more often by hand.
PREEMPTIONS = int(os.environ.get("TEST_PREEMPTIONS", "1"))
PRICES = """
prices:
  currency: EUR
  partitions: {spot: {node_hour: 8}, ondemand: {node_hour: 12}}
  on_demand: ondemand
"""


def test_a_preempted_run_costs_what_slurm_has_accounted_for(site: ClusterSite, cluster: Cluster) -> None:
    (site.path / "slurmtrain.yaml").write_text(PRICES)
    run_id = site.submit(site.light(params=PARAMS, resources=TWO, slurm=SPOT, checkpoint={"every": {"steps": 30}}))
    for number in range(1, PREEMPTIONS + 1):
        until_trains(site, run_id, starts=number)
        preempt(cluster, lambda number=number: len(events(site, run_id, "requeue")) >= number)
    site.until_state(run_id, "completed")
    run = site.show(run_id)
    cost = run["cost"]
    assert {each["partition"] for each in run["attempts"]} == {"spot"}
    # Agents know the partition of each node.
    assert {(each["node"], each["partition"]) for each in events(site, run_id, "agent")} == {(0, "spot"), (1, "spot")}
    on_nodes = [sum(s for kind, s in each["seconds"].items() if kind != "queue") for each in run["attempts"]]
    assert cost["spent"] == pytest.approx(2 * 8 / 3600 * sum(on_nodes), rel=1e-3)
    assert cost["interruptions_by_cause"] == {"preempted": PREEMPTIONS}
    assert cost["lost"] > 0
    assert cost["on_demand"] == pytest.approx((cost["spent"] - cost["lost"]) * 12 / 8)
    parts = ("training", "saving", "starting", "stopping", "lost")
    assert sum(cost[name] for name in parts) == pytest.approx(cost["spent"])
    # Slurm counts whole seconds, and the time until it has noticed the end of each start.
    rows = cluster.slurm("sacct", "-D", "-X", "-n", "-P", "-o", "ElapsedRaw,NNodes", "-j", run["job_id"]).split()
    accounted = sum(int(seconds) * int(nodes) for seconds, nodes in (row.split("|") for row in rows))
    assert cost["node_hours"] * 3600 == pytest.approx(accounted, abs=2 * 10 * len(rows))


def test_of_several_partitions_a_run_costs_what_the_one_does_that_took_it(site: ClusterSite, cluster: Cluster) -> None:
    (site.path / "slurmtrain.yaml").write_text(PRICES)
    spec = site.light(params={"steps": 5}, slurm={"partition": "spot,ondemand"})
    dry = site.json("submit", str(spec), "--dry-run", "--executor", "slurm")["price"]
    # Either may take it.
    assert dry["at_most"] == pytest.approx(12 / 6)
    run_id = site.submit(spec, "--wait")
    run = site.show(run_id)
    [attempt] = run["attempts"]
    if cluster.version() < (24, 11):
        # Slurm 22.05 does not tell the job.
        assert attempt["partition"] == "ondemand,spot"
        problem = "it is unknown which of the partitions ondemand, spot it had, and their prices differ"
        assert (run["cost"]["problem"], run["cost"]["unit"]) == (problem, "node-hours")
        return
    price = {"spot": 8, "ondemand": 12}[attempt["partition"]]
    assert run["cost"]["spent"] == pytest.approx(price * run["cost"]["node_hours"])
