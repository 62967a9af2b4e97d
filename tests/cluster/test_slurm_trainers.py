"""Real trainers on two nodes of a real Slurm, preempted."""

from __future__ import annotations

import random

import pytest
from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import SPOT, TWO, events, preempt
from helpers.rare import THOROUGH
from helpers.site import PATIENCE_S, until
from helpers.trainers import SAVE_EVERY, TRAINERS, lost_steps, trained_steps, trainings

STEPS = 60
NAMES = ["lightning", "transformers"] if THOROUGH else ["lightning"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_preempted_trainer_with_an_adapter_loses_no_step(site: ClusterSite, cluster: Cluster, name: str) -> None:
    trainer = TRAINERS[name]
    trainer.skip_if_missing()
    run_id = site.submit(trainer.spec(site, adapter=True, steps=STEPS, resources=TWO, slurm=SPOT))
    target = SAVE_EVERY + random.Random(name).randrange(1, SAVE_EVERY)
    # Importing a trainer takes minutes while other tests train on all cores.
    until(lambda: trained_steps(site, run_id) >= target, f"{target} steps", patience_s=3 * PATIENCE_S)
    preempt(cluster, lambda: events(site, run_id, "requeue"))
    site.until_state(run_id, "completed", patience_s=2 * PATIENCE_S)
    run = site.show(run_id)
    assert [attempt["cause"] for attempt in run["attempts"]] == ["preempted", "completed"]
    assert len({attempt["job_id"] for attempt in run["attempts"]}) == 1
    assert (run["step"], run["lost_steps"], lost_steps(site, run_id)) == (STEPS, 0, [0])
    assert trainings(site, run_id)[-1].last == STEPS
    assert run["metrics"]["loss"] > 0
