"""Drills with real runs on this machine."""

from __future__ import annotations

import json

import pytest
from helpers.site import Site

# Commands that wait look at a run that must be started again as often as they ask Slurm.
SOON = {"SLURMTRAIN_SLURM_INTERVAL": "10"}


@pytest.mark.slow
def test_a_drill_of_a_script_with_a_session_shows_who_started_it_again_and_the_same_result(site: Site) -> None:
    spec = site.light(
        params={"steps": 60, "step_ms": 60}, checkpoint={"every": {"steps": 5}}, requeue={"backoff_s": 0.5}
    )
    words = ("--executor", "local", "--fault", "preempt", "--fault", "rank")
    completed = site.call("drill", str(spec), *words, "--json", env=SOON)
    drill = json.loads(completed.stdout)["drill"]
    preempted, killed = drill["faults"]
    assert drill["passed"], drill
    assert [one["comparison"]["identical"] for one in (preempted, killed)] == [True, True]
    assert (preempted["cause"], preempted["started_by"], preempted["lost_steps"]) == ("preempted", "sync", 0)
    assert (killed["cause"], killed["started_by"], killed["restarts"]) == ("crash", "agents, in place", 1)
    # What it lost is what it had done since it saved last.
    assert killed["lost_steps"] <= killed["at_step"] + 60 - killed["resumed_at"]
    assert killed["resumed_at"] >= 5
    names = {run["id"]: run["name"] for run in site.json("status")["runs"]}
    assert names == {
        drill["reference"]["run_id"]: "light-drill-reference",
        preempted["run_id"]: "light-drill-preempt",
        killed["run_id"]: "light-drill-rank",
    }


@pytest.mark.slow
def test_a_drill_of_a_script_without_a_session_compares_the_files_that_it_leaves(site: Site) -> None:
    spec = site.spec(
        command=f"python {site.scripts / 'plain.py'} {{checkpoint_dir}} 40 100 --resume {{resume_from}}",
        resources={"nodes": 1, "procs_per_node": 1},
        checkpoint={"glob": "{checkpoint_dir}/ckpt-*.txt"},
    )
    completed = site.call("drill", str(spec), "--executor", "local", "--fault", "all", env=SOON)
    assert "all: its script has no slurmtrain.session(), so its steps are not counted" in completed.stdout
    [row] = [line.split() for line in completed.stdout.splitlines() if line.startswith("all ")]
    assert row[2] == "passed"
    assert row[5:7] == ["yes", "sync,"]
