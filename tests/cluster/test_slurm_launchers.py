"""Commands that are started once per node of a real Slurm: torchrun, preempted; a head whose workers never end."""

from __future__ import annotations

import random

import pytest
from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import PARAMS, SPOT, STEPS, TWO, digests, events, preempt
from helpers.rare import rare
from helpers.site import PATIENCE_S, until

# As a head with its workers: the command of node 0 ends, and those of other nodes would never.
SERVED = "bash -c 'if [ {node_rank} = 0 ]; then sleep 2; else exec sleep 600; fi'"


@pytest.mark.slow
def test_a_run_is_completed_by_node_0_if_it_says_so(site: ClusterSite) -> None:
    keys = {"command": SERVED, "launcher": "none", "resources": {"nodes": 3, "time": "00:05:00"}, "slurm": SPOT}
    run_id = site.submit(site.spec("served", completed_by="node0", **keys))
    site.until_state(run_id, "completed")
    [attempt] = site.show(run_id)["attempts"]
    assert attempt["cause"] == "completed"
    assert len(events(site, run_id, "stopping")) == 2


@rare
@pytest.mark.slow
def test_without_that_the_status_names_the_nodes_that_still_run_and_the_time_limit_is_the_end(
    site: ClusterSite,
) -> None:
    resources = {"nodes": 2, "time": "00:02:00"}
    keys = {"command": SERVED, "launcher": "none", "resources": resources, "slurm": SPOT}
    run_id = site.submit(site.spec("served", **keys))
    until(lambda: "the command of node 0 completed" in site.status(run_id)["reason"], "a sentence")
    assert "still runs: with 'completed_by: node0'" in site.status(run_id)["reason"]
    site.until_state(run_id, "failed", patience_s=2 * PATIENCE_S)
    run = site.show(run_id)
    assert [attempt["cause"] for attempt in run["attempts"]] == ["timeout"]
    assert "set 'completed_by: node0'" in run["reason"]


@pytest.mark.slow
def test_ranks_of_torchrun_lose_no_step_when_slurm_preempts_them(
    site: ClusterSite, cluster: Cluster, undisturbed: str
) -> None:
    command = f"python -m torch.distributed.run {site.scripts / 'steps.py'}"
    run_id = site.submit(site.spec("torchrun", command=command, params=PARAMS, resources=TWO, slurm=SPOT))
    site.until_step(run_id, random.Random(0).randrange(1, 20))
    preempt(cluster, lambda: events(site, run_id, "requeue"))
    site.until_state(run_id, "completed", patience_s=2 * PATIENCE_S)
    run = site.show(run_id)
    assert [attempt["cause"] for attempt in run["attempts"]] == ["preempted", "completed"]
    assert (run["step"], run["lost_steps"]) == (STEPS, 0)
    assert digests(site, run_id) == {undisturbed}
    assert not cluster.jobs()
