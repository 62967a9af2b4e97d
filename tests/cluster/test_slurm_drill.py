"""A drill on a real cluster, as an ordinary user."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from helpers.cluster import ClusterSite
from helpers.rare import rare

# A reference run and two struck ones, each started twice.
PATIENCE_S = 500


def drill(site: ClusterSite, spec: Path, *faults: str, code: int) -> dict[str, Any]:
    """Drill a spec on the cluster; returns what is printed as JSON."""
    words = [word for fault in faults for word in ("--fault", fault)]
    completed = subprocess.run(
        [site.python, "-m", "slurmtrain", "drill", str(spec), "--executor", "slurm", *words, "--json"],
        cwd=site.path,
        env=site.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        **site.identity,
    )
    assert completed.returncode == code, completed.stdout + completed.stderr
    outcome: dict[str, Any] = json.loads(completed.stdout)["drill"]
    return outcome


@rare
def test_a_drill_on_two_nodes_shows_what_restarts_a_run_after_a_preemption_and_after_all_its_processes_died(
    site: ClusterSite,
) -> None:
    spec = site.light(
        params={"steps": 120, "step_ms": 80},
        resources={"nodes": 2, "procs_per_node": 1, "time": "00:10:00"},
        checkpoint={"every": {"steps": 10}},
        requeue={"backoff_s": 1},
        slurm={"partition": "spot"},
    )
    outcome = drill(site, spec, "preempt", "all", code=0)
    assert (outcome["passed"], outcome["reference"]["state"]) == (True, "completed")
    preempted, killed = outcome["faults"]
    assert [one["state"] for one in outcome["faults"]] == ["completed", "completed"]
    assert [one["comparison"]["identical"] for one in outcome["faults"]] == [True, True]
    assert (preempted["cause"], preempted["started_by"], preempted["lost_steps"]) == (
        "preempted",
        "agents, by requeue",
        0,
    )
    assert preempted["step_s"] > preempted["started_s"] > 0
    # Nothing of it was left to put its job back, and Slurm does not do so by itself for a job that failed.
    assert (killed["started_by"], killed["attempts"]) == ("sync", 2)
    assert killed["on"] == "all of its processes"
    jobs = [attempt["job_id"] for attempt in site.show(killed["run_id"])["attempts"]]
    assert len(set(jobs)) == 2
