"""Runs that a Python program submits to a real cluster, and what is exported of them to Prometheus."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from helpers.cluster import ClusterSite
from helpers.site import ONE_PROCESS, PATIENCE_S

PROGRAM = """
import json
import sys

import slurmtrain

registry = slurmtrain.Registry()
[run] = registry.submit(sys.argv[1], {"params.steps": 20})
assert run.state in ("pending", "running"), run
run.wait(120)
curve = run.curves("loss")["loss"].kept
facts = {"state": run.state, "executor": run.executor, "job": run.job_id, "steps": list(curve.steps)}
print(json.dumps({**facts, "nodes": run.nodes, "causes": [attempt.cause for attempt in run.attempts]}))
"""


def exported(site: ClusterSite) -> dict[str, list[dict[str, Any]]]:
    """The samples of each metric that there are."""
    metrics = site.json("metrics")["metrics"]
    return {metric["name"]: metric["samples"] for metric in metrics if metric["samples"]}


def test_a_program_submits_waits_and_reads_and_the_run_is_counted_in_its_partition(site: ClusterSite) -> None:
    spec = site.light("light", params={"steps": 10}, resources=ONE_PROCESS)
    completed = subprocess.run(
        [site.python, "-c", PROGRAM, str(spec)],
        cwd=site.path,
        env=site.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        **site.identity,
    )
    assert completed.returncode == 0, completed.stderr
    run = json.loads(completed.stdout)
    assert (run["state"], run["executor"], run["causes"]) == ("completed", "slurm", ["completed"])
    assert run["steps"] == list(range(1, 21))
    assert run["job"].isdigit()
    assert len(run["nodes"]) == 1
    samples = exported(site)
    [attempts] = samples["slurmtrain_attempts_total"]
    assert (attempts["labels"]["executor"], attempts["value"]) == ("slurm", 1)
    partition = attempts["labels"]["partition"]
    assert partition
    [queue] = samples["slurmtrain_queue_seconds"]
    assert (queue["labels"]["partition"], queue["count"]) == (partition, 1)
    [seconds] = samples["slurmtrain_node_seconds_total"]
    assert 0 < seconds["value"] < PATIENCE_S
    states = {each["labels"]["state"]: each["value"] for each in samples["slurmtrain_runs"]}
    assert (states["completed"], sum(states.values())) == (1, 1)


def test_metrics_say_whether_slurm_answers_and_what_runs(site: ClusterSite) -> None:
    run_id = site.submit(site.light("long", params={"steps": 100000, "step_ms": 20}, resources=ONE_PROCESS))
    samples = exported(site)
    assert [sample["value"] for sample in samples["slurmtrain_scheduler_up"]] == [1]
    [info] = samples["slurmtrain_run_info"]
    assert (info["labels"]["run"], info["labels"]["executor"]) == (run_id, "slurm")
    assert info["labels"]["partition"]
    site.call("cancel", run_id)
    assert "slurmtrain_run_info" not in exported(site)
