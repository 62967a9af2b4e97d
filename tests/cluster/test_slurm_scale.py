"""Scaling studies on a real cluster: sizes, strategies and hardware, with a preemption and a command that is killed."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest
from helpers.cluster import NODES, Cluster, ClusterSite
from helpers.cluster_runs import preempt
from helpers.rare import rare
from helpers.site import PATIENCE_S, until

STRATEGIES = ("ddp", "fsdp", "zero1")
STEPS = 40
# The nodes of this cluster share the CPUs of one machine: figures of runs at the same time are no better than that.
ALONE = ("+slurm.exclusive=true", "+slurm.partition=spot", "--parallel", "1")
PRICES = "prices: {currency: EUR, partitions: {spot: {node_hour: 8}, ondemand: {node_hour: 12}}}\n"


def words(site: ClusterSite, name: str, *more: str) -> tuple[str, ...]:
    """The words of a study of an experiment of the GPT."""
    few = (f"params.steps={STEPS}", "params.batch_size=64", "tracking.mlflow.enabled=false", "resources.mem=null")
    where = (f"workdir={site.person.code}", "resources.time=00:10:00", *ALONE)
    return ("scale", str(site.person.code / "experiments" / "gpt" / f"{name}.yaml"), *few, *where, *more)


def listed(site: ClusterSite) -> list[dict[str, Any]]:
    runs = site.json("status", "--all", "--no-fold")["runs"]
    return sorted(runs, key=lambda run: run["id"])


@rare
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_study_of_three_sizes_and_strategies_is_interrupted_and_makes_the_tables_of_its_runs(
    site: ClusterSite, cluster: Cluster
) -> None:
    study = words(site, "ddp", "--nodes", "1,2,4", "--strategies", ",".join(STRATEGIES), "resources.procs_per_node=1")
    beyond = site.call(*words(site, "ddp", "--nodes", f"1,{NODES + 1}"), code=2)
    assert (
        beyond.stderr == f"error: resources.nodes: partition spot gives a job {NODES} nodes at most, not {NODES + 1}\n"
    )
    assert listed(site) == []
    waiting = site.start(*study, "--wait")
    until(lambda: any(run["state"] == "running" for run in listed(site)), "a running study")
    waiting.send_signal(signal.SIGKILL)
    waiting.wait()
    runs = listed(site)
    assert len(runs) == 9
    first = next(run for run in runs if run["state"] == "running")
    job = site.job(first["id"])
    preempt(cluster, lambda: cluster.restarts(job) >= 1 or site.status(first["id"])["state"] == "completed")
    site.call("cancel", runs[-1]["id"])
    completed = site.call(*study, "--wait", patience_s=12 * PATIENCE_S)
    assert "1 run was started again" in completed.stderr
    assert [run["id"] for run in listed(site)] == [run["id"] for run in runs]
    print(completed.stdout)
    assert re.search(r"^Scaling$.*^Strategies$", completed.stdout, re.M | re.S)

    answer = site.json("scale", runs[0]["sweep"])
    assert [(run["strategy"], run["nodes"], run["batch"]) for run in answer["runs"]] == [
        (strategy, nodes, 64) for strategy in STRATEGIES for nodes in (1, 2, 4)
    ]
    alone = {run["id"]: run for run in site.json("compare", runs[0]["sweep"], "--performance")["runs"]}
    for run in answer["runs"]:
        same = alone[run["id"]]
        figures = ("steps_per_second", "samples_per_second", "memory_bytes", "utilization")
        assert [run[name] for name in figures] == [same[name] for name in figures]
        # Nodes note their utilization every 15 s.
        assert None not in [run[name] for name in figures[:-1]]
    for series in answer["scaling"]:
        law = series["law"]
        assert (law["kind"], law["points"]) == ("strong", 3)
        assert law["error"] > 0
        assert law["efficiency"]["low"] <= law["efficiency"]["value"] <= law["efficiency"]["high"]
        assert re.match(r"4 processes: \d\.\d\d efficient; ", series["advice"])
    # Shards of everything need less memory on more nodes; in this order, by size.
    assert [answer["runs"][index]["id"] for index in (0, 3, 6)] == answer["strategies"][:3]


@rare
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_study_of_hardware_compares_throughput_and_what_the_same_money_buys(site: ClusterSite) -> None:
    (site.path / "slurmtrain.yaml").write_text(PRICES)
    components = "[{nodes: 1, procs_per_node: 1}, {nodes: 1, procs_per_node: 1}]"
    study = words(site, "components", "--hardware", f"resources.components={components}")
    completed = site.call(*study, "--wait", patience_s=6 * PATIENCE_S)
    print(completed.stdout)
    assert "EUR/1000" in completed.stdout
    answer = site.json("scale", "gpt-components-scale")
    assert [(run["hardware"], run["nodes"], run["hour_price"]) for run in answer["runs"]] == [
        ("equal", 1, pytest.approx(8.0)),
        ("equal", 2, pytest.approx(16.0)),
        ("mixed", 2, pytest.approx(16.0)),
        ("by speed", 2, pytest.approx(16.0)),
    ]
    throughputs = [row["throughput"] for row in answer["hardware"]]
    assert throughputs[0] == 1.0
    assert [row["cost_efficiency"] for row in answer["hardware"]] == pytest.approx(
        [throughputs[0], *(each / 2 for each in throughputs[1:])]
    )
