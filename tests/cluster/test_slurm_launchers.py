"""Ranks that torchrun starts on two nodes of a real Slurm, preempted."""

from __future__ import annotations

import random

import pytest
from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import PARAMS, SPOT, STEPS, TWO, digests, events, preempt
from helpers.site import PATIENCE_S


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
