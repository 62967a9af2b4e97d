"""A job that does nothing is noticed by what its node notes of it, and ended if its spec asks for that."""

from __future__ import annotations

from helpers.cluster import ClusterSite
from helpers.cluster_runs import SPOT, watching
from helpers.rare import rare


@rare
def test_a_watch_ends_a_job_that_sleeps_and_leaves_one_that_computes(site: ClusterSite) -> None:
    command = "python -c 'while True: pass'"
    busy = site.submit(site.commanding(command, "busy", slurm=SPOT, idle_after="30s"))
    idle = site.submit(site.commanding("sleep 600", "idle", slurm=SPOT, idle_after="30s"))
    with watching(site):
        run = site.until_state(idle, "cancelled", patience_s=240)
    assert run["reason"].startswith("its processes computed nothing for ")
    assert run["reason"].endswith("(idle_after: 30 s)")
    assert (run["cause"], run["attempt"]) == ("cancelled", 1)
    assert site.status(busy)["state"] == "running"
    assert "was cancelled: its processes computed nothing" in site.call("why", idle).stdout
