"""A job under nsys is preempted, saves and goes on as without it."""

from __future__ import annotations

from pathlib import Path

from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import PARAMS, SPOT, STEPS, TWO, events, preempt, until_trains
from helpers.nsys import write_nsys
from helpers.rare import rare
from helpers.site import PATIENCE_S


@rare
def test_a_preempted_job_under_nsys_saves_and_continues(cluster: Cluster, site: ClusterSite) -> None:
    program, calls = write_nsys(site.path / "bin"), site.path / "calls"
    setup = [f"export PATH={program.parent}:$PATH NSYS_CALLS={calls}"]
    spec = site.light("nsys", params=PARAMS, resources=TWO, slurm=SPOT, profile="nsys", setup=setup)
    run_id = site.submit(spec)
    until_trains(site, run_id, starts=1)
    preempt(cluster, lambda: events(site, run_id, "stopped"))
    run = site.until_state(run_id, "completed", "failed", patience_s=2 * PATIENCE_S)
    assert (run["state"], run["step"]) == ("completed", STEPS)
    shown = site.show(run_id)
    assert [attempt["cause"] for attempt in shown["attempts"]] == ["preempted", "completed"]
    assert shown["lost_steps"] == 0
    reports = [(Path(each["path"]).name, each["attempt"]) for each in shown["profiles"]]
    assert reports == [("rank-0.nsys-rep", 1), ("rank-1.nsys-rep", 1)]
    assert len(calls.read_text().splitlines()) == 2
