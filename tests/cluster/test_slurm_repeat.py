"""A run on two nodes that is submitted again has the same weights, bit for bit, also if it is preempted."""

from __future__ import annotations

import os

from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import SPOT, events, preempt, until_trains
from helpers.rare import rare

SCRIPT = """
import random, time
import torch
import slurmtrain
from torch import nn
from torch.nn.parallel import DistributedDataParallel

with slurmtrain.session() as run:
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    run.checkpoint(model=model, optimizer=optimizer)
    for step in run.steps(40):
        loss = (model(torch.rand(3, 4)) * random.random()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=float(loss))
        time.sleep(0.3 if run.params["slow"] and run.attempt == 1 else 0)
"""


@rare
def test_a_rerun_on_two_nodes_has_the_same_weights_although_its_code_is_gone_and_it_is_preempted(
    site: ClusterSite, cluster: Cluster
) -> None:
    project = site.path / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    for place in (project, *project.rglob("*")):
        os.chown(place, site.person.uid, site.person.gid)
    resources = {"nodes": 2, "procs_per_node": 1, "time": "00:10:00"}
    keys = {"code": "snapshot", "workdir": str(project), "resources": resources, "slurm": SPOT, "seed": 7}
    spec = site.commanding("python train.py", "repeated", params={"slow": 0}, deterministic=True, **keys)
    first = site.submit(spec)
    site.until_state(first, "completed")

    (project / "train.py").write_text("raise SystemExit('new code')\n")
    [again] = site.json("rerun", first, "params.slow=1")["runs"]
    until_trains(site, again["id"], starts=1)
    preempt(cluster, lambda: events(site, again["id"], "requeue"))
    site.until_state(again["id"], "completed")
    assert len(site.show(again["id"])["attempts"]) == 2

    difference = site.json("diff", first, again["id"])
    assert difference["checkpoints"] == {"equal": True, "step": 40, "why": ""}
    assert difference["spec"] == {"params.slow": [0, 1]}
    assert (difference["code"]["same"], difference["environment"]) == (True, {})
    assert site.show(again["id"])["parents"] == [{"run": first, "relation": "rerun", "step": None}]
    notes = events(site, again["id"], "environment")
    assert len(notes) == 4
    assert len({note["software"] for note in notes}) == 1
    assert all("slurm" in note["versions"] for note in notes if note["node"] == 0)
