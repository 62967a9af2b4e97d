"""Runs over several nodes that begin with a checkpoint of another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import SPOT, events, preempt
from helpers.rare import rare

# From step 10 on, the first attempt is slow: whatever is to interrupt it comes before its end.
PARAMS = {"steps": 16, "slow_from": 10}
SPEC = {
    "resources": {"nodes": 2, "procs_per_node": 1, "time": "00:10:00"},
    "slurm": SPOT,
    "checkpoint": {"every": {"steps": 4}, "keep": 9},
    "params": PARAMS,
}


def files_of(run: dict[str, Any], step: int) -> Any:
    return json.loads((Path(run["dir"]) / f"checkpoints/step-{step}/MANIFEST.json").read_text())["files"]


@rare
def test_a_fork_over_two_nodes_is_preempted_and_ends_bit_for_bit_as_its_parent(
    site: ClusterSite, cluster: Cluster
) -> None:
    parent = site.submit(site.light("parent", **{**SPEC, "params": {"steps": 16}}))
    site.until_state(parent, "completed")
    forked = site.submit(site.light("forked", **SPEC), "--from", f"{parent}:4")
    site.until_step(forked, 10)
    preempt(cluster, lambda: events(site, forked, "requeue"))
    site.until_state(forked, "completed")
    run = site.show(forked)
    assert run["parents"] == [{"run": parent, "relation": "fork", "step": 4}]
    assert (run["step"], run["lost_steps"]) == (16, 0)
    first, second = run["attempts"]
    assert first["first_step"] == 4
    assert second["first_step"] == first["last_step"] >= 10
    assert files_of(run, 16) == files_of(site.show(parent), 16)
