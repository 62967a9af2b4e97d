"""A search on a real cluster, whose runs are preempted."""

from __future__ import annotations

from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import SPOT, events, preempt, until_trains
from helpers.rare import rare
from helpers.site import ONE_PROCESS, until

LOGGED = 150
# It logs up to a step, and trains on until it is told to end: runs are then compared at that step.
SCRIPT = f"""import time
from pathlib import Path
import torch
import slurmtrain

with slurmtrain.session(params={{"x": 0.0}}) as run:
    x = run.params["x"]
    run.checkpoint(model=torch.nn.Linear(1, 1))
    for step in run.steps(100000):
        if step < {LOGGED}:
            run.log(loss=x + 1 / (step + 1))
        if Path(f"end-{{x}}").exists():
            break
        time.sleep(0.02)
"""


@rare
def test_trials_that_are_preempted_keep_their_values_and_the_worse_one_is_pruned(
    site: ClusterSite, cluster: Cluster
) -> None:
    (site.path / "search.py").write_text(SCRIPT)
    spec = site.commanding(
        "python search.py",
        params={"x": 0.0},
        resources=ONE_PROCESS,
        slurm=SPOT,
        code="none",
        checkpoint={"every": {"steps": 10}},
        sweep={
            "params.x": "uniform(0, 1)",
            "search": {
                "metric": "loss",
                "mode": "min",
                "trials": 2,
                "parallel": 2,
                "sampler": "random",
                "pruner": {"median": {"n_startup_trials": 1}},
            },
        },
    )
    runs = site.json("submit", str(spec), "--executor", "slurm")["runs"]
    for run in runs:
        until_trains(site, run["id"], starts=1)
    preempt(cluster, lambda: all(events(site, run["id"], "end") for run in runs))
    for run in runs:
        until_trains(site, run["id"], starts=2)
        site.until_step(run["id"], LOGGED)
    better, worse = sorted(runs, key=lambda run: float(run["params"]["x"]))
    # While the better one runs, there is nothing to compare with.
    assert "pruned" not in site.call("sync").stderr
    (site.path / f"end-{better['params']['x']}").touch()
    site.until_state(better["id"], "completed")
    reason = f"pruned by the median pruner at step {LOGGED}"
    assert f"run {worse['id']} was {reason}" in " ".join(site.call("sync").stderr.split())
    pruned = site.until_state(worse["id"], "cancelled")
    assert pruned["reason"] == reason
    for run in runs:
        shown = site.show(run["id"])
        assert shown["attempts"][0]["cause"] == "preempted"
        assert shown["lost_steps"] == 0
    site.call("sync")
    [search] = site.json("status", runs[0]["sweep"])["searches"]
    assert search["states"] == {"complete": 1, "pruned": 1}
    assert search["best"]["run"] == better["id"]
    until(lambda: not list((site.runs / "searches").iterdir()), "the end of the search")
