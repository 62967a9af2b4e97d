"""Models that are distributed over the nodes of a real cluster."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import events, preempt
from helpers.gpt import TOLERANCE, logged_losses
from helpers.rare import rare
from helpers.site import PROJECT

STEPS = 24


def expected_losses(site: ClusterSite) -> list[float]:
    """The losses of one process, with the Python of the nodes, whose standard library is the text."""
    program = f"import json; from helpers.gpt import losses_of_one_process as f; print(json.dumps(f({STEPS})))"
    environment = {**os.environ, "PYTHONPATH": f"{PROJECT / 'tests'}{os.pathsep}{PROJECT}"}
    printed = subprocess.run([site.python, "-c", program], env=environment, capture_output=True, text=True, check=True)
    losses: list[float] = json.loads(printed.stdout)
    return losses


@rare
def test_hsdp_over_two_nodes_is_preempted_and_has_the_losses_of_one_process(
    site: ClusterSite, cluster: Cluster
) -> None:
    spec = site.person.code / "experiments" / "gpt" / "hsdp.yaml"
    few = (f"params.steps={STEPS}", "+params.seconds_per_step=0.2", "tracking.mlflow.enabled=false")
    run_id = site.submit(spec, *few, f"workdir={site.person.code}", "+slurm.partition=spot", "resources.mem=null")
    site.until_step(run_id, 4)
    job = site.job(run_id)
    preempt(cluster, lambda: cluster.restarts(job) == 1)
    site.until_state(run_id, "completed")
    run = site.show(run_id)
    assert (run["step"], run["lost_steps"], len(set(run["attempts"][-1]["nodes"]))) == (STEPS, 0, 2)
    assert len(events(site, run_id, "restored")) == 1
    steps, losses = zip(*logged_losses(site.runs / run_id), strict=True)
    assert list(steps) == list(range(1, STEPS + 1))
    assert list(losses) == pytest.approx(expected_losses(site), rel=TOLERANCE)
